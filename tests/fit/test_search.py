import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.fit.search import Stopped, Tried, largest
from workbench.harness.outcome import Outcome


class Works:
    """Lengths below `most` work. load: of a length, or None; above: whether it is known where it is above 1."""

    def __init__(self, most, load=None, above=True, limiter="memory"):
        self.most, self.load, self.above, self.limiter, self.tried = most, load, above, limiter, []

    def __call__(self, n):
        assert n not in self.tried and n > 0
        self.tried.append(n)
        works = n <= self.most
        load = self.load(n) if self.load and (works or self.above) else None
        return Tried(None if works else self.limiter, load, {"length": n})


def search(works, first=1024, limit_n=1 << 30, grain=128, step=0.005, time_step=0.1, near=False):
    found = largest(works, first, limit_n, grain, step, {"time": time_step}, near)
    assert all(n % grain == 0 for n in works.tried)
    return found


LOADS = {
    "a line": lambda n: n / 3_000_000,
    "a line with an offset": lambda n: 0.4 + 0.6 * n / 3_000_000,
    "squares": lambda n: (n / 3_000_000) ** 2,
    "a line, then squares": lambda n: max(0.8 * n / 3_000_000, (n / 3_000_000) ** 2),
    "steps": lambda n: math.ceil(20 * n / 3_000_000) / 20,
}


@pytest.mark.parametrize("above", [True, False], ids=["known above", "unknown above"])
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("first", [1024, 65_536, 50_000_000])
def test_a_load_that_is_seen_leads_there(load, above, first):
    works = Works(3_000_000, load, above)
    found = search(works, first)
    assert 0 < found.high - found.low <= 0.005 * found.low and found.low <= 3_000_000 < found.high
    assert len(works.tried) <= 22 if load is LOADS["steps"] or not above else 14


@pytest.mark.parametrize("off, tries", [(0, 2), (-1, 10), (-3, 10), (3, 7), (-10, 11), (30, 13)])
def test_a_good_guess_takes_two_tries_and_a_bad_one_a_few(off, tries):
    works = Works(1_000_000, lambda n: 0.9 * n / 1_000_000, above=False)
    found = search(works, first=int(1_000_000 * (1 + off / 100)), near=True)
    assert found.low <= 1_000_000 < found.high <= found.low * 1.005 + 128
    if off == 0:
        assert works.tried[0] == found.low
    assert len(works.tried) <= tries, works.tried


def test_where_results_are_wrong_is_found_by_halving():
    """On an H100 a search that went by the bytes took two dozen calls of seconds each, all of them just below."""
    works = Works(29_000, lambda n: n / 32_112, limiter="validity")
    found = search(works, first=32_112, grain=16, near=True)
    assert found.low <= 29_000 < found.high and found.fields()["limiter"] == "validity"
    assert len(works.tried) <= 11


def test_time_is_not_looked_for_as_closely():
    times = search(Works(3_000_000, limiter="time"))
    assert 0.02 < (times.high - times.low) / times.low <= 0.1


@settings(max_examples=200, deadline=None)
@given(
    most=st.integers(0, 5000), first=st.integers(1, 10_000), grain=st.sampled_from([1, 7, 128]), near=st.booleans(),
    loads=st.dictionaries(st.integers(0, 15), st.floats(0.01, 3)),
    limiter=st.sampled_from(["memory", "time", "validity"]),
)  # fmt: skip
def test_any_loads_are_survived(most, first, grain, near, loads, limiter):
    works = Works(most, lambda n: loads.get(n % 16), limiter=limiter)
    limit_n = 4000 // grain * grain
    found = search(works, first, limit_n, grain, time_step=0.005, near=near)
    assert found.low <= most and len(works.tried) < 60
    if found.high is None:
        assert found.low == limit_n <= most
    else:
        assert most < found.high <= found.low + max(grain, 0.005 * found.low)


def test_what_limits_is_told():
    found = {"n": 0, "limiter": "validity", "status": "ok", "error": None}
    assert search(Works(0, limiter="validity")).fields() == found
    found |= {"n": 1 << 20, "limiter": "search", "length": 1 << 20}
    assert search(Works(1 << 40), limit_n=1 << 20).fields() == found


def test_a_search_that_is_stopped_keeps_what_it_knows():
    inner = Works(50_000)

    def works(n):
        if n > 60_000:
            raise Stopped(Outcome("killed", "ended by signal 11"))
        return inner(n)

    fields = largest(works, 1024, 1 << 30, 128, 0.005, {}).fields()
    assert fields == {"n": 16_384, "limiter": None, "status": "killed", "error": "ended by signal 11", "length": 16_384}
    fields = largest(works, 65_536, 1 << 30, 128, 0.005, {}).fields()
    assert (fields["n"], fields["status"]) == (None, "killed")
