"""Figures about orderings, from DataFrames (see `workbench.analysis.locality`), orderings and arrays alone."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.ticker import PercentFormatter

from workbench.harness.narrate import title
from workbench.plots import style

# Paul Tol's muted scheme: colour-blind safe, and apart from the colours that stand for patterns.
COLORS = {
    "row_major": "#CC6677", "snake": "#882255", "tiles": "#999933", "morton": "#44AA99", "hilbert": "#332288",
    "random": style.COLORS["muted"], "natural": "#CC6677",  # row-major on a line
}  # fmt: skip
MARKERS = {"row_major": "s", "snake": "v", "tiles": "D", "morton": "^", "hilbert": "o", "random": "x"}
EMPTY, JUMP, SHADES = "#f2f2f2", "#d62728", 32


def color(order: str) -> str:
    return COLORS.get(order.partition("-")[0], style.COLORS["muted"])


def curves(orders):
    """The path of each ordering through its grid of two axes, light (first token) to dark (last); jumps are red."""
    across = min(3, len(orders))
    down, (height, width) = -(-len(orders) // across), orders[0].shape
    size = (7, 0.3 + down * (0.35 + 6.2 / across * height / width))
    fig, axes = style.subplots(down, across, figsize=size, squeeze=False)
    cmap = plt.get_cmap(style.SEQUENTIAL)
    for ax in axes.flat[len(orders) :]:
        ax.remove()
    for ax, order in zip(axes.flat, orders, strict=False):
        points = order.coordinates.numpy()[:, ::-1].astype(float)  # x is the last axis
        segments, steps = np.stack([points[:-1], points[1:]], 1), order.steps.numpy()
        shades, thin = np.arange(len(steps)) * SHADES // len(steps), 0.4 if order.name.startswith("random") else 1.5
        for x in range(SHADES):
            _strokes(ax, segments[(shades == x) & (steps == 1)], color=cmap(0.15 + 0.85 * x / (SHADES - 1)), lw=1.5)
        _strokes(ax, segments[steps > 1], color=JUMP, lw=thin / 2)
        ax.plot(*points[0], "o", color=style.COLORS["accent"], ms=6, zorder=3)
        ax.set(xlim=(-0.7, width - 0.3), ylim=(height - 0.3, -0.7), aspect="equal")
        ax.set_title(f"{title(order.name)}: {order.jumps:,} jumps", fontsize=10)
        style.bare(ax)
    return style.finish(fig, f"The path of each order through a grid of {height} x {width} cells.")


def _strokes(ax, segments, **look) -> None:
    """Segments (many, 2 ends, 2) as one path, which takes a tenth of the bytes of many."""
    apart = np.full((len(segments), 1, 2), np.nan)
    ax.plot(*np.concatenate([segments, apart], 1).reshape(-1, 2).T, **look)


def locality(extent, within):
    """Left: how wide a run of tokens lies on the grid (`locality.extent`); right: how near neighbours are in tokens."""
    fig, (left, right) = style.subplots(1, 2, figsize=(9.5, 3.8))
    ends = _lines(left, extent, "length", "extent")
    lengths = np.array(sorted(extent["length"].unique()))
    left.plot(lengths, np.sqrt(lengths), ":", color="black", lw=1.2)
    left.set_yscale("log", base=2)
    left.yaxis.set_major_formatter("{x:g}")
    left.set(title="A run of tokens on the grid", xlabel="consecutive tokens", ylabel="box around them (cells)")
    style.name_ends(left, [*ends, (lengths[-1], lengths[-1] ** 0.5, "a square:\nthe least", "black")])
    ends = _lines(right, within, "lag", "share")
    right.yaxis.set_major_formatter(PercentFormatter(1))
    right.set(title="Adjacent cells in the sequence", xlabel="tokens apart, at most", ylim=(0, 1.03))
    right.set_ylabel("share of the pairs of adjacent cells")
    style.name_ends(right, ends)
    return style.finish(fig, "How compact runs of tokens are, and how near adjacent cells are, by order.")


def blocks(matrices: dict):
    """Matrices of touched blocks, bool (query blocks, key blocks), by the name of the ordering (or a label)."""
    fig, axes = style.subplots(1, len(matrices), figsize=(9.5, 0.9 + 9.0 / len(matrices)), squeeze=False)
    for i, (ax, (name, seen)) in enumerate(zip(axes[0], matrices.items(), strict=True)):
        ax.imshow(seen, cmap=ListedColormap([EMPTY, color(name)]), vmin=0, vmax=1, interpolation="none")
        ax.grid(False)
        ax.set(title=f"{title(name)}: {100 * seen.mean():.1f}%", xlabel="key block", ylabel="query block" * (i == 0))
        ax.set(xticks=[0, len(seen) - 1], yticks=[0, len(seen) - 1])
    return style.finish(fig, "The blocks of queries and keys that are touched under each order.")


def touched_by_side(frame):
    """`locality.blocks_touched` of sliding windows: percent against the side of the window."""
    fig, ax = style.subplots(figsize=(7, 3.4))
    ends = _lines(ax, frame, "side", "percent")
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter("{x:g}%")
    ax.set(xlabel="side of the window (cells)", ylabel="blocks touched", xticks=sorted(frame["side"].unique()))
    style.name_ends(ax, ends)
    return style.finish(fig, "Percent of blocks touched against the side of a sliding window, a line an order.")


def runs_on_picture(features, orders, length: int):
    """A picture of cells (rows, cols, pixels * 3), in [0, 1]; only a run of `length` tokens in the middle is lit."""
    rows, cols, pixels = features.shape
    side = round((pixels / 3) ** 0.5)
    picture = features.view(rows, cols, side, side, 3).transpose(1, 2).reshape(rows * side, cols * side, 3).numpy()
    fig, axes = style.subplots(1, len(orders), figsize=(9.5, 9.2 / len(orders) * rows / cols + 0.4))
    for ax, order in zip(axes, orders, strict=True):
        rank = order.rank.view(order.shape).numpy()
        start = (len(order) - length) // 2
        lit = ((rank >= start) & (rank < start + length)).repeat(side, 0).repeat(side, 1)[..., None]
        ax.imshow(np.where(lit, picture, 0.82 + 0.18 * picture.mean(2, keepdims=True)))
        style.bare(ax)
        ax.set_title(title(order.name))
    return style.finish(fig, f"A photograph, lit only where {length:,} consecutive tokens are, under each order.")


def similarity(frame, level: float):
    """`locality.similarity`: at each distance along the order, and on average up to it."""
    fig, (left, right) = style.subplots(1, 2, figsize=(9.5, 3.6), sharey=True)
    for ax, value in ((left, "similarity"), (right, "run")):
        ends = _lines(ax, frame, "lag", value, markers=False)
        ax.axhline(0, color="#666666", lw=0.8)
    right.axhline(level, color="black", lw=1, ls=":")
    style.note(right, "a half", (1, level), (2, 4))
    left.set(xlabel="tokens apart along the order", ylabel="similarity of the patches", title="At this distance")
    right.set(xlabel="tokens apart, at most", title="On average up to this distance")
    style.name_ends(right, ends)  # the right one's
    return style.finish(fig, "Similarity of patches against their distance along each order, at it and up to it.")


def neighbours(frame, radius: int):
    """`locality.neighbours`: for every branch, how much of a token's surroundings shares its segment, and is seen."""
    branches = frame["branch"].unique()
    fig, axes = style.subplots(1, 2, figsize=(9.5, 0.62 * len(branches) + 1.3), sharey=True)
    side = 2 * radius + 1
    titles, looks = {"inside": "In the token's segment", "seen": "Seen by the token in some head"}, {}
    for ax, (value, words) in zip(axes, titles.items(), strict=True):
        for name, part in frame.groupby("order", sort=False):
            y = [list(branches).index(b) for b in part["branch"]]
            kind = name.partition("-")[0]
            shift = 0.13 * (list(frame["order"].unique()).index(name) - (frame["order"].nunique() - 1) / 2)
            looks[title(name)] = look = {"marker": MARKERS[kind], "color": color(name), "ms": 7}
            ax.plot(part[value], np.array(y) + shift, ls="", **look)
        ax.xaxis.set_major_formatter(PercentFormatter(1))
        ax.set(xlim=(-0.03, 1.03), title=words, xlabel=f"of the cells within {side} x {side}")
        style.stripes(ax, len(branches))
    axes[0].set_yticks(range(len(branches)), branches)
    axes[0].set(ylabel="segment / rate", ylim=(len(branches) - 0.5, -0.5))
    style.key(fig, looks, len(looks))
    return style.finish(fig, "A token's neighbours in its segment, and those it sees, by branch and order.")


