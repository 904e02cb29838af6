"""The probes on CUDA: events, the allocator's numbers, statuses of fused kernels.

The first two tests compare times, as of a card that does nothing else: they fail where another process uses it.
"""

import torch

import workbench as wb
from workbench.probes import memory, roofline, timing
from workbench.probes.case import Case

MB = 1 << 20


def test_events_time_the_gpu_and_not_the_launch():
    a = torch.randn(4096, 4096, device="cuda")
    one = timing.measure(lambda: a @ a, samples=9).median_ms
    four = timing.measure(lambda: [a @ a for _ in range(4)], samples=9).median_ms
    assert 3 < four / one < 5


def test_compare_finds_itself_equal():
    a = torch.randn(2048, 2048, device="cuda")
    frame = timing.compare({"two": lambda: a @ a @ a, "one": lambda: a @ a}, samples=15)
    assert 1.5 < frame.speedup["one"] < 2.5 and 0.9 < frame.speedup["A/A"] < 1.1


def test_the_peak_is_above_what_there_was():
    kept = torch.zeros(MB, device="cuda")

    def fn():
        a = torch.zeros(16 * MB, device="cuda")  # float32: the sum of uint8 is that of a copy in int64
        return torch.zeros(8 * MB, device="cuda"), a.sum()

    assert 96 * MB <= memory.measure(fn, "cuda") < 97 * MB and kept.is_cuda


def test_a_kernel_that_does_not_take_the_input_is_unsupported():
    row = timing.time(Case(wb.Dense(), 64, 2, 64, backend="flash", device="cuda"))
    assert row["status"] == "unsupported", row["error"]  # float32


def test_out_of_memory_is_data_and_leaves_nothing():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    hungry = lambda q, k, v: [q @ torch.empty(1 << 50, device="cuda")]  # noqa: E731
    row = timing.time(Case(wb.Dense(), 1 << 14, 8, 64, backend=hungry, device="cuda"))
    assert row["status"] == "oom" and torch.cuda.memory_allocated() == before


def test_ceilings():
    got = roofline.ceilings("cuda")
    assert got["matmul_tflops"]["bfloat16"] > got["matmul_tflops"]["float64"] > 0
    assert got["copy_gbs"] > 50
