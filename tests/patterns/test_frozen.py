"""Patterns do not change once they are made, whatever becomes of what they were made of."""

import copy
import pickle
import threading
import types

import numpy as np
import pytest
import torch

import workbench as wb
from tests.tools import refused
from workbench import Predicate, attention, layouts
from workbench.analysis import locality
from workbench.patterns import orderings
from workbench.patterns.frozen import frozen

LIMIT, LIMITS = 4, {"one": 1}


def helper(i):
    return i < LIMIT


def by_itself(h, i, j):
    return i < by_itself.limit


by_itself.limit = 2


def with_default(h, i, j, *, limits=LIMITS):
    return i < limits["one"]


class Window:
    def __init__(self):
        self.limit = 1

    def __call__(self, h, i, j):
        return (i - j).abs() < self.limit

    def method(self, h, i, j):
        return self(h, i, j)


def cases():
    """name -> (a function, a change of what it reads)."""
    yield "tensor", (lambda t: (lambda h, i, j: t[i], lambda: t.zero_()))(torch.ones(8, dtype=torch.bfloat16))
    yield "list", (lambda x: (lambda h, i, j: x[-1] < i, lambda: x.append(7)))([1])
    yield "global", (lambda h, i, j: i < LIMIT, lambda: globals().update(LIMIT=LIMIT - 2))
    yield "called function", (lambda h, i, j: helper(i), lambda: globals().update(LIMIT=LIMIT - 2))
    yield "inner function", (lambda h, i, j: (lambda: i < LIMIT)(), lambda: globals().update(LIMIT=LIMIT - 2))
    window = Window()
    yield "object", (window, lambda: setattr(window, "limit", 2))
    yield "bound method", (window.method, lambda: setattr(window, "limit", 3))
    yield "default", (with_default, lambda: LIMITS.update(one=6))
    yield "attribute", (by_itself, lambda: setattr(by_itself, "limit", 4))


CASES = dict(cases())
PLACE = torch.tensor(0), torch.arange(8), torch.arange(8)[:, None]


@pytest.mark.parametrize("function, change", CASES.values(), ids=CASES)
def test_what_a_function_reads_is_copied(function, change):
    was = globals()["LIMIT"]
    made, before = frozen(function), function(*PLACE).clone()
    change()
    try:
        assert torch.equal(made(*PLACE), before) and not torch.equal(function(*PLACE), before)
    finally:
        globals()["LIMIT"] = was


def test_what_needs_no_copy_or_has_none_is_read_where_it_is():
    steps, flags, window = iter(x for x in range(3)), types.ModuleType("flags"), wb.Window(3)
    assert frozen(lambda: (steps, flags, window))() == (steps, flags, window)
    assert frozen(torch.nn.functional.pad) is torch.nn.functional.pad
    later = [lambda: unfilled]
    made = frozen(later[0])
    with pytest.raises(NameError):
        made()
    unfilled = 1
    assert later[0]() == 1


def inputs(n=256, grad=False):
    torch.manual_seed(0)
    return [torch.randn(1, n, 2, 4, dtype=torch.float64, requires_grad=grad) for _ in range(3)]


@pytest.mark.parametrize("kind", ["predicate", "block-sparse"])
def test_attention_its_gradients_and_copies_are_of_the_pattern_as_it_was_made(kind):
    document = torch.arange(256) // 128
    same = lambda h, i, j: document[i] == document[j]  # noqa: E731
    pattern = wb.Predicate(same) if kind == "predicate" else wb.BlockSparse(layouts.local(9), 64) & wb.Predicate(same)
    q, k, v = inputs(grad=True)
    want = wb.reference(q, k, v, pattern)[0]
    gradients = torch.autograd.grad(want.sum(), (q, k, v))
    out = attention(q, k, v, pattern)
    document.zero_()
    for found in (out, *(attention(q, k, v, x) for x in (pattern, copy.copy(pattern), copy.deepcopy(pattern)))):
        torch.testing.assert_close(found, want)
        for x, y in zip(torch.autograd.grad(found.sum(), (q, k, v)), gradients, strict=True):
            torch.testing.assert_close(x, y)
    assert pattern.pairs(256, 1) == 256 * 128


