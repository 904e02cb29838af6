import pytest
import torch

from workbench.probes import memory

MB = 1 << 20


def test_allocations_are_counted_exactly():
    def fn():
        a = torch.zeros(2 * MB, dtype=torch.uint8)
        b = torch.zeros(3 * MB, dtype=torch.uint8)
        del a
        c = torch.zeros(MB, dtype=torch.uint8)
        return c, b[:7]

    got = memory.measure(fn)
    assert (got.allocated_before_bytes, got.allocated_after_bytes, got.peak_allocated_bytes) == (0, 4 * MB, 5 * MB)
    assert got.extra_bytes == 5 * MB


def test_scratch_inside_an_op_is_counted():
    x = torch.randn(1 << 20)
    got = memory.measure(lambda: x.sort().values)
    assert got.allocated_after_bytes == 4 * MB  # the values
    assert got.peak_allocated_bytes >= 12 * MB  # and their int64 indices, which nothing here names


def test_profiler_says_nothing(capfd):
    memory.measure(lambda: torch.zeros(3))
    assert capfd.readouterr().err == ""


def test_refusals():
    for fn, device, want in ((lambda: 1, "mps", "device='mps': want 'cpu'"), (lambda: 1, None, "device='None'"),
                             ("module:function", "cpu", "fn='module:function': want a function")):  # fmt: skip
        with pytest.raises(ValueError, match=want):
            memory.measure(fn, device)
