"""A wide figure is laid out anew for a phone: nothing upon another, every panel with its own labels."""

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


@pytest.mark.parametrize("make", [lambda: labelled(2), lambda: labelled(4), reach])
def test_a_wide_figure_is_laid_out_for_a_phone(make):
    fig = make()
    assert phone.narrow(fig) and not phone.narrow(fig)
    fig.draw_without_rendering()
    boxes = [ax.get_tightbbox() for ax in fig.axes] + [x.get_window_extent() for x in fig.legends]
    for a, b in itertools.combinations(boxes, 2):
        assert a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
    assert len({round(ax.get_position().y0, 2) for ax in fig.axes}) == 2
    assert all(box.x0 > -1 and box.x1 < fig.bbox.width + 1 for box in boxes)


def test_panels_that_shared_labels_have_their_own():
    fig = labelled(2)
    phone.narrow(fig)
    below = fig.axes[1].yaxis
    assert below.get_label_text() == "milliseconds" and below.get_major_ticks()[0].label1.get_visible()


def test_axes_on_one_place_stay_there():
    fig, ax = style.subplots(figsize=(9.5, 3))
    ax.twinx().plot([1, 2])
    assert not phone.narrow(fig)
