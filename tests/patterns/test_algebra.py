import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import BlockSparse, Dense, Dilated, Neighborhood, PerHead, Predicate, Window, layouts, orderings
from workbench.patterns import Combined, from_spec
from workbench.patterns.dilated import PAPER

LONG = 1 << 18
LONGFORMER = Window(512) | BlockSparse(layouts.global_(1))
BIGBIRD = LONGFORMER | BlockSparse(layouts.random(3 / 2048))


KINDS = ["window", "window", "dilated", "dilated", "blocks", "grid", "fn", "dense"]


def leaf(draw, n: int):
    kind, causal = draw.choice(KINDS), draw.random() < 0.5
    if kind == "window":
        return Window(draw.randint(1, n + 3), causal, draw.choice([1, 1, 2, 3]), draw.choice([0, 0, 1, 5]))
    if kind == "dilated":
        branches = [(draw.randint(1, n + 2), draw.randint(1, 4)) for _ in range(draw.randint(1, 3))]
        rule = draw.choice([{}, {"offsets": "blocked"}, {"heads": "partition"}])
        return Dilated(*zip(*branches, strict=True), causal, **rule)
    if kind == "blocks":
        by_head = layouts.random(0.3, draw.randint(0, 9), per_head=True)
        layout = draw.choice([layouts.local(1), layouts.strided(3), by_head])
        return BlockSparse(layout, draw.choice([2, 3, 4, (2, 4)]), causal)
    if kind == "grid":
        shape = next((x, n // x) for x in (4, 3, 2, 1) if n % x == 0)
        order = draw.choice([None, orderings.random(shape, 1)])
        return Neighborhood(shape, (draw.randint(0, 2), draw.randint(0, 4)), order)
    by_head = draw.random() < 0.5
    return Dense(causal) if kind == "dense" else Predicate(lambda h, i, j: (i - j + h * by_head) % 3 > 0, causal)


def tree(draw, n: int, depth: int):
    if not depth or draw.random() < 0.2:
        return leaf(draw, n)
    left, right = tree(draw, n, depth - 1), tree(draw, n, depth - 1)
    return draw.choice([left | right, left | right, left & right, left - right])


def count(pattern, n, heads):
    """What a pattern counts, by what its parts count at all pairs."""
    if not isinstance(pattern, (Combined, PerHead)):
        return pattern.multiplicity(n, heads).long()
    first, *rest = (count(part, n, heads) for part in pattern.of)
    if isinstance(pattern, PerHead):
        return torch.stack([x[h] for h, x in enumerate([first, *rest])])
    for x in rest:
        first = {"|": first + x, "&": first * x, "-": first * (x == 0)}[pattern.kind]
    return first.clamp(max=1)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_any_combination(agree, seed):
    draw = random.Random(seed)
    n, heads = draw.randint(1, 24), draw.randint(1, 3)
    pattern, queries = tree(draw, n, draw.randint(0, 3)), draw.choice([None, draw.randint(0, n)])
    if draw.random() < 0.3:
        of = [pattern, tree(draw, n, 1)]
        pattern = PerHead([draw.choice([x for x in of if x.divisor(heads) == 1] or [Dense()]) for _ in range(heads)])
    own = getattr(pattern, "block_size", None)
    sizes = (None, tuple(2 * x for x in own)) if own else (4, (3, 5), 128)
    agree(pattern, count(pattern, n, heads), queries, sizes, exact=not isinstance(pattern, (Dilated, PerHead)))


def test_operators_join_and_have_names():
    a, b, c = Window(512, True), BlockSparse(layouts.global_(1)), Dense(True)
    assert (a | b | c).of == (a, b, c) == (a | (b | c)).of and (a & b & c).of == (a, b, c)
    assert LONGFORMER.name == "window-512 | global-1" and (a - b).name == "window-512-causal - global-1"
    assert (a | (b & c)).short_name == "window-512 | (global-1 & dense)"
    assert repr(a - (b | c)).startswith("Window(width=512, causal=True, dilation=1, sinks=0) - (BlockSparse(")
    assert PerHead([a, a, c]).name == "per-head[2 x window-512-causal, 1 x dense-causal]"
    assert PerHead([Window(4), Window(4)]).name == "per-head[2 x window-4]"  # two objects, as a spec may have them
    assert [(a | c).causal, (a | b).causal, (a & b).causal, (a - b).causal, (b - a).causal] == [1, 0, 1, 1, 0]
    with pytest.raises(TypeError):
        a | 3


def test_a_spec_keeps_which_heads_have_the_same_pattern():
    pattern = PerHead([Window(4), Window(4) | Dense(), Window(4)])
    made = from_spec(json.loads(json.dumps(pattern.spec())))
    assert made.of[0] is made.of[2] and made.spec() == pattern.spec() and len(made.groups) == 2


def test_a_function_is_asked_only_inside_the_blocks_and_the_sequence():
    limits = torch.arange(143)  # indexing it with 143 raises
    pairs = BlockSparse(layouts.local(1), 16, causal=True).pairs(143, 1, 99)

    class Asked:  # what a class holds is not copied
        far = []

    def seen(h, i, j):
        Asked.far.append(int((i // 16 - j // 16).abs().max()))
        return limits[i] >= limits[j]

    assert (BlockSparse(layouts.local(1), 16) & Predicate(seen)).pairs(143, 1, 99) == pairs
    assert max(Asked.far[1:]) <= 1  # the first asks whether it depends on the head


def test_each_sequence_of_a_batch_has_its_own():
    keep = torch.rand(2, 2, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    blocks = BlockSparse(layouts.explicit(keep), 4)
    for pattern in (blocks | Window(3), PerHead([blocks, Dense()])):
        assert pattern.batch == 2 and pattern.check(20, 2) == (20, 2, 20)
        for b, one in enumerate(pattern.each()):
            assert one.batch is None and one.of[0].spec() == pattern.of[0].for_batch(b).spec()


@pytest.mark.parametrize("pattern, seconds", [
    (LONGFORMER, 0.5), (BIGBIRD, 1), (Window(4096, True) - Window(64, True), 1),
    (PerHead([Window(512, True), Window(4096, True)]), 0.5), (LONGFORMER | Dilated(PAPER, (1, 2, 4, 6, 12)), 2),
], ids=lambda x: getattr(x, "short_name", x))  # fmt: skip
def test_blocks_of_long_sequences_are_found_without_looking_at_pairs(one_core_seconds, pattern, seconds):
    heads = 2 if isinstance(pattern, PerHead) else 1
    assert one_core_seconds(lambda: pattern.blocks(LONG, heads)) < seconds


def test_pairs_of_a_long_sequence_are_counted_without_looking_at_all():
    n, first, window = 1 << 15, BlockSparse(layouts.global_(1)), Window(512)
    near = [range(max(0, i - 256), min(n, i + 257)) for i in range(n)]
    both = sum(len(x) if i < 128 else max(0, 128 - x.start) for i, x in enumerate(near))
    assert (window | first).pairs(n, 3) == 3 * (first.pairs(n, 1) + window.pairs(n, 1) - both)
    assert (window | first).uncovered(n, 3) == 0 and (window & first).uncovered(n, 1) == n - 128 - 256
    nested = Dilated([64, 128], [1, 2])
    assert (nested | nested).pairs(n, 2) == nested.distinct(n, 2) < nested.pairs(n, 2)
