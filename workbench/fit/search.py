"""The largest length that works, found in few tries: what is tried may be an estimate or a call that takes minutes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from workbench.harness.outcome import Outcome

OTHER = ("validity", "launch")  # limiters of which the load, bytes and time, tells nothing
GROWTH = 16  # the next length is at most so many times the last, whose cost may tell little


@dataclass(frozen=True)
class Tried:
    """A length that was tried. limiter: what stands in its way, None where it works; load: bytes over the budget or
    milliseconds over the limit, whichever is more, None where neither is known; found: the row's fields about it."""

    limiter: str | None
    load: float | None
    found: dict


@dataclass(frozen=True)
class Found:
    """low: the largest length that works; high: the least that does not, or None; stopped: why the search ended early,
    or None where it did not."""

    low: int
    high: int | None
    tried: dict[int, Tried]
    stopped: Outcome | None

    def fields(self) -> dict:
        """n is None where no length is known to work, 0 where it is known that not even the shortest does."""
        limits = self.tried[self.high].found.get("error") if self.high else None
        return {
            "n": self.low or (None if self.stopped else 0),
            "limiter": None if self.stopped else self.tried[self.high].limiter if self.high else "search",
            "status": self.stopped.status if self.stopped else "ok",
            "error": self.stopped.error if self.stopped else limits,
        } | {x: y for x, y in (self.tried[self.low].found if self.low else {}).items() if x != "error"}  # fmt: skip


class Stopped(Exception):
    """Raised while a length is tried: the search cannot go on, for the reason in `outcome`.

    A refusal, where a shorter length worked, is of such a size and limits it; always: it is not, it is of any length.
    """

    def __init__(self, outcome: Outcome, always: bool = False):
        super().__init__(outcome.error)
        self.outcome, self.always = outcome, always or outcome.status not in ("refused", "unsupported")


def largest(
    works: Callable[[int], Tried], first: int, limit_n: int, grain: int, step: float, steps: dict, near=False
) -> Found:
    """The largest multiple of grain up to limit_n that works, to the grain or to `step` of it, a limiter's in `steps`.

    first: where to look first; near: whether that is a good guess, so that two tries may do. `works` may raise Stopped.
    """
    low, high, tried, stalled = 0, None, {}, 0
    n = min(max(grain, first // grain * grain), limit_n)
    while True:
        try:
            tried[n] = works(n)
        except Stopped as stop:
            if stop.always or not low:
                return Found(low, high, tried, stop.outcome)
            tried[n] = Tried("launch", None, {"error": stop.outcome.error})
        width = math.inf if high is None else high - low
        low, high = (n, high) if tried[n].limiter is None else (low, n)
        apart = max(grain, low * (step if high is None else steps.get(tried[high].limiter, step)))
        if low == limit_n or high is not None and high - low <= apart:
            return Found(low, high, tried, None)
        if high is None:
            n = min(_above(tried, low, apart, near), limit_n)
        else:
            stalled = low and (stalled + 1) * (high - low > width / 2)
            apart = max(apart, (not low) * high * step)
            n = min((low + high) / 2 if stalled > 1 else _below(tried, low, high, apart), high - grain)
        n = max(int(n) // grain, 1) * grain


def _above(tried: dict[int, Tried], low: int, apart: float, near: bool) -> float:
    """Where to look next when all that was tried works: where the load is 1, but just behind a good guess."""
    steps = sum(n > low / 2 for n in tried) - 1  # so many near by; from each, twice as far on at least
    least = low + apart * 2**steps
    return least if near and not steps else min(max(_root(tried, low, math.inf) - apart / 2, least), GROWTH * low)


def _below(tried: dict[int, Tried], low: int, high: int, apart: float) -> float:
    """Where to look next below what does not work: where the load is 1, which may be just below `high`."""
    middle, blind = (low + high) / 2, not tried[high].load
    if tried[high].limiter in OTHER or blind and tried[high].limiter == "time" and not low:
        return middle
    if blind:  # it is the further below, the more such tries have failed
        apart *= (4 if low else 2) ** (sum(x.limiter is not None and not x.load for x in tried.values()) - 1)
    if 2 * apart >= high - low:
        return middle
    least = low + apart if low else high / GROWTH
    return min(max(_root(tried, low or high, middle if low else high) - apart / 2, least), high - apart)


def _root(tried: dict[int, Tried], near: int, unknown: float) -> float:
    """The length of load 1, seen from the two known loads that are nearest: on a line, or where the load grows faster
    than N, as time may, on a power of N. unknown: where no load is known."""
    known = sorted((abs(math.log(n / near)), n, x.load) for n, x in tried.items() if x.load)[:2]
    if not known:
        return unknown
    _, n, a = known[0]
    if len(known) == 1 or a == known[1][2]:
        return n / a
    _, m, b = known[1]
    power = math.log(a / b) / math.log(n / m)
    if power > 1.2:
        return n * (1 / a) ** (1 / power)
    slope = (a - b) / (n - m)
    return n + (1 - a) / slope if slope > 0 else n / a  # a load that falls as N grows tells nothing of its slope
