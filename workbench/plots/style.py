"""One look for every figure, and the sentence that stands for a figure where it cannot be seen."""

from __future__ import annotations

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from workbench.harness.machine import short_name
from workbench.harness.narrate import MODES as MODES
from workbench.harness.narrate import number as number

# Colour-blind safe (after Okabe-Ito, the light ones darker: 3 to 1 on white); one meaning per colour, on all pages.
COLORS = {
    "Dense": "#000000", "Dilated": "#0072B2", "BlockSparse": "#D55E00", "Neighborhood": "#009E73",
    "Window": "#009E73", "Predicate": "#C2669A", "accent": "#C17F00", "muted": "#767676",
}  # fmt: skip
SEQUENTIAL = "mako_r"
TOP = 0.96  # of an axis' height: no name of a line above, beside the title
MARKERS = {"Dense": "o", "Dilated": "s", "BlockSparse": "^", "Neighborhood": "D", "Predicate": "v"}


def use() -> None:
    """Set the style; every figure does, so that a notebook need not."""
    own = {
        "figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False, "grid.color": "#e6e6e6",
        "axes.edgecolor": "#666666", "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "axes.labelsize": 10, "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.fontsize": 9,
        "legend.title_fontsize": 9, "legend.frameon": False, "figure.constrained_layout.use": True,
    }  # fmt: skip
    sns.set_theme(context="notebook", style="whitegrid", rc=own)


def subplots(*grid, **options):
    """`plt.subplots` in the style."""
    use()
    return plt.subplots(*grid, **options)


def family_color(family: str) -> str:
    """The colour of a class of patterns: the same one in every figure."""
    return COLORS.get(family, COLORS["Predicate"])


def family_look(family: str, pale: bool = False) -> dict:
    """Colour, marker and stroke of a class of patterns for `plot`; pale and hollow: of another machine."""
    color = family_color(family)
    look = {"alpha": 0.45, "mfc": "white", "lw": 1.1} if pale else {"mfc": color, "lw": 1.8}
    return look | {"color": color, "marker": MARKERS.get(family, "v")}


def length(n: float) -> str:
    """A length, most of which are powers of two: 131072 is 128K, and 632960, which is none of 1,024, 632,960."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if n >= size and n % size == 0:
            return f"{n / size:,g}{unit}"
    return f"{n:,.10g}"


def log_ticks(axis, form, at=None) -> None:
    """Label a logarithmic axis by form(value), at these places if there are any, without minor ticks."""
    if at is not None:
        axis.set_ticks(at)
    axis.set_major_formatter(FuncFormatter(lambda x, _: form(x)))
    axis.set_minor_locator(NullLocator())


def note(ax, text: str, at: tuple, offset=(0, 0), **look) -> None:
    """Small text, `offset` points away from a place."""
    ax.annotate(text, at, xytext=offset, textcoords="offset points", **{"fontsize": 9} | look)


def name_ends(ax, ends) -> None:
    """Name lines to the right of an axis, or beside their ends where these are far from it, one above the other where
    they are close: the axis' scales and limits are final then. ends: (x, y, text, colour)."""
    columns, size = {}, 9 if len(ends) < 12 else 7.5
    for x, y, text, color in sorted(ends, key=lambda end: end[1]):
        across, at = ax.transAxes.inverted().transform(ax.transData.transform((x, y)))
        columns.setdefault(1.03 if across > 0.5 else across + 0.05, []).append((at, (x, y), text, color))
    for across, column in columns.items():
        room = [0.055 * size / 9 * (1 + text.count("\n")) for _, _, text, _ in column]
        for (_, end, text, color), at in zip(column, _spread([end[0] for end in column], room), strict=True):
            arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3}
            ax.annotate(text, end, xytext=(across, at), textcoords="axes fraction", color=color, fontsize=size,
                        va="center", arrowprops=arrow)  # fmt: skip


def _spread(places: list[float], room: list[float]) -> np.ndarray:
    """Ascending places in an axis moved so far apart that each has its room, closer where there is too little."""
    gaps = [(a + b) / 2 for a, b in itertools.pairwise(room)]
    offsets = np.cumsum([0, *gaps]) * min(1, TOP / sum(room))  # of each place from the first, at least
    return offsets + np.maximum.accumulate(places - offsets).clip(0, TOP - offsets[-1])


def stripes(ax, lines: int) -> None:
    """Every other one of so many lines at 0, 1, ... shaded, and no grid across them."""
    ax.grid(False, axis="y")
    for y in range(0, lines, 2):
        ax.axhspan(y - 0.5, y + 0.5, color="#f6f6f6", lw=0, zorder=0)


def whiskers(middle, low, high) -> np.ndarray:
    """What matplotlib's `errorbar` takes of intervals: the two lengths from the middle to the ends."""
    return np.clip([middle - low, high - middle], 0, None)


def key(fig, looks: dict[str, dict | str], columns: int, **options) -> None:
    """A legend below a figure: what a line or a marker of each look, or an area of each colour, means. options: of
    `Figure.legend`."""
    square = {"marker": "s", "ms": 11}
    looks = {words: look if isinstance(look, dict) else square | {"color": look} for words, look in looks.items()}
    handles = [Line2D([], [], **{"ls": "", "label": words} | look) for words, look in looks.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=columns, **options)


def layer_colors(layers: int) -> dict:
    """What `imshow` takes to colour after how many layers something is known: 0 itself, -1 never, NaN nothing."""
    ramp = plt.get_cmap(SEQUENTIAL)(np.linspace(0.85, 0.1, max(1, layers)))
    return {"cmap": ListedColormap(["#d9d9d9", COLORS["accent"], *ramp]), "vmin": -1.5, "vmax": layers + 0.5}


def layer_bar(fig, image, axes, layers: int) -> None:
    """The key to `layer_colors` beside these axes."""
    bar = fig.colorbar(image, ax=list(axes), ticks=range(-1, layers + 1), label="layers")
    bar.ax.set_yticklabels(["never", *map(str, range(layers + 1))])
    bar.ax.minorticks_off()


def bare(ax) -> None:
    """Take ticks, grid and frame away."""
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    ax.spines[:].set_visible(False)


def device(rows) -> str:
    """The short name of the device that recorded rows are from: H100 for "NVIDIA H100 80GB HBM3"."""
    return short_name(str(rows["run_device"].iloc[0])).upper()


def blank(why: str):
    """A figure that says why there is nothing to draw."""
    fig, ax = subplots(figsize=(6, 0.6))
    ax.axis("off")
    ax.text(0, 0.5, why, va="center", fontsize=10)
    return finish(fig, why)


def save(fig, path: str, title: str) -> None:
    """Write a figure with a title over it: a picture for the README."""
    fig.suptitle(title, fontsize=10)
    fig.savefig(path, dpi=110, metadata={"Description": fig.get_label()})


def cells(panels):
    """The data of pictures made of cells: a DataFrame with a column a panel (name -> two axes), a row a line of cells,
    and in it a digit a cell, a point where there is none."""
    text = {name: [["." if not x >= 0 else str(int(x)) for x in line] for line in panel.tolist()]
            for name, panel in panels.items()}  # fmt: skip
    return pd.DataFrame({name: map("".join, lines) for name, lines in text.items()}).rename_axis("line")


def finish(fig, alt: str):
    """Give the figure its alternative text (read by the report) and leave pyplot's registry, so it shows once."""
    fig.set_label(alt)
    plt.close(fig)
    return fig
