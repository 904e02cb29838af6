import json

import pandas as pd
import pytest
import torch

from tests.tools import refused
from workbench.analysis import multicard
from workbench.harness import records
from workbench.patterns import from_spec
from workbench.plots import speed as draw
from workbench.probes import catalog, suite


def made_up(groups, speed=2.0):
    """Rows as `measure` writes them: the baseline at 100 TFLOP/s, the others at half of it."""
    rows = []
    for name in groups:
        cases = catalog.one_card()[name]()
        first = next(iter(cases))
        for label, case in cases.items():
            of = suite.fields_of(case)
            per_pair = 4 * of["head_dim"] * (3.5 if of["mode"] == "fwdbwd" else 1)
            ms = per_pair * of["pairs"] / (100 if label == first else 100 / speed) / 1e9
            row = of | {"suite": name, "label": label, "against": first, "status": "ok", "median_ms": ms}
            rows.append(row | {"speedup": 3.0, "speedup_low": 2.9, "speedup_high": 3.1, "extra_bytes": 2**30})
    return pd.DataFrame(rows).assign(run_device="NVIDIA H100 80GB HBM3")


def test_every_group_names_cases_that_can_be_recorded():
    for name, make in catalog.one_card().items():
        if name == "neighborhood":  # its blocks take seconds to count
            continue
        for label, case in make().items():
            row = suite.fields_of(case)
            assert json.loads(json.dumps(records.plain(row))) and row["pairs"] > 0, (name, label)


def test_rates_are_over_attended_pairs_and_beside_the_baseline_of_the_group():
    rows = suite.rates(made_up(["window fwd", "random fwdbwd"]))
    assert rows.loc[rows["label"] == "triton", "tflops"].tolist() == pytest.approx([50, 50])
    assert rows.loc[rows["label"] == "dense", "of_dense"].tolist() == pytest.approx([1, 1])
    assert rows.loc[rows["label"] == "fa4", "of_dense"].tolist() == pytest.approx([0.5, 0.5])
    other = made_up(["window fwd"]).assign(suite="again", backend="cudnn", median_ms=lambda x: x["median_ms"] / 2)
    for kernel, share in (("cudnn", 0.25), ("auto", 0.5)):  # another kernel that is faster; the same, in a better run
        both = suite.rates(pd.concat([made_up(["window fwd"]), other.assign(backend=kernel)], ignore_index=True))
        assert both.loc[1, "of_dense"] == pytest.approx(share)
        assert suite.summary(both).get("dense of another group", pd.Series()).count() == 3 * (kernel == "cudnn")
    assert suite.apart(rows[:1].assign(tflops=1.09 * rows["tflops"]), rows) == []
    (said,) = suite.apart(rows[:1].assign(tflops=2 * rows["tflops"]), rows)
    assert said.endswith("10% apart: dense by auto, 16 x 128, forward, N = 32,768 (200 TFLOP/s there, 100 here).")
    assert set(suite.summary(rows).index) == {"window of 2,048, 16 x 128", "random blocks, 90% left out, 16 x 128"}
    assert set(suite.summary(rows)["speed relative to dense"].dropna()) == {"3.00 (2.90 to 3.10)"}


def test_pictures_say_what_they_show():
    rows = suite.rates(made_up(["longnet paper 12x64 fwd 131072", "longnet pow2 16x128 causal fwdbwd 1048576"]))
    fig = draw.against_dense(rows)
    named = [text.get_text().replace("\n", ", ") for text in fig.axes[0].get_yticklabels()]
    assert named == sorted(set(rows["what"]))
    assert [line.get_xdata()[0] for line in fig.axes[0].get_lines()[:-1]] == pytest.approx([0.5, 0.5])
    rows = made_up(["window fwd", "random fwdbwd"])
    old = rows[rows["label"] == "triton"].assign(label="flex", backend="flex")  # of a backend that is no longer one
    ax = draw.times_faster(suite.rates(pd.concat([rows, old]))).axes[0]
    assert ax.texts[4].get_text().endswith("forward, N = 32K")
    assert [(text.get_text(), text.xy[0]) for text in ax.texts[5:]] == [("3.0x", 1.02)] * 3  # beside the axis
    assert ax.get_yticklabels()[2].get_text() == "FlexAttention"