def fields(grids: dict, cell, layers: int):
    """Receptive fields, `locality.field_on_grid` by the ordering's name: after how many layers each cell is known."""
    shape = next(iter(grids.values())).shape
    size = (9.5, 8.2 / len(grids) * shape[0] / shape[1] + 0.4)
    fig, axes = style.subplots(1, len(grids), figsize=size, squeeze=False)
    for ax, (name, grid) in zip(axes[0], grids.items(), strict=True):
        ax.imshow(grid, interpolation="none", **style.layer_colors(layers))
        ax.plot(cell[1], cell[0], "*", color=style.COLORS["accent"], mec="black", mew=0.6, ms=13)
        style.bare(ax)
        ax.spines[:].set_visible(True)
        ax.set_title(title(name))
    style.layer_key(fig, layers)
    return style.finish(fig, f"After how many of {layers} layers a token knows of each cell, under each order.")


def _lines(ax, frame, x: str, y: str, markers: bool = True) -> list[tuple]:
    """One line an ordering, over a logarithmic axis of powers of two; returns their ends for `style.name_ends`."""
    ends = []
    for name, part in frame.sort_values(x).groupby("order", sort=False):
        marker = MARKERS[name.partition("-")[0]] if markers else None
        dash = "--" if name == "morton" else "-"  # where it coincides with tiles, both show
        ax.plot(part[x], part[y], dash, color=color(name), marker=marker, ms=4.5, lw=1.5)
        ends.append((part[x].iloc[-1], part[y].iloc[-1], title(name), color(name)))
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.xaxis.set_minor_locator(plt.NullLocator())
    return ends