def test_what_functions_of_this_package_are_given_is_copied():
    curve = torch.arange(64).flip(0)
    pattern = locality.reordered(wb.Window(3, True), curve)
    before = pattern.multiplicity(64, 1)
    curve.zero_()
    assert torch.equal(pattern.multiplicity(64, 1), before)


def test_another_process_is_given_a_function_by_its_name(monkeypatch):
    pattern = wb.Predicate(helper_of_three)
    monkeypatch.setitem(globals(), "LIMIT", 3)
    assert pickle.loads(pickle.dumps(pattern)).pairs(8, 1) == 3 * 8 and pattern.pairs(8, 1) == 4 * 8


def helper_of_three(h, i, j):
    return helper(i)


def test_blocks_are_found_once(monkeypatch):
    pattern, found, right = wb.Predicate(lambda h, i, j: (i - j).abs() < 3), [], wb.Predicate._blocks
    monkeypatch.setattr(wb.Predicate, "_blocks", lambda *sizes: found.append(1) or right(*sizes))
    for _ in range(2):
        attention(*inputs(64), pattern)
    assert len(found) == 1


@pytest.mark.parametrize("made", [
    wb.Dense(), wb.Dilated([4], [1]), wb.BlockSparse(layouts.local(1)), wb.Neighborhood((4, 4), 1),
    wb.Predicate(helper), orderings.hilbert((4, 4)), layouts.local(2),
], ids=lambda made: type(made).__name__)  # fmt: skip
def test_attributes_are_neither_set_nor_deleted(made):
    for name in ("causal", "name", *vars(made)):
        with pytest.raises(AttributeError):
            setattr(made, name, True)
        with pytest.raises(AttributeError):
            delattr(made, name)


def test_tensors_given_are_copied_and_the_copies_are_not_written_to():
    blocks, curve = torch.eye(4, dtype=torch.bool), torch.arange(16)
    layout, order = layouts.explicit(blocks), orderings.Ordering("mine", (4, 4), curve)
    pattern, near = wb.BlockSparse(layout, 4), wb.Neighborhood((4, 4), 1, order)
    want = pattern.multiplicity(16, 1), near.multiplicity(16, 1)
    blocks.zero_()
    curve.zero_()
    assert torch.equal(pattern.multiplicity(16, 1), want[0]) and torch.equal(near.multiplicity(16, 1), want[1])
    layout.tensor.zero_()
    order.curve.zero_()
    refused("the layout's tensor has been written to", pattern.pairs, 16, 1)
    refused("curve of mine has been written to", near.pairs, 16, 1)
    with pytest.raises(TypeError):
        layouts.local(1).arguments["k"] = 5


