"""Figures about orderings, from DataFrames (see `workbench.analysis.locality`), orderings and arrays alone."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import BoundaryNorm, ListedColormap, to_rgb
from matplotlib.ticker import PercentFormatter
from mpl_toolkits.mplot3d.art3d import Line3DCollection

from workbench.analysis.locality_words import label as label
from workbench.plots import style

# Paul Tol's muted scheme: colour-blind safe, and apart from the colours that stand for patterns.
COLORS = {
    "row_major": "#CC6677", "tiles": "#999933", "morton": "#44AA99", "hilbert": "#332288",
    "random": style.COLORS["muted"], "natural": "#CC6677",  # row-major on a line
}  # fmt: skip
MARKERS = {"row_major": "s", "tiles": "D", "morton": "^", "hilbert": "o", "random": "x"}
EMPTY, FAINT = "#f2f2f2", "#d9d9d9"


def color(order: str) -> str:
    return COLORS.get(order.partition("-")[0], "#000000")


def curves(orders):
    """The path of each ordering through its grid, two or three axes, from light (first token) to dark (last)."""
    style.use()
    solid = any(len(order.shape) == 3 for order in orders)
    height, width = max(o.shape[-2] for o in orders), max(o.shape[-1] for o in orders)
    size = (3.6 * len(orders), 3.8) if solid else (2.15 * len(orders) + 0.6, 2.15 * height / width + 0.7)
    fig = plt.figure(figsize=size)
    axes = [
        fig.add_subplot(1, len(orders), i + 1, projection="3d" if len(o.shape) == 3 else None)
        for i, o in enumerate(orders)
    ]
    cmap = plt.get_cmap(style.SEQUENTIAL)
    for ax, order in zip(axes, orders, strict=True):
        points = order.coordinates.numpy()[:, ::-1].astype(float)  # x is the last axis
        segments = np.stack([points[:-1], points[1:]], 1)
        place = 0.15 + 0.85 * np.linspace(0, 1, len(segments))
        thin = 0.5 if order.name.startswith("random") else 1.6
        lines = (Line3DCollection if len(order.shape) == 3 else LineCollection)(segments, cmap=cmap, linewidths=thin)
        lines.set_array(place)
        lines.set_clim(0, 1)
        if len(order.shape) == 3:
            ax.add_collection3d(lines)
            ax.scatter(*points[0], color=style.COLORS["accent"], s=45, depthshade=False)
            ax.set(zlim=(-0.3, order.shape[0] - 0.7), zticks=[])
            ax.set_box_aspect(order.shape[::-1], zoom=1.15)
        else:
            ax.add_collection(lines)
            ax.plot(*points[0], "o", color=style.COLORS["accent"], ms=6, zorder=3)
            ax.set_aspect("equal")
        ax.set(xlim=(-0.7, order.shape[-1] - 0.3), ylim=(order.shape[-2] - 0.3, -0.7))
        ax.set_title(label(order.name))
        style.bare(ax)
    bar = fig.colorbar(plt.cm.ScalarMappable(cmap=ListedColormap(cmap(np.linspace(0.15, 1, 200)))), ax=axes, shrink=0.8)
    bar.set_ticks([0, 1], labels=["first", "last"])
    bar.set_label("token", labelpad=-12)
    bar.outline.set_visible(False)
    shape = " x ".join(map(str, orders[0].shape))
    names = ", ".join(label(o.name) for o in orders)
    return style.finish(fig, f"The paths of {names} through a grid of {shape} cells; a dot marks the first token.")


def locality(extent, within):
    """Left: how wide a run of tokens lies on the grid (`locality.extent`); right: how near neighbours are in tokens."""
    fig, (left, right) = style.subplots(1, 2, figsize=(10, 3.9))
    _lines(left, extent, "length", "extent")
    lengths = np.array(sorted(extent["length"].unique()))
    left.plot(lengths, np.sqrt(lengths), ":", color="black", lw=1.2, label="a square: the least")
    left.set_yscale("log", base=2)
    left.yaxis.set_major_formatter("{x:g}")
    left.set(title="A run of tokens on the grid", xlabel="consecutive tokens")
    left.set_ylabel("side of the box around them (cells)")
    left.legend(fontsize=9)
    _lines(right, within, "lag", "share")
    right.yaxis.set_major_formatter(PercentFormatter(1))
    right.set(title="Adjacent cells in the sequence", xlabel="tokens apart, at most", ylim=(0, 1.03))
    right.set_ylabel("share of the pairs of adjacent cells")
    return style.finish(
        fig,
        "Two line charts, one line an ordering: the side of the box around a run of consecutive tokens against the "
        "length of the run, and the share of adjacent cells that are at most so many tokens apart.",
    )


def blocks(matrices: dict, title: str):
    """Matrices of touched blocks, bool (query blocks, key blocks), by the name of the ordering (or a label)."""
    fig, axes = style.subplots(1, len(matrices), figsize=(2.75 * len(matrices), 3.35), squeeze=False)
    for i, (ax, (name, seen)) in enumerate(zip(axes[0], matrices.items(), strict=True)):
        _matrix(ax, seen, color(name))
        ax.set_title(f"{label(name)}: {100 * seen.mean():.1f}%")
        ax.set(xlabel="key block", ylabel="query block" if i == 0 else "")
    fig.suptitle(title, x=0.01, ha="left", fontsize=11)
    shares = ", ".join(f"{label(name)} {100 * seen.mean():.1f}%" for name, seen in matrices.items())
    return style.finish(fig, f"{title}. Blocks touched: {shares}.")


def touched_by_side(frame):
    """`locality.blocks_touched` of sliding windows: percent against the side of the window."""
    fig, ax = style.subplots(figsize=(6.5, 3.6))
    _lines(ax, frame, "side", "percent")
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter("{x:g}%")
    ax.set_xticks(sorted(frame["side"].unique()))
    ax.set(
        xlabel="side of the window (cells)", ylabel="blocks touched", title=f"A grid of {frame['grid'].iloc[0]} cells"
    )
    ax.legend(fontsize=9)
    text = "A line chart of the percent of blocks touched against the side of a sliding window, one line an ordering."
    return style.finish(fig, text)


def block_on_grid(order, seen, block: int, radius: int):
    """The query block of the grid's middle cell, with the key blocks that it touches (left), and all blocks (right).

    seen: bool (query blocks, key blocks), `locality.touched` of a neighborhood of this radius.
    """
    fig, (left, right) = style.subplots(1, 2, figsize=(8.6, 4.3), width_ratios=[1.15, 1])
    token = order.rank.view(order.shape).numpy()
    middle = token[tuple(side // 2 for side in order.shape)] // block
    own, touched = token // block == middle, seen[middle][token // block]
    cells = order.coordinates[middle * block : (middle + 1) * block]
    needed = np.zeros(order.shape, dtype=bool)
    for y, x in cells.tolist():
        needed[max(0, y - radius) : y + radius + 1, max(0, x - radius) : x + radius + 1] = True
    kind = np.where(own, 3, np.where(needed, 2, np.where(touched, 1, 0)))
    palette = [EMPTY, "#E3C9A0", style.COLORS["accent"], color(order.name)]
    left.imshow(kind, cmap=ListedColormap(palette), vmin=-0.5, vmax=3.5, interpolation="nearest")
    style.bare(left)
    _outline(left, order.shape)
    names = ["not touched", "loaded, not needed", "needed: in some query's window", f"the {block} queries of one block"]
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=c, edgecolor=FAINT) for c in palette]
    left.legend(handles[::-1], names[::-1], loc="upper left", bbox_to_anchor=(0, -0.02), fontsize=9, ncols=2)
    left.set_title(f"{label(order.name)}, on the grid: {int(seen[middle].sum())} of {seen.shape[1]} key blocks")
    _matrix(right, seen, color(order.name))
    right.axhline(middle, color=style.COLORS["accent"], lw=1.5)
    right.set(xlabel="key block", ylabel="query block", title=f"All query blocks: {100 * seen.mean():.1f}% touched")
    return style.finish(
        fig,
        f"{label(order.name)}, window of {2 * radius + 1} x {2 * radius + 1}: the middle query block touches "
        f"{int(seen[middle].sum())} of {seen.shape[1]} key blocks; over all query blocks {100 * seen.mean():.1f}%.",
    )


def runs_on_picture(features, orders, length: int, title: str):
    """A picture of cells (rows, cols, pixels * 3), in [0, 1]; only a run of `length` tokens in the middle is lit."""
    rows, cols, pixels = features.shape
    side = round((pixels / 3) ** 0.5)
    picture = features.view(rows, cols, side, side, 3).transpose(1, 2).reshape(rows * side, cols * side, 3).numpy()
    fig, axes = style.subplots(1, len(orders), figsize=(2.5 * len(orders), 2.5 * rows / cols + 0.7))
    for ax, order in zip(axes, orders, strict=True):
        rank = order.rank.view(order.shape).numpy()
        start = (len(order) - length) // 2
        lit = ((rank >= start) & (rank < start + length)).repeat(side, 0).repeat(side, 1)[..., None]
        ax.imshow(np.where(lit, picture, 0.82 + 0.18 * picture.mean(2, keepdims=True)))
        style.bare(ax)
        ax.set_title(label(order.name))
    fig.suptitle(title, x=0.01, ha="left", fontsize=11)
    names = ", ".join(label(order.name) for order in orders)
    return style.finish(fig, f"{title}: a photograph, lit only where {length:,} consecutive tokens are, for {names}.")


def similarity(frame, level: float):
    """`locality.similarity`: at each distance along the order, and on average up to it."""
    fig, (left, right) = style.subplots(1, 2, figsize=(10, 3.9), sharey=True)
    for ax, value in ((left, "similarity"), (right, "run")):
        _lines(ax, frame, "lag", value, markers=False)
        ax.axhline(0, color="#666666", lw=0.8)
    right.axhline(level, color="black", lw=1, ls=":")
    style.note(right, f"{level:g}", (frame["lag"].max(), level), (-20, 4), va="center")
    left.set(xlabel="tokens apart along the order", ylabel="similarity of the patches", title="At this distance")
    right.set(xlabel="tokens apart, at most", title="On average up to this distance")
    right.legend(fontsize=9)
    return style.finish(
        fig,
        "Two line charts of the similarity of the photograph's patches against their distance along the order, one "
        "line an ordering: at each distance, and on average up to it. Row-major peaks again at every whole row.",
    )


def times(frame, percent: dict[str, float]):
    """The time of the same attention under each order: `timing.compare`'s table, and the percent of blocks touched."""
    fig, ax = style.subplots(figsize=(8.5, 0.5 * len(frame) + 1.1))
    orders = [frame.index[0] if name == "A/A" else name for name in frame.index]
    again = frame.index == "A/A"
    y = np.arange(len(frame))
    bars = ax.barh(y, frame["median_ms"], color=[color(name) for name in orders], height=0.62)
    for bar in np.array(bars)[again]:
        bar.set(alpha=0.45)
    spread = [frame["median_ms"] - frame["q10_ms"], frame["q90_ms"] - frame["median_ms"]]
    ax.errorbar(frame["median_ms"], y, xerr=spread, fmt="none", ecolor="black", elinewidth=1, capsize=3)
    pairs = zip(frame["median_ms"], orders, strict=True)
    said = [f"{style.number(t)} ms, {percent[o]:.1f}% of the blocks" for t, o in pairs]
    for text, end, at in zip(said, frame["q90_ms"], y, strict=True):
        style.note(ax, text, (end, at), (6, 0), va="center")
    names = [label(o) + " again" * bool(a) for o, a in zip(orders, again, strict=True)]
    ax.set_yticks(y, names)
    ax.set_xlim(0, 1.5 * frame["q90_ms"].max())
    ax.set_xlabel("time of one forward (ms); whiskers: 10th and 90th percentile")
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    said = "; ".join(f"{name} {text}" for name, text in zip(names, said, strict=True))
    return style.finish(fig, f"Time of the same neighborhood attention under each order: {said}.")


