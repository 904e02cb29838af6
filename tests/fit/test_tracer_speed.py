"""A trace makes few of the calls that are alike, and lists no blocks: to the byte what all of them would bring."""

import collections
import contextlib
import copy
import dataclasses
import weakref

import pytest
import torch

import workbench as wb
from tests import tools
from workbench.engines import torch_backend
from workbench.engines.torch import block_sparse
from workbench.fit import allocator, cards, fake_cuda, tracer, tracer_shortcuts, workspace
from workbench.patterns.base import Pattern
from workbench.patterns.dilated import PAPER
from workbench.probes.case import Case

layouts = wb.layouts
SIZES = {"heads": 12, "head_dim": 64, "device": "cuda"}
CASES = [
    (wb.Dense(), "flash", 3000, "a100-40gb", {}),
    (wb.Dense(), "efficient", 3000, "t4", {"dtype": "float16"}),
    (wb.Dense(True), "torch", 1000, "h100", {"dtype": "float32", "nq": 300}),
    (wb.Dilated(PAPER, (1, 2, 4, 8, 16)), "torch", 70_001, "a100-40gb", {"mode": "fwd"}),
    (wb.Dilated(PAPER, (1, 2, 4, 6, 12)), "torch", 5000, "rtx2080ti", {}),
    (wb.Dilated((100, 700, 3000), (1, 3, 7), True), "torch", 5000, "h100", {"batch": 2, "kv_heads": 4, "nq": 4100}),
    (wb.Dilated(PAPER, (1, 2, 4, 6, 12)), "triton", 41_216, "h100", {}),
    (wb.BlockSparse(layouts.local(8), 128), "torch", 2176, "h100", {"dtype": "float32"}),
    (wb.BlockSparse(layouts.local(1) | layouts.global_(1), 64), "torch", 3000, "rtx2080ti", {"mode": "fwd"}),
    (wb.BlockSparse(layouts.random(0.2, per_head=True), 128), "torch", 1280, "h100", {}),
    (wb.BlockSparse(layouts.local(8), 128, True), "triton", 12_345, "h100", {"nq": 5000}),
    (wb.Neighborhood((300, 32), 5), "triton", 9600, "h100", {}),
    (wb.Neighborhood((9600,), 300), "triton", 9600, "h100", {"nq": 9000}),
]


def peaks(case, card):
    """(requested, allocated, reserved) at the peak of a case."""
    case = dataclasses.replace(case, pattern=copy.copy(case.pattern))
    events, *_ = tracer.run(case, cards.find(card))
    used = allocator.replay(events)
    return used.peak_requested, used.peak_allocated, used.peak_reserved


class InItsPlace(tracer.Births):
    """Follows what is on the card, and while `mirrored` what is on the CPU in its place."""

    mirrored = False

    def born(self, x, name):
        if not self.mirrored or x.is_meta:
            return super().born(x, name)
        storage = x.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        if address not in self.alive and nbytes:
            self.alive[address] = self.add(nbytes, name)
            self.watched[address] = weakref.ref(storage, lambda _: self.died(address))

    def mirror(self, call):
        self.mirrored = True
        try:
            return call()
        finally:
            self.mirrored = False


@contextlib.contextmanager
def lists_made(self):
    """`Shortcuts.taken` with all calls, and lists of blocks that are made on the CPU in the card's place."""
    births, strips = self.births, block_sparse.strips

    def followed(blocks, limit):
        found = strips(blocks, limit)
        while (one := births.mirror(lambda: next(found, None))) is not None:
            with torch.utils._python_dispatch._disable_current_modes():
                twin = block_sparse.Strips(*(x.to(fake_cuda.META) for x in one[:3]), one.full)
            for x in twin[:3]:  # whose places `one` has
                births.alive[x.untyped_storage()._cdata] = 0
            yield twin
            for x in twin[:3]:
                del births.alive[x.untyped_storage()._cdata]
            del one, twin, x

    def blocks_of(pattern, q, n):
        made = pattern.blocks(n, q.shape[2], q.shape[1])  # on the host
        lists = births.mirror(lambda: [x.clone() for x in (made.starts, made.columns, made.full)])
        return dataclasses.replace(made, **dict(zip(("starts", "columns", "full"), lists, strict=True)))

    replaced = [(block_sparse, "strips", followed), (torch_backend, "blocks_of", blocks_of)]
    with fake_cuda.replaced(replaced):
        yield


@pytest.mark.parametrize("number", tools.tiers(range(len(CASES)), [0, 2, 5, 7, 8, 9, 10, 11]))
def test_few_calls_take_what_all_of_them_do(monkeypatch, number):
    pattern, backend, n, card, options = CASES[number]
    if backend == "triton":
        pytest.importorskip("triton")
    case = Case(pattern, n, backend=backend, **SIZES | {"dtype": "bfloat16", "mode": "fwdbwd"} | options)
    found = peaks(case, card)
    monkeypatch.setattr(tracer, "Births", InItsPlace)
    monkeypatch.setattr(tracer_shortcuts.Shortcuts, "taken", contextlib.contextmanager(lists_made.__wrapped__))
    monkeypatch.setattr(tracer, "_kind", lambda func: None)
    assert peaks(case, card) == found


