import pandas as pd
import pytest

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
    lines = {line.get_label() for line in fig.axes[0].get_lines()}
    assert {"dense (cudnn)", "dense (flash)", "dilated (triton)", "block-sparse (triton)"} <= lines
    assert "At the longest N: dense" in fig.get_label()


def test_another_machines_rows_are_told_apart(card):
    rows, best = card
    fig = draw.rate(rows, best, rows.copy(), best)
    pale = [line for line in fig.axes[0].get_lines() if "H100" in line.get_label()]
    assert pale and all(line.get_markerfacecolor() == "white" for line in pale)
    notes = [text.get_text() for text in fig.axes[0].texts]
    assert notes == ["bfloat16 matmul here", "bfloat16 matmul, H100"]


def test_rows_that_failed_are_not_drawn(card):
    rows = card[0].copy()
    rows.loc[rows["label"] == "dilated", "status"] = "oom"
    lines = [line.get_label() for line in draw.time_against_n(rows).axes[0].get_lines()]
    assert not any(label.startswith("dilated") for label in lines) and lines


def test_break_even_shows_the_noise_beside_the_gain():
    rows = pd.DataFrame({
        "name": ["dense", "random-0.50", "random-0.90", "A/A"], "sparsity": [0, 0.5, 0.9, 0], "ideal": [1, 2, 10, 1],
        "speedup": [1, 1.5, 7, 1], "speedup_low": [1, 1.4, 6, 0.9], "speedup_high": [1, 1.6, 8, 1.1], "n": [64] * 4,
    })  # fmt: skip
    ax = draw.break_even(rows).axes[0]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "dense against itself", "fewer pairs, same rate", "measured, 95% interval",
    ]  # fmt: skip
    assert "90%: 7.00x" in ax.figure.get_label()


@pytest.mark.parametrize(("n", "text"), [(4096, "4K"), (1 << 20, "1M"), (1000, "1000"), (1536, "1536")])
def test_lengths_are_written_short(n, text):
    assert style.length(n) == text


def test_a_rate_is_drawn_without_a_ceiling_and_a_group_only_beside_its_baseline(card):
    rows = card[0]
    draw.rate(rows, {"matmul_tflops": {}})
    assert "nothing ran" in draw.time_against_n(rows.assign(status="oom")).get_label()
    group = pd.DataFrame({"suite": ["a"], "n": [64], "label": ["ours"], "against": ["dense"]})
    assert "not timed" in draw.times_faster(group).get_label()
