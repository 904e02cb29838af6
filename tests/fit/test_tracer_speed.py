"""A trace makes few of the calls that are alike: to the byte what all of them would bring."""

import copy
import dataclasses

import pytest

import workbench as wb
from tests import tools
from workbench.engines.torch import steps
from workbench.fit import allocator, cards, tracer, tracer_shortcuts
from workbench.patterns.dilated import PAPER
from workbench.probes.case import Case

layouts, H100 = wb.layouts, cards.find("h100")
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
    events, *_ = tracer.of_case(case, cards.find(card))
    used = allocator.replay(events)
    return used.peak_requested, used.peak_allocated, used.peak_reserved


@pytest.mark.parametrize("number", tools.tiers(range(len(CASES)), [0, 2, 5, 7, 8, 9, 10, 11]))
def test_few_calls_take_what_all_of_them_do(monkeypatch, number):
    pattern, backend, n, card, options = CASES[number]
    if backend == "triton":
        pytest.importorskip("triton")
    case = Case(pattern, n, backend=backend, **SIZES | {"dtype": "bfloat16", "mode": "fwdbwd"} | options)
    found = peaks(case, card)
    monkeypatch.setattr(tracer_shortcuts, "few_starts", steps.starts)
    monkeypatch.setattr(tracer_shortcuts, "EACH", 1 << 30)
    monkeypatch.setattr(tracer, "_written", lambda func: None)
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
    few, many = (
        len(tracer.of_case(Case(make(n), n, backend=backend, dtype="bfloat16", mode="fwdbwd", **SIZES), H100).events)
        for n in (1 << 16, 1 << 18)
    )
    assert many <= 4 * few and many < 20_000
