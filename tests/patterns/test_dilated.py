import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.patterns import Dilated, Predicate, from_spec

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
    "paper-over-1024-twice": ((2, 4, 8, 16, 32), (1, 2, 4, 6, 12), 64, 12),
    "twelve-heads-rate-5": ((10,), (5,), 23, 12),
    "rate-above-heads": ((16,), (8,), 40, 3),
    "rate-above-width": ((3, 5), (4, 9), 17, 6),
    "width-not-a-multiple": ((7, 10), (3, 4), 41, 4),
    "coprime-widths": ((3, 4, 5), (1, 2, 3), 61, 2),
    "width-beyond-n": ((64, 1000), (1, 7), 13, 2),
    "rate-beyond-n": ((64, 64), (50, 1), 13, 60),
    "one-token": ((4, 8), (1, 2), 1, 2),
    "no-tokens": ((4, 8), (1, 2), 0, 2),
    "single-positions": ((1, 2), (1, 1), 9, 1),
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


def test_twelve_heads_of_rate_five_use_five_offsets():
    pattern = Dilated([10], [5])
    assert [pattern.offset(0, h, 12) for h in range(12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_blocked_offsets_follow_the_official_code():
    pattern = Dilated([16], [5], offsets="blocked")  # ceil(12 / 5) = 3 heads an offset
    assert [pattern.offset(0, h, 12) for h in range(12)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_key_that_three_branches_show_counts_three_times():
    pattern = Dilated(**TINY)
    assert pattern.multiplicity(16, 1)[0, 0, 0] == 3
    assert pattern.pairs(16, 1) == 16 * 4 + 2 * 4**2 + 4**2
    assert pattern.distinct(16, 1) < pattern.pairs(16, 1)


def test_one_segment_without_dilation_is_dense():
    assert Dilated([100], [1]).pairs(29, 2) == 2 * 29 * 29
    assert Dilated([29], [1], causal=True).pairs(29, 2) == 29 * 30


@pytest.mark.parametrize(
    "heads, sizes", [(12, [3, 3, 2, 2, 2]), (5, [1] * 5), (2, [1, 1, 0, 0, 0]), (1, [1, 0, 0, 0, 0])]
)
def test_partition_deals_all_heads(heads, sizes):
    pattern = Dilated((2, 4, 8, 16, 32), (1, 2, 4, 6, 12), heads="partition")
    groups = [list(pattern.head_range(b, heads)) for b in range(5)]
    assert [len(g) for g in groups] == sizes
    assert sum(groups, []) == list(range(heads))
    assert pattern.divisor(heads) == min(heads, 5)
    for b, group in enumerate(groups):
        assert [pattern.offset(b, h, heads) for h in range(heads)] == [
            b % pattern.dilation_rates[b] if h in group else None for h in range(heads)
        ]
    assert (pattern.multiplicity(64, heads).sum((1, 2)) > 0).all()  # no head is left without work


def test_rates_above_one_leave_rows_uncovered():
    pattern = Dilated([8, 16], [2, 4])
    assert pattern.coverage(64, 4).tolist() == [0.5] * 4
    assert pattern.uncovered(64, 4) == 4 * 32


def test_a_rate_above_the_heads_covers_only_their_residues():
    pattern = Dilated([16], [8])
    seen = pattern.multiplicity(32, 3).sum((0, 2)) > 0
    assert seen.nonzero().flatten().tolist() == [t for t in range(32) if t % 8 < 3]
    assert pattern.coverage(32, 3).tolist() == [1 / 8] * 3


def test_blocks_that_one_branch_alone_fills_are_full():
    inside = Dilated([32, 64], [1, 2]).blocks(64, 1, block_size=16).full.view(4, 4)
    assert not inside.any()  # the second branch is everywhere
    apart = Dilated([32, 32], [1, 40], causal=True).blocks(64, 2, block_size=(16, 8))
    columns = [apart.columns[a:b].tolist() for a, b in zip(apart.starts, apart.starts[1:], strict=False)]
    full = [apart.full[a:b].tolist() for a, b in zip(apart.starts, apart.starts[1:], strict=False)]
    assert columns[:4] == [[0, 1], [0, 1, 2, 3], [4, 5], [4, 5, 6, 7]]
    assert full[1] == [True, True, False, False]  # the diagonal is partial
    assert full[0] == [False, False]  # the second branch shows position 0 to itself


def test_sorting_by_residue_helps_dilation_alone():
    n, permuted = 4096, torch.arange(4096).view(-1, 4).T.flatten()  # sorted by t mod 4
    pattern = Dilated([4096], [4])
    assert pattern.block_density(n, 1) == 1
    sorted_ = Predicate(lambda h, i, j: pattern.count(h, permuted[i], permuted[j], n, 1) > 0)
    assert sorted_.block_density(n, 1) == pytest.approx(0.0625)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("config", [PAPER, TINY], ids=["paper", "tiny"])
@pytest.mark.parametrize("question", ["pairs", "density", "coverage", "uncovered"])
def test_a_million_tokens_take_less_than_a_second(one_core_seconds, config, causal, question):
    pattern = Dilated(**config, causal=causal)
    for nq in (None, MILLION // 3 + 5):
        assert one_core_seconds(lambda nq=nq: getattr(pattern, question)(MILLION, 12, nq)) < 1


def test_widths_without_a_short_period_take_seconds_at_most(one_core_seconds):
    pattern = Dilated((7, 11, 13, 17, 19), (1, 2, 4, 6, 12))
    assert one_core_seconds(lambda: pattern.density(MILLION, 12)) < 3


def test_a_million_tokens_are_the_sum_of_their_periods():
    pattern = Dilated(**PAPER, causal=True)
    assert pattern.distinct(MILLION, 12) == 32 * pattern.distinct(32768, 12)
    assert pattern.pairs(MILLION + 77, 12) == 32 * pattern.pairs(32768, 12) + pattern.pairs(77, 12)


def test_chunks_do_not_change_the_count(monkeypatch):
    from workbench.patterns import cells

    pattern = Dilated((3, 5, 7, 11), (1, 2, 3, 4), causal=True)
    want = pattern.distinct(1000, 3, 777), pattern.uncovered(1000, 3, 777)
    monkeypatch.setattr(cells, "CHUNK", 13)
    assert (pattern.distinct(1000, 3, 777), pattern.uncovered(1000, 3, 777)) == want


def test_no_overflow_at_2_to_the_27():
    n = 1 << 27
    assert Dilated([n, n], [1, 1]).pairs(n, 512) == 512 * 2 * n * n
    assert Dilated([n, n], [1, 1]).distinct(n, 512) == 512 * n * n
    huge = Dilated([n] * 4, [n - 1, n - 3, n - 5, n - 7])  # the common multiple is far beyond 64 bits
    assert huge.pairs(n, 1) == 4 * 4  # each branch keeps 0 and its rate
    assert huge.distinct(n, 1) == 13  # the pair (0, 0) is common to the four


@pytest.mark.parametrize("change, message", [
    (dict(segment_lengths=[]), r"segment_lengths=\[\]: want a non-empty list of ints >= 1"),
    (dict(dilation_rates=[]), r"dilation_rates=\[\]: want a non-empty list"),
    (dict(segment_lengths=[4, 8]), r"segment_lengths=\(4, 8\).*one rate for each segment length, got 3 for 2"),
    (dict(segment_lengths=[4, 0, 8]), r"segment_lengths\[1\]=0: want an int >= 1"),
    (dict(segment_lengths=[4, 8.0, 8]), r"segment_lengths\[1\]=8.0: want an int >= 1"),
    (dict(segment_lengths=[4, True, 8]), r"segment_lengths\[1\]=True: want an int >= 1"),
    (dict(segment_lengths="4,8"), r"segment_lengths='4,8': want a non-empty list"),
    (dict(segment_lengths=4), r"segment_lengths=4: want a non-empty list"),
    (dict(dilation_rates=[1, 2, -4]), r"dilation_rates\[2\]=-4: want an int >= 1"),
    (dict(causal="no"), r"causal='no': want True or False"),
    (dict(heads="some"), r"heads='some': want one of 'all', 'partition'"),
    (dict(offsets=0), r"offsets=0: want one of 'interleaved', 'blocked'"),
    (dict(heads="partition", offsets="blocked"), r"offsets='blocked'.*want offsets='interleaved'"),
])  # fmt: skip
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        Dilated(**(TINY | change))


def test_names():
    assert Dilated(**PAPER).name == "longnet-paper"
    assert Dilated(PAPER["segment_lengths"], (1, 2, 4, 8, 16)).name == "longnet-pow2"
    assert Dilated(**PAPER, heads="partition").name == "longnet-paper-partition"
    assert Dilated([4, 8], [1, 2], offsets="blocked").name == "dilated-4x1-8x2-blocked"


def test_copies_and_specs_are_the_same_pattern():
    pattern = Dilated(**TINY, causal=True, offsets="blocked")
    for other in (from_spec(pattern.spec()), copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern))):
        assert other.spec() == pattern.spec()
        assert torch.equal(other.multiplicity(29, 3), pattern.multiplicity(29, 3))