MAKERS = {
    "dense": wb.Dense,
    "dilated": lambda: wb.Dilated([8, 16], [1, 2], True),
    "blocks": lambda: wb.BlockSparse(layouts.local(1) | layouts.random(0.3, per_head=True), 8, True),
    "neighborhood": lambda: wb.Neighborhood((8, 8), 2, orderings.hilbert((8, 8))),
    "tiles": lambda: wb.Neighborhood((8, 8), 2, orderings.tiles((8, 8), 3)),
    "predicate": lambda: wb.Predicate(lambda h, i, j: (i - j) % 3 == 0),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_tables_are_made_on_the_cpu_as_ordinary_tensors(make):
    q, k, v = inputs(64, grad=True)
    want = attention(q, k, v, make()), *(getattr(make(), name)(64, 2) for name in ("pairs", "distinct", "uncovered"))
    with torch.device("meta"), torch.inference_mode():
        pattern = make()
        assert [getattr(pattern, name)(64, 2) for name in ("pairs", "distinct", "uncovered")] == list(want[1:])
        assert pattern.multiplicity(64, 2).sum() == want[1] and pattern.block_density(64, 2) > 0
        attention(q, k, v, pattern)
    with torch.device("meta"):
        out = attention(q, k, v, pattern)
    torch.testing.assert_close(out, want[0])
    out.sum().backward()


def test_numbers_of_numpy_and_torch_are_the_numbers_they_are():
    assert wb.Dense().pairs(np.int32(65536), np.int8(12)) == 12 << 32
    assert wb.Dilated(np.array([4, 8]), torch.tensor([1, 2])).segment_lengths == (4, 8)
    assert orderings.hilbert(np.int64(8)).shape == (8,) and orderings.tiles((4, 4), np.int32(2)).name == "tiles-2x2"
    assert layouts.random(np.float32(0.5), np.int64(3)).spec() == layouts.random(0.5, 3).spec()
    assert wb.BlockSparse(layouts.local(np.int64(1)), np.int16(64), np.bool_(True)).block_size == (64, 64)
    q, k, v = inputs(16)
    for scale in (np.float32(0.5), np.float64(0.5), torch.tensor(0.5)):
        assert torch.equal(attention(q, k, v, wb.Dense(), scale=scale), attention(q, k, v, wb.Dense(), scale=0.5))
    for wrong in (True, np.bool_(True), torch.tensor(True), 64.0, np.float64(64), "64", torch.zeros((), device="meta")):
        refused("n=.*: want an int >= 0", wb.Dense().pairs, wrong, 1)
    for wrong in (True, np.nan, np.inf, 0, -1, np.array([0.5]), "0.5"):
        refused("scale=.*: want a finite number above 0", attention, q, k, v, wb.Dense(), scale=wrong)


def test_counts_of_a_trillion_tokens_are_exact():
    n = 1 << 40
    assert wb.Dense(True).pairs(n, 3) == 3 * n * (n + 1) // 2
    assert wb.Dilated([n], [1]).pairs(n, 1) == n * n
    w, half = 1 << 36, n // 2
    assert wb.Dilated([w, n], [1, 2], True).pairs(n, 1) == 16 * (w * (w + 1) // 2) + half * (half + 1) // 2
    assert wb.Dilated([1 << 27] * 4, [(1 << 27) - x for x in (1, 3, 5, 7)]).pairs(1 << 27, 1) == 4 * 4  # 0 and its rate
    paper = wb.Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12], True)
    assert paper.pairs(n + 77, 12) == (n >> 15) * paper.pairs(1 << 15, 12) + paper.pairs(77, 12)
    assert wb.Neighborhood((1 << 20, 1 << 20), 1 << 20).pairs(n, 1) == n * n
    assert wb.BlockSparse(layouts.local(0), 1 << 33).pairs(n, 1) == n << 33


def test_heads_in_the_place_of_positions_are_warned_of():
    with pytest.warns(UserWarning, match=r"^4 positions of 64 heads: tensors are \(batch, positions, heads"):
        attention(*(torch.randn(1, 4, 64, 8) for _ in range(3)), wb.Dense())


SHARED = [3, threading.Lock(), 4]


def length():
    return len(SHARED)


def near(h, i, j):
    return (i - j).abs() < len(SHARED) + 0 * length() + eval("0 * len(SHARED)")


def test_what_cannot_be_copied_is_read_where_it_is_in_every_place():
    assert int(Predicate(near).multiplicity(12, 1).sum()) == 12 + 2 * (11 + 10)


class Owner:
    def __init__(self):
        self.w = 3
        self.pattern = Predicate(self.near)

    def near(self, h, i, j):
        return (i - j).abs() < self.w


def test_a_pattern_of_its_owners_method_is_pickled_with_it():
    back = pickle.loads(pickle.dumps(Owner()))
    assert int(back.pattern.multiplicity(12, 1).sum()) == 54
