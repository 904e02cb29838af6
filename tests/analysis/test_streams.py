"""What notebook 08 says, on rows that are made up, and its picture."""

import pandas as pd
import pytest

from workbench.analysis import streams
from workbench.plots import streams as draw
from workbench.streaming import api

PLANS = pd.DataFrame([
    {"pattern": "LongNet", "n": n, "chunk": 1 << 20, "in_memory_gib": n / 2**22, "streamed_gib": 0.25,
     "fits_in_memory": fits, "traffic_s": 0.5, "products_s": 20.0} for n, fits in ((1 << 20, True), (1 << 30, False))
])  # fmt: skip
BESIDE = pd.DataFrame([PLANS.iloc[-1].to_dict() | {"pattern": "dense", "products_s": 4e5}, PLANS.iloc[-1].to_dict()])
RUNS = pd.DataFrame([
    {"run": "a", "of": "half", "n": 1 << 30, "execution": "layer", "mode": "fwd", "seconds": 19.96, "tflops": 281.3},
    {"n": 1 << 20, "execution": "in memory", "mode": "fwd", "seconds": 0.1, "tflops": 283.0, "of_in_memory": 1.0},
    {"n": 1 << 20, "execution": "streamed", "mode": "fwd", "seconds": 0.11, "of_in_memory": 1.1, "peak_gib": 1.0},
])  # fmt: skip
TOOK = pd.DataFrame([{"run": "b", "n": n, "sampled_rows": 7, "right": n > 512} for n in (1024, 512)])


def test_sentences_are_of_the_rows():
    said, headline = streams.answer(BESIDE, PLANS, RUNS, TOOK)
    assert headline == "A layer of 1,073,741,824 tokens on one card in 20.0 s (half)"
    assert said[0] == f"**{headline}**, at 281 TFLOP/s, from the records."
    assert streams.answer(BESIDE, PLANS, RUNS, TOOK.assign(run="a"))[0][0].endswith("TFLOP/s, measured here.")
    assert said[1].startswith("1,073,741,824 tokens do not fit on the card at once, 1,048,576 do; streamed")
    assert "dense attention 4.63 days, LongNet 20 s and its copies 0.5 s (at the same time)." in said[2]
    assert said[3].endswith("the records: forward, **1.10 times** as long at 1,048,576 tokens." + streams.MORE)
    assert said[4] == "Sampled rows of 2 runs of up to 1,024 tokens were checked here: not all right."
    failed = pd.DataFrame([{"n": 2048, "right": None}, *TOOK.to_dict("records")])
    said, _ = streams.answer(BESIDE, PLANS, RUNS.assign(of_in_memory=1.0), failed)
    assert "forward, as long at 1,048,576 tokens" in said[3] and said[4].endswith("not all right; 1 did not run.")
    said, headline = streams.answer(BESIDE, PLANS[:1], RUNS[:0], TOOK)
    assert headline == "1,073,741,824 tokens planned on one card" and len(said) == 2


def test_the_curve_has_a_line_of_each_plan_and_a_dot_of_each_run():
    memory, time = draw.against_n(PLANS, RUNS, "h200").axes
    assert [line.get_label() for line in memory.lines] == ["in memory", "streamed", "all of an H200"]
    dots = {line.get_label(): line.get_ydata().tolist() for line in time.lines}
    assert dots["layer, measured"] == [19.96] and dots["in memory, measured"] == [0.1]


def test_what_runs_here_is_right_planned_to_the_byte_and_a_record(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_RECORDS", str(tmp_path))
    progress, took = streams.live({"fwd": [1000], "layer": [1024], "fwdbwd": [777]}, 64, 0.05)
    assert len(progress) == 4 and progress["positions"].iloc[-1] == 1024
    assert (256e-6 / progress["million_tokens_per_second"]).sum() == pytest.approx(progress["seconds"].iloc[-1])
    assert {*took["of"]} == {"LongNet, 1 head x 32, float16"}
    assert took["right"].all() and (took["sampled_rows"] > 10).all() and (took["relative_error"] > 0).all()
    peaks = took.groupby("execution")["of_planned_bytes"].unique()
    assert peaks["streamed"] == peaks["layer"] == 1
    ran = ["fwdbwd streamed", "fwdbwd in memory", "fwd streamed", "fwd in memory", "fwd layer"]
    assert [*took["mode"] + " " + took["execution"]] == ran and took["of_in_memory"].count() == 4
    (journal,) = tmp_path.rglob("*.jsonl")
    assert len(journal.read_text().splitlines()) == 1 + len(ran)


def test_a_run_that_fails_is_a_row_and_a_wrong_one_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_RECORDS", str(tmp_path))
    lengths = {"fwd": [1000], "layer": [1024], "fwdbwd": []}
    _, took = streams.live(lengths, 64, 0.0001)
    status = dict(zip(took["execution"], took["status"], strict=True))
    assert status == {"streamed": "oom", "in memory": "ok", "layer": "oom"}
    attention, layer = api.attention, api.layer
    late = lambda x: x[500:].copy_(x[499:-1].clone())  # noqa: E731, rows that are those of their neighbours
    monkeypatch.setattr(api, "attention", lambda qkv, p, to, **o: (attention(qkv, p, to, **o), late(to[0]))[0])
    monkeypatch.setattr(api, "layer", lambda module, x, **o: (layer(module, x, **o), late(x))[0])
    _, took = streams.live(lengths, 64, 0.05)
    assert dict(zip(took["execution"], took["right"], strict=True)) == {
        "streamed": False, "in memory": True, "layer": False
    }  # fmt: skip
