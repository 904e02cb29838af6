"""One look for every figure, and the sentence that stands for a figure where it cannot be seen."""

from __future__ import annotations

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.colors import ListedColormap
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from workbench.harness.machine import short_name
from workbench.harness.narrate import counted

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
    for size, unit in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if n >= size and n % size == 0:
            return f"{n / size:,g}{unit}"
    return f"{n:,.10g}"


def log_ticks(axis, form, at=None, **locator) -> None:
    """Label a logarithmic axis by form(value), without minor ticks; at: the places; locator: of a LogLocator."""
    if at is not None:
        axis.set_ticks(at)
    if locator:
        axis.set_major_locator(LogLocator(**locator))
    axis.set_major_formatter(FuncFormatter(lambda x, _: form(x)))
    axis.set_minor_locator(NullLocator())


def note(ax, text: str, at: tuple, offset=(0, 0), **look) -> None:
    """Small text, `offset` points away from a place."""
    ax.annotate(text, at, xytext=offset, textcoords="offset points", **{"fontsize": 9} | look)


def name_ends(ax, ends) -> None:
    """Name lines to the right of an axis, or beside their ends where these are far from it, one above the other where
    they are close: the axis' scales and limits are final then. ends: (x, y, text, colour)."""
    columns, high = {}, ax.get_window_extent().height / ax.figure.dpi
    for x, y, text, color in sorted(reversed(ends), key=lambda end: end[1]):  # of equals the first stands on top
        across, at = ax.transAxes.inverted().transform(ax.transData.transform((x, y)))
        columns.setdefault(1 if across > 0.5 else across, []).append((at, (x, y), text, color))
    for across, column in columns.items():
        plate = {"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.5} if across < 1 else None  # on lines of others
        room = [1.3 * 9 / 72 * (1 + text.count("\n")) for _, _, text, _ in column]
        for (_, end, text, color), at, up in zip(column, *_spread([x[0] for x in column], room, high), strict=True):
            arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3}
            arrow |= {"relpos": (0, 0.5)}  # from where a text begins: in the order of their ends none crosses another
            place = ax.transAxes + ScaledTranslation(0.2, up, ax.figure.dpi_scale_trans)
            ax.annotate(text, end, xytext=(across, at), textcoords=place, color=color, fontsize=9, va="center",
                        arrowprops=arrow, bbox=plate)  # fmt: skip


def _spread(places: list[float], room: list[float], high: float) -> tuple[np.ndarray, np.ndarray]:
    """Ascending places in an axis about so many inches high moved up and down until each has its room, or closer where
    there is too little: places in the axis, and inches from these, so that they stay apart when the layout moves."""
    gaps = [(a + b) / 2 for a, b in itertools.pairwise(room)]
    offsets = np.cumsum([0, *gaps]) * min(1, TOP * high / sum(room))
    offsets -= offsets[-1]  # of each place from the last, at least
    free = np.array(places) - offsets / high
    middle = (np.maximum.accumulate(free) + np.minimum.accumulate(free[::-1])[::-1]) / 2
    return middle.clip(-offsets[0] / high, TOP), offsets


def stripes(ax, lines: int) -> None:
    """Every other one of so many lines at 0, 1, ... shaded, and no grid across them."""
    ax.grid(False, axis="y")
    for y in range(0, lines, 2):
        ax.axhspan(y - 0.5, y + 0.5, color="#f6f6f6", lw=0, zorder=0)


def whiskers(middle, low, high) -> np.ndarray:
    """What matplotlib's `errorbar` takes of intervals: the two lengths from the middle to the ends."""
    return np.clip([middle - low, high - middle], 0, None)


def key(fig, looks: dict[str, dict | str | list], columns: int) -> None:
    """A legend below a figure, in so many columns or what there is room for: what a line or a marker of each look, or
    an area of each colour, or of each of several colours, means."""
    square, beside = {"marker": "s", "ms": 11}, {tuple: HandlerTuple(ndivide=None, pad=0.3)}
    several = [look if isinstance(look, list) else [look] for look in looks.values()]
    each = [[x if isinstance(x, dict) else square | {"color": x} for x in some] for some in several]
    handles = [tuple(Line2D([], [], **{"ls": ""} | x) for x in some) for some in each]
    for most in range(columns, 0, -1):
        for legend in [*fig.legends]:
            legend.remove()
        legend = fig.legend(handles, looks, loc="outside lower center", ncols=most, handler_map=beside)
        if legend.get_window_extent().width <= fig.bbox.width:
            break
    fig.workbench_key = looks, columns


def layer_colors(layers: int) -> dict:
    """What `imshow` takes to colour after how many layers something is known: 0 itself, -1 never, NaN nothing."""
    ramp = plt.get_cmap(SEQUENTIAL)(np.linspace(0.85, 0.1, max(1, layers)))
    return {"cmap": ListedColormap(["#d9d9d9", COLORS["accent"], *ramp]), "vmin": -1.5, "vmax": layers + 0.5}


def layer_key(fig, layers: int) -> None:
    """The key to `layer_colors` below a figure."""
    names = ["not yet", "itself", *(counted(x, "layer") for x in range(1, layers + 1))]
    key(fig, dict(zip(names, layer_colors(layers)["cmap"].colors, strict=True)), len(names))


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
