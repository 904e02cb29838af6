from pathlib import Path

import pytest
import torch

import workbench as wb
from workbench.probes import memory

MB = 1 << 20
ROOT = Path(wb.__file__).parents[1]


def test_allocations_are_counted_exactly():
    def fn():
        a = torch.zeros(2 * MB, dtype=torch.uint8)
        b = torch.zeros(3 * MB, dtype=torch.uint8)
        del a
        c = torch.zeros(MB, dtype=torch.uint8)
        return c, b[:7]

    got = memory.measure(fn)
    assert (got.allocated_before_bytes, got.allocated_after_bytes, got.peak_allocated_bytes) == (0, 4 * MB, 5 * MB)
    assert got.extra_bytes == 5 * MB and got.reserved_bytes is None
    assert got.source == "torch profiler" and got.device_used_bytes > 50 * MB


def test_scratch_inside_an_op_is_counted():
    x = torch.randn(1 << 20)
    got = memory.measure(lambda: x.sort().values)
    assert got.allocated_after_bytes == 4 * MB  # the values
    assert got.peak_allocated_bytes >= 12 * MB  # and their int64 indices, which nothing here names


def test_profiler_says_nothing(capfd):
    memory.measure(lambda: torch.zeros(3))
    assert capfd.readouterr().err == ""


def test_fresh_and_here_agree_on_what_is_allocated():
    options = {"n": 512, "heads": 4, "head_dim": 32, "backend": "reference", "dtype": torch.float64}
    here = memory.measure_attention(wb.Dense(), in_process=True, **options)
    there = memory.measure_attention(wb.Dense(), **options)
    assert here["status"] == there["status"] == "ok"
    inputs = 3 * 512 * 4 * 32 * 8
    for row in (here, there):
        assert row["allocated_before_bytes"] == inputs
        assert row["peak_bytes"] == row["extra_bytes"] + inputs
        assert row["extra_bytes"] > 4 * 512 * 512 * 8  # a matrix of scores
        assert (row["pairs"], row["backend"], row["measured"]) == (4 * 512 * 512, "reference", True)
    assert here["extra_bytes"] == there["extra_bytes"]
    assert here["reserved_bytes"] is there["reserved_bytes"] is None and there["device_used_bytes"] > 50 * MB


def test_refusals():
    row = memory.measure_attention(wb.Dense(), n=64, heads=2, head_dim=8, backend="nonsense", in_process=True)
    assert row["status"] == "refused" and "nonsense" in row["error"] and row["peak_bytes"] is None
    with pytest.raises(ValueError, match="module:function"):
        memory.measure_attention(wb.Predicate(lambda h, i, j: i == j), n=8, heads=1, head_dim=8)
    for fn, device, want in ((lambda: 1, "mps", "device='mps': want 'cpu'"), (lambda: 1, None, "device='None'"),
                             ("module:function", "cpu", "fn='module:function': want a function")):  # fmt: skip
        with pytest.raises(ValueError, match=want):
            memory.measure(fn, device)
