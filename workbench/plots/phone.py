"""A figure for a phone: the panels that stand side by side below each other, so that its labels can be read there."""

from matplotlib.gridspec import GridSpec

from workbench.plots import style

WIDTH = 4.6  # inches: at the width of a phone its 9 points are 10 pixels


def narrow(fig) -> bool:
    """Lay the figure out anew, WIDTH wide; False, and nothing done, where it is no wider or its panels are in no grid.

    Panels follow one another as words in lines; but where one is higher than a row, whole columns do.
    """
    panels = [ax for ax in fig.axes if ax.get_subplotspec()]
    if fig.get_figwidth() <= WIDTH or not panels:
        return False
    specs = [ax.get_subplotspec() for ax in panels]
    old = specs[0].get_gridspec()
    across, rows = max(1, round(WIDTH * old.ncols / fig.get_figwidth())), old.nrows
    places = [(x // across, x % across, range(1)) for x in range(len(panels))]
    if any(len(spec.rowspan) > 1 for spec in specs):
        columns = [(*divmod(spec.colspan.start, across), spec.rowspan) for spec in specs]
        places = [(line * rows, column, span) for line, column, span in columns]
    down = max(top + span.stop for top, _, span in places)
    grid = GridSpec(down, across, fig)
    for ax, (top, column, span) in zip(panels, places, strict=True):
        ax.set_subplotspec(grid[top + span.start : top + span.stop, column])
        if len(ax.get_shared_y_axes().get_siblings(ax)) > 1:
            ax.tick_params(labelleft=column == 0)
            ax.set_ylabel(panels[0].get_ylabel() * (column == 0))
    fig.set_size_inches(WIDTH, fig.get_figheight() * down / rows)
    style.fold_key(fig, WIDTH)
    return True
