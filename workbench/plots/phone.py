"""A figure for a phone: the panels that stand side by side below each other, so that its labels can be read there."""

from matplotlib.gridspec import GridSpec

from workbench.plots import style

WIDTH = 4.6  # inches: at the width of a phone its 9 points are 10 pixels


def narrow(fig) -> bool:
    """Lay the figure out anew, WIDTH wide, its panels one after the other as words in lines; False, and nothing done,
    where it is no wider or its panels do not have a cell each of one grid, as twin axes have not."""
    panels = [ax for ax in fig.axes if ax.get_subplotspec()]
    cells = {ax.get_subplotspec().num1 for ax in panels if ax.get_gridspec() is panels[0].get_gridspec()}
    if fig.get_figwidth() <= WIDTH or not panels or len(cells) < len(panels):
        return False
    old = panels[0].get_gridspec()
    across = max(1, round(WIDTH * old.ncols / fig.get_figwidth()))
    grid = GridSpec(-(-len(panels) // across), across, fig)
    for place, ax in zip(grid, panels, strict=False):
        ax.set_subplotspec(place)
        if len(ax.get_shared_y_axes().get_siblings(ax)) > 1:
            ax.tick_params(labelleft=place.is_first_col())
            ax.set_ylabel(panels[0].get_ylabel() * place.is_first_col())
    fig.set_size_inches(WIDTH, fig.get_figheight() * grid.nrows / old.nrows)
    if hasattr(fig, "workbench_key"):
        style.key(fig, *fig.workbench_key)
    return True
