from itertools import pairwise

import pandas as pd
import pytest
from matplotlib import pyplot
from matplotlib.text import Text

from workbench.analysis import roofline
from workbench.plots import speed as draw
from workbench.plots import style
from workbench.probes import speed


@pytest.fixture(scope="module")
def card():
    return speed.recorded("h100x1")


def test_time_has_a_panel_a_mode_and_a_line_a_backend(card):
    fig = draw.time_against_n(card[0])
    assert [ax.get_title("left") for ax in fig.axes] == ["forward", "forward + backward"]
    assert {"dense, cuDNN", "dense, FlashAttention-2", "dilated", "block-sparse", "neighborhood"} <= named(fig)


def test_another_machines_rows_are_told_apart(card):
    fig = draw.time_against_n(card[0], card[0].copy())
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
    assert device["points"]["measured"].str.fullmatch(r"2026-\d\d-\d\d, \w{7}").all()
    said = roofline.bound(device)
    assert f"moves **{best['copy_gbs']:,.0f} GB/s**" in said and f" of {len(device['points'])} marks lie below" in said
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
    assert named[1:] == ["Hilbert: 3.5 ms,\n6%", "row-major, again (A/A): 1.55 ms,\n12%"]


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


@pytest.mark.parametrize(("n", "text"), [(4096, "4K"), (1 << 30, "1G"), (1000, "1,000"), (632_960, "632,960")])
def test_lengths_are_written_short(n, text):
    assert style.length(n) == text


def test_a_group_is_drawn_only_beside_its_baseline(card):
    rows = card[0]
    assert not draw.time_against_n(rows.assign(status="oom")).axes[0].get_lines()
    group = pd.DataFrame({"suite": ["a"], "n": [64], "label": ["ours"], "against": ["dense"]})
    assert "not timed" in draw.times_faster(group).get_label()


def placed(ends, height=4.8):
    """The boxes of the names, in inches from the bottom of the axis, and its height."""
    fig, ax = style.subplots(figsize=(6.4, height))
    ax.set(xlim=(0, 1), ylim=(0, 1), title="a title", xlabel="x")
    style.name_ends(ax, ends)
    fig.canvas.draw()
    pyplot.close(fig)
    axis = ax.get_window_extent()
    boxes = [Text.get_window_extent(text) for text in ax.texts]  # without its line
    return [((box.y0 - axis.y0) / fig.dpi, (box.y1 - axis.y0) / fig.dpi) for box in boxes], axis.height / fig.dpi


@pytest.mark.parametrize("height", [2.4, 4.8])
def test_names_stay_inside_the_axis_and_apart_however_high_it_is(height):
    equal = [(1, 0.99, f"line {k}", "black") for k in range(5)]
    for ends in (equal, [*equal, (1, 0.02, "two\nlines", "red")], [(1, k / 9, str(k), "red") for k in range(9)]):
        boxes, high = placed(ends, height)
        assert all(low > -0.35 and top < high + 0.05 for low, top in boxes)
        assert all(one[1] <= other[0] + 0.02 for one, other in pairwise(sorted(boxes)))
    boxes, high = placed([(1, k / 30, f"line {k}", "black") for k in range(30)], height)
    assert boxes[-1][1] < high + 0.1 and all(a[0] < b[0] for a, b in pairwise(boxes)), "closer where there is no room"


def test_names_of_equal_ends_stand_around_them_the_first_on_top():
    boxes, high = placed([(1, 0.5, f"line {k}", "black") for k in range(3)])
    low, middle, top = (sum(box) / 2 / high for box in boxes)
    assert low < middle < top and middle == pytest.approx(0.5, abs=0.03)
