"""What notebook 08 says, on rows that are made up, and its picture."""

import pandas as pd

from workbench.analysis import streams
from workbench.plots import streams as draw

PLANS = pd.DataFrame([
    {"pattern": "LongNet", "n": n, "chunk": 1 << 20, "in_memory_gib": n / 2**22, "streamed_gib": 0.25,
     "fits_in_memory": fits, "traffic_s": 0.5, "products_s": 20.0} for n, fits in ((1 << 20, True), (1 << 30, False))
])  # fmt: skip
BESIDE = pd.DataFrame([PLANS.iloc[-1].to_dict() | {"pattern": "dense", "products_s": 4e5}, PLANS.iloc[-1].to_dict()])
RUNS = pd.DataFrame([
    {"n": 1 << 30, "execution": "layer", "mode": "fwd", "seconds": 19.96, "tflops": 281.3},
    {"n": 1 << 20, "execution": "in memory", "mode": "fwd", "seconds": 0.1, "tflops": 283.0},
])  # fmt: skip
TOOK = pd.DataFrame([{"n": 1024, "peak_bytes": 5, "planned_bytes": 5, "sampled_rows": 7, "right": False}])


def test_sentences_are_of_the_rows():
    said, headline = streams.answer(BESIDE, PLANS, RUNS, TOOK)
    assert headline == "1,073,741,824 tokens on one card in 20.0 s" and said[0].startswith(
        f"**{headline}**, 281 TFLOP/s"
    )
    assert said[1].startswith("1,073,741,824 tokens do not fit on the card at once")
    assert "take 400,000 s of dense attention, 20 s of LongNet" in said[2]
    assert said[-1].endswith("7 sampled rows are wrong.")
    said, headline = streams.answer(BESIDE, PLANS[:1], RUNS[:0], TOOK)
    assert headline == "1,073,741,824 tokens planned on one card" and len(said) == 3


def test_the_curve_has_a_line_of_each_plan_and_a_dot_of_each_run():
    memory, time = draw.against_n(PLANS, RUNS, "h200").axes
    assert [line.get_label() for line in memory.lines] == ["in memory", "streamed", "all of an H200"]
    dots = {line.get_label(): line.get_ydata().tolist() for line in time.lines}
    assert dots["layer, measured"] == [19.96] and dots["in memory, measured"] == [0.1]


def test_a_live_run_is_right_and_planned_to_the_byte():
    progress, took = streams.live(1024, 64, 0.05)
    assert len(progress) == 8 and progress["positions"].iloc[-1] == 1024
    assert took["right"].all() and (took["planned_bytes"] == took["peak_bytes"]).all()