@pytest.mark.parametrize("backend, make", [
    ("torch", lambda n: wb.Dilated(PAPER, (1, 2, 4, 6, 12))),
    ("triton", lambda n: wb.Dilated(PAPER, (1, 2, 4, 6, 12))),
    ("torch", lambda n: wb.BlockSparse(layouts.local(8), 128)),
    ("torch", lambda n: wb.BlockSparse(layouts.local(1) | layouts.global_(1), 512)),
    ("triton", lambda n: wb.BlockSparse(layouts.local(8) | layouts.global_(1), 64, True)),
    ("triton", lambda n: wb.BlockSparse(layouts.random(0.1), 128)),
    ("triton", lambda n: wb.Neighborhood((n // 128, 128), 16)),
])  # fmt: skip
def test_a_trace_takes_hardly_longer_for_long_sequences(monkeypatch, backend, make):
    if backend == "triton":
        pytest.importorskip("triton")
    seen, listed, follow = collections.Counter(), [], tracer.Births.follow
    monkeypatch.setattr(tracer.Births, "follow", lambda *x: seen.update([n]) or follow(*x))
    for kind in (wb.BlockSparse, wb.Neighborhood):
        blocks = kind.blocks
        monkeypatch.setattr(kind, "blocks", lambda self, n, *x, b=blocks: listed.append(n) or b(self, n, *x))
    for n in (1 << 19, 1 << 23):
        case = Case(make(n), n, backend=backend, dtype="bfloat16", mode="fwdbwd", **SIZES)
        assert peaks(case, "h100")[0] > 8 * n * 12 * 64 * 2  # q, k, v, the gradient, and the gradients of each
    assert seen[1 << 23] <= 4 * seen[1 << 19] and seen[1 << 23] < 1500  # operators
    assert max(listed, default=0) < 1 << 15


PATTERNS = [
    *((layouts.local(2), bs, causal) for bs in (4, 8, (4, 8)) for causal in (False, True)),
    *((layout, 4, causal) for causal in (False, True) for layout in (
        layouts.global_(2), layouts.strided(5), layouts.hierarchical(2, 3),
        layouts.strided(4) & ~layouts.local(2), layouts.global_(3) - layouts.strided(3),
        layouts.random(0.1), layouts.random(0.3, per_head=True), layouts.random(0.2) | layouts.local(1),
    )),
]  # fmt: skip


@pytest.mark.parametrize("n, nq", [(397, 397), (400, 400), (400, 392), (397, 300), (5, 5), (64, 0)])
def test_blocks_are_counted_as_listed(n, nq):
    for layout, block_size, causal in PATTERNS:
        pattern = wb.BlockSparse(layout, block_size, causal)
        assert torch.equal(pattern.row_counts(n, 2, nq), pattern.blocks(n, 2, nq).row_counts()), pattern
        assert pattern.pairs(n, 2, nq) == Pattern.pairs(pattern, n, 2, nq), pattern


@pytest.mark.parametrize("shape", [(60, 8), (90, 4), (300,), (40, 3, 2), (7, 5), (61, 10)])
@pytest.mark.parametrize("radius", [0, 1, 5])
def test_blocks_of_a_neighborhood_are_counted_as_listed(shape, radius):
    pattern, n = wb.Neighborhood(shape, radius), torch.Size(shape).numel()
    for block_size in (4, 8, (4, 8), 6):
        for nq in (n, n - 4, n - 5):
            found = pattern.row_counts(n, 2, nq, block_size)
            assert torch.equal(found, pattern.blocks(n, 2, nq, block_size).row_counts())
    assert pattern.pairs(n, 2) == Pattern.pairs(pattern, n, 2)


def test_equal_calls_are_repeated_only_where_one_leaves_what_the_last_left():
    births = tracer.Births(cards.find("h100"))
    repeated = tracer_shortcuts.Shortcuts(births).repeated

    def calls(leave, times=50):
        kept = []
        for x in repeated(range(times), lambda _: 0, 10):
            id = births.add(100, str(x))
            if leave and kept:
                births.events.append(tracer.Event(kept.pop(), -1, ""))
            kept.append(id)

    calls(leave=False)  # it grows: nothing is known of the third from the second
    assert len(births.events) == 10
    births.events.clear()
    calls(leave=True)
    assert len(births.events) == 2 * 10 - 1 and allocator.replay(births.events).peak_requested == 200


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_float32_is_refused_by_kernels_that_have_none(monkeypatch, backend):
    monkeypatch.setattr(workspace, "of", lambda *_: 0)
    for heads in (12, 4):
        case = Case(wb.Dense(), 1024, dtype="float32", backend=backend, mode="fwdbwd", kv_heads=heads, **SIZES)
        with pytest.raises(NotImplementedError, match="No available kernel for torch.float32"):
            peaks(case, "h100")
