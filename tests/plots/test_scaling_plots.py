import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot

from tests.analysis.test_multicard import rows  # noqa: F401 (a fixture)
from workbench.analysis import many_ranks, multicard
from workbench.patterns import orderings
from workbench.plots import scaling as draw
from workbench.scaling.link import Rates


def labels(fig):
    return [text.get_text() for text in fig.legends[0].get_texts()]


def test_speedups_have_a_line_a_case_and_a_panel_a_number_of_ranks_with_the_ideal(rows):  # noqa: F811
    fig = draw.speedups(rows)
    assert [ax.get_title("left") for ax in fig.axes] == ["forward, 2 ranks", "forward, 4 ranks"]
    lines = ["dense, 256", "dense, 512", *(f"LongNet, geometric, {n}" for n in ("256", "512", "1K"))]
    assert [x.get_text() for x in fig.axes[0].get_yticklabels()] == lines
    assert labels(fig) == ["sequence (in numbers at the right)", "DDP", "one device against itself"]
    for ax, ideal, gain in zip(fig.axes, (2, 4), ("1.60", "2.00"), strict=True):
        upright = {line.get_xdata()[0] for line in ax.get_lines() if len(set(line.get_xdata())) == 1}
        assert {ideal, 1} <= upright
        assert [text.get_text() for text in ax.texts[:5]] == [gain] * 5, "what sequence gives, by line"
    assert [text.get_text() for text in fig.axes[1].texts[5:]] == ["ideal"]


def test_a_pattern_that_nothing_ran_has_no_line_and_one_that_some_ranks_did_not_says_so(rows):  # noqa: F811
    shared = rows["strategy"].isin(["sequence", "distributed data parallel"])
    none = rows[(rows["kind"] != "longnet-geometric") | ~shared]
    assert len(draw.speedups(none).axes[0].get_yticks()) == 2
    some = rows[(rows["kind"] != "longnet-geometric") | (rows["nproc"] == 2)]
    said = [text.get_text() for text in draw.speedups(some).axes[1].texts]
    assert said == ["2.00"] * 2 + ["not measured"] * 3 + ["ideal"]
    assert draw.speedups(rows[:0]).get_label().startswith("No way of using several ranks")


def test_curves_tell_modelled_from_measured(rows):  # noqa: F811
    curves = many_ranks.curves(rows, Rates(1e-4, 1e9, 1e-3), (2, 16, 64), 64, 16)
    fig, none = draw.curves(curves, many_ranks.efficiency(rows)), many_ranks.efficiency(rows)[:0]
    assert labels(fig) == ["dense", "LongNet, geometric", "measured"]
    lines = [x for x in fig.axes[0].get_lines() if x.get_linestyle() == "--" and len(x.get_xdata()) < 4]
    dense, longnet = (x.get_xdata().tolist() for x in lines if len(x.get_xdata()) > 1 and set(x.get_ydata()) != {1})
    assert dense == [2, 16] and longnet == [2, 16, 64], "a curve ends at 16 tokens on a rank"
    assert len(fig.axes[0].collections) >= 2, "a band each"
    assert labels(draw.curves(curves, none)) == ["dense", "LongNet, geometric"]
    assert "no rate" in draw.curves(curves[:0], none).get_label()


def test_messages_have_markers_a_fit_and_its_bounds():
    sizes = [1 << 16, 1 << 24]
    sent = pd.DataFrame([
        {"stage": "link", "status": "ok", "message_bytes": x, "samples_ms": [ms, 2 * ms], "median_ms": ms,
         "bytes_per_second": 1000 * x / ms} for x in sizes for ms in [1000 * (1e-4 + x / 4e9)]
    ])  # fmt: skip
    call = pd.DataFrame([{"stage": "cost", "status": "ok", "message_bytes": 1, "exchanges": 1, "median_ms": 2.0}])
    fig = draw.messages({"here": pd.concat([sent, call]), "recorded": sent})
    (ax,) = fig.axes
    assert ax.get_lines()[0].get_ydata().tolist() == pytest.approx([0.568, 3.91], rel=1e-2)
    assert [x.get_text() for x in fig.legends[0].get_texts()] == ["here: 4 GB/s", "recorded"]
    assert [x.get_text() for x in ax.get_xticklabels()] == ["64 KiB", "16 MiB"]


def test_borders_have_a_line_an_order():
    moved = pd.DataFrame({
        "order": ["row_major", "row_major", "hilbert", "hilbert"], "world": [4, 16, 4, 16],
        "bytes": [100 << 20, 400 << 20, 80 << 20, 200 << 20], "halo": [0.5, 2, 0.4, 1],
    })  # fmt: skip
    fig = draw.borders(moved)
    for ax, want in zip(fig.axes, ([100, 400], [0.5, 2]), strict=True):
        assert ax.get_lines()[0].get_ydata().tolist() == want
    assert [text.get_text() for text in fig.axes[0].texts] == ["row-major", "Hilbert"]
    fig.canvas.draw()
    for ax, want in zip(fig.axes, ("100 200", "0.5 1 2"), strict=True):
        low, high = ax.get_ylim()
        told = [x.get_text() for x in ax.get_yticklabels() if low <= x.get_position()[1] <= high]
        assert " ".join(told) == want and not any(x.get_text() for x in ax.get_yticklabels(minor=True))


def test_a_ranks_cells_and_those_it_gets_are_coloured():
    order = orderings.row_major((8, 8))
    fig = draw.shards([order], world=4, radius=1)
    image = np.asarray(fig.axes[0].images[0].get_array())
    colors, count = np.unique(image.reshape(-1, 3), axis=0, return_counts=True)
    title = fig.axes[0].get_title("left")
    assert title == "row-major: gets 16\nfor 16 of its own", "a strip of two rows, on both sides"
    assert sorted(count)[:2] == [16, 16] and len(colors) == 4


def test_the_readmes_picture_has_every_pattern_that_is_on_record(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(draw, "speedups", lambda x: drawn.append(x) or pyplot.figure())
    draw.picture(tmp_path / "x.png")
    kinds = list(dict.fromkeys(drawn[0]["kind"]))
    assert kinds == [x for x in multicard.KINDS if x in kinds] and "longnet-geometric" in kinds