def test_a_gain_within_the_noise_of_dense_attention_is_named_so():
    rows = made_up(["short"])
    again = rows[rows["label"] == "dense"].assign(label="A/A", speedup_high=1.05, speedup_low=0.95)
    for most, word in ((1.05, "3.0x"), (3.0, "3.0x (noise)")):
        found = suite.rates(pd.concat([rows, again.assign(speedup_high=most)]))
        assert word in [text.get_text() for text in draw.times_faster(found).axes[0].texts]


def test_the_committed_records_answer_the_questions_of_the_page():
    """From the tables: LongNet beside dense attention and its own code, the orders of a neighborhood."""
    rows = suite.recorded("h200x1", "h100x1")
    longnet = rows[rows["suite"].str.startswith("longnet")]
    assert {"fa4", "triton"} <= set(longnet["backend"])
    forward, both = suite.per_pair(longnet)
    assert "**0.67 to 1.07 times** the rate of dense attention by FlashAttention-4." in forward[0], "not by cuDNN's"
    assert "the rate of dense attention by FlashAttention-4." in both[0] and both[1].startswith("Least: LongNet")
    theirs = rows[rows["suite"].str.startswith("peers")]
    assert "Forward, torchscale takes **4.7 to 4.8 times** as long" in suite.times_longer(theirs)[0]
    assert set(theirs["what"]) == {"LongNet, paper, blocked offsets, 12 x 64"}
    assert suite.devices(theirs, dated=True) == "H100 (2026-11-28, commit 029a585)"
    assert set(longnet["what"]).isdisjoint(theirs["what"])  # two patterns, two names
    orders = suite.orders(rows[rows["suite"] == "neighborhood"])["speed relative to row-major"].round(1)
    assert orders[["Hilbert", "Morton", "row-major"]].tolist() == [3.8, 3.9, 1]


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
    assert set(rows["label"]) == {"dense", "workbench", "workbench, CUDA graph", "A/A"}
    assert len(records.load(tmp_path)) == 4 and (rows["status"] == "ok").all()


def test_what_is_on_record_is_not_measured_again(monkeypatch):
    known = suite.recorded("h200x1", "h100x1")
    monkeypatch.setattr(suite.machine, "kind", lambda: "h200x1")
    asked = []
    new = made_up(["window fwd"]).assign(run_device="NVIDIA H200", median_ms=7.0)
    monkeypatch.setattr(suite, "run", lambda groups, **options: asked.append((groups, options)) or new)
    rows = suite.gathered(["window"], ["h100x1"], within_s=5)
    (groups, options) = asked[0]
    assert groups == ["window"] and options["within_s"] == 5 and "window fwd" in set(options["known"]["suite"])
    assert set(rows["suite"]) == set(known["suite"])
    assert (rows.loc[rows["suite"] == "window fwd", "median_ms"] == 7).all()
    monkeypatch.setattr(suite, "run", lambda *_, **__: new[:0])
    assert len(suite.gathered(["window"], ["h100x1"])) == len(known) == len(suite.gathered([], ["h100x1"]))


@pytest.mark.parametrize("name", catalog.PATTERNS)
def test_a_name_is_one_pattern_of_that_name(name):
    made = catalog.maker(name)(1 << 14, False)
    assert from_spec(made.spec()) == made or made.spec() == from_spec(made.spec()).spec()
    assert made.name.startswith("longnet-p") <= (made.name == name)  # where a pattern has a name of its own, it is this


def test_a_name_that_means_several_patterns_is_refused_with_the_choices():
    longnets = "longnet-paper or longnet-pow2 or longnet-geometric"
    for name, want in (("longnet", longnets), ("window", "window-blocks or window-tokens")):
        refused(f"pattern='{name}': want {want}", catalog.maker, name)
    refused("pattern=None: want one of dense, longnet-paper", catalog.maker, None)
    of_notebook_04 = multicard.at("longnet-geometric", 4096, heads=1, head_dim=8)(1 << 14).pattern
    assert of_notebook_04.spec() == catalog.maker("longnet-geometric")(1 << 14, False).spec()
