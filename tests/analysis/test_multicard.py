"""What notebook 04 asks, on rows that are made up: shares, interval and curves are those of their definition."""

import json

import pandas as pd
import pytest
import torch

from workbench import Dense, Neighborhood
from workbench.analysis import multicard
from workbench.analysis import multicard_words as words
from workbench.harness import records
from workbench.patterns.dilated import geometric
from workbench.probes.timing import AA, speedup
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
    assert list(cases) == [
        "dense fwd 1 x 256", "dense fwdbwd 1 x 256", "longnet-geometric fwd 1 x 256", "longnet-geometric fwd 1 x 300",
        "longnet-geometric fwdbwd 1 x 256", "longnet-geometric fwdbwd 1 x 300",
    ]  # fmt: skip
    assert cases["longnet-geometric fwd 1 x 300"].pattern.segment_lengths == (64, 256, 300)
    assert isinstance(cases["dense fwd 1 x 256"].pattern, Dense)
    assert 0.045 < multicard.at("block-sparse", 64, **SIZES)(1 << 18).pattern.density(1 << 18, 1) < 0.055


def test_causal_is_another_kind():
    patterns = [Dense(), Dense(True), geometric(300, first=64), geometric(300, True, 64)]
    patterns += [multicard.at(kind, 64, **SIZES)(300).pattern for kind in multicard.KINDS[3:]] + [
        Neighborhood((300,), 8)
    ]
    frame = pd.DataFrame([{"pattern_spec": x.spec(), "pattern": x.name, "n": 300} for x in patterns])
    assert list(multicard.kinds(frame)["kind"]) == [
        "dense", "dense causal", "longnet-geometric", "longnet-geometric causal", *multicard.KINDS[3:],
        patterns[-1].name,
    ]  # fmt: skip


def test_ranks_are_those_that_have_a_card_and_here_as_many_as_asked_for(monkeypatch):
    for cards, want in ((0, [2, 4]), (1, [1]), (2, [2]), (8, [2, 4])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda cards=cards: cards)
        assert multicard.possible([2, 4]) == want


def test_rows_that_are_wrong_or_did_not_run_are_left_out_and_named(rows):
    assert len(multicard.ok(rows)) == len(rows)
    rows.loc[3, "valid"], rows.loc[3, "error"] = False, "wrong: out is off"
    rows.loc[7, "valid"], rows.loc[7, "error"] = False, "wrong: lse is off"
    rows.loc[11, "valid"], rows.loc[11, "error"] = False, "wrong: nothing is right"
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


def test_bytes_are_the_plans_only_where_every_rank_says_so(rows):
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
