import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot

from tests.analysis.test_multicard import rows  # noqa: F401 (a fixture)
from workbench.analysis import multicard
from workbench.patterns import orderings
from workbench.plots import distributed as draw_plans
from workbench.plots import scaling as draw


def labels(fig):
    return [text.get_text() for text in fig.legends[0].get_texts()]


def test_speedups_have_a_panel_a_pattern_and_number_of_ranks_with_the_ideal(rows):  # noqa: F811
    fig = draw.speedups(rows, most=lambda world: min(world, 3))
    assert [ax.get_title("left") for ax in fig.axes] == ["dense", "longnet-geometric", "", ""]
    assert fig.axes[2].get_ylabel() == "forward, 4 ranks:\nspeed-up over one device"
    assert labels(fig) == ["sequence", "DDP", "one device against itself"]
    for ax, ideal in zip(fig.axes, ([2], [2], [4, 3], [4, 3]), strict=True):
        flat = [line.get_ydata()[0] for line in ax.get_lines() if len(set(line.get_ydata())) == 1]
        assert set(ideal) <= set(flat)
    assert [text.get_text() for text in fig.axes[2].texts] == ["ideal", "what this machine allows"]
    assert "longnet-geometric, forward, N = 1,024, 4 ranks, sequence: 2.00" in fig.get_label()


def test_a_pattern_that_nothing_ran_has_no_panel_and_one_that_some_ranks_did_not_says_so(rows):  # noqa: F811
    shared = rows["strategy"].isin(["sequence", "distributed data parallel"])
    none = rows[(rows["kind"] != "longnet-geometric") | ~shared]
    assert [ax.get_title("left") for ax in draw.speedups(none).axes] == ["dense", ""]
    some = rows[(rows["kind"] != "longnet-geometric") | (rows["nproc"] == 2)]
    said = [[text.get_text() for text in ax.texts] for ax in draw.speedups(some).axes]
    assert said == [["ideal"], [], ["ideal"], ["no result"]]


def test_another_machines_speedups_are_hollow_and_named_and_in_view(rows):  # noqa: F811
    other = rows.assign(n=rows["n"] * 64, run_device="NVIDIA H100 80GB HBM3")
    fig = draw.speedups(rows, other[other["nproc"] == 2])
    assert "sequence · H100" in labels(fig)
    for ax in fig.axes[:2]:
        hollow = [line for line in ax.get_lines() if line.get_markerfacecolor() == "white"]
        assert hollow and all(line.get_xdata().max() < ax.get_xlim()[1] for line in hollow)


def test_cards_have_a_bar_each_and_what_is_not_counted_says_so(rows):  # noqa: F811
    case = rows[(rows["kind"] == "longnet-geometric") & (rows["n"] == 1024) & (rows["nproc"] == 4)].copy()
    case.loc[case["strategy"] == "sequence", "sent_bytes"] = None
    fig = draw.cards(case, "rank")
    assert [len(ax.patches) for ax in fig.axes] == [12, 8, 12]  # three ways, four ranks
    assert "  not counted" in [text.get_text() for text in fig.axes[1].texts]
    assert labels(fig) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert "sequence, computing, of the time: 90%, 80%, 80%, 80%" in fig.get_label()


def test_curves_tell_modelled_from_measured(rows):  # noqa: F811
    curves = multicard.curves(rows, 1e9, (2, 16, 64), 64)
    fig = draw.curves(curves, multicard.efficiency(rows))
    kinds = ("dense", "longnet-geometric")
    assert labels(fig) == [f"{kind}, {how}" for how in ("modelled", "measured") for kind in kinds]
    assert len(fig.axes[0].collections) >= 2, "a band each"
    assert labels(draw.curves(curves)) == ["dense, modelled", "longnet-geometric, modelled"]


def test_borders_have_a_line_an_order():
    moved = pd.DataFrame({
        "order": ["row_major", "row_major", "hilbert", "hilbert"], "world": [4, 16, 4, 16],
        "bytes": [100, 400, 80, 200], "halo": [0.5, 2, 0.4, 1],
    })  # fmt: skip
    fig = draw_plans.borders(moved)
    for ax, want in zip(fig.axes, ([100, 400], [0.5, 2]), strict=True):
        assert ax.get_lines()[0].get_ydata().tolist() == want
    assert "On 16 ranks: row-major 400 bytes, 2.00 times what is held; Hilbert 200 bytes" in fig.get_label()
    fig.canvas.draw()
    for ax, want in zip(fig.axes, ("100 B 200 B", "0.5 1 2"), strict=True):
        low, high = ax.get_ylim()
        told = [x.get_text() for x in ax.get_yticklabels() if low <= x.get_position()[1] <= high]
        assert " ".join(told) == want and not any(x.get_text() for x in ax.get_yticklabels(minor=True))


@pytest.mark.parametrize("rank", [None, 0])
def test_a_ranks_cells_and_those_it_gets_are_coloured(rank):
    order = orderings.row_major((8, 8))
    fig = draw_plans.shards([order], world=4, radius=1, rank=rank)
    image = np.asarray(fig.axes[0].images[0].get_array())
    colors, count = np.unique(image.reshape(-1, 3), axis=0, return_counts=True)
    got = 8 if rank == 0 else 16  # a strip of two rows has a neighbour on one side, or on both
    assert fig.axes[0].get_title("left") == f"row-major: gets {got}\nfor 16 of its own"
    assert sorted(count)[:2] == sorted([got, 16])[:2] and len(colors) == 4


def test_the_readmes_picture_has_every_pattern_that_is_on_record(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(draw, "speedups", lambda x: drawn.append(x) or pyplot.figure())
    draw.picture(tmp_path / "x.png")
    assert list(dict.fromkeys(drawn[0]["kind"])) == list(multicard.KINDS)
