import numpy as np
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
    assert points(draw.n_against_budget(measured)) == ["o", "o", "s"]
    limited = draw.n_against_budget(measured.assign(predicted_limiter=["memory", "time", "validity"] * 2))
    assert points(limited) == ["o", "o", "s", "x", "*"]
    assert limited.legends[0].get_texts()[-1].get_text() == "wrong results beyond"


def points(fig):
    return [x.get_marker() for x in fig.axes[0].get_lines() if x.get_linestyle() == "None"]


def test_another_machines_frontiers_are_hollow_and_named(rows, measured):
    far = measured["budget_bytes"] * 64
    fig = draw.n_against_budget(rows[rows["card"] == "h100"], measured.assign(budget_bytes=far))
    plates = {text.get_text(): text.get_bbox_patch() for text in fig.axes[1].texts}  # lest lines cross a name
    assert plates["dilated, Triton"] and not plates["dilated, Triton, H100"] and not fig.legends
    marked = [x for x in fig.axes[0].get_lines() if x.get_marker() in "os"]
    assert len(marked) == 3 and all(x.get_markerfacecolor() == "white" for x in marked)


def test_the_share_is_of_what_inputs_and_results_take(measured):
    line = measured[measured["label"] == "dilated, triton"]
    bytes_a_token = 8 * 8 * 64 * 2  # q, k, v, out and their gradients
    share = draw.n_against_budget(line).axes[1].get_lines()[0].get_ydata()
    np.testing.assert_allclose(share, line["predicted_n"] * bytes_a_token / line["budget_bytes"])


def test_the_map_names_each_cells_limiter(rows):
    ax = draw.limiter_map(rows[rows["budget_bytes"] == 8 * GIB]).axes[0]
    assert [x.get_text() for x in ax.get_yticklabels()] == ["T4", "H100"]
    assert ax.figure.get_figwidth() < phone.WIDTH and ax.get_xticklabels()[2].get_text() == "dilated, Triton"
    (refused,) = [x.get_position() for x in ax.texts if x.get_text() == "refused"]
    assert refused == (2.5, 0.5)  # triton's kernels on a T4, in the middle of its cell
    assert len({x.get_text().split("\n")[-1] for x in ax.texts}) > 1 and "what limits it (time: " in ax.get_xlabel()
    assert ax.collections[0].get_facecolors().reshape(2, 3, 4)[0, 2].tolist() == [1, 1, 1, 1]  # of what is refused
    rows = rows[rows["budget_bytes"] == 8 * GIB].assign(predicted_ms=None, limiter="memory")
    untimed = [x.get_text().endswith("\nmemory\n(time not\nmodelled)") for x in draw.limiter_map(rows).axes[0].texts]
    assert untimed == [True, True, False, True, True, True]
    named = draw.n_against_budget(rows[rows["card"] == "h100"]).axes[1].texts
    assert all(x.get_text().endswith("\n(time not modelled)") for x in named)


def test_the_layers_add_up_to_what_is_alive():
    ways = executions.ways(["dense, auto", "dilated, torch"], SHAPED, **SIZES)
    found = {name: estimate.trace(at(4096), "h100") for name, at in ways.items()}
    fig = draw.bytes_over_run({name: frontiers.alive(one.events) for name, one in found.items()}, most=9)
    for ax, one in zip(fig.axes, found.values(), strict=True):
        top = max(path.vertices[:, 1].max() for layer in ax.collections for path in layer.get_paths())
        assert top == pytest.approx(one.requested_bytes / GIB)
    assert frontiers.numbers(found)["requested"].tolist() == [one.requested_bytes for one in found.values()]
    named = [x.get_text() for x in fig.legends[0].get_texts()]
    assert len(named) == 10 and "scratch of cuDNN's backward" in named and named[-1] == "others"
