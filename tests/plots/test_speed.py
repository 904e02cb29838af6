import pandas as pd
import pytest
from matplotlib import pyplot

from workbench.analysis import roofline
from workbench.plots import speed as draw
from workbench.plots import style
from workbench.probes import speed


@pytest.fixture(scope="module")
def card():
    return speed.recorded("h100x1")


def test_time_has_a_panel_a_mode_and_a_line_a_backend(card):
    rows, _ = card
    fig = draw.time_against_n(rows)
    assert [ax.get_title("left") for ax in fig.axes] == ["forward", "forward + backward"]
    assert {"dense, cuDNN", "dense, FlashAttention-2", "dilated", "block-sparse", "neighborhood"} <= named(fig)


def test_another_machines_rows_are_told_apart(card):
    rows, _ = card
    fig = draw.time_against_n(rows, rows.copy())
    pale = [line for line in fig.axes[0].get_lines() if line.get_markerfacecolor() == "white"]
    assert len(pale) == 5 and {"dilated", "dilated, H100"} <= named(fig)


def named(fig) -> set[str]:
    return {text.get_text() for text in fig.axes[0].texts}


def test_a_roofline_has_both_ceilings_and_no_point_above_them(card):
    rows, best = card
    device = roofline.device(rows, best)
    assert device["tflops"] == pytest.approx(best["matmul_tflops"]["bfloat16"]) and device["gbs"] == best["copy_gbs"]
    assert device["peak"] == 989.4 and (device["points"]["tflops"] <= device["tflops"]).all()
    low = roofline.device(rows, best | {"matmul_tflops": {"bfloat16": 1.0}})
    assert low["tflops"] == rows["tflops"].max()  # never more than all of a ceiling
    assert f" of {len(device['points'])} marks lie below" in roofline.bound(device)
    assert roofline.shown({"a": device})["share"].max() < 1


def test_rows_that_failed_are_not_drawn(card):
    rows = card[0].copy()
    rows.loc[rows["label"] == "dilated", "status"] = "oom"
    assert "dilated" not in named(draw.time_against_n(rows)) and "block-sparse" in named(draw.time_against_n(rows))


def test_each_call_is_drawn_and_the_noise_named():
    table = pd.DataFrame({"samples_ms": [[1.0, 2.0], [3.0, 4.0], [1.5, 1.6]], "median_ms": [1.5, 3.5, 1.55]})
    notes = {"row_major": "12%", "hilbert": "6%"}
    ax = draw.each_call(table.set_index(pd.Index(["row_major", "hilbert", "A/A"])), notes).axes[0]
    drawn = [list(line.get_xdata()) for line in ax.get_lines() if line.get_marker() == "o"]
    assert drawn == list(table["samples_ms"])
    named = [text.get_text() for text in ax.get_yticklabels()]
    assert named[1:] == ["Hilbert: 3.5 ms, 6%", "row-major, again (A/A): 1.55 ms, 12%"]


def test_break_even_shows_the_noise_beside_the_gain():
    rows = pd.DataFrame({
        "name": ["dense", "random-0.50", "random-0.90", "A/A"], "sparsity": [0, 0.5, 0.9, 0], "ideal": [1, 2, 10, 1],
        "speedup": [1, 1.5, 7, 1], "speedup_low": [1, 1.4, 6, 0.9], "speedup_high": [1, 1.6, 8, 1.1], "n": [64] * 4,
    })  # fmt: skip
    ax = draw.break_even(rows).axes[0]
    assert named(ax.figure) == {"dense against itself", "fewer pairs,\nsame rate", "measured"}
    ideal = ax.get_lines()[1]
    assert ax.get_xscale() == "log" and ideal.get_ydata() == pytest.approx(1 / ideal.get_xdata())
    (bars,) = ax.containers
    assert bars[0].get_xydata()[-1].tolist() == pytest.approx([0.1, 7])


@pytest.mark.parametrize(("n", "text"), [(4096, "4K"), (1 << 20, "1M"), (1000, "1,000"), (632_960, "632,960")])
def test_lengths_are_written_short(n, text):
    assert style.length(n) == text


def test_a_group_is_drawn_only_beside_its_baseline(card):
    rows = card[0]
    assert not draw.time_against_n(rows.assign(status="oom")).axes[0].get_lines()
    group = pd.DataFrame({"suite": ["a"], "n": [64], "label": ["ours"], "against": ["dense"]})
    assert "not timed" in draw.times_faster(group).get_label()


def placed(ends):
    fig, ax = style.subplots()
    ax.set(xlim=(0, 1), ylim=(0, 1))
    style.name_ends(ax, ends)
    pyplot.close(fig)
    return {text.get_text(): text.xyann[1] for text in ax.texts}


def test_many_names_stay_inside_the_axis_and_apart():
    for many in (3, 11, 17, 30):
        places = [*placed([(1, 0.02 * k / many, f"line {k}", "black") for k in range(many)]).values()]
        assert places[0] > -1e-9 and places[-1] <= style.TOP and len(places) == many
        steps = [b - a for a, b in zip(places, places[1:], strict=False)]
        assert min(steps) > 0.03 and max(steps) < 0.06
    high = [*placed([(1, 0.9 + k / 100, str(k), str(k / 10)) for k in range(5)]).values()]
    assert high[-1] == style.TOP and high[0] > 0.7
