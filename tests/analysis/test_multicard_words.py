"""The sentences of notebook 04, on rows that would make them false if they only took the largest number."""

import pandas as pd

from tests.analysis.test_multicard import row
from workbench.analysis import multicard
from workbench.analysis import multicard_words as words
from workbench.probes.timing import AA
from workbench.scaling.strategies import ONE

DDP = "distributed data parallel"


def case(kind="dense", n=256, nproc=2, alone=8.0, **took):
    """Rows of one case: one device, itself again (A/A), DDP, and what else is named by its milliseconds."""
    lines = [row(kind, n, nproc, x, [alone] * 3) for x in (ONE, AA, DDP)]
    lines += [row(kind, n, nproc, x.replace("_", " "), [ms] * 3) for x, ms in took.items()]
    for line in lines:
        ratio = alone / line["median_ms"]
        line |= {"speedup": ratio, "speedup_low": ratio - 0.02, "speedup_high": ratio + 0.02}
    return lines


def said(lines) -> str:
    return " ".join(words.by_sequence(pd.DataFrame(lines)))


def test_a_speed_up_is_none_where_more_ranks_take_longer_than_one_device_took_elsewhere():
    """153 ms on four ranks, "1.82 times" as fast as a one device that took 279; two ranks took 97, one device 122."""
    lines = case(nproc=2, alone=122, sequence=153) + case(nproc=4, alone=279, sequence=153)
    assert said(lines).startswith("Dividing the sequence makes none of 1 case faster than one device here")
    best = said(case(nproc=2, alone=122, sequence=97) + case(nproc=4, alone=279, sequence=153))
    assert "over 2 cards is faster than one device in **1 of 1 case**: **1.26 times** as fast, the most for " in best


def test_the_range_is_told_and_where_another_way_is_ahead():
    found = said(case(sequence=5, heads=4.5) + case("longnet-geometric", 1024, sequence=4.1, heads=6))
    assert "in **2 of 2 cases**: **1.60 to 1.95 times** as fast, the most for LongNet, geometric" in found
    assert found.endswith("in 1 case, the most for dense, forward, N = 256 (heads 1.78, sequence 1.60).")
    assert "ahead" not in said(case(sequence=5, heads=4.95))
    many = said([x for k, ms in enumerate((4.5, 4.9, 4.2, 4.8)) for x in case(n=256 << k, sequence=5, heads=ms)])
    assert many.endswith("in 3 cases, the most for dense, forward, N = 1,024 (heads 1.90, sequence 1.60).")


def test_runs_of_the_same_case_are_further_apart_than_the_rounds_of_one():
    runs = [x | {"run": run} for run, ms in (("a", 4.0), ("b", 5.0)) for x in case(sequence=ms)]
    (found,) = words.between_runs(pd.DataFrame(runs))
    assert "differs by **25%** (the median of 1 case)" in found and found.endswith("its interval is 2% wide.")
    assert words.between_runs(pd.DataFrame(runs).assign(run="a")) == []


def test_what_cannot_be_is_noise():
    assert "makes none" in said(case(sequence=2)), "four times as fast on two ranks"
    lines = case(sequence=6)
    lines[2] |= {"speedup": 1.5, "speedup_high": 1.6}  # DDP of one sequence is one device's work
    assert "makes none" in said(lines)
    wrong = [x | {"valid": False} for x in case(sequence=4)]
    assert "no right result" in said(case()) and "no right result" in said(wrong)


def test_results_that_agree_are_counted():
    rows = pd.DataFrame(case(sequence=4, heads=5))
    assert words.compared(rows) == "Compared with one device: **5 of 5** results agree up to rounding."
    assert "**3 of 4** results agree" in words.compared(rows.assign(valid=[True, True, True, False, None]))


def shares(**fields):
    line = {"sequences": 2, "N": 256, "ranks": 2, "strategy": "DDP", "busiest": 1.0, "idlest": 0.99, "speed-up": 2.02}
    return pd.DataFrame([line | {"low": 1.94, "high": 2.05, "peak": 0.5} | fields])