def neighbours(frame, radius: int, what: str):
    """`locality.neighbours`: for every branch, how much of a token's surroundings shares its segment, and is seen."""
    branches = frame["branch"].unique()
    fig, axes = style.subplots(1, 2, figsize=(10, 0.62 * len(branches) + 1.6), sharey=True)
    side = 2 * radius + 1
    titles = {"inside": "In the token's segment", "seen": "Seen by the token in some head"}
    for ax, (value, title) in zip(axes, titles.items(), strict=True):
        for name, part in frame.groupby("order", sort=False):
            y = [list(branches).index(b) for b in part["branch"]]
            kind = name.partition("-")[0]
            shift = 0.13 * (list(frame["order"].unique()).index(name) - (frame["order"].nunique() - 1) / 2)
            ax.plot(part[value], np.array(y) + shift, MARKERS[kind], color=color(name), ms=7, label=label(name))
        ax.xaxis.set_major_formatter(PercentFormatter(1))
        ax.set(xlim=(-0.03, 1.03), title=title, xlabel=f"of the cells within {side} x {side}")
        for y in range(1, len(branches)):
            ax.axhline(y - 0.5, color="#e6e6e6", lw=1)
        ax.grid(axis="y", visible=False)
    axes[0].set_yticks(range(len(branches)), branches)
    axes[0].set_ylabel("segment / rate")
    axes[0].invert_yaxis()
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
    fig.suptitle(what, x=0.01, ha="left", fontsize=11)
    return style.finish(
        fig,
        f"{what}: for each branch of LongNet and each ordering, the share of a token's neighbours within "
        f"{side} x {side} cells that are in its segment, and that it sees in some head.",
    )


