import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.text import Text

import workbench as wb
from workbench.analysis import locality
from workbench.harness.narrate import title
from workbench.patterns import orderings
from workbench.plots import orderings as plots

GRID = (8, 12)
ORDERS = locality.orders(GRID, tile=4, seed=0)


def touched(order):
    return locality.touched(wb.Neighborhood(order.shape, 1, order), len(order), 8)


def longnet():
    pattern, cell = wb.Dilated([16, 48], [1, 2]), (3, 5)
    grids = {o.name: locality.field_on_grid(o, pattern, 2, cell, 2) for o in ORDERS}
    return plots.fields(grids, cell, 2), locality.neighbours(ORDERS, pattern, 2)


FIGURES = {  # how it is made, and a text in it
    "curves": (lambda: plots.curves(ORDERS), "row-major: 7 jumps"),
    "locality": (lambda: plots.locality(locality.extent(ORDERS, [2, 8]), locality.within(ORDERS, [2, 8])), "Hilbert"),
    "blocks": (lambda: plots.blocks({o.name: touched(o) for o in ORDERS}), "random: 100.0%"),
    "sides": (
        lambda: plots.touched_by_side(locality.blocks_touched([(*GRID, "sliding", s) for s in (3, 5)], 4, 8)),
        "tiles 4 x 4",
    ),
    "runs": (lambda: plots.runs_on_picture(torch.rand(*GRID, 12), ORDERS, 20), "Morton"),
    "similarity": (lambda: plots.similarity(locality.similarity(torch.rand(*GRID, 3), ORDERS, 9), 0.5), "a half"),
    "neighbours": (lambda: plots.neighbours(longnet()[1], 1), "of the cells within 3 x 3"),
    "fields": (lambda: longnet()[0], "not yet"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figure_draws_from_its_data_and_says_what_it_shows(name):
    make, text = FIGURES[name]
    figure = make()
    figure.canvas.draw()
    assert text in {x.get_text() for x in figure.findobj(Text)} and figure.get_label()
    assert not plt.get_fignums()  # or Jupyter would show it twice


def test_jumps_are_drawn_apart_from_steps():
    order = orderings.morton((4, 4))
    *steps, jumps, _ = (int(np.isnan(line.get_ydata()).sum()) for line in plots.curves([order]).axes[0].get_lines())
    assert jumps == order.jumps and sum(steps) == 15 - order.jumps


def test_labels_and_colours_tell_orderings_apart():
    names = [o.name for o in ORDERS]
    assert [title(name) for name in names] == ["row-major", "tiles 4 x 4", "Morton", "Hilbert", "snake", "random"]
    assert len({plots.color(name) for name in names}) == len(names)
