"""What a pattern, a layout or an ordering is called, and that its spec, its repr and its copies are the same one."""

import copy
import json
import pickle

import pytest
import torch

import workbench as wb
from tests.tools import refused
from workbench.patterns import BlockSparse, Dense, Dilated, Neighborhood, Predicate, from_spec, layouts, orderings
from workbench.patterns.layouts import explicit, global_, local, random, strided

MASK = torch.arange(32).view(4, 8) % 5 > 0
GRID = (4, 8)
PATTERNS = [
    Dense(causal=True), Dilated([4, 8], [1, 2], heads="partition"), Dilated([4, 8], [1, 2], True, offsets="blocked"),
    BlockSparse(local(1) | random(0.2, 1) - local(0), (4, 8), causal=True),
    BlockSparse(explicit(torch.arange(128).view(2, 8, 8) % 3 > 0, name="mine") & ~strided(3), 4),
    Neighborhood(GRID, (1, 2)), BlockSparse((layouts.hierarchical(2, 3) | global_(0)) & random(0.25, 7, True), 4),
    *(Neighborhood(GRID, 1, x) for x in (
        orderings.snake(GRID), orderings.tiles(GRID, (2, 3)), orderings.hilbert(GRID), orderings.morton(GRID),
        orderings.random(GRID, 3), orderings.Ordering("mine", GRID, torch.arange(32).flip(0)),
        orderings.hilbert(GRID).restrict(MASK),
        orderings.hilbert(GRID).restrict(MASK).restrict(torch.arange(32).view(GRID) < 20),
    )),
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_spec_repr_and_copies_are_the_same_pattern(pattern):
    n = 32 if getattr(pattern, "ordering", None) is None else len(pattern.ordering)
    known = vars(wb.patterns) | {"orderings": orderings}
    others = [from_spec(json.loads(json.dumps(pattern.spec()))), copy.deepcopy(pattern)]
    others += [pickle.loads(pickle.dumps(pattern))] + ([] if "<" in repr(pattern) else [eval(repr(pattern), known)])
    for other in others:
        assert type(other) is type(pattern) and other.spec() == pattern.spec() and other.name == pattern.name
        assert torch.equal(other.multiplicity(n, 2), pattern.multiplicity(n, 2))


def every_third(h, i, j):
    return (i - j) % 3 == 0


def test_the_spec_of_a_function_says_what_it_was_and_cannot_make_it():
    text = "def every_third(h, i, j):\n    return (i - j) % 3 == 0"
    spec = Predicate(every_third, causal=True).spec()
    assert spec == {"pattern": "Predicate", "fn": text, "causal": True}
    refused("a Predicate cannot be made from its spec: fn is Python code", from_spec, spec)
    with pytest.raises(ValueError, match="a Predicate cannot be made from its spec"):
        from_spec((BlockSparse(local(1)) & Predicate(every_third)).spec())


def inner():
    return lambda h, i, j: (i - j) % 3 == 0


@pytest.mark.parametrize("fn", [every_third, lambda h, i, j: (i - j) % 3 == 0, inner()], ids=["def", "lambda", "inner"])
@pytest.mark.parametrize("made", [Predicate, lambda fn: BlockSparse(local(1), 4) & Predicate(fn)], ids=["own", "in"])
def test_a_pattern_with_a_function_is_copied_and_pickled_where_the_function_has_a_name(made, fn):
    pattern = made(fn)
    copies = [copy.copy(pattern), copy.deepcopy([pattern])[0]]
    if fn is every_third:
        copies.append(pickle.loads(pickle.dumps(pattern)))
    for other in copies:
        assert other is not pattern and repr(other) == repr(pattern)
        assert torch.equal(other.multiplicity(13, 2), pattern.multiplicity(13, 2))


@pytest.mark.parametrize("spec, message", [
    ({}, "pattern=None: want one of Dense, Dilated"), ("dense", "pattern='dense': want one of Dense, Dilated"),
    ({"pattern": "BlockSparse", "layout": {"layout": "explicit"}}, "blocks=None: want what `pack` makes"),
    ({"pattern": "BlockSparse", "layout": {"layout": "spiral"}}, "layout='spiral': want one of local, global_"),
    ({"pattern": "Neighborhood", "shape": [9], "radius": 1, "ordering": {"ordering": "peano"}}, "ordering='peano'"),
    ({"pattern": "Dense", "window": 3}, "unexpected keyword argument 'window'"),
    ({"pattern": "Dilated", "segment_lengths": [4], "dilation_rates": [0]}, r"dilation_rates\[0\]=0"),
])  # fmt: skip
def test_a_spec_that_is_not_understood_is_refused(spec, message):
    refused(message, from_spec, spec)


PAPER = (2048, 4096, 8192, 16384, 32768)


@pytest.mark.parametrize("value, name", [
    (local(4) | global_(1) | strided(16), "local-4+global-1+strided-16"), (random(0.1), "random-0.90"),
    (random(0.005), "random-0.995"), ((local(4) | global_(1)) - local(0), "(local-4+global-1)-local-0"),
    (~(local(1) & strided(2)), "~(local-1&strided-2)"), (BlockSparse(random(0.1)), "random-0.90"),
    (Dilated(PAPER, (1, 2, 4, 6, 12)), "longnet-paper"), (Dilated(PAPER, (1, 2, 4, 8, 16)), "longnet-pow2"),
    (Dilated(PAPER, (1, 2, 4, 6, 12), heads="partition"), "longnet-paper-partition"),
    (Dilated([4, 8], [1, 2], offsets="blocked"), "dilated-4x1-8x2-blocked"), (Neighborhood(4096, 1024), "window-2048"),
    (Neighborhood((8, 8), (1, 2), orderings.hilbert((8, 8))), "neighborhood-1x2-hilbert-of-8x8"),
    (Predicate(every_third), "predicate-every_third"), (Predicate(lambda h, i, j: i == j), "predicate"),
    (Dense(True), "dense-causal"),
])  # fmt: skip
def test_names(value, name):
    assert value.name == name


def test_patterns_that_differ_have_names_that_differ():
    assert Dense(True).short_name == "dense" and Neighborhood((8, 8), 16).short_name == "neighborhood-16"
    blocks = torch.eye(4) > 0
    patterns = [
        Dense(), Dense(True), *(Dilated([4, 8], [1, 2], x, y) for x in (False, True) for y in ("all", "partition")),
        Dilated([4, 8], [1, 2], offsets="blocked"), *(Neighborhood(x, 1) for x in ((2, 8), (8, 2), (4, 4), (2, 2, 4))),
        Neighborhood((4, 4), (2, 1)), *(BlockSparse(layouts.explicit(x), 4) for x in (blocks, ~blocks, blocks[None])),
        BlockSparse(layouts.local(1), 4), BlockSparse(layouts.local(1), 4, True), BlockSparse(layouts.local(1), (4, 8)),
        *(BlockSparse(layouts.random(x), 4) for x in (0.1, 0.10001, 0.10004)), Predicate(len), Predicate(len, True),
    ]  # fmt: skip
    names = [pattern.name for pattern in patterns]
    assert len(set(names)) == len(names), names
