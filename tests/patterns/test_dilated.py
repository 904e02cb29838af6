import pytest
import torch
from hypothesis import example, given, settings
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


@settings(max_examples=40, deadline=None)
@given(
    branches=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=4), n=st.integers(0, 34),
    queries=st.floats(0, 1), heads=st.integers(1, 7), causal=st.booleans(),
    kind=st.sampled_from(["interleaved", "blocked", "partition"]),
)  # fmt: skip
@example([(2, 1), (4, 2), (8, 4), (16, 6), (32, 12)], 32, 1.0, 12, False, "interleaved")  # LongNet's own, over 1,024
@example([(4, 2), (4, 2), (4, 1)], 19, 0.5, 2, True, "interleaved")
@example([(1000, 7), (64, 50)], 13, 0.1, 60, True, "interleaved")
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
