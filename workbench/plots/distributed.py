"""Pictures of plans: which rank sends how much to which, how even the work is, and how the order of cells matters.

Each function draws from plans, orderings or a DataFrame alone; the label of its Figure is the alternative text.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm, to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator

from workbench.distributed import Plan, Shards
from workbench.patterns import Neighborhood
from workbench.plots import orderings, style
from workbench.plots.scaling import rank_ticks

CELLS = 128  # ranks that are drawn one by one: of more, neighbours are summed


def traffic(plans: Mapping[str, object], itemsize: int = 2, head_dim: int = 64):
    """A column for each plan {name: `workbench.distributed.Plan`}. Above: bytes from each rank (row) to each (column)
    in a forward (see `Plan.bytes`), white for none. Below: the pairs that each rank computes, over their mean."""
    if not plans:
        return style.blank("Nothing ran whose plan could be drawn.")
    many, size = len(plans), EngFormatter("B", places=1)
    shared = {"squeeze": False, "sharey": "row" if many == 1 else False}
    fig, axes = style.subplots(2, many, figsize=(2.2 * many + 1, 4.8), height_ratios=(3, 1), **shared)
    moved = {name: plan.bytes(itemsize, head_dim).numpy() for name, plan in plans.items()}
    sent = {name: grouped(x) for name, x in moved.items()}
    seen = np.concatenate([x[x > 0] for x in sent.values()] or [np.zeros(0)])
    norm = LogNorm(seen.min(), max(seen.max(), seen.min() * 2)) if len(seen) else None
    told = []
    for (name, plan), above, below in zip(plans.items(), *axes, strict=True):
        total = int(moved[name].sum())
        ends = (-0.5, plan.world - 0.5)
        shown = np.ma.masked_equal(sent[name], 0)
        image = above.imshow(
            shown, norm=norm, cmap=style.SEQUENTIAL, extent=(*ends, *ends[::-1]), interpolation="nearest"
        )
        above.set(
            title="\n".join([*name.split(", "), f"N = {plan.n:,}, {plan.world} ranks", f"{size(total)} in all"]),
            xlabel="to rank",
            ylabel="from rank",
        )
        above.grid(False)
        if not total:
            above.text(0.5, 0.5, "nothing moves", transform=above.transAxes, ha="center", va="center", fontsize=9)
        for axis in (above.xaxis, above.yaxis, below.xaxis):
            axis.set_major_locator(MaxNLocator(4, integer=True))
        share = plan.pairs.astype(float) / max(1.0, float(plan.pairs.mean()))
        color = style.family_color(type(plan.pattern).__name__)
        below.fill_between(np.arange(plan.world + 1) - 0.5, np.append(share, share[-1]), step="post", color=color, lw=0)
        below.axhline(1, color="#666666", lw=0.8)
        below.set(xlabel=f"rank; max / mean {plan.balance:.2f}", ylabel="pairs", xlim=ends, ylim=(0, None))
        told.append(f"{name} on {plan.world} ranks moves {total:,} bytes, balance {plan.balance:.2f}")
    if norm is not None:
        room = max(1.1, (norm.vmax / norm.vmin) ** 0.12)
        ticks = {"ticks": style.apart(np.unique(seen), room), "format": size}
        bar = fig.colorbar(image, ax=list(axes[0]), label="from one rank to another", shrink=0.8, **ticks)
        bar.ax.minorticks_off()
    return style.finish(fig, f"Bytes between ranks and pairs a rank. {'; '.join(told)}.")


def grouped(sent: np.ndarray) -> np.ndarray:
    """(world, world) -> the same with neighbouring ranks summed, such that there are at most CELLS rows and columns."""
    each = -(-len(sent) // CELLS)
    edges = np.arange(0, len(sent), each)
    return np.add.reduceat(np.add.reduceat(sent, edges, 0), edges, 1)


def borders(rows: pd.DataFrame):
    """For each order of a 2-D neighborhood's cells, against the number of ranks: the bytes that a forward moves, and
    the rows that a rank gets over those that it holds. rows: of `multicard.borders`."""
    fig, axes = style.subplots(1, 2, figsize=(9.6, 3.9))
    for ax, column in zip(axes, ("bytes", "halo"), strict=True):
        for name, line in rows.groupby("order", sort=False):
            look = {"color": orderings.color(name), "marker": orderings.MARKERS.get(name, "o"), "ms": 5}
            ax.plot(line["world"], line[column], label=orderings.label(name), **look)
        ax.set(xscale="log", yscale="log", xlabel="ranks")
        rank_ticks(ax, rows["world"])
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=15))
        style.log_ticks(ax.yaxis, "{:g}".format)
    axes[0].set_title("moved, all ranks together")
    axes[0].yaxis.set_major_formatter(EngFormatter("B"))
    axes[1].axhline(1, color="#666666", lw=0.8)
    axes[1].set_title("rows that a rank gets, over those it holds")
    axes[0].legend(loc="best")
    last = rows[rows["world"] == rows["world"].max()]
    words = "; ".join(f"{orderings.label(r.order)} {r.bytes:,} bytes, {r.halo:.2f} times what is held"
                      for r in last.itertuples())  # fmt: skip
    return style.finish(fig, f"Bytes moved by the order of the cells. On {last['world'].iloc[0]:,} ranks: {words}.")


def shards(orders, world: int, radius: int, rank: int | None = None):
    """A panel for each ordering of a 2-D grid: the shards, one rank's in full colour, and the cells that it gets.

    orders: of `workbench.orderings`, of one shape; radius: of the neighborhood; rank: by default the middle one.
    """
    rank = world // 2 if rank is None else rank
    fig, axes = style.subplots(1, len(orders), figsize=(3.3 * len(orders) + 0.3, 3.9), squeeze=False)
    words = []
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
        ax.set(title=f"{orderings.label(order.name)}: gets {got.sum():,}\nfor {(owner == rank).sum():,} of its own",
               xticks=[], yticks=[])  # fmt: skip
        ax.grid(False)
        words.append(f"{orderings.label(order.name)} {got.sum():,} cells for {(owner == rank).sum():,} of its own")
    patches = [Patch(color=style.COLORS["accent"], label=f"cells of others that rank {rank} needs, radius {radius}")]
    fig.legend(handles=patches, loc="outside lower center", fontsize=9)
    return style.finish(fig, f"Shards of a grid on {world} ranks. Rank {rank} gets: {'; '.join(words)}.")
