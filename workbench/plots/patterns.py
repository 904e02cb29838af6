"""Pictures of patterns: what attends to what, what it costs, and what it keeps.

Each function draws from patterns or a DataFrame alone and returns a matplotlib Figure with its alternative text.
"""

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from workbench.analysis.reach import reach as reached
from workbench.harness.narrate import binary
from workbench.patterns import Dilated, Pattern
from workbench.plots import style

MARKERS = "os^Dv<>P"
UNCOVERED = "#f3d9b1"


def masks(patterns: dict[str, Pattern], n: int, heads: int = 1, head: int = 0):
    """One panel a pattern: a cell is coloured where the query (row) of one head sees the key (column)."""
    panels = [(f"{name}\n{pattern.density(n, heads):.1%} of pairs", pattern.multiplicity(n, heads)[head], pattern)
              for name, pattern in patterns.items()]  # fmt: skip
    return _grids(panels, f"Which keys each query sees, {n:,} tokens, head {head}: {', '.join(patterns)}.")


def heads(pattern: Pattern, n: int, heads: int):
    """One panel a head, and what all of them see together; queries that no key reaches are shaded."""
    count, panels = pattern.multiplicity(n, heads), []
    for name, seen in [*((f"head {h}", count[h]) for h in range(heads)), ("all heads", (count > 0).any(0).int())]:
        empty = int((seen == 0).all(1).sum())
        words = f"{name}: {(seen > 0).double().mean():.1%}" + f"\n{empty:,} empty rows" * (empty > 0)
        panels.append((words, seen, pattern))
    alt = f"Which keys each query of {pattern.name} sees, {n:,} tokens, head by head and together."
    return _grids(panels, alt, across=5, shade=True)


def branches(pattern: Dilated, n: int, heads: int, head: int = 0):
    """One panel a branch of a dilated pattern, and their sum: how often a query of this head sees each key."""
    total, panels = pattern.multiplicity(n, heads)[head], []
    for w, r in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
        alone = Dilated([w], [r], causal=pattern.causal, offsets=pattern.offsets)
        words = f"segments of {w}\n{'every position' if r == 1 else f'one position in {r}'}"
        panels.append((words, alone.multiplicity(n, heads)[head], pattern))
    panels.append((f"all branches\nup to {total.max()} times", total, pattern))
    return _grids(panels, f"Which keys each query sees, {n:,} tokens, head {head}: branch by branch, and their sum.")


