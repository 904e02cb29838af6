import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.patterns import Dilated

MILLION = 1 << 20
PAPER = dict(segment_lengths=(2048, 4096, 8192, 16384, 32768), dilation_rates=(1, 2, 4, 6, 12))
TINY = dict(segment_lengths=(4, 8, 16), dilation_rates=(1, 2, 4))


def count(w, r, n, heads, causal=False, offset=lambda branch, h, r: h % r):
    """The definition, position by position."""
    total = torch.zeros(heads, n, n, dtype=torch.int64)
    for branch, (width, rate) in enumerate(zip(w, r, strict=True)):
        for h in range(heads):
            o = offset(branch, h, rate)
            kept = [t for t in range(n) if t % width % rate == o]
            for t in kept:
                for j in kept:
                    total[h, t, j] += t // width == j // width and (j <= t or not causal)
    return total


CASES = {  # w, r, n, heads
    "ragged": ((4, 8, 16), (1, 2, 4), 29, 3),
    "paper-over-1024": ((2, 4, 8, 16, 32), (1, 2, 4, 6, 12), 32, 12),
    "twelve-heads-rate-5": ((10,), (5,), 23, 12),
    "rate-above-heads": ((16,), (8,), 40, 3),
    "rate-above-width": ((3, 5), (4, 9), 17, 6),
    "coprime-widths": ((3, 4, 5), (1, 2, 3), 61, 2),
    "width-beyond-n": ((64, 1000), (1, 7), 13, 2),
    "rate-beyond-n": ((64, 64), (50, 1), 13, 60),
    "no-tokens": ((4, 8), (1, 2), 0, 2),
    "equal-branches": ((4, 4, 4), (2, 2, 1), 19, 2),
}


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_brute_force(agree, case, causal):
    w, r, n, heads = case
    want = count(w, r, n, heads, causal)
    for nq in {n, n // 2, min(n, 1)}:
        agree(Dilated(w, r, causal), want, nq, block_sizes=(4, (5, 3)), exact=len(w) == 1)


@settings(max_examples=40, deadline=None)
@given(
    branches=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=4),
    n=st.integers(0, 34),
    queries=st.floats(0, 1),
    heads=st.integers(1, 5),
    causal=st.booleans(),
    kind=st.sampled_from(["interleaved", "blocked", "partition"]),
)
def test_any_configuration(agree, branches, n, queries, heads, causal, kind):
    w, r = zip(*branches, strict=True)
    pattern, offset = {
        "interleaved": lambda: (Dilated(w, r, causal), lambda b, h, rate: h % rate),
        "blocked": lambda: (Dilated(w, r, causal, offsets="blocked"), lambda b, h, rate: h // -(-heads // rate)),
        "partition": lambda: (Dilated(w, r, causal, heads="partition"), partition(heads, len(w))),
    }[kind]()
    agree(
        pattern, count(w, r, n, heads, causal, offset), round(queries * n), block_sizes=(4, (5, 3)), exact=len(w) == 1
    )


def partition(heads, branches):
    """Deal heads to branches one by one, then give each branch consecutive heads: the first groups are the larger."""
    sizes = [len(range(b, heads, branches)) for b in range(branches)]
    owner = [b for b, size in enumerate(sizes) for _ in range(size)]
    return lambda branch, h, rate: branch % rate if owner[h] == branch else None


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("config", [PAPER, TINY], ids=["paper", "tiny"])
def test_a_million_tokens_take_less_than_a_second(one_core_seconds, config, causal):
    pattern = Dilated(**config, causal=causal)
    for nq in (None, MILLION // 3 + 5):
        assert one_core_seconds(lambda nq=nq: pattern.pairs(MILLION, 12, nq)) < 1


def test_a_million_tokens_are_the_sum_of_their_periods():
    pattern = Dilated(**PAPER, causal=True)
    assert pattern.pairs(MILLION + 77, 12) == 32 * pattern.pairs(32768, 12) + pattern.pairs(77, 12)


def test_no_overflow_at_2_to_the_27():
    n = 1 << 27
    assert Dilated([n, n], [1, 1]).pairs(n, 512) == 512 * 2 * n * n
    huge = Dilated([n] * 4, [n - 1, n - 3, n - 5, n - 7])  # the common multiple is far beyond 64 bits
    assert huge.pairs(n, 1) == 4 * 4  # each branch keeps 0 and its rate
