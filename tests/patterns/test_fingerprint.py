"""What a pattern's function reads may change: what is kept with the pattern is then made again."""

import functools
import threading
import types

import numpy as np
import pytest
import torch

import workbench as wb
from tests.tools import refused
from workbench import attention, layouts
from workbench.patterns import orderings
from workbench.patterns.fingerprint import fingerprint

LIMIT, FLAGS = 4, types.ModuleType("flags")
FLAGS.limit = FLAGS.most = 1


def helper(i):
    return (i < LIMIT) & (i < FLAGS.most)


class Window:
    wide = 3

    def __init__(self):
        self.limit = 1

    @property
    def reach(self):
        return self.limit + self.wide

    def __call__(self, h, i, j):
        return (i - j).abs() < self.reach

    def method(self, h, i, j):
        return self(h, i, j)


def with_default(h, i, j, limits={"one": 1}):  # noqa: B006
    return i < limits["one"]


class Wrapper:
    def __init__(self, function, limits):
        functools.update_wrapper(self, function)
        self.limits = limits

    def __call__(self, *where):
        return self.__wrapped__(*where) & (where[1] < self.limits[0])


def cases():
    """name -> (a function, a change of what it reads)."""
    yield "tensor", (lambda t: (lambda h, i, j: t[i], lambda: t.zero_()))(torch.ones(8, dtype=torch.bfloat16))
    yield "list", (lambda x: (lambda h, i, j: x[0] < i, lambda: x.append(7)))([1])
    yield "global", (lambda h, i, j: i < LIMIT, lambda: globals().update(LIMIT=LIMIT + 1))
    yield "called function", (lambda h, i, j: helper(i), lambda: globals().update(LIMIT=LIMIT + 1))
    wrapper = Wrapper(lambda h, i, j: i < 3, [1])
    yield "wrapper", (wrapper, lambda: wrapper.limits.insert(0, 2))
    yield "module", (lambda h, i, j: i < FLAGS.limit, lambda: setattr(FLAGS, "limit", 5))
    yield "module, by another function", (lambda h, i, j: helper(i) & FLAGS.limit, lambda: setattr(FLAGS, "most", 5))
    yield "cached", (functools.cache(lambda h, i, j: i < LIMIT), lambda: globals().update(LIMIT=LIMIT + 1))
    window = Window()
    yield "object", (window, lambda: setattr(window, "limit", 2))
    yield "bound method", (window.method, lambda: setattr(window, "limit", 3))
    yield "class", (window, lambda: setattr(Window, "wide", 4))
    yield "default", (with_default, lambda: with_default.__defaults__[0].update(one=2))
    generator = np.random.default_rng(0)
    yield "random state", (lambda h, i, j: i < generator.integers(9), lambda: generator.integers(9))


CASES = dict(cases())


@pytest.mark.parametrize("function, change", CASES.values(), ids=CASES)
def test_a_fingerprint_changes_with_what_a_function_reads_and_only_then(function, change):
    before = fingerprint(function)
    assert before.known() and fingerprint(function).digest == before.digest
    change()
    assert fingerprint(function).digest != before.digest


def test_what_cannot_be_read_is_not_known():
    lock, steps = threading.Lock(), iter(x for x in range(3))
    for function in (lambda h, i, j: lock, lambda h, i, j: next(steps)):
        assert not fingerprint(function).known()
        assert fingerprint(function).digest != fingerprint(function).digest


def inputs(n=256, grad=False):
    torch.manual_seed(0)
    return [torch.randn(1, n, 2, 4, dtype=torch.float64, requires_grad=grad) for _ in range(3)]


@pytest.mark.parametrize("kind", ["predicate", "block-sparse"])
def test_attention_follows_what_the_function_reads(kind):
    document = torch.arange(256) // 128
    same = lambda h, i, j: document[i] == document[j]  # noqa: E731
    pattern = wb.Predicate(same) if kind == "predicate" else wb.BlockSparse(layouts.local(9), 64) & wb.Predicate(same)
    q, k, v = inputs()
    for change in (lambda: None, lambda: document.zero_(), lambda: document.data.copy_(torch.arange(256) // 32)):
        change()
        torch.testing.assert_close(attention(q, k, v, pattern), wb.reference(q, k, v, pattern)[0])


def test_blocks_are_found_once_while_nothing_changes(monkeypatch):
    width = [3]
    pattern = wb.Predicate(lambda h, i, j: (i - j).abs() < width[0])
    found = []
    right = wb.Predicate._blocks
    monkeypatch.setattr(wb.Predicate, "_blocks", lambda *sizes: found.append(1) or right(*sizes))
    q, k, v = inputs(64)
    attention(q, k, v, pattern)
    attention(q, k, v, pattern)
    assert len(found) == 1
    width[0] = 5
    torch.testing.assert_close(attention(q, k, v, pattern), wb.reference(q, k, v, pattern)[0])
    assert len(found) == 2


def test_a_backward_refuses_what_changed_since_its_forward():
    document = torch.arange(64) // 32
    pattern = wb.Predicate(lambda h, i, j: document[i] == document[j])
    q, k, v = inputs(64, grad=True)
    attention(q, k, v, pattern).sum().backward()
    out = attention(q, k, v, pattern)
    document.zero_()
    with pytest.raises(RuntimeError, match="changed since the forward"):
        out.sum().backward()


def test_a_function_that_changes_what_it_reads_is_asked_anew_and_differentiated():
    asked = []
    pattern = wb.Predicate(lambda h, i, j: asked.append(1) or (i - j).abs() < 3)
    q, k, v = inputs(64, grad=True)
    for _ in range(2):
        before = len(asked)
        attention(q, k, v, pattern).sum().backward()
        assert len(asked) > before


@pytest.mark.parametrize(
    "made",
    [
        wb.Dense(), wb.Dilated([4], [1]), wb.BlockSparse(layouts.local(1)), wb.Neighborhood((4, 4), 1),
        wb.Predicate(helper), orderings.hilbert((4, 4)), layouts.local(2),
    ],
    ids=lambda made: type(made).__name__,
)  # fmt: skip
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
