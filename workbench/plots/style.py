"""One look for every figure, and the sentence that stands for a figure where it cannot be seen."""

from __future__ import annotations

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.ticker import FuncFormatter, NullLocator

from workbench.harness.narrate import MODES as MODES
from workbench.harness.narrate import number as number

# Colour-blind safe (Okabe-Ito); one meaning a colour across all notebooks.
COLORS = {
    "dense": "#000000",
    "dilated": "#0072B2",
    "block-sparse": "#D55E00",
    "neighborhood": "#009E73",
    "predicate": "#CC79A7",
    "accent": "#E69F00",
    "muted": "#999999",
}
SEQUENTIAL = "mako_r"
MARKERS = {"Dense": "o", "Dilated": "s", "BlockSparse": "^", "Neighborhood": "D", "Predicate": "v"}


def use() -> None:
    """Set the style; every plotting function calls it, so that a notebook need not."""
    sns.set_theme(
        context="notebook",
        style="whitegrid",
        rc={
            "figure.dpi": 110,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.color": "#e6e6e6",
            "axes.edgecolor": "#666666",
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.labelsize": 10,
            "legend.frameon": False,
            "figure.constrained_layout.use": True,
        },
    )


def length(n: float) -> str:
    """A length, most of which are powers of two: 131072 is 128K, and 1000 is 1000."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if n >= size and n % size == 0:
            return f"{n / size:g}{unit}"
    return f"{n:g}"


def log_ticks(axis, form, at=None) -> None:
    """Label a logarithmic axis by form(value), at these places if there are any, without minor ticks."""
    if at is not None:
        axis.set_ticks(at)
    axis.set_major_formatter(FuncFormatter(lambda x, _: form(x)))
    axis.set_minor_locator(NullLocator())


def apart(values, room: float) -> list:
    """Those of ascending values that are at least `room` times the one kept before: the ticks that have room."""
    kept = []
    for x in values:
        if not kept or x >= kept[-1] * room:
            kept.append(x)
    return kept


def device(rows) -> str:
    """The short name of the device that recorded rows are from: H100 for "NVIDIA H100 80GB HBM3"."""
    name = str(rows["run_device"].iloc[0])
    return next((word for word in name.split() if word[:1] in "HABLGT" and any(c.isdigit() for c in word)), name)


def blank(why: str):
    """A figure that says why there is nothing to draw."""
    use()
    fig, ax = plt.subplots(figsize=(6, 0.6))
    ax.axis("off")
    ax.text(0, 0.5, why, va="center", fontsize=10)
    return finish(fig, why)


def finish(fig, alt: str):
    """Give the figure its alternative text (read by the report) and leave pyplot's registry, so it shows once."""
    fig.set_label(alt)
    plt.close(fig)
    return fig
