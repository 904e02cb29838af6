import numpy as np
import pandas as pd
import pytest

from workbench.analysis import frontiers
from workbench.fit import estimate, executions, frontier
from workbench.plots import frontier as draw
from workbench.plots import phone
from workbench.probes import catalog

SHAPED = catalog.shaped([256, 1024], [1, 4], 512)
SIZES = {"heads": 8, "head_dim": 64, "dtype": "float16", "mode": "fwdbwd"}
GIB = 1 << 30


@pytest.fixture(scope="module")
def rows():
    ways = executions.ways(["dense, eager", "dense, auto", "dilated, triton"], SHAPED, **SIZES)
    return frontier.sweep(ways, ["t4", "h100"], [GIB, 8 * GIB], step=0.05, say=None)


@pytest.fixture
def measured(rows):
    rows = rows[rows["card"] == "h100"]
    return rows.assign(measured_n=rows["predicted_n"], measured=True, run_device="NVIDIA H100 80GB HBM3")


def test_a_line_is_predicted_and_a_marker_measured(rows, measured):
    fig = draw.n_against_budget(rows[rows["card"] == "h100"])
    assert {line.get_marker() for line in fig.axes[0].get_lines()} <= {"None", "x"}
    fig = draw.n_against_budget(measured)
    assert points(fig) == ["o", "o", "s"]
    assert fig.axes[1].get_xlabel().startswith("budget")
    assert points(draw.n_against_budget(measured.assign(predicted_limiter="time"))) == ["o", "o", "s", "x"]


def points(fig):
    return [x.get_marker() for x in fig.axes[0].get_lines() if x.get_linestyle() == "None"]


def test_another_machines_frontiers_are_hollow_and_named(rows, measured):
    fig = draw.n_against_budget(rows[rows["card"] == "h100"], measured)
    named = [text.get_text() for text in fig.axes[1].texts]
    assert "dilated, Triton" in named and not fig.legends
    marked = [x for x in fig.axes[0].get_lines() if x.get_marker() in "os"]
    assert len(marked) == 3 and all(x.get_markerfacecolor() == "white" for x in marked)


def test_the_share_is_of_what_inputs_and_results_take(measured):
    line = measured[measured["label"] == "dilated, triton"]
    bytes_a_token = 8 * 8 * 64 * 2  # q, k, v, out and their gradients
    share = draw.n_against_budget(line).axes[1].get_lines()[0].get_ydata()
    np.testing.assert_allclose(share, line["predicted_n"] * bytes_a_token / line["budget_bytes"])
    assert (share < 1).all() and (share > 0.5).all()


def test_the_map_names_each_cells_limiter(rows):
    fig = draw.limiter_map(rows[rows["budget_bytes"] == 8 * GIB])
    ax = fig.axes[0]
    assert [x.get_text() for x in ax.get_xticklabels()] == ["T4", "H100"]
    said = [x.get_text() for x in ax.texts]
    assert len(said) == 6
    (refused,) = [x.get_position() for x in ax.texts if x.get_text() == "refused"]
    assert refused == (0.5, 2.5)  # triton's kernels on a T4, in the middle of its cell
    assert len({x.get_text().split("\n")[-1] for x in ax.texts}) > 1 and "what limits it (time: " in ax.get_xlabel()
    red, green, blue, _ = ax.collections[0].get_facecolors().reshape(3, 2, 4)[2, 0]
    assert (red, green, blue) == (1, 1, 1)  # of what is refused


def test_where_no_time_is_modelled_a_map_and_a_line_say_so(rows):
    rows = rows[rows["budget_bytes"] == 8 * GIB].assign(predicted_ms=None, limiter="memory")
    ax = draw.limiter_map(rows).axes[0]
    assert [x.get_text().endswith("\nmemory; time\nnot modelled") for x in ax.texts] == [True] * 4 + [False, True]
    assert len({tuple(x) for x in ax.collections[0].get_facecolors()}) == 2
    named = draw.n_against_budget(rows[rows["card"] == "h100"]).axes[1].texts
    assert all(x.get_text().endswith("\n(time not modelled)") for x in named)


def test_on_a_phone_a_map_has_a_line_per_card_and_a_key(rows):
    rows = rows[(rows["budget_bytes"] == GIB) & (rows["card"] == "t4")]
    fig = draw.limiter_map(pd.concat([rows.assign(card=x) for x in ("t4", "a10", "l4")]))
    assert phone.narrow(fig) and not phone.narrow(fig)
    fig.draw_without_rendering()
    (ax,), cell = fig.axes, fig.axes[0].get_window_extent().width / 3
    assert [x.get_text() for x in ax.get_yticklabels()] == ["T4", "A10", "L4"]
    assert all(x.get_window_extent().width < cell for x in ax.texts) and fig.legends


def test_the_layers_add_up_to_what_is_alive():
    found = {}
    for name in ("dense, auto", "dilated, torch"):
        case = executions.ways([name], SHAPED, **SIZES)[name](4096)
        found[name] = estimate.trace(case, "h100")
    fig = draw.bytes_over_run({name: frontiers.alive(one.events) for name, one in found.items()}, most=3)
    for ax, one in zip(fig.axes, found.values(), strict=True):
        top = max(path.vertices[:, 1].max() for layer in ax.collections for path in layer.get_paths())
        assert top == pytest.approx(one.requested_bytes / GIB)
    assert frontiers.numbers(found)["requested"].tolist() == [one.requested_bytes for one in found.values()]
    assert len(fig.legends[0].get_texts()) == 4 and "others" in fig.legends[0].get_texts()[-1].get_text()
