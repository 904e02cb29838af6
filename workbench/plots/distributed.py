"""Pictures of plans: how the order of a grid's cells matters for what moves between ranks.

Each function draws from plans, orderings or a DataFrame alone; the label of its Figure is the alternative text.
"""

import numpy as np
import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from workbench.distributed import Plan, Shards
from workbench.harness.narrate import title
from workbench.patterns import Neighborhood
from workbench.plots import orderings, style
from workbench.plots.scaling import rank_ticks


def borders(rows: pd.DataFrame):
    """For each order of a 2-D neighborhood's cells, against the number of ranks: the bytes that a forward moves, and
    the rows that a rank gets over those that it holds. rows: of `multicard.borders`."""
    rows = rows.assign(mib=rows["bytes"] / 2**20)
    fig, axes = style.subplots(1, 2, figsize=(9.5, 3.7))
    for ax, column in zip(axes, ("mib", "halo"), strict=True):
        for name, line in rows.groupby("order", sort=False):
            look = {"color": orderings.color(name), "marker": orderings.MARKERS.get(name, "o"), "ms": 5}
            ax.plot(line["world"], line[column], **look)
            style.note(ax, title(name), (line["world"].iloc[-1], line[column].iloc[-1]), (0, 6), ha="right",
                       color=orderings.color(name))  # fmt: skip
        ax.set(xscale="log", yscale="log", xlabel="ranks")
        ax.margins(y=0.12)  # room for the names
        rank_ticks(ax, rows["world"])
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=15))
        style.log_ticks(ax.yaxis, "{:,g}".format)
    axes[0].set_title("MiB moved, all ranks together")
    axes[1].axhline(1, color="#666666", lw=0.8)
    axes[1].set_title("rows that a rank gets, over those it holds")
    return style.finish(fig, "Bytes that a forward moves against the number of ranks, a line per order of the cells.")


def shards(orders, world: int, radius: int, rank: int | None = None):
    """A panel for each ordering of a 2-D grid: the shards, one rank's in full colour, and the cells that it gets.

    orders: of `workbench.orderings`, of one shape; radius: of the neighborhood; rank: by default the middle one.
    """
    rank = world // 2 if rank is None else rank
    fig, axes = style.subplots(1, len(orders), figsize=(3.3 * len(orders) + 0.4, 4.1), squeeze=False)
    for ax, order in zip(axes[0], orders, strict=True):
        place = order.rank.reshape(order.shape).numpy()
        parts = Shards.even(place.size, world)
        owner = np.searchsorted(parts.bounds.numpy(), place, "right") - 1
        need = Plan(Neighborhood(order.shape, radius, order), parts, 1, 1, place.size).halo(rank)
        got = np.isin(place, np.concatenate([np.zeros(0, int), *(x.rows.positions.numpy() for x in need)]))
        shown = np.where(owner % 2, 0.93, 0.98)[..., None] * np.ones(3)
        shown[got], shown[owner == rank] = to_rgb(style.COLORS["accent"]), to_rgb(orderings.color(order.name))
        ax.imshow(shown, interpolation="nearest")
        for axis in (0, 1):  # borders between ranks
            where = np.argwhere(np.diff(owner, axis=axis) != 0)
            y, x = where[:, 0] + (0.5 if axis == 0 else 0), where[:, 1] + (0.5 if axis == 1 else 0)
            lines = (ax.hlines, ax.vlines)[axis]
            one, other = ((y, x), (x, y))[axis]
            lines(one, other - 0.5, other + 0.5, color="#b5b5b5", lw=0.5)
        ax.set(title=f"{title(order.name)}: gets {got.sum():,}\nfor {(owner == rank).sum():,} of its own",
               xticks=[], yticks=[])  # fmt: skip
        ax.grid(False)
    patches = [Patch(color=orderings.color(order.name), label=f"rank {rank}, {title(order.name)}")
               for order in orders]  # fmt: skip
    patches += [Patch(color=style.COLORS["accent"], label=f"cells of others that it needs, radius {radius}")]
    patches += [Patch(facecolor="#ededed", edgecolor="#b5b5b5", label="other ranks, in two greys")]
    fig.legend(handles=patches, loc="outside lower center", ncols=2, fontsize=9)
    return style.finish(fig, f"Shards of a grid on {world} ranks, and the cells that rank {rank} gets, by order.")
