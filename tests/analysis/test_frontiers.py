"""What notebook 03 asks, and its sentences on rows that would make them false or end in an error."""

import json

import pandas as pd
import pytest

from workbench import Dilated
from workbench.analysis import frontiers
from workbench.fit import cards, estimate, executions, frontier
from workbench.harness.narrate import title
from workbench.probes import catalog

SHAPED = catalog.shaped([256, 1024], [1, 4], 512)
SIZES = {"heads": 8, "head_dim": 64, "dtype": "float16", "mode": "fwd"}


def test_a_way_is_a_case_at_any_length_of_a_name_or_a_spec():
    ways = executions.ways(["dense, eager", "window-tokens, triton", "dense, workbench:attention"], SHAPED, **SIZES)
    assert ways["dense, eager"](100).backend == "eager"
    assert ways["dense, workbench:attention"](100).backend == "workbench:attention"
    assert ways["window-tokens, triton"](640).pattern.shape == (640,) and ways["window-tokens, triton"](640).n == 640
    for name, want in (("dense", "'pattern, backend', the pattern one of dense"), ("sparse, triton", "one of dense,"),
                       ("dense, efficent", "one of auto,")):  # fmt: skip
        with pytest.raises(ValueError, match=f"want {want}"):
            executions.ways([name], SHAPED, **SIZES)
    spec = json.dumps(Dilated([256, 1024], [1, 4]).spec())
    ((name, at),) = executions.ways([f"{spec}, torch"], **SIZES).items()
    assert name == f"{spec}, torch" and at(2048).backend == "torch"
    assert at(2048).pattern.spec() == Dilated([256, 1024], [1, 4]).spec()


def test_what_is_alive_peaks_at_what_is_requested():
    found = estimate.trace(executions.ways(["dilated, triton"], SHAPED, **SIZES)["dilated, triton"](4096), "h100")
    alive = frontiers.alive(found.events)
    assert alive.sum(axis=1).max() == found.requested_bytes and (alive >= 0).all().all()
    assert list(alive.columns[:3]) == ["q", "k", "v"]


def test_scores_are_most_of_what_eager_attention_takes():
    at = executions.ways(["dense, eager", "dense, auto"], SHAPED, **SIZES)
    share = {name: frontiers.scores_share(estimate.trace(case(4096), "h100"), 4096, 8) for name, case in at.items()}
    assert share["dense, eager"] > 0.8 and share["dense, auto"] == 0


def test_allocated_promises_more_than_runs():
    """allocated_n is the longest whose allocated bytes are no more than the card's, and the next is more."""
    at = executions.ways(["dense, auto", "dilated, triton"], SHAPED, **SIZES)
    card, found = cards.find("rtx3060"), {title(way): case for way, case in at.items()}
    for row in frontiers.promised(at, "rtx3060").to_dict("records"):
        seen, case = row[frontiers.PROMISED], found[row["way"]]
        assert estimate.trace(case(seen), card).allocated_bytes <= card.total_bytes
        assert estimate.trace(case(seen + frontier.GRAIN), card).allocated_bytes > card.total_bytes
        assert row[frontiers.RUNS] < seen and 0.02 < row[frontiers.TOO_MUCH] < 0.2


def test_records_are_found_by_machine_with_their_labels(tmp_path, monkeypatch):
    monkeypatch.setattr(frontiers.records, "default_folder", lambda: tmp_path)
    assert frontiers.recorded("h100x1").empty
    at = executions.ways(["dense, eager"], SHAPED, **SIZES)["dense, eager"]
    recorder = frontiers.records.start("frontier", "gpu", tmp_path / "h100x1")
    row = frontier.search(at, card="h100", budget_bytes=1 << 30, say=None) | {"measured": True}
    for n, more in ((1024, {}), (2048, {}), (4096, {"heads": 4}), (None, {}), (512, {"stage": "probe"})):
        recorder.row(**row | {"measured_n": n, "n": n} | more)
    found = frontiers.recorded("h100x1")
    assert found["label"].item() == "dense, eager" and found["measured_n"].item() in (2048, 4096)
    assert "run_device" in found


