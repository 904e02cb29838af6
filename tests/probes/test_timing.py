import gc
import math
import sys
import weakref

import pytest
import torch

import workbench as wb
from tests.tools import refused
from workbench.harness import records
from workbench.harness.outcome import attempt
from workbench.probes import memory, timing
from workbench.probes.case import Case


def timed(pattern, **options):
    case = Case(pattern, **{"n": 40, "heads": 4, "head_dim": 8} | {x: y for x, y in options.items() if x != "seconds"})
    return timing.time(case, samples=2, **{x: y for x, y in options.items() if x == "seconds"})


@pytest.fixture
def sleep(monkeypatch):
    """A clock that only this function moves on, in place of the machine's."""
    now = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])
    return lambda seconds: now.append(now.pop() + seconds)


def test_measure_takes_warm_samples(sleep):
    calls = []

    def fn():
        calls.append(sleep(0.05 if len(calls) < 2 else 0.004))

    got = timing.measure(fn, warmup=2, samples=5)
    assert len(calls) == 7 and got.samples_ms == pytest.approx([4] * 5)  # the two slow first calls do not count


def test_measure_keeps_to_its_time(sleep):
    calls = []

    def fn():
        calls.append(sleep(0.05))

    assert len(timing.measure(fn, warmup=2, samples=100, seconds=0.3).samples_ms) == len(calls) - 2 <= 4
    assert len(timing.measure(fn, warmup=9, samples=100, seconds=0).samples_ms) == 3
    assert len(timing.measure(fn, warmup=0, samples=2, seconds=0).samples_ms) == 2


def test_compare_interleaves_and_measures_itself(sleep):
    order = []

    def sleeps(name, seconds):
        return lambda: (order.append(name), sleep(seconds))

    frame = timing.compare({"slow": sleeps("slow", 0.012), "fast": sleeps("fast", 0.003)}, samples=7, warmup=1)
    assert list(frame.index) == ["slow", "fast", "A/A"]
    assert all(len(x) == 7 for x in frame.samples_ms)
    rounds = [order[2:][x : x + 3] for x in range(0, 21, 3)]
    assert all(sorted(r) == ["fast", "slow", "slow"] for r in rounds) and len(set(map(tuple, rounds))) > 1
    assert frame.speedup["slow"] == 1 and frame.speedup["fast"] == pytest.approx(4)
    assert frame.speedup_low["fast"] <= frame.speedup["fast"] <= frame.speedup_high["fast"]
    assert frame.speedup["A/A"] == pytest.approx(1)
    refused("at least one", timing.compare, {})


@pytest.mark.parametrize("backend, mode", [("torch", "fwd"), ("reference", "fwdbwd"), ("sdpa", "fwdbwd")])
def test_row_is_a_whole_record(backend, mode, tmp_path):
    row = timed(wb.Dense(causal=True), backend=backend, mode=mode, dtype=torch.float64)
    assert (row["status"], row["error"]) == ("ok", None)
    assert (row["pattern"], row["backend"], row["mode"], row["dtype"]) == ("dense", backend, mode, "float64")
    assert row["pairs"] == 4 * 40 * 41 // 2
    assert len(row["samples_ms"]) == 2 and row["median_ms"] == pytest.approx(sum(row["samples_ms"]) / 2)
    recorder = records.start("timing", "tiny", tmp_path)
    written = recorder.row(**row)
    assert set(records.FIELDS) - {"peak_bytes", "extra_bytes", "asked", "suite"} <= set(written)
    assert recorder.settled(pattern="dense", n=40, backend=backend)


def test_auto_is_recorded_as_what_it_took():
    row = timed(wb.Dilated([8, 16], [1, 2]))
    assert row["backend"] == "torch" and row["pattern_spec"]["segment_lengths"] == [8, 16]


