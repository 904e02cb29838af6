import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch

import workbench as wb
from workbench.analysis import locality
from workbench.patterns import orderings
from workbench.plots import orderings as plots

GRID = (8, 12)
ORDERS = locality.orders(GRID, tile=4, seed=0)
PERCENT = {"row_major": 12.84, "hilbert": 5.9}


def touched(order):
    return locality.touched(wb.Neighborhood(order.shape, 1, order), len(order), 8)


def times():
    frame = pd.DataFrame(
        {"median_ms": [2000.0, 9.5, 2100.0], "q10_ms": [1900.0, 9.0, 2000.0], "q90_ms": [2500.0, 11.0, 2600.0]}
    )
    return frame.set_index(pd.Index(["row_major", "hilbert", "A/A"], name="name"))


def longnet():
    pattern, cell = wb.Dilated([16, 48], [1, 2]), (3, 5)
    grids = {o.name: locality.field_on_grid(o, pattern, 2, cell, 2) for o in ORDERS}
    return plots.fields(grids, cell, 2, "A full grid"), locality.neighbours(ORDERS, pattern, 2)


FIGURES = {
    "curves": (lambda: plots.curves(ORDERS), "grid of 8 x 12 cells"),
    "locality": (
        lambda: plots.locality(locality.extent(ORDERS, [2, 8]), locality.within(ORDERS, [2, 8])),
        "adjacent cells",
    ),
    "blocks": (lambda: plots.blocks({o.name: touched(o) for o in ORDERS}, "A window"), "random 100.0%"),
    "sides": (
        lambda: plots.touched_by_side(locality.blocks_touched([(*GRID, "sliding", s) for s in (3, 5)], 4, 8)),
        "side of a sliding window",
    ),
    "runs": (lambda: plots.runs_on_picture(torch.rand(*GRID, 12), ORDERS, 20, "20 tokens"), "20 tokens"),
    "similarity": (
        lambda: plots.similarity(locality.similarity(torch.rand(*GRID, 3), ORDERS, 9), 0.5),
        "Similarity of the photograph",
    ),
    "times": (lambda: plots.times(times(), PERCENT), "Hilbert 9.5 ms, 5.9% of the blocks"),
    "neighbours": (lambda: plots.neighbours(longnet()[1], 1, "A full grid"), "within 3 x 3 cells"),
    "fields": (lambda: longnet()[0], "row 3, column 5 after 2 layers"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figure_draws_from_its_data_and_says_what_it_shows(name):
    make, alt = FIGURES[name]
    figure = make()
    figure.canvas.draw()
    assert alt in figure.get_label()
    assert not plt.get_fignums()  # or Jupyter would show it twice


def test_jumps_are_drawn_apart_from_steps():
    order = orderings.morton((4, 4))
    steps, jumps = plots.curves([order]).axes[0].collections
    assert len(jumps.get_segments()) == order.jumps and len(steps.get_segments()) == 15 - order.jumps


def test_labels_and_colours_tell_orderings_apart():
    names = [o.name for o in ORDERS]
    assert [plots.label(name) for name in names] == ["row-major", "tiles 4 x 4", "Morton", "Hilbert", "snake", "random"]
    assert len({plots.color(name) for name in names}) == len(names)
