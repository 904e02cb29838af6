"""What notebook 04 asks and says, and its model of many ranks, on rows that are made up: also those that would make a
sentence false if it only took the largest number."""

import json

import pandas as pd
import pytest
import torch

from workbench import Dense, Neighborhood
from workbench.analysis import many_ranks, multicard
from workbench.analysis import multicard_words as words
from workbench.harness import records
from workbench.patterns.dilated import geometric
from workbench.probes.timing import AA, speedup
from workbench.scaling.link import Rates
from workbench.scaling.strategies import ONE

SIZES = {"heads": 2, "head_dim": 16}


def row(kind, n, nproc, strategy, samples, first=64, **fields):
    """A sweep's row; samples: milliseconds, beside a one-device call of 8 ms in each round."""
    case = multicard.at(kind, first, **SIZES)(n)
    split = strategy == "distributed data parallel"
    busy = [0.9, *[0.0 if split or strategy == ONE else 0.8] * (nproc - 1)]
    made = case.fields() | {"world": 1 if strategy in (ONE, AA) else nproc, "strategy": strategy}
    made |= {"label": f"{kind} {n}", "nproc": nproc, "kind": kind, "status": "ok", "error": None, "valid": True}
    made |= {"pairs": case.pattern.pairs(n, 2), "samples_ms": samples, "median_ms": sorted(samples)[len(samples) // 2]}
    made |= speedup([8.0] * len(samples), samples) | {"busy": busy, "peak_by_card": [1 << 20] * nproc}
    made |= {"peak_bytes": 1 << 20, "sent_bytes": [512] * nproc, "planned_bytes": None}
    return made | fields


@pytest.fixture
def rows():
    lines = []
    for nproc, took in ((2, 5.0), (4, 4.0)):
        for kind, lengths in (("dense", (256, 512)), ("longnet-geometric", (256, 512, 1024))):
            for n in lengths:
                lines += [row(kind, n, nproc, x, [8.0] * 3) for x in (ONE, AA, "distributed data parallel")]
                lines.append(row(kind, n, nproc, "sequence", [took] * 3, planned_bytes=[512] * nproc))
    return pd.DataFrame(lines)


def test_cases_have_the_patterns_that_their_kind_names():
    cases = multicard.cases({"dense": [256], "longnet-geometric": [256, 300]}, 64, ("fwd", "fwdbwd"), **SIZES)
    assert list(cases)[::5] == ["dense fwd 1 x 256", "longnet-geometric fwdbwd 1 x 300"] and len(cases) == 6
    assert cases["longnet-geometric fwd 1 x 300"].pattern.segment_lengths == (64, 256, 300)
    assert isinstance(cases["dense fwd 1 x 256"].pattern, Dense)
    assert 0.045 < multicard.at("block-sparse", 64, **SIZES)(1 << 18).pattern.density(1 << 18, 1) < 0.055


def test_causal_is_another_kind():
    patterns = [Dense(), Dense(True), geometric(300, first=64), geometric(300, True, 64)]
    patterns += [multicard.at(kind, 64, **SIZES)(300).pattern for kind in multicard.KINDS[3:]]
    patterns.append(Neighborhood((300,), 8))
    frame = pd.DataFrame([{"pattern_spec": x.spec(), "pattern": x.name, "n": 300} for x in patterns])
    names = [y for x in multicard.KINDS[:2] for y in (x, f"{x} causal")]
    assert list(multicard.kinds(frame)["kind"]) == [*names, *multicard.KINDS[3:], patterns[-1].name]


def test_ranks_are_those_that_have_a_card_and_here_as_many_as_asked_for(monkeypatch):
    for cards, want in ((0, [2, 4]), (1, [1]), (2, [2]), (8, [2, 4])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda cards=cards: cards)
        assert multicard.possible([2, 4]) == want


def test_rows_that_are_wrong_or_did_not_run_are_left_out_and_named(rows):
    assert len(multicard.ok(rows)) == len(rows)
    for at, why in ((3, "out is off"), (7, "lse is off"), (11, "nothing is right")):
        rows.loc[at, "valid"], rows.loc[at, "error"] = False, f"wrong: {why}"
    rows.loc[2, "status"], rows.loc[2, "error"] = "unsupported", "not on this machine"
    assert len(multicard.ok(rows)) == len(rows) - 4
    assert multicard.missing(rows) == [
        "Not measured: DDP for dense: not on this machine.",
        "Wrong, so left out: sequence for dense and LongNet, geometric: out is off.",
    ]  # fmt: skip
    assert multicard.wrong(rows) == {("dense", "sequence"), ("longnet-geometric", "sequence")}


def test_a_summary_has_a_column_a_strategy(rows):
    table = multicard.summary(rows, multicard.time_and_speedup)
    assert list(table) == ["N", "ranks", ONE, "sequence", "DDP"] and len(table) == 10
    assert list(dict.fromkeys(table.index)) == ["dense", "LongNet, geometric"]
    first = table.iloc[0]
    assert first["sequence"] == "5 (1.60x)" and first[ONE] == "8"
    memory = multicard.summary(rows[rows["nproc"] == 2], multicard.peak_and_sent)
    assert memory["sequence"].iloc[0] == "1 (0.000488)" and "ranks" not in memory
    shares = multicard.summary(rows.drop(index=0), multicard.busy)
    assert shares["sequence"].iloc[0] == "80% to 90%" and shares["DDP"].iloc[0] == "0% to 90%"


def test_bytes_are_the_plans_and_results_agree_only_where_every_rank_says_so(rows):
    said = words.compared(rows[:5].assign(valid=[True, True, True, False, None]))
    assert said == "Compared with one device: **3 of 4** results agree up to rounding."
    assert "**10 of 10 calls**" in words.as_planned(rows)
    rows.at[3, "sent_bytes"] = [512, 511]
    assert "**9 of 10 calls**" in words.as_planned(rows)


def test_one_sequence_in_shares_of_the_batch_has_an_idle_card(rows):
    found = multicard.by_batch(rows[rows["kind"] == "dense"]).set_index(["N", "ranks", "strategy"])
    assert found.loc[(256, 2, "DDP"), ["busiest", "idlest", "work", "peak"]].tolist() == [0.9, 0, 0, 1]
    assert found.loc[(256, 4, "sequence"), "idlest"] == 0.8


def test_hilbert_shards_have_the_short_borders():
    found = multicard.borders((32, 32), 2, ["row_major", "hilbert"], [4, 16], heads=2, head_dim=8, itemsize=2)
    by = found.set_index(["order", "world"])
    assert by.loc[("hilbert", 16), "bytes"] < by.loc[("row_major", 16), "bytes"]
    rows_got = 2 * 2 * 3 * 32  # three borders of four strips, two rows across the width each way
    assert by.loc[("row_major", 4), "bytes"] == rows_got * 2 * 2 * 8 * 2
    assert by.loc[("row_major", 4), "halo"] == pytest.approx(rows_got / 1024)


def test_what_moves_is_counted_from_plans(rows):
    found = multicard.moved(rows, 8)
    dense = found.loc["dense"]
    assert dense["rows got over rows held"] == 7 and dense["MiB, all ranks"] == 7 * 2 * 512 * 2 * 16 * 4 / 2**20
    assert dense["MiB, busiest sender"] == dense["MiB, all ranks"] / 8 and found.loc["LongNet, geometric", "N"] == 1024
    grouped = multicard.moved(rows.assign(kv_heads=1, mode="fwdbwd"), 8)  # two query heads on a key head
    assert grouped.loc["dense", "MiB, all ranks"] == dense["MiB, all ranks"] / 2 and multicard.moved(rows[:0], 8).empty


def test_both_orders_are_a_row_each_with_what_was_measured():
    rows = pd.DataFrame([row(kind, 256, 2, x, [ms] * 3) for kind in multicard.GRIDS for x, ms in
                         ((ONE, 8.0), ("sequence", 5.0))])  # fmt: skip
    found = multicard.orders(rows, "here")
    assert found["order"].tolist() == ["row-major", "Hilbert"] and list(found.index) == ["here"] * 2
    assert found[["one device (ms)", "all ranks (ms)", "speed-up"]].iloc[0].tolist() == [8, 5, 1.6]
    assert multicard.orders(rows[rows["strategy"] != ONE], "here").empty and multicard.orders(rows[:0], "here").empty


def test_what_is_saved_beside_a_figure_has_single_values(rows):
    found = multicard.plain(rows.assign(run_utc="1", nothing=None))
    assert {"kind", "n", "median_ms", "speedup"} <= {*found} and not {"samples_ms", "run_utc", "nothing"} & {*found}


def test_what_is_committed_is_of_one_commit_and_of_one_sequence(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "default_folder", lambda: tmp_path)
    assert all(x.empty for x in multicard.recorded(["h100x2"]))
    lines = [{"kind": "run", "run": x, "utc": x, "commit": y} for x, y in (("1", "old"), ("2", "new"), ("3", "new"))]
    for run, took in (("3", 4.0), ("2", 5.0), ("1", 6.0)):
        for n in (4096, 256) if run == "2" else (4096,):
            made = row("longnet-geometric", n, 2, "sequence", [took] * 3, first=256)
            made |= {"kind": "row", "run": run, "stage": "sweep"}
            lines += [made, made | {"batch": 2}]
    for run in "12":
        lines.append({"kind": "row", "run": run, "stage": "link", "status": "ok", "message_bytes": 8, "median_ms": 1.0})
    (tmp_path / "h200x2").mkdir()
    lines = [line | {"probe": "scaling"} for line in lines]
    (tmp_path / "h200x2" / "2026-01-01-scaling-abc.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = multicard.recorded(["h100x2", "h200x2"])
    assert found.rows["n"].tolist() == [256, 4096] and found.rows["median_ms"].tolist() == [5.0, 4.0]
    assert found.link["run"].tolist() == ["2"] and found.timelines.empty


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
    lines = case(sequence=5, heads=4.5) + case("longnet-geometric", 1024, sequence=4.1, heads=6)
    assert words.headline(pd.DataFrame(lines)) == "dividing the sequence: 1.60 to 1.95 times on 2 cards"
    assert words.headline(pd.DataFrame(case(sequence=9)), "rank") == "dividing the sequence: no gain"
    found = said(lines)
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


def test_engines_are_named_by_their_kernels():
    rows = pd.DataFrame(case(sequence=5)).assign(kernel=["cudnn_sdpa_sm90", None, None, "kernel_cutlass_flash_fwd"])
    one, ours = words.computed_by(rows)
    assert one == "**cuDNN** takes most of the time of one device for dense."
    assert ours == "**FlashAttention-4** takes most of the time of sequence for dense."
    assert words.computed_by(rows.assign(kernel=None)) == []


def test_a_neighborhood_that_is_slower_on_two_ranks_says_so():
    one, other = case(multicard.GRIDS[0], alone=43, sequence=28), case(multicard.GRIDS[1], alone=9, sequence=11)
    (told,) = words.orders(multicard.orders(pd.DataFrame(one + other), "Here"))
    assert told.startswith("Here, N = 256, forward: dividing")
    assert "among 2 gives **1.54 times** in row-major order and **0.82** along the Hilbert curve: too little" in told
    assert told.endswith("one device alone is faster.")
    assert words.orders(multicard.orders(pd.DataFrame(one), "Here")) == [] and words.orders(pd.DataFrame()) == []


def test_bytes_of_an_order_may_be_more_or_none():
    moved = pd.DataFrame({"order": ["row_major", "hilbert"] * 2, "world": [2, 2, 4, 4], "bytes": [100, 110, 300, 150]})
    assert words.fewer_bytes(moved) == "Along the Hilbert curve **50%** of row-major's bytes move on 4 ranks."
    assert words.fewer_bytes(moved[:2]).startswith("Along the Hilbert curve **110%**")
    assert words.fewer_bytes(moved.assign(bytes=0)) == "In neither order do any bytes move."


RATES = Rates(1e-4, 1e9, 1e-3)


def test_efficiency_is_over_the_ranks_and_the_weak_one_by_pairs(rows):
    found = many_ranks.efficiency(rows).set_index(["kind", "scaling", "world"])
    assert found.loc[("dense", "strong", 2), ["n", "efficiency", "low", "high"]].tolist() == [512, 0.8, 0.8, 0.8]
    assert found.loc[("dense", "strong", 4), "efficiency"] == 0.5
    # twice the positions, four times the pairs, 5 ms for 8: each rank does 3.2 times what one did
    assert found.loc[("dense", "weak", 2), "efficiency"] == pytest.approx(2 * 1.6)
    assert found.loc[("longnet-geometric", "weak", 4), "n"] == 1024
    assert ("dense", "weak", 4) not in found.index, "nothing four times as long was measured"


def test_curves_go_up_to_all_of_the_exchange_hidden_and_end_at_few_tokens(rows):
    found = many_ranks.curves(rows, RATES, (2, 16, 64), 64, 16)
    assert not found["measured"].any() and set(found["scaling"]) == {"strong", "weak"}
    assert (found["efficiency"] < found["most"]).any() and (found["efficiency"] <= found["most"]).all()
    longnet = found[found["kind"] == "longnet-geometric"].groupby("scaling")["world"].apply(list)
    assert longnet["strong"] == [2, 16, 64] and longnet["weak"] == [2, 16, 64]
    assert found.query("kind == 'dense' and scaling == 'strong'")["world"].tolist() == [2, 16], "512 tokens, 16 each"
    weak = found[(found["kind"] == "longnet-geometric") & (found["scaling"] == "weak")]
    assert weak["n"].tolist() == [512, 4096, 16_384] and set(found.query("kind == 'dense'")["n"]) >= {512}
    assert weak["pattern"].iloc[-1] == geometric(16_384, first=64).name
    assert many_ranks.curves(rows, RATES, (2, 16), 64, 1 << 20).empty


def test_the_model_is_held_against_every_forward(rows):
    found = many_ranks.checked(rows, RATES)
    assert len(found) == 10, "two lengths of dense and three of LongNet, on two numbers of ranks"
    one = found[(found.index == "dense") & (found["N"] == 512) & (found["ranks"] == 2)].iloc[0]
    seconds = 0.008 / 2 + 1e-3 + 2 * 256 * 2 * 16 * 4 / 1e9  # its half, the call, and 256 rows of k and v, two heads
    assert one["modelled (ms)"] == pytest.approx(1000 * seconds)
    assert one["off by (%)"] == pytest.approx(100 * abs(1000 * seconds / 5 - 1))
    assert many_ranks.checked(rows[rows["strategy"] != ONE], RATES).empty


def test_ranks_that_slow_each_other_are_allowed_for(rows):
    shared = pd.DataFrame([row("dense", 256, 2, "distributed data parallel", [6.4] * 3, batch=2, speedup=1.25)])
    both = pd.concat([rows, shared], ignore_index=True)
    assert many_ranks.together(rows, 2) == 1 and many_ranks.together(both, 2) == 0.625
    assert many_ranks.together(both.assign(speedup=0.3), 2) == 0.5, "they take turns at worst"
    slower = many_ranks.checked(both, RATES)["modelled (ms)"] - many_ranks.checked(rows, RATES)["modelled (ms)"]
    assert slower.tolist()[:2] == pytest.approx([8 / 2 / 0.625 - 8 / 2] * 2)


def test_the_model_says_how_far_it_is_off():
    one = {"pattern": "dense", "N": 256, "ranks": 2, "measured (ms)": 5.0, "modelled (ms)": 4.5, "off by (%)": 9.8}
    (said,) = many_ranks.model_error(pd.DataFrame([one, one | {"off by (%)": 3.0}]).set_index("pattern"))
    assert said.startswith("The model of many ranks (rates of the link and of one card) against 2 measured forwards")
    assert "2 measured forwards: largest error **9.8%**, half of them within 9.8%. The worst: dense, N = 256, 2" in said
    said = many_ranks.model_error(pd.DataFrame([one | {"off by (%)": 12.0}, one]).set_index("pattern"), "rank")
    assert said[1] == "**Off by more than 10% in 1 of 2**: do not read the curves closer than that."
    assert many_ranks.model_error(pd.DataFrame()) == ["No time of the model was measured here."]


def test_the_fit_says_how_near_it_is():
    sent = {"stage": "link", "status": "ok", "message_bytes": [1e6, 1e8], "median_ms": [1.1, 95.0]}
    said = many_ranks.rates_in_words(RATES, pd.DataFrame(sent), "rank")
    assert said.startswith("Fitted to 2 sizes of messages, each rank sends **1 GB/s** after 0.1 ms")
    assert "within 5% of that" in said and said.endswith("takes **1 ms** beside what it computes and moves.")