def test_a_slow_card_is_named_and_not_taken_for_a_strategy():
    assert words.uneven(shares()) == [] == words.uneven(shares(idlest=None, busiest=None))
    (warning,) = words.uneven(shares(idlest=0.66))
    assert warning.startswith("**Not a fair row:**") and "one computed 100% of the time and another 66%" in warning
    assert words.uneven(shares(sequences=1, idlest=0.0)) == [], "one sequence is no equal share"


def test_the_longest_is_told_only_of_two_searches_that_ended():
    rows = pd.DataFrame({"status": ["ok", "ok"], "n": [100.0, 195.0], "world": [1, 2]})
    found = words.longest(rows, 24, 0.02)
    assert "is **1.95 times** as long as that of one: 195 against 100, each found to within 2%" in found
    assert "is as long as that of one: 100 against 100" in words.longest(rows.assign(n=100.0), 24, 0.02)
    for bad in (rows.assign(n=[100.0, None]), rows.assign(status=["ok", "killed"]), rows[:0]):
        assert "nothing to compare" in words.longest(bad, 24, 0.02)


def test_what_other_ways_cost_is_a_range_with_its_worst_case():
    lines = case(sequence=5, heads=4.5, context_parallel=5) + case("longnet-geometric", 1024, sequence=4, heads=6)
    for x, sent in ((3, 4), (4, 8), (9, 1), (10, 16)):  # sequence and heads of each case
        lines[x] |= {"sent_bytes": [1, sent << 20]}
    lines[5] |= {"peak_bytes": 7 << 19}
    memory, sent = words.costs(pd.DataFrame(lines))
    assert memory.startswith("Context parallel holds **3.5 times** the memory of dividing the sequence; most")
    assert memory.endswith("N = 256: 3.5 against 1 MiB.")
    assert "the heads sends **2 to 16 times** the bytes" in sent
    assert "LongNet, geometric, forward, N = 1,024: 16 against 1" in sent
    assert words.costs(pd.DataFrame(case(sequence=5))) == []


def test_the_headline_is_a_range_or_no_gain():
    lines = case(sequence=5) + case("longnet-geometric", 1024, sequence=4.1)
    assert words.headline(pd.DataFrame(lines)) == "dividing the sequence: 1.60 to 1.95 times on 2 cards"
    assert words.headline(pd.DataFrame(case(sequence=9)), "rank") == "dividing the sequence: no gain"


def test_engines_are_named_by_their_kernels():
    rows = pd.DataFrame(case(sequence=5)).assign(kernel=["cudnn_sdpa_sm90", None, None, "kernel_cutlass_flash_fwd"])
    assert words.computed_by(rows) == [
        "**cuDNN** takes most of the time of one device for dense.",
        "**FlashAttention-4** takes most of the time of sequence for dense.",
    ]
    assert words.computed_by(rows.assign(kernel=None)) == []


def test_a_neighborhood_that_is_slower_on_two_ranks_says_so():
    one, other = case(multicard.GRIDS[0], alone=43, sequence=28), case(multicard.GRIDS[1], alone=9, sequence=11)
    rows = pd.DataFrame(one + other)
    (told,) = words.orders(multicard.orders(rows, "Here"))
    assert told.startswith("Here, N = 256, forward: dividing")
    assert "among 2 gives **1.54 times** in row-major order and **0.82** along the Hilbert curve: too little" in told
    assert told.endswith("one device alone is faster.")
    assert words.orders(multicard.orders(pd.DataFrame(one), "Here")) == [] and words.orders(pd.DataFrame()) == []


def test_bytes_of_an_order_may_be_more_or_none():
    moved = pd.DataFrame({"order": ["row_major", "hilbert"] * 2, "world": [2, 2, 4, 4], "bytes": [100, 110, 300, 150]})
    assert words.fewer_bytes(moved) == "Along the Hilbert curve **50%** of row-major's bytes move on 4 ranks."
    assert words.fewer_bytes(moved[:2]).startswith("Along the Hilbert curve **110%**")
    assert words.fewer_bytes(moved.assign(bytes=0)) == "In neither order do any bytes move."