@pytest.mark.parametrize("kind", ["h100x1", "h200x1", "h200x2", "no-such-card"])
def test_calls_that_computed_something_else_are_found_or_none_are(kind):
    found, rows = frontiers.wrong(kind), frontiers.records.committed(kind, "frontier").to_dict("records")
    there_are = any(row["stage"] == "probe" and row["limiter"] == "validity" for row in rows)
    assert bool(len(found)) == there_are and list(found)[-1] == "said"
    assert all(words.startswith("wrong: ") for words in found["said"])
    if kind == "h100x1":
        assert {str(x) for x in found[["n", "elements"]].dtypes} == {"int64"}
        assert "dense, cudnn" in set(found["way"]) and (found["elements"] > 2**31).all()


def lines(**n):
    rows = [{"label": x, "n": value, "budget_bytes": gib << 30} for x, value in n.items() for gib in (1, 4)]
    return pd.DataFrame(rows).assign(limiter="memory", predicted_ms=1.0)


def test_what_writes_all_scores_is_told_apart_from_the_least_and_the_most_of_the_others():
    told = frontiers.most(lines(a=640.0, b=64.0, c=None, d=500.0, **{"b, eager": 8.0}), "h100")
    said = "takes **64** (b, limited by memory) to **640** (a, limited by memory) tokens; b, eager writes them and"
    assert told.endswith(f"4 GiB for tensors: what writes no N x N scores {said} takes **8**.")
    untimed = frontiers.most(lines(a=640.0).assign(predicted_ms=None), "h100")
    assert untimed.endswith("takes **640** (a, limited by memory (time not modelled)) tokens.")
    assert frontiers.most(lines(a=None), "t4") == "On t4 none of these ways runs with the largest budget."


def measured(**fields):
    row = {"label": "a", "status": "ok", "error": None, "measured_n": 1000.0, "predicted_n": 1000.0, "step": 0.02}
    return pd.DataFrame([row | {"grain": 16, "probes": 5, "measured": True} | fields])


def test_predictions_are_counted_where_both_numbers_are():
    same = "In **1 of 1 search** the prediction is within a step of what was measured in this run; "
    assert frontiers.agreement(measured())[0] == same + "all are equal."
    off = frontiers.agreement(pd.concat([measured(), measured(predicted_n=1500.0)]))
    assert "**1 of 2 searches**" in off[0] and "at worst off by 50.00%" in off[0]
    old = [measured(measured=False, run_utc=f"2026-11-{day}T02", run_commit=f"c{day}") for day in (28, 30)]
    said = "measured before (2, on record of 2026-11-28 to 2026-11-30) and in this run (1); all are equal."
    assert frontiers.agreement(pd.concat([*old, measured()]))[0].endswith(said)
    assert frontiers.whence(old[0], commits=True).endswith("of 2026-11-28, commits c28)")
    failed = frontiers.agreement(measured(status="killed", measured_n=None, error="by signal 9"))
    assert failed == ["No search has both a prediction and a measurement.", "Not measured, a: by signal 9"]


def test_what_is_promised_too_much_and_what_lies_beyond_is_told():
    frame = pd.DataFrame({"way": ["a", "b"], frontiers.TOO_MUCH: [0.1, 0.2]})
    said = "(predicted, by memory alone), what `max_memory_allocated` reports promises up to **20.0%** more tokens than"
    assert frontiers.overpromised(frame, "t4") == f"On t4 {said} run (b)."
    assert frontiers.overpromised(pd.DataFrame([]), "t4") == "None of these ways runs on t4."
    table = pd.DataFrame({"status": ["ok", "ok"], "n": [2**20, None]})
    assert "**N = 524,288**. Of the frontiers above 1 of 2 lie beyond it: " in frontiers.beyond(table, 32, 128)
    assert "Of the frontiers above 0 of 2 lie beyond it" in frontiers.beyond(table, 1, 64)


def test_limits_are_counted_also_where_no_time_is_modelled():
    table = pd.DataFrame({"status": ["ok"] * 3 + ["refused"], "limiter": ["time", "search", "memory", None], "n": 64})
    words = "time 1, nothing as far as was searched 1, memory (time not modelled) 1"
    assert frontiers.limits(table.assign(predicted_ms=None)) == f"What limits the 3 frontiers here: {words}."
    assert frontiers.limits(table[3:].assign(predicted_ms=None)).endswith("here: none of these ways runs.")
    autos = table.assign(label="dense, auto", card=["t4", "h200", "b200", "l4"], kernel=["efficient", "fa4"] * 2)
    said = "memory-efficient on T4 and B200; FlashAttention-4 on H200"
    assert frontiers.autos(autos.assign(n=[64, 64, 64, None])) == f"At these lengths dense, auto is {said}."
    assert frontiers.autos(autos.assign(label="dense, eager")) == ""
