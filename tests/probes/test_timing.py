import gc
import math
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import workbench as wb
from workbench.harness import records
from workbench.harness.outcome import attempt
from workbench.probes import timing
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
    with pytest.raises(ValueError, match="at least one"):
        timing.compare({})


def test_compare_records_the_order_it_drew(sleep):
    order = []
    calls = {x: lambda x=x: (order.append(x), sleep(0.001)) for x in "abcd"}
    frame, same, other = (timing.compare(calls, samples=8, warmup=0, seed=seed) for seed in (5, 5, 6))
    places = np.array(frame.places.tolist())  # (alternatives and A/A, rounds)
    names = np.array([x if x != "A/A" else "a" for x in frame.index])
    assert [list(names[places[:, x].argsort()]) for x in range(8)] == [order[x : x + 5] for x in range(0, 40, 5)]
    assert set(frame.order_seed) == {5} and same.places.equals(frame.places) and not other.places.equals(frame.places)


class Card:
    """A card and its NVML, in software: a clock and reasons for each sample, and a log of what happened when."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM = 1

    def __init__(self, clocks, reasons):
        self.clocks, self.reasons, self.log = list(clocks), list(reasons), []

    def nvmlInit(self):
        self.log.append("init")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetClockInfo(self, handle, kind):
        assert (handle, kind) == ("GPU-1234-abcd", 1)
        self.log.append("clock")
        return self._next(self.clocks)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self._next(self.reasons)

    def _next(self, answers):
        if not answers:
            raise self.NVMLError("Not Supported")
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def event(self, enable_timing):
        event = SimpleNamespace(synchronize=lambda: self.log.append("wait"))

        def record():
            event.at = timing.perf_counter()
            self.log.append("event")

        event.record, event.elapsed_time = record, lambda end: 1000 * (end.at - event.at)
        return event


@pytest.fixture
def card(monkeypatch):
    """Makes this process one that has work on a card, the card being `Card` and NVML its own."""

    def make(clocks, reasons):
        made = Card(clocks, reasons)
        monkeypatch.setitem(sys.modules, "pynvml", made)
        monkeypatch.setattr(timing, "_on_gpu", lambda: True)
        monkeypatch.setattr(torch.cuda, "Event", made.event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.log.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid="1234-abcd"))
        return made

    return make


def test_compare_reads_clocks_between_rounds(card):
    made = card([210, 1900, 1980, 1700], [1, 0, 4 | 64, 4])
    call = lambda: made.log.append("call")  # noqa: E731
    frame = timing.compare({"a": call, "b": call}, samples=4)
    assert set(frame.sm_clock_mhz) == {1700}
    assert frame.throttle.tolist() == 3 * [["software power cap", "hardware thermal slowdown"]]
    one = 3 * ["event", "call", "event"] + ["clock", "synchronize"]
    ran = made.log[made.log.index("clock") :]  # from after the warm-up on
    assert made.log[0] == "init" and ran[:46] == ["clock"] + 4 * one + ["clock"] and "clock" not in ran[46:]
    assert records.plain(frame.to_dict("index"))["A/A"]["throttle"] == frame.throttle["a"]


def test_measure_reads_clocks_once_all_is_launched(card):
    made = card([1000, 1200, 1400, 1600], [0])
    got = timing.measure(lambda: made.log.append("call"), samples=3, warmup=1)
    assert (got.sm_clock_mhz, got.throttle) == (1300, [])
    launched = made.log[made.log.index("clock") + 1 :]
    assert launched == ["call", "synchronize"] + 3 * ["event", "call", "event"] + 3 * ["wait", "clock"]


@pytest.mark.parametrize(
    "clocks, reasons, want",
    [([], [1], (None, [])), ([900], [], (900, None)), ([900], [1 << 20], (900, ["reason 0x100000"]))],
)
def test_what_a_card_does_not_tell_is_none(clocks, reasons, want, card):
    card(clocks, reasons)
    got = timing.measure(lambda: None, samples=1)
    assert (got.sm_clock_mhz, got.throttle) == want


def test_without_nvml_there_are_no_clocks(card, monkeypatch):
    made = card([900], [4])

    def fails(*_):
        raise Card.NVMLError("Not Found")

    for broken in ("nvmlInit", "nvmlDeviceGetHandleByUUID"):
        with monkeypatch.context() as patch:
            patch.setattr(made, broken, fails)
            assert timing.measure(lambda: None, samples=1).sm_clock_mhz is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    frame = timing.compare({"a": lambda: None}, samples=2)
    assert frame.sm_clock_mhz.tolist() == frame.throttle.tolist() == [None, None]


def test_nvml_names_every_reason_that_it_has():
    pynvml = pytest.importorskip("pynvml")
    bits = {value for name, value in vars(pynvml).items() if name.startswith("nvmlClocksThrottleReason")}
    assert {x for x in bits if x.bit_count() == 1} - {1} == set(timing.THROTTLE)


@pytest.mark.parametrize("backend, mode", [("torch", "fwd"), ("reference", "fwdbwd"), ("sdpa", "fwdbwd")])
def test_row_is_a_whole_record(backend, mode, tmp_path):
    row = timed(wb.Dense(causal=True), backend=backend, mode=mode, dtype=torch.float64)
    assert (row["status"], row["error"], row["sm_clock_mhz"], row["throttle"]) == ("ok", None, None, None)
    assert (row["pattern"], row["backend"], row["mode"], row["dtype"]) == ("dense", backend, mode, "float64")
    assert row["pairs"] == 4 * 40 * 41 // 2
    assert len(row["samples_ms"]) == 2 and row["median_ms"] == pytest.approx(sum(row["samples_ms"]) / 2)
    recorder = records.start("timing", "tiny", tmp_path)
    written = recorder.row(**row)
    assert set(records.FIELDS) - {"peak_bytes", "extra_bytes"} <= set(written)
    assert recorder.done(pattern="dense", n=40, backend=backend)


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


def test_sdpa_is_the_dense_attention():
    case = Case(wb.Dense(causal=True), 24, 4, 8, torch.float64, "sdpa", kv_heads=2)
    q, k, v = torch.randn(24, 4, 8), torch.randn(24, 2, 8), torch.randn(24, 2, 8)
    q, k, v = (x[None].double() for x in (q, k, v))
    got = case.function(q, k, v)[0](q, k, v)
    torch.testing.assert_close(got, wb.reference(q, k, v, wb.Dense(causal=True))[0])


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
    with pytest.raises(ValueError, match="samples=0: want an int >= 1"):
        timing.measure(int, samples=0)
    with pytest.raises(ValueError, match="samples=0: want an int >= 1"):
        timing.compare({"a": int}, samples=0)
    for more, want in (({"mode": "backward"}, "mode='backward'"), ({"dtype": "float31"}, "dtype='float31'"),
                       ({"kv_heads": 3}, "3 key heads do not divide"), ({"nq": 41}, "nq=41, n=40"),
                       ({"device": "gpu"}, "device='gpu': want 'cpu'"), ({"seconds": None}, "seconds=None"),
                       ({"batch": -1}, "batch=-1"), ({"backend": None}, "backend=None")):  # fmt: skip
        with pytest.raises(ValueError, match=want):
            timed(wb.Dense(), **more)
    for alternatives in ([int], {}, {"a": 3}, {"A/A": int}, None):
        with pytest.raises(ValueError, match="alternatives"):
            timing.compare(alternatives)


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

    collecting = gc.isenabled()
    gc.disable()
    try:
        outcome = attempt(hungry)
    finally:
        if collecting:
            gc.enable()
    assert (outcome.status, outcome.result) == ("oom", None)
    assert outcome.error == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert len(alive) == 2 and all(ref() is None for ref in alive)


def test_ceilings_of_this_cpu():
    from workbench.probes.roofline import ceilings, flops

    got = ceilings("cpu", seconds=0.5)
    side, best = got["matmul_size"]["float32"], min(got["samples_ms"]["float32"])
    assert got["matmul_tflops"]["float32"] == pytest.approx(2 * side**3 / (best * 1e-3) / 1e12)
    assert 1e-5 < got["matmul_tflops"]["float32"] < 100 and 0.1 < got["copy_gbs"] < 5000
    assert math.isclose(got["copy_gbs"], 2 * got["copy_bytes"] / (min(got["samples_ms"]["copy"]) * 1e-3) / 1e9)
    assert flops(10, 64) == 4 * 64 * 10 and flops(10, 64, "fwdbwd", batch=2) == 14 * 64 * 10 * 2
