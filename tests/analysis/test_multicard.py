"""What notebook 04 asks, on rows that are made up: shares, interval and curves are those of their definition."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch

from workbench import Dense, Neighborhood
from workbench.analysis import multicard
from workbench.analysis import multicard_words as words
from workbench.harness import records
from workbench.patterns.dilated import geometric
from workbench.probes.case import Case
from workbench.probes.timing import AA, speedup
from workbench.scaling.strategies import ONE


def row(kind, n, nproc, strategy, samples, first=64, **fields):
    """A sweep's row; samples: milliseconds, beside a one-device call of 8 ms in each round."""
    pattern = multicard.maker(kind, first)(n)
    split = strategy == "distributed data parallel"
    busy = [0.9, *[0.0 if split or strategy == ONE else 0.8] * (nproc - 1)]
    made = Case(pattern, n, 2, 16).fields() | {"world": 1 if strategy in (ONE, AA) else nproc, "strategy": strategy}
    made |= {"label": f"{kind} {n}", "nproc": nproc, "kind": kind, "status": "ok", "error": None, "valid": True}
    made |= {"pairs": pattern.pairs(n, 2), "samples_ms": samples, "median_ms": sorted(samples)[len(samples) // 2]}
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
    cases = multicard.cases(
        {"dense": [256], "longnet-geometric": [256, 300]}, 64, ("fwd", "fwdbwd"), heads=2, head_dim=16
    )
    assert list(cases) == [
        "dense fwd 1 x 256", "dense fwdbwd 1 x 256", "longnet-geometric fwd 1 x 256", "longnet-geometric fwd 1 x 300",
        "longnet-geometric fwdbwd 1 x 256", "longnet-geometric fwdbwd 1 x 300",
    ]  # fmt: skip
    assert cases["longnet-geometric fwd 1 x 300"].pattern.segment_lengths == (64, 256, 300)
    assert isinstance(cases["dense fwd 1 x 256"].pattern, Dense)
    assert 0.045 < multicard.maker("block-sparse")(1 << 18).density(1 << 18, 1) < 0.055
    with pytest.raises(ValueError, match="pattern='ring': want one of dense, longnet-geometric, block-sparse, neigh"):
        multicard.maker("ring")


def test_causal_is_another_kind():
    patterns = [Dense(), Dense(True), geometric(300, first=64), geometric(300, True, 64)]
    patterns += [multicard.maker(kind)(300) for kind in multicard.KINDS[3:]] + [Neighborhood((300,), 8)]
    frame = pd.DataFrame([{"pattern_spec": x.spec(), "pattern": x.name, "n": 300} for x in patterns])
    assert list(multicard.kinds(frame)["kind"]) == [
        "dense", "dense causal", "longnet-geometric", "longnet-geometric causal", *multicard.KINDS[3:],
        patterns[-1].name,
    ]  # fmt: skip


def test_ranks_are_those_that_have_a_card_and_here_as_many_as_asked_for(monkeypatch):
    for cards, want, most in ((0, [2, 4], 3), (1, [1], 1), (2, [2], 2), (8, [2, 4], 4)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda cards=cards: cards)
        monkeypatch.setattr(multicard, "processors", lambda: 3)
        assert multicard.possible([2, 4]) == want and multicard.most(4) == most


def test_rows_that_are_wrong_or_did_not_run_are_left_out_and_named(rows):
    assert len(multicard.ok(rows)) == len(rows)
    rows.loc[3, "valid"], rows.loc[3, "error"] = False, "wrong: out is off"
    rows.loc[2, "status"], rows.loc[2, "error"] = "unsupported", "not on this machine"
    assert len(multicard.ok(rows)) == len(rows) - 2
    assert multicard.missing(rows) == [
        "`distributed data parallel`: not on this machine", "`sequence`: wrong: out is off",
    ]  # fmt: skip


def test_a_summary_has_a_column_a_strategy(rows):
    table = multicard.summary(rows, multicard.time_and_speedup)
    assert list(table) == ["pattern", "N", "ranks", ONE, "sequence", "DDP"] and len(table) == 10
    first = table.iloc[0]
    assert first["sequence"] == "5 (1.60x)" and first[ONE] == "8"
    memory = multicard.summary(rows[rows["nproc"] == 2], multicard.peak_and_sent)
    assert memory["sequence"].iloc[0] == "1 (0.000488)" and "ranks" not in memory


def test_bytes_are_the_plans_only_where_every_rank_says_so(rows):
    assert "**10 of 10**" in words.as_planned(rows)
    rows.at[3, "sent_bytes"] = [512, 511]
    assert "**9 of 10**" in words.as_planned(rows)


def test_one_sequence_in_shares_of_the_batch_has_an_idle_card(rows):
    found = multicard.by_batch(rows[rows["kind"] == "dense"]).set_index(["N", "ranks", "strategy"])
    assert found.loc[(256, 2, "DDP"), ["busiest", "idlest", "peak"]].tolist() == [0.9, 0, 1]
    assert found.loc[(256, 4, "sequence"), "idlest"] == 0.8


def test_efficiency_is_over_the_ranks_and_the_weak_one_by_pairs(rows):
    found = multicard.efficiency(rows).set_index(["kind", "scaling", "world"])
    assert found.loc[("dense", "strong", 2), ["n", "efficiency", "low", "high"]].tolist() == [512, 0.8, 0.8, 0.8]
    assert found.loc[("dense", "strong", 4), "efficiency"] == 0.5
    # twice the positions, four times the pairs, 5 ms for 8: each rank does 3.2 times what one did
    assert found.loc[("dense", "weak", 2), "efficiency"] == pytest.approx(2 * 1.6)
    assert found.loc[("longnet-geometric", "weak", 4), "n"] == 1024
    assert ("dense", "weak", 4) not in found.index, "nothing four times as long was measured"


def test_curves_are_between_all_and_none_of_the_exchange_hidden(rows):
    found = multicard.curves(rows, 1e9, (2, 16, 64), 64)
    assert not found["measured"].any() and set(found["scaling"]) == {"strong", "weak"}
    assert (found["least"] < found["efficiency"]).any() and (found["least"] <= found["efficiency"]).all()
    strong = found[(found["kind"] == "longnet-geometric") & (found["scaling"] == "strong")]
    weak = found[(found["kind"] == "longnet-geometric") & (found["scaling"] == "weak")]
    assert set(strong["n"]) == {1024} and weak["n"].tolist() == [512, 4096, 16_384]
    assert weak["pattern"].iloc[-1] == geometric(16_384, first=64).name


def test_plans_are_of_the_longest(rows):
    with_gradients = rows.assign(mode="fwdbwd")  # where no forward ran, they stand in for it
    assert len(multicard.one_case(with_gradients)) == len(multicard.one_case(rows)) > 0
    assert list(multicard.plans(with_gradients, 8)) == list(multicard.plans(rows, 8))
    plans = multicard.plans(rows, 8)
    assert {kind: plan.n for kind, plan in plans.items()} == {"dense": 512, "longnet-geometric": 1024}
    assert all(plan.world == 8 for plan in plans.values())
    grouped = multicard.plans(rows.assign(kv_heads=1, nq=256), 8)  # two query heads on a key head, the last 256 queries
    assert {(plan.heads, plan.kv_heads, plan.nq) for plan in grouped.values()} == {(2, 1, 256)}


def test_hilbert_shards_have_the_short_borders():
    found = multicard.borders((32, 32), 2, ["row_major", "hilbert"], [4, 16], heads=2, head_dim=8, itemsize=2)
    by = found.set_index(["order", "world"])
    assert by.loc[("hilbert", 16), "bytes"] < by.loc[("row_major", 16), "bytes"]
    rows_got = 2 * 2 * 3 * 32  # three borders of four strips, two rows across the width each way
    assert by.loc[("row_major", 4), "bytes"] == rows_got * 2 * 2 * 8 * 2
    assert by.loc[("row_major", 4), "halo"] == pytest.approx(rows_got / 1024)


def test_what_is_committed_is_the_newest_of_one_sequence_with_the_links_rate(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "default_folder", lambda: tmp_path)
    assert multicard.recorded(["h100x2"])[0].empty
    lines = [{"kind": "run", "run": "a", "utc": "1"}, {"kind": "run", "run": "b", "utc": "2"}]
    for run, took in (("b", 4.0), ("a", 5.0)):
        made = row("longnet-geometric", 4096, 2, "sequence", [took] * 3, first=256)
        lines.append(made | {"kind": "row", "run": run, "stage": "sweep"})
        lines.append(made | {"kind": "row", "run": run, "stage": "sweep", "batch": 2})
    for size, speed in ((1 << 20, 1e9), (1 << 24, 5e9)):
        lines.append({"kind": "row", "run": "a", "stage": "link", "status": "ok", "message_bytes": size}
                     | {"bytes_per_second": speed})  # fmt: skip
    (tmp_path / "h200x2").mkdir()
    lines = [line | {"probe": "scaling"} for line in lines]
    (tmp_path / "h200x2" / "2026-01-01-scaling-abc.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found, speed = multicard.recorded(["h100x2", "h200x2"])
    assert found["kind"].tolist() == ["longnet-geometric"] and found["median_ms"].tolist() == [4.0] and speed == 5e9