def test_any_callable_is_timed_with_gradients_where_asked():
    seen = []

    def mine(q, k, v):
        seen.append((q.shape, k.shape, q.requires_grad, torch.is_grad_enabled()))
        return q + k.mean(1, keepdim=True).repeat_interleave(2, 2) + v.mean(1, keepdim=True).repeat_interleave(2, 2)

    for mode in ("fwd", "fwdbwd"):
        row = timed(wb.Dense(), backend=mine, mode=mode, kv_heads=2, nq=7, batch=3)
        assert (row["status"], row["backend"], row["kv_heads"], row["nq"]) == ("ok", "mine", 2, 7)
        assert set(seen) == {((3, 7, 4, 8), (3, 40, 2, 8), mode == "fwdbwd", mode == "fwdbwd")}
        seen.clear()
    assert timed(wb.Dense(), backend="operator:matmul")["status"] == "killed"  # three inputs


@pytest.mark.parametrize("pattern, options, status, error", [
    (wb.Dilated([8], [1]), {"backend": "sdpa"}, "refused", "Dense only"),
    (wb.Dense(causal=True), {"backend": "sdpa", "nq": 8}, "refused", "nq=8"),
    (wb.Dense(), {"backend": "flash"}, "unsupported", "CUDA only"),
    (wb.Dense(), {"backend": "nonsense"}, "refused", "nonsense"),
    (wb.Dense(), {"backend": lambda q, k, v: torch.empty(1 << 60)}, "oom", "memory"),
    (wb.Dense(), {"backend": lambda q, k, v: q.no_such_thing}, "killed", "AttributeError"),
    (wb.Dense(), {"backend": lambda q, k, v: sys.exit(4)}, "killed", "SystemExit: 4"),
])  # fmt: skip
def test_what_does_not_run_is_data(pattern, options, status, error):
    row = timed(pattern, **options)
    assert row["status"] == status and error in row["error"]
    assert row["median_ms"] is None and row["n"] == 40


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a card")
def test_a_card_that_is_not_there_is_unsupported():
    assert timed(wb.Dense(), device="cuda")["status"] == "unsupported"


def test_bad_arguments_are_refused():
    refused("samples=0: want an int >= 1", timing.measure, int, samples=0)
    refused("samples=0: want an int >= 1", timing.compare, {"a": int}, samples=0)
    for more, want in (({"mode": "backward"}, "mode='backward'"), ({"dtype": "float31"}, "dtype='float31'"),
                       ({"kv_heads": 3}, "3 key heads do not divide"), ({"nq": 41}, "nq=41, n=40"),
                       ({"device": "gpu"}, "device='gpu': want 'cpu'"), ({"seconds": None}, "seconds=None"),
                       ({"batch": -1}, "batch=-1"), ({"backend": None}, "backend=None")):  # fmt: skip
        refused(want, timed, wb.Dense(), **more)
    for alternatives in ([int], {}, {"a": 3}, {"A/A": int}, None):
        refused("alternatives", timing.compare, alternatives)


def test_a_failed_allocation_leaves_nothing_alive():
    alive = []

    def hungry():
        tensor = torch.zeros(100)
        alive.append(weakref.ref(tensor))
        try:
            tensor.view(7)  # an error in whose context the next one is raised
        except RuntimeError:
            inner = torch.zeros(100)
            alive.append(weakref.ref(inner))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore") from None

    gc.disable()
    try:
        outcome = attempt(hungry)
    finally:
        gc.enable()
    assert (outcome.status, outcome.result) == ("oom", None)
    assert outcome.error == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert len(alive) == 2 and all(ref() is None for ref in alive)


def test_ceilings_of_this_cpu():
    from workbench.probes.roofline import ceilings, operations

    got = ceilings("cpu", seconds=0.5)
    side, best = got["matmul_size"]["float32"], min(got["samples_ms"]["float32"])
    assert got["matmul_tflops"]["float32"] == pytest.approx(2 * side**3 / (best * 1e-3) / 1e12)
    assert 1e-5 < got["matmul_tflops"]["float32"] < 100 and 0.1 < got["copy_gbs"] < 5000
    assert math.isclose(got["copy_gbs"], 2 * got["copy_bytes"] / (min(got["samples_ms"]["copy"]) * 1e-3) / 1e9)
    for mode, many in (("fwd", 4), ("fwdbwd", 14)):  # of 50 pairs in each of 3
        assert operations(Case(wb.Dense(), 5, 2, 64, mode=mode, batch=3)) == many * 64 * 50 * 3


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
        refused(want, memory.measure, fn, device)
