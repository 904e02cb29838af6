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

    assert memory.measure(fn) == 5 * MB


def test_scratch_inside_an_op_is_counted():
    x = torch.randn(1 << 20)  # its values, and their int64 indices, which nothing here names
    assert memory.measure(lambda: x.sort().values) >= 12 * MB


def test_profiler_says_nothing(capfd):
    memory.measure(lambda: torch.zeros(3))
    assert capfd.readouterr().err == ""


def test_refusals():
    for fn, device, want in ((lambda: 1, "mps", "device='mps': want 'cpu'"), (lambda: 1, None, "device='None'"),
                             ("module:function", "cpu", "fn='module:function': want a function")):  # fmt: skip
        with pytest.raises(ValueError, match=want):
            memory.measure(fn, device)
