"""A wide figure is laid out anew for a phone: nothing beside or upon another, every panel with its own labels."""

import itertools

import pytest

import workbench as wb
from workbench.plots import patterns, phone, style


def labelled(count: int):
    fig, axes = style.subplots(1, count, figsize=(9.5, 3), sharey=True)
    axes[0].set_ylabel("milliseconds")
    for ax in axes:
        ax.plot([1, 2], [1, 2])
        style.name_ends(ax, [(2, 2, "a line with a long name", "black")])
    style.key(fig, {f"what the {x} colour means": color for x, color in enumerate(("red", "green", "blue"))}, 3)
    return fig


def reach():
    return patterns.reach({"dense": wb.Dense(), "window": wb.Window(3)}, 16, 1, 3)[0]


@pytest.mark.parametrize(("make", "rows"), [(lambda: labelled(2), 2), (lambda: labelled(4), 2), (reach, 3)])
def test_a_wide_figure_is_laid_out_for_a_phone(make, rows):
    fig = make()
    drawn = {id(ax) for ax in fig.axes}
    assert phone.narrow(fig) and fig.get_figwidth() == phone.WIDTH and drawn == {id(ax) for ax in fig.axes}
    fig.draw_without_rendering()
    boxes = [ax.get_tightbbox() for ax in fig.axes] + [x.get_window_extent() for x in fig.legends]
    for one, other in itertools.combinations(boxes, 2):
        apart = one.x1 <= other.x0 + 1 or other.x1 <= one.x0 + 1 or one.y1 <= other.y0 + 1 or other.y1 <= one.y0 + 1
        assert apart
    assert len({round(ax.get_position().y0, 2) for ax in fig.axes if ax.get_subplotspec()}) == rows
    assert all(box.x0 > -1 and box.x1 < fig.bbox.width + 1 for box in boxes)
    assert not phone.narrow(fig)


def test_panels_that_shared_their_labels_have_them_each():
    fig = labelled(2)
    phone.narrow(fig)
    for ax in fig.axes:
        assert ax.get_ylabel() == "milliseconds" and any(x.label1.get_visible() for x in ax.yaxis.get_major_ticks())