def _grids(panels: list[tuple[str, Tensor, Pattern]], alt: str, across: int = 4, shade: bool = False):
    """A panel each of (title, counts (queries, keys), the pattern whose colour it has), at most `across` side by side,
    with a key of what the colours say. shade: mark the rows that see nothing."""
    columns, wide, most = min(len(panels), across), 1.8, max(1, *(int(count.max()) for _, count, _ in panels))
    rows = -(-len(panels) // columns)
    fig, axes = style.subplots(rows, columns, figsize=(wide * columns + 0.3, (wide + 0.75) * rows), squeeze=False)
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    for at, (title, count, pattern) in enumerate(panels):
        ax, last = axes.flat[at], len(count) - 1
        image = np.asarray(_cmap(pattern, most)(count.numpy() / most))[..., :3]
        if shade:
            image[(count == 0).all(1).numpy()] = to_rgb(UNCOVERED)
        ax.imshow(image, interpolation="none")
        ax.set(xticks=[0, last], yticks=[0, last], ylabel="query" * (at % columns == 0))
        ax.set(xlabel="key" * (at >= len(panels) - columns))
        ax.set_title(title, fontsize=10)
        ax.grid(False)
    colors = {}
    for c in sorted({*range(1, min(most, 4) + 1), most}):
        some = dict.fromkeys(_cmap(pattern, most)(c / most) for _, count, pattern in panels if (count == c).any())
        if some:
            colors[f"seen {c} times" if c > 1 else "seen once"] = [*some]
    if shade and any((count == 0).all(1).any() for _, count, _ in panels):
        colors["a row that sees nothing"] = UNCOVERED
    style.key(fig, colors, len(colors))
    return style.finish(fig, alt)


def _cmap(pattern: Pattern, deepest: int):
    """White for nothing; the pattern's colour for one; towards black up to `deepest`."""
    color = style.family_color(type(pattern).__name__)
    dark = color if deepest == 1 else tuple(0.35 * c for c in to_rgb(color))
    return LinearSegmentedColormap.from_list("count", sorted({0: "white", 1 / deepest: color, 1: dark}.items()))


def reach(patterns: dict[str, Pattern], n: int, heads: int, layers: int):
    """A panel of the share of tokens that a token depends on after each layer, and one of strips: after how many layers
    the token in the middle depends on each other one. Returns the figure and the shares, a row a layer."""
    fig, (ax, strips) = style.subplots(1, 2, figsize=(9.5, 0.9 + 0.6 * max(4, len(patterns))))
    ends, shares, first = [], {}, []
    for x, (name, pattern) in enumerate(patterns.items()):
        seen = reached(pattern, n, heads, layers)  # (layers + 1, n, n)
        shares[name], color = seen.double().mean((1, 2)).numpy(), style.family_color(type(pattern).__name__)
        ax.plot(range(layers + 1), shares[name], color=color, marker=MARKERS[x % len(MARKERS)], ms=5)
        ends.append((layers, shares[name][-1], f"{name} {shares[name][-1]:.0%}", color))
        token = seen[:, n // 2]
        first.append(np.where(token.any(0), token.int().argmax(0), -1))
    ax.set(xlabel="layers", ylabel="tokens that a token depends on", xticks=range(layers + 1), ylim=(0, 1.03))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    style.name_ends(ax, ends)
    strips.imshow(first, aspect="auto", interpolation="none", **style.layer_colors(layers))
    strips.grid(False)
    strips.hlines(np.arange(len(patterns) + 1) - 0.5, -0.5, n - 0.5, color="white", lw=8)
    strips.set_yticks(range(len(patterns)), patterns)
    strips.set_xlabel(f"tokens, coloured by when token {n // 2} first depends on them")
    style.layer_key(fig, layers)
    fig = style.finish(fig, f"What a token depends on after up to {layers} layers, {n:,} tokens, line by pattern.")
    return fig, pd.DataFrame(shares).rename_axis("layers")


def cost(table: pd.DataFrame):
    """Pairs (counted) and predicted bytes (modelled, dashed) against N, from the rows of `analysis.cost.table`."""
    fig, (left, right) = style.subplots(1, 2, figsize=(9.5, 3.6))
    ends, sizes = [], []
    for x, (name, rows) in enumerate(table.groupby("pattern", sort=False)):
        look = {"color": style.family_color(rows.family.iloc[0]), "marker": MARKERS[x % len(MARKERS)]}
        left.plot(rows.n, rows.pairs, ms=5, **look)
        # lines that coincide show as nested markers
        right.plot(rows.n, rows.predicted_bytes, "--", ms=12 - 2.5 * min(x, 4), mfc="none", mew=1.4, **look)
        ends.append((rows.n.iloc[-1], rows.pairs.iloc[-1], name, look["color"]))
        sizes.append((rows.n.iloc[-1], rows.predicted_bytes.iloc[-1], name, look["color"]))
    scores = table.drop_duplicates("n").sort_values("n")
    right.plot(scores.n, scores.scores_bytes, ":", color=style.COLORS["muted"])
    sizes.append((scores.n.iloc[-1], scores.scores_bytes.iloc[-1], "an N x N matrix\nof scores", "#666666"))
    left.set(title="pairs attended (counted)", ylabel=f"pairs, all {table.heads.iloc[0]} heads")
    right.set(title="memory of a fused forward (modelled)")
    for ax in (left, right):
        ax.set(xscale="log", yscale="log", xlabel="tokens N")
        style.log_ticks(ax.xaxis, style.length, sorted(table.n.unique()))
    low, high = right.get_ylim()
    style.log_ticks(right.yaxis, binary, [2.0**x for x in range(10, 70, 4) if low <= 2.0**x <= high])
    for ax, names in ((left, ends), (right, sizes)):
        style.name_ends(ax, names)
    return style.finish(fig, "Pairs, and modelled bytes, of each pattern against N, logarithmic axes.")


def attention_maps(sources: dict[str, Tensor], qk: dict[str, Tensor]):
    """Per source, its grid and, head by head, dense attention's weights from the token in the middle.

    sources: name -> (rows, cols, channels). qk: name -> (1, rows * cols, heads, head_dim), queries and keys at once.
    """
    many = next(iter(qk.values())).shape[2]
    size, bare = (9.5, 1.95 * len(sources)), {"xticks": [], "yticks": []}
    fig, axes = style.subplots(len(sources), many + 1, figsize=size, subplot_kw=bare, squeeze=False)
    for line, (name, features) in zip(axes, sources.items(), strict=True):
        rows, cols, _ = features.shape
        middle = rows // 2 * cols + cols // 2
        line[0].imshow(features.mean(-1).numpy(), cmap="gray")
        line[0].set_title(name)
        x = qk[name][0].transpose(0, 1)  # (heads, N, head_dim)
        weights = torch.softmax((x[:, middle, None] @ x.transpose(1, 2))[:, 0] / x.shape[2] ** 0.5, -1)
        for h, ax in enumerate(line[1:]):
            image = ax.imshow((weights[h] / weights[h].max()).view(rows, cols).numpy(), cmap=style.SEQUENTIAL, vmin=0)
            ax.plot(cols // 2, rows // 2, "+", color=style.COLORS["accent"], ms=9, mew=1.6)
            ax.set_title(f"head {h}")
    bar = fig.colorbar(image, ax=list(axes.flat), ticks=[0, 1], shrink=0.7)
    bar.ax.set_yticklabels(["no weight", "the most\nin a panel"])
    return style.finish(fig, f"Dense attention's weights from the middle of {', '.join(sources)}, head by head.")


def mass(table: pd.DataFrame):
    """What each pattern keeps of dense attention's weight (rings, a head each) beside its cost (bar: share of pairs).

    table: columns source, pattern, family, head, density, mass. The pattern whose pairs hold most is on top.
    """
    sources = list(dict.fromkeys(table.source))
    means = table.groupby(["source", "pattern"])[["mass", "density"]].mean()
    gain = (means.mass / means.density).groupby("pattern").mean()
    names = list(gain.sort_values(ascending=False).index)
    fig, axes = style.subplots(1, len(sources), figsize=(9.5, 1.2 + 0.4 * len(names)), sharey=True, squeeze=False)
    heads = sorted(table["head"].unique())
    for ax, source in zip(axes[0], sources, strict=True):
        ax.barh(names, means.density[source][names], height=0.62, color="#d9d9d9", zorder=1)
        for r in table[table.source == source].itertuples():
            look = {"ms": 4 + 2 * heads.index(r.head), "mfc": "none", "mec": style.family_color(r.family), "mew": 1.6}
            ax.plot(r.mass, r.pattern, "o", **look)
        ax.set(title=source, xlabel="share of pairs (bar), of weight (rings)", xlim=(0, 1.04))
        ax.xaxis.set_major_formatter(PercentFormatter(1))
        ax.grid(False, axis="y")
    axes[0, 0].set_ylim(len(names) - 0.45, -0.6)
    ring = {"color": "#444444", "marker": "o", "mfc": "none", "mew": 1.6}
    style.key(fig, {f"head {h}": ring | {"ms": 4 + 2 * x} for x, h in enumerate(heads)}, len(heads))
    return style.finish(fig, "Dense attention's weight that each pattern keeps, beside its share of pairs.")
