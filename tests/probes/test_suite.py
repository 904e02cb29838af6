import json

import pandas as pd
import pytest
import torch

from workbench.harness import records
from workbench.plots import speed as draw
from workbench.probes import catalog, suite


def made_up(groups, speed=2.0):
    """Rows as `measure` writes them: the baseline at 100 TFLOP/s, the others at half of it."""
    rows = []
    for name in groups:
        cases = catalog.one_card()[name]()
        first = next(iter(cases))
        for label, case in cases.items():
            of = suite.fields(case)
            per_pair = 4 * of["head_dim"] * (3.5 if of["mode"] == "fwdbwd" else 1)
            ms = per_pair * of["pairs"] / (100 if label == first else 100 / speed) / 1e9
            row = of | {"suite": name, "label": label, "against": first, "status": "ok", "median_ms": ms}
            rows.append(row | {"speedup": 3.0, "speedup_low": 2.9, "speedup_high": 3.1, "extra_bytes": 2**30})
    return pd.DataFrame(rows)


def test_every_group_names_cases_that_can_be_recorded():
    for name, make in catalog.one_card().items():
        if name == "neighborhood":  # its blocks take seconds to count
            continue
        for label, case in make().items():
            row = suite.fields(case)
            assert json.loads(json.dumps(records.plain(row))) and row["pairs"] > 0, (name, label)


def test_rates_are_over_attended_pairs_and_beside_the_baseline_of_the_group():
    rows = suite.rates(made_up(["window fwd", "random fwdbwd"]))
    assert rows.loc[rows["label"] == "triton", "tflops"].tolist() == pytest.approx([50, 50])
    assert rows.loc[rows["label"] == "dense cudnn", "of_dense"].tolist() == pytest.approx([1, 1])
    assert rows.loc[rows["label"] == "flex", "of_dense"].tolist() == pytest.approx([0.5, 0.5])
    assert {"window fwd", "random fwdbwd"} == set(suite.summary(rows)["group"])
    assert set(suite.summary(rows)["times faster"].dropna()) == {"3.00 (2.90 to 3.10)"}


def test_pictures_say_what_they_show():
    rows = suite.rates(made_up(["longnet paper 12x64 fwd 131072", "longnet pow2 16x128 causal fwdbwd 1048576"]))
    assert "paper 12x64, forward, N = 128K: 0.50" in draw.against_dense(rows).get_label()
    rows = suite.rates(made_up(["window fwd", "random fwdbwd"]))
    assert "window fwd, flex: 3.00x" in draw.times_faster(rows).get_label()


def test_recorded_takes_the_newest_run_of_a_group(tmp_path, monkeypatch):
    for speed, utc in ((2.0, "2026-01-01T00:00:00Z"), (4.0, "2026-01-02T00:00:00Z")):
        run = f"run-{speed}"
        lines = [{"kind": "run", "schema": 1, "run": run, "utc": utc}]
        frame = made_up(["window fwd"], speed).to_dict("records")
        lines += [{"kind": "row", "run": run, "probe": "timing"} | records.plain(row) for row in frame]
        (tmp_path / "h100x1").mkdir(exist_ok=True)
        (tmp_path / "h100x1" / f"{run}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    monkeypatch.setattr(records, "default_folder", lambda: tmp_path)
    rows = suite.recorded("h100x1")
    assert rows.loc[rows["label"] == "triton", "tflops"].tolist() == pytest.approx([25])
    assert suite.recorded("h200x1").empty


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA card")
def test_without_a_card_nothing_is_recorded(tmp_path):
    with pytest.raises(RuntimeError, match="torch finds none here"):
        suite.run(folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_a_group_is_measured_and_recorded(tmp_path):
    rows = suite.run(["shorter 4096"], folder=tmp_path, samples=3, seconds=2, say=None)
    assert set(rows["label"]) == {"dense cudnn", "workbench", "workbench, CUDA graph", "A/A"}
    assert len(records.load(tmp_path)) == 4 and (rows["status"] == "ok").all()