def fields(grids: dict, cell, layers: int, what: str):
    """Receptive fields, `locality.field_on_grid` by the ordering's name: after how many layers each cell is known."""
    shape = next(iter(grids.values())).shape
    size = (2.6 * len(grids) + 1, 2.6 * shape[0] / shape[1] + 0.75)
    fig, axes = style.subplots(1, len(grids), figsize=size, squeeze=False)
    ramp = plt.get_cmap(style.SEQUENTIAL)(np.linspace(0.85, 0.25, layers))
    cmap = ListedColormap([to_rgb(FAINT), *ramp[:, :3]]).with_extremes(bad="white")
    norm = BoundaryNorm(np.arange(-0.5, layers + 1), cmap.N)
    for ax, (name, grid) in zip(axes[0], grids.items(), strict=True):
        shown = np.where(grid < 0, 0, np.where(grid == 0, 1, grid))
        image = ax.imshow(np.ma.masked_invalid(shown), cmap=cmap, norm=norm, interpolation="nearest")
        ax.plot(cell[1], cell[0], "*", color=style.COLORS["accent"], mec="black", mew=0.6, ms=13)
        style.bare(ax)
        _outline(ax, shape)
        ax.set_title(label(name))
    bar = fig.colorbar(image, ax=axes, shrink=0.85, ticks=range(layers + 1))
    bar.ax.set_yticklabels(["never", *(f"{n} layer" + "s" * (n > 1) for n in range(1, layers + 1))])
    bar.ax.minorticks_off()
    fig.suptitle(what, x=0.01, ha="left", fontsize=11)
    known = "; ".join(
        f"{label(name)} {(grid >= 0).sum() / np.isfinite(grid).sum():.0%} of the cells" for name, grid in grids.items()
    )
    place = f"the token at row {cell[0]}, column {cell[1]}"
    return style.finish(fig, f"{what}, known to {place} after {layers} layers: {known}.")


def _lines(ax, frame, x: str, y: str, markers: bool = True) -> None:
    """One line an ordering, over a logarithmic axis of powers of two."""
    for name, part in frame.groupby("order", sort=False):
        marker = MARKERS[name.partition("-")[0]] if markers else None
        dash = "--" if name == "morton" else "-"  # where it coincides with tiles, both show
        ax.plot(part[x], part[y], dash, color=color(name), marker=marker, ms=4.5, lw=1.5, label=label(name))
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.xaxis.set_minor_locator(plt.NullLocator())


def _matrix(ax, seen, shade: str) -> None:
    ax.imshow(seen, cmap=ListedColormap([EMPTY, shade]), vmin=0, vmax=1, interpolation="nearest")
    ax.grid(False)
    last = len(seen) - 1
    ax.set_xticks([0, last])
    ax.set_yticks([0, last])


def _outline(ax, shape) -> None:
    box = plt.Rectangle((-0.5, -0.5), shape[1], shape[0], fill=False, edgecolor="#999999", lw=0.8, clip_on=False)
    ax.add_patch(box)
