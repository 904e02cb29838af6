"""Timing: warm, every sample kept, alternatives interleaved; CUDA events where the work is on a GPU."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from workbench.harness.outcome import attempt
from workbench.patterns import checks
from workbench.probes.case import Case, case_of

AA = "A/A"  # the first alternative measured against itself: what noise alone does
HOT = 0.02  # seconds of calls after which the host's part of a short one, too, takes what it takes in a loop


@dataclass(frozen=True)
class Timing:
    """How long each call took, in milliseconds, in the order in which they ran."""

    samples_ms: list[float]

    @property
    def median_ms(self) -> float:
        return float(np.median(self.samples_ms))


def measure(fn: Callable[[], object], *, warmup: int = 2, samples: int = 9, seconds: float = 10.0) -> Timing:
    """Time fn() `samples` times, after `warmup` calls that do not count.

    seconds: about what all of it may take; fewer samples, but at least three, where a call is slow. However long the
    first calls compile, a tenth of it is for samples. Where fn started work on a GPU the samples are taken by CUDA
    events, queued without waiting in between, so that the time to launch kernels shows only where the GPU waits for it.
    """
    checks.callable_("fn", fn)
    _check(samples, warmup, seconds)
    seconds = max(seconds - _warm(fn, warmup, seconds), seconds / 10)
    reads, begin = [], perf_counter()
    lasts = _hot(fn) if _on_gpu() else None  # of events, known only when it is too late
    while len(reads) < samples:
        reads.append(_sample(fn))
        spent = perf_counter() - begin if lasts is None else len(reads) * lasts
        if len(reads) >= 3 and spent + spent / len(reads) > seconds:  # fewer would show no spread
            break
    return Timing([read() for read in reads])


def compare(
    alternatives: dict[str, Callable[[], object]], *, warmup: int = 2, samples: int = 9, seconds: float = 60.0, seed=0
):
    """Time alternatives against the first, interleaved: every round runs each once, in an order drawn anew.

    Returns a DataFrame, a row each and one named "A/A", the first measured against itself: median_ms, q10_ms, q90_ms;
    speedup (the first's time over this one's in the same round, median of the rounds), speedup_low and speedup_high
    (the 95% bootstrap interval of that median) and samples_ms. A speed-up within the A/A row's interval is noise.
    seconds: no round is started after about this long, warm-up included, once three are done.
    """
    import pandas as pd

    alternatives = checks.named("alternatives", alternatives, "a function without arguments")
    if AA in alternatives:
        raise ValueError(f"alternatives={list(alternatives)}: want none named 'A/A'")
    for name, fn in alternatives.items():
        checks.callable_(f"alternatives[{name!r}]", fn)
    _check(samples, warmup, seconds)
    first = next(iter(alternatives))
    runs = {**alternatives, AA: alternatives[first]}
    begin = perf_counter()
    for fn in alternatives.values():
        _warm(fn, warmup, seconds / len(alternatives))
    shuffled, reads = random.Random(seed), {name: [] for name in runs}
    for done in range(samples):
        if done >= 3 and perf_counter() - begin > seconds:
            break
        for name in shuffled.sample(list(runs), len(runs)):
            reads[name].append(_sample(runs[name]))
        if _on_gpu():
            torch.cuda.synchronize()
    taken = {name: [read() for read in each] for name, each in reads.items()}
    rows = []
    for took in taken.values():
        row = dict(zip(("median_ms", "q10_ms", "q90_ms"), np.quantile(took, [0.5, 0.1, 0.9]).tolist(), strict=True))
        rows.append(row | speedup(taken[first], took, seed) | {"samples_ms": took})
    return pd.DataFrame(rows, index=pd.Index(taken, name="name"))


def time(case: Case, *, warmup: int = 2, samples: int = 9, seconds: float = 10.0) -> dict:
    """Time one attention call on random inputs: a record's row, whatever becomes of it (see `Case` and `Outcome`).

    `backend` becomes the one that 'auto' stands for; `pairs` are those of one batch entry. The rest as in `measure`.
    """
    _check(samples, warmup, seconds)
    row = {"probe": "timing"} | case_of(case).fields()

    def work():
        pairs = case.pattern.pairs(case.n, case.heads, case.nq)
        call, name = case.prepare()
        return pairs, name, measure(call, warmup=warmup, samples=samples, seconds=seconds)

    outcome = attempt(work)
    row |= {"status": outcome.status, "error": outcome.error, "measured": True}
    row |= dict.fromkeys(("samples_ms", "median_ms", "pairs"))
    if outcome.status == "ok":
        row["pairs"], row["backend"], timing = outcome.result
        row |= {"samples_ms": timing.samples_ms, "median_ms": timing.median_ms}
    return row


def _check(samples: int, warmup: int, seconds: float) -> None:
    checks.whole("samples", samples, 1)
    checks.whole("warmup", warmup, 0)
    checks.number("seconds", seconds, above=-1)


def _sample(fn) -> Callable[[], float]:
    """Run fn once; what is returned reads how many milliseconds it took, once the GPU is done."""
    if not _on_gpu():
        begin = perf_counter()
        fn()
        taken = 1000 * (perf_counter() - begin)
        return lambda: taken
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    fn()
    end.record()

    def read() -> float:
        end.synchronize()
        return begin.elapsed_time(end)

    return read


def _warm(fn, calls: int, seconds: float) -> float:
    """Call fn until warm; returns the seconds that took."""
    begin = perf_counter()
    for _ in range(calls):
        _lasts(fn)
        if perf_counter() - begin > seconds:
            break
    return perf_counter() - begin


def _hot(fn) -> float:
    """Call fn for `HOT` seconds, or once; returns how long the last call took."""
    begin, took = perf_counter(), 0.0
    while not took or perf_counter() - begin < HOT:
        took = _lasts(fn)
    return took


def _lasts(fn) -> float:
    """Seconds that a call takes, waiting for the GPU if there is one."""
    begin = perf_counter()
    fn()
    if _on_gpu():
        torch.cuda.synchronize()
    return perf_counter() - begin


def _on_gpu() -> bool:
    """Whether this process has work on a GPU. (An event's time is right for work on the CPU, too.)"""
    return torch.cuda.is_initialized()


def speedup(first_ms: list[float], samples_ms: list[float], seed: int = 0) -> dict[str, float]:
    """speedup over the first, the median of the ratios in the same round, and the 95% bootstrap interval of that
    median: speedup_low, speedup_high. Of two that were timed apart, as many rounds as both have."""
    ratios = np.array([x / y for x, y in zip(first_ms, samples_ms, strict=False)])
    drawn = np.random.default_rng(seed).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return {"speedup": float(np.median(ratios)), "speedup_low": float(low), "speedup_high": float(high)}
