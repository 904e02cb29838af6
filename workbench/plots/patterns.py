"""Pictures of patterns: what attends to what, what it costs, and what it keeps.

Each function draws from patterns or a DataFrame alone and returns a matplotlib Figure with its alternative text.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, PercentFormatter
from torch import Tensor

from workbench.analysis.reach import reach as reached
from workbench.patterns import Dilated, Pattern
from workbench.plots import style

MARKERS = "os^Dv<>P"
UNCOVERED = "#f3d9b1"
MOST = 4  # panels side by side


# --- what attends to what ---------------------------------------------------------------------------------------------


def masks(patterns: dict[str, Pattern], n: int, heads: int = 1, head: int = 0):
    """One panel a pattern: a cell is coloured where the query (row) of one head sees the key (column)."""
    fig, axes = _panels(len(patterns))
    for ax, (name, pattern) in zip(axes, patterns.items(), strict=True):
        _grid(ax, pattern.multiplicity(n, heads)[head].numpy(), pattern)
        ax.set_title(f"{name}\n{pattern.density(n, heads):.1%} of pairs")
    shares = ", ".join(f"{name} {p.density(n, heads):.1%}" for name, p in patterns.items())
    return style.finish(fig, f"Which keys each query sees, {n:,} tokens, head {head}. Share of pairs: {shares}.")


def heads(pattern: Pattern, n: int, heads: int):
    """One panel a head; queries that no key reaches are shaded."""
    count, coverage = pattern.multiplicity(n, heads).numpy(), pattern.coverage(n, heads).tolist()
    fig, axes = _panels(heads)
    for h, ax in enumerate(axes):
        _grid(ax, count[h], pattern, shade=True)
        ax.set_title(f"head {h}\ncovers {coverage[h]:.0%} of rows")
    covers = ", ".join(f"head {h} {share:.0%}" for h, share in enumerate(coverage))
    return style.finish(fig, f"{pattern.name} on {n:,} tokens, head by head. Rows with a visible key: {covers}.")


def branches(pattern: Dilated, n: int, heads: int, head: int = 0):
    """One panel a branch of a dilated pattern, and their sum: how often a query of this head sees each key."""
    if pattern.heads != "all":
        raise ValueError(f"heads={pattern.heads!r}: want a pattern whose heads are in every branch, heads='all'")
    fig, axes = _panels(len(pattern.segment_lengths) + 1)
    for ax, w, r in zip(axes, pattern.segment_lengths, pattern.dilation_rates, strict=False):
        alone = Dilated([w], [r], causal=pattern.causal, offsets=pattern.offsets)
        _grid(ax, alone.multiplicity(n, heads)[head].numpy(), pattern, deepest=len(axes) - 1)
        ax.set_title(f"segments of {w}\n{'every position' if r == 1 else f'one position in {r}'}")
    total = pattern.multiplicity(n, heads)[head].numpy()
    _grid(axes[-1], total, pattern, deepest=len(axes) - 1)
    axes[-1].set_title(f"all branches\nup to {total.max()} times")
    alt = f"Branches of {pattern.name}, head {head}, {n} tokens and their sum: a key is seen up to {total.max()} times."
    return style.finish(fig, alt)


def reach(patterns: dict[str, Pattern], n: int, heads: int, layers: int):
    """Left: the share of tokens that a token depends on after each layer. Right: which, for the token in the middle."""
    style.use()
    fig = plt.figure(figsize=(9, 1.3 + 0.62 * max(4, len(patterns))))
    left, right = fig.subfigures(1, 2, width_ratios=(1, 1.25))
    ax, strips = left.subplots(), np.atleast_1d(right.subplots(len(patterns), 1, sharex=True))
    ends = []
    for x, (name, pattern) in enumerate(patterns.items()):
        seen = reached(pattern, n, heads, layers)
        share, color = seen.double().mean((1, 2)).numpy(), style.family_color(type(pattern).__name__)
        ax.plot(range(layers + 1), share, color=color, marker=MARKERS[x % len(MARKERS)], ms=5, label=name)
        strips[x].imshow(
            seen[:, n // 2].numpy(), aspect="auto", cmap=_cmap(color), vmin=0, vmax=1, interpolation="nearest"
        )
        strips[x].set_title(name, fontsize=9)
        strips[x].set_yticks([0, layers])
        strips[x].grid(False)
        ends.append(f"{name} {share[-1]:.0%}")
    ax.set(xlabel="layers", ylabel="tokens that a token depends on", xticks=range(layers + 1), ylim=(0, 1.03))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.set_title("receptive field, mean over tokens")
    fig.legend(*ax.get_legend_handles_labels(), fontsize=9, loc="outside lower center", ncols=len(patterns))
    strips[-1].set_xlabel(f"what token {n // 2} depends on (rows: after 0 to {layers} layers)")
    alt = f"Receptive field over {layers} layers on {n:,} tokens. After the last: {', '.join(ends)}."
    return style.finish(fig, alt)


def _panels(many: int):
    columns = min(many, MOST)
    rows = -(-many // columns)
    fig, axes = style.subplots(rows, columns, figsize=(2.3 * columns + 0.4, 2.85 * rows), squeeze=False)
    for ax in axes.flat[many:]:
        ax.remove()
    for ax in axes[:, 0]:
        ax.set_ylabel("query")
    for ax in axes.flat[max(0, many - columns) : many]:
        ax.set_xlabel("key")
    return fig, list(axes.flat[:many])


def _grid(ax, count: np.ndarray, pattern: Pattern, deepest: int | None = None, shade: bool = False) -> None:
    """count (queries, keys); the deepest colour is the highest count, or `deepest` where panels are compared.

    shade: mark the rows that see nothing.
    """
    color = style.family_color(type(pattern).__name__)
    deepest = max(1, int(count.max()) if count.size and deepest is None else deepest or 1)
    image = np.asarray(_cmap(color, deepest)(count / deepest))[..., :3]
    if shade:
        image[(count == 0).all(1)] = to_rgb(UNCOVERED)
    ax.imshow(image, interpolation="nearest")
    n = len(count)
    ax.set(xticks=[0, n - 1], yticks=[0, n - 1])
    ax.grid(False)


def _cmap(color: str, deepest: int = 1):
    """White for nothing; the colour for one; towards black up to `deepest`."""
    dark = tuple(0.35 * c for c in to_rgb(color))
    if deepest == 1:
        return LinearSegmentedColormap.from_list("count", [(0, "white"), (1, color)])
    return LinearSegmentedColormap.from_list("count", [(0, "white"), (1 / deepest, color), (1, dark)])


# --- what it costs ----------------------------------------------------------------------------------------------------


def cost(table: pd.DataFrame):
    """Pairs (counted) and predicted bytes (modelled, dashed) against N, from the rows of `analysis.cost.table`."""
    fig, (left, right) = style.subplots(1, 2, figsize=(9, 3.9))
    for x, (name, rows) in enumerate(table.groupby("pattern", sort=False)):
        look = {"color": style.family_color(rows.family.iloc[0]), "marker": MARKERS[x % len(MARKERS)]}
        left.plot(rows.n, rows.pairs, label=name, ms=5, **look)
        # lines that coincide show as nested markers
        right.plot(rows.n, rows.predicted_bytes, "--", ms=12 - 2.5 * min(x, 4), mfc="none", mew=1.4, **look)
    scores = table.drop_duplicates("n").sort_values("n")
    right.plot(scores.n, scores.scores_bytes, ":", color=style.COLORS["muted"])
    look = {"ha": "right", "va": "center", "fontsize": 8, "color": "#666666"}
    style.note(right, "an N x N matrix of scores", (scores.n.iloc[-1], scores.scores_bytes.iloc[-1]), (-8, 0), **look)
    left.set(title="pairs attended (counted)", ylabel=f"pairs, all {table.heads.iloc[0]} heads")
    right.set(title="memory of a fused forward (modelled)", ylabel="predicted bytes")
    for ax in (left, right):
        ax.set(xscale="log", yscale="log", xlabel="tokens N")
        style.log_ticks(ax.xaxis, style.length, sorted(table.n.unique()))
        ax.yaxis.set_major_formatter(EngFormatter(sep=" "))
    right.yaxis.set_major_formatter(EngFormatter(unit="B", sep=" "))
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    last = table[table.n == table.n.max()]
    ends = ", ".join(f"{r.pattern} {r.pairs:.2e} pairs and {r.predicted_bytes:.2e} bytes" for r in last.itertuples())
    return style.finish(fig, f"Pairs and modelled bytes against N. At N={table.n.max():,}: {ends}.")


def times(table: pd.DataFrame):
    """Every sample of `workbench.probes.timing.compare`, a line an alternative; the bar is the median."""
    fig, ax = style.subplots(figsize=(7.5, 1.1 + 0.42 * len(table)))
    for y, r in enumerate(table.itertuples()):
        color = style.COLORS["muted"] if r.Index == "A/A" else style.COLORS["Dilated"]
        ax.plot(r.samples_ms, [y] * len(r.samples_ms), "o", color=color, alpha=0.5, ms=6, mew=0)
        ax.plot(r.median_ms, y, "|", color="black", ms=20, mew=2)
    names = [f"{table.index[0]}, again (A/A)" if name == "A/A" else name for name in table.index]
    medians = [f"{style.number(ms)} ms" for ms in table.median_ms]
    ax.set_yticks(range(len(table)), [f"{n}: {ms}" for n, ms in zip(names, medians, strict=True)])
    ax.set(xlabel="milliseconds a call (dots: samples, bar: median)", xlim=(0, None), ylim=(len(table) - 0.5, -0.5))
    told = ", ".join(f"{n} {ms}" for n, ms in zip(names, medians, strict=True))
    return style.finish(fig, f"Median times: {told}.")


# --- what it keeps ----------------------------------------------------------------------------------------------------


def attention_maps(sources: dict[str, Tensor], qk: dict[str, Tensor]):
    """Per source, its grid and, head by head, dense attention's weights from the token in the middle.

    sources: name -> (rows, cols, channels). qk: name -> (1, rows * cols, heads, head_dim), queries and keys at once.
    """
    many = next(iter(qk.values())).shape[2]
    size = (1.85 * (many + 1), 2.15 * len(sources))
    fig, axes = style.subplots(len(sources), many + 1, figsize=size, squeeze=False)
    for line, (name, features) in zip(axes, sources.items(), strict=True):
        rows, cols, _ = features.shape
        middle = rows // 2 * cols + cols // 2
        line[0].imshow(features.mean(-1).numpy(), cmap="gray")
        line[0].set_title(name)
        x = qk[name][0].transpose(0, 1)  # (heads, N, head_dim)
        weights = torch.softmax((x[:, middle, None] @ x.transpose(1, 2))[:, 0] / x.shape[2] ** 0.5, -1)
        for h, ax in enumerate(line[1:]):
            ax.imshow(weights[h].view(rows, cols).numpy(), cmap=style.SEQUENTIAL, vmin=0)
            ax.plot(cols // 2, rows // 2, "+", color=style.COLORS["accent"], ms=9, mew=1.6)
            ax.set_title(f"head {h}")
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
    return style.finish(
        fig,
        f"Dense attention's weights from the middle of each grid, {many} heads: {', '.join(sources)}. Darker is more.",
    )


def mass(table: pd.DataFrame):
    """What each pattern keeps of dense attention's weight (rings, a head each) beside its cost (bar: share of pairs).

    table: columns source, pattern, family, head, density, mass.
    """
    sources, names = list(dict.fromkeys(table.source)), list(dict.fromkeys(table.pattern))
    fig, axes = style.subplots(
        1, len(sources), figsize=(4.7 * len(sources), 1.4 + 0.42 * len(names)), sharex=True, sharey=True, squeeze=False
    )
    heads = sorted(table["head"].unique())
    for ax, source in zip(axes[0], sources, strict=True):
        for r in table[table.source == source].itertuples():
            y = names.index(r.pattern)
            if r.head == heads[0]:
                ax.barh(y, r.density, height=0.62, color="#d9d9d9", zorder=1)
            look = {"ms": 4 + 2 * heads.index(r.head), "mfc": "none", "mec": style.family_color(r.family), "mew": 1.6}
            ax.plot(r.mass, y, "o", **look)
        ax.set(title=source, xlabel="share", xlim=(0, 1.04))
        ax.xaxis.set_major_formatter(PercentFormatter(1))
        ax.grid(False, axis="y")
    axes[0, 0].set_yticks(range(len(names)), names, fontsize=9)
    axes[0, 0].set_ylim(len(names) - 0.45, -0.6)
    bar = Line2D([], [], color="#d9d9d9", lw=8, label="cost: share of pairs computed")
    rings = [
        Line2D([], [], color="#444444", marker="o", mfc="none", mew=1.6, ls="", ms=4 + 2 * x, label=f"kept, head {h}")
        for x, h in enumerate(heads)
    ]
    fig.legend(handles=[bar, *rings], loc="outside lower center", ncols=len(rings) + 1, fontsize=9)
    means = table.groupby(["source", "pattern"], sort=False)[["mass", "density"]].mean()
    told = "; ".join(f"{s}, {p}: {r.mass:.0%} kept for {r.density:.0%} of pairs" for (s, p), r in means.iterrows())
    return style.finish(fig, f"Share of dense attention's weight that each pattern keeps, beside its cost. {told}.")
