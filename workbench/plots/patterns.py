"""Pictures of patterns: what attends to what, what it costs, and what it keeps.

Each function draws from patterns or a DataFrame alone and returns a matplotlib Figure with its alternative text.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from workbench.analysis.reach import reach as reached
from workbench.harness.narrate import binary
from workbench.patterns import Dilated, Pattern
from workbench.plots import style

MARKERS = "os^Dv<>P"
UNCOVERED = "#f3d9b1"
MOST = 4  # panels side by side


def masks(patterns: dict[str, Pattern], n: int, heads: int = 1, head: int = 0):
    """One panel a pattern: a cell is coloured where the query (row) of one head sees the key (column)."""
    fig, axes = _panels(len(patterns))
    for ax, (name, pattern) in zip(axes, patterns.items(), strict=True):
        _grid(ax, pattern.multiplicity(n, heads)[head].numpy(), pattern)
        ax.set_title(f"{name}\n{pattern.density(n, heads):.1%} of pairs", fontsize=10)
    most = max(patterns.values(), key=lambda pattern: int(pattern.multiplicity(n, heads)[head].max()))
    _key(fig, most, int(most.multiplicity(n, heads)[head].max()))
    shares = ", ".join(f"{name} {p.density(n, heads):.1%}" for name, p in patterns.items())
    return style.finish(fig, f"Which keys each query sees, {n:,} tokens, head {head}. Share of pairs: {shares}.")


def heads(pattern: Pattern, n: int, heads: int):
    """One panel a head, and what all of them see together; queries that no key reaches are shaded."""
    count = pattern.multiplicity(n, heads).numpy()
    together, (fig, axes) = (count > 0).any(0).astype(int), _panels(heads + 1, most=5)
    names = [*(f"head {h}" for h in range(heads)), "all heads"]
    for ax, seen, name in zip(axes, [*count, together], names, strict=True):
        _grid(ax, seen, pattern, deepest=int(count.max()), shade=True)
        empty = int((seen == 0).all(1).sum())
        ax.set_title(f"{name}: {(seen > 0).mean():.1%}" + f"\n{empty:,} empty rows" * (empty > 0), fontsize=10)
    _key(fig, pattern, int(count.max()), empty=bool((count == 0).all(2).any()))
    seen = ", ".join(f"{(each > 0).mean():.1%}" for each in count)
    alt = f"{pattern.name} on {n:,} tokens, head by head. Share of pairs: {seen}; together {together.mean():.1%}."
    return style.finish(fig, alt)


def branches(pattern: Dilated, n: int, heads: int, head: int = 0):
    """One panel a branch of a dilated pattern, and their sum: how often a query of this head sees each key."""
    if pattern.heads != "all":
        raise ValueError(f"heads={pattern.heads!r}: want a pattern whose heads are in every branch, heads='all'")
    fig, axes = _panels(len(pattern.segment_lengths) + 1)
    total = pattern.multiplicity(n, heads)[head].numpy()
    for ax, w, r in zip(axes, pattern.segment_lengths, pattern.dilation_rates, strict=False):
        alone = Dilated([w], [r], causal=pattern.causal, offsets=pattern.offsets)
        _grid(ax, alone.multiplicity(n, heads)[head].numpy(), pattern, deepest=int(total.max()))
        ax.set_title(f"segments of {w}\n{'every position' if r == 1 else f'one position in {r}'}", fontsize=10)
    _grid(axes[-1], total, pattern, deepest=int(total.max()))
    axes[-1].set_title(f"all branches\nup to {total.max()} times", fontsize=10)
    _key(fig, pattern, int(total.max()))
    alt = f"Branches of {pattern.name}, head {head}, {n} tokens and their sum: a key is seen up to {total.max()} times."
    return style.finish(fig, alt)


def reach(patterns: dict[str, Pattern], n: int, heads: int, layers: int):
    """Left: the share of tokens that a token depends on after each layer. Right: for the token in the middle, after
    how many layers it depends on each other one. Returns the figure and the shares, a row a layer."""
    style.use()
    fig = plt.figure(figsize=(9.5, 0.9 + 0.6 * max(4, len(patterns))))
    left, right = fig.subfigures(1, 2, width_ratios=(1.15, 1))
    ax, strips = left.subplots(), np.atleast_1d(right.subplots(len(patterns), 1, sharex=True))
    ramp = plt.get_cmap(style.SEQUENTIAL)(np.linspace(0.85, 0.1, max(1, layers)))[:, :3]
    ramp = [to_rgb("#d9d9d9"), to_rgb(style.COLORS["accent"]), *ramp]  # never, itself, after 1 layer ...
    ends, shares = [], {}
    for x, (name, pattern) in enumerate(patterns.items()):
        seen = reached(pattern, n, heads, layers)  # (layers + 1, n, n)
        shares[name], color = seen.double().mean((1, 2)).numpy(), style.family_color(type(pattern).__name__)
        ax.plot(range(layers + 1), shares[name], color=color, marker=MARKERS[x % len(MARKERS)], ms=5)
        ends.append((layers, shares[name][-1], f"{name} {shares[name][-1]:.0%}", color))
        token = seen[:, n // 2]
        first = np.where(token.any(0), token.int().argmax(0), -1)
        image = strips[x].imshow(first[None], aspect="auto", cmap=ListedColormap(ramp), vmin=-1.5, vmax=layers + 0.5)
        strips[x].set_title(name, fontsize=9, fontweight="normal")
        strips[x].set_yticks([])
        strips[x].grid(False)
    ax.set(xlabel="layers", ylabel="tokens that a token depends on", xticks=range(layers + 1), ylim=(0, 1.03))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    style.name_ends(ax, ends)
    strips[-1].set_xlabel(f"tokens, coloured by when token {n // 2} first depends on them")
    bar = right.colorbar(image, ax=list(strips), ticks=range(-1, layers + 1), label="layers")
    bar.ax.set_yticklabels(["never", *map(str, range(layers + 1))])
    bar.ax.minorticks_off()
    told = ", ".join(text for *_, text, _ in ends)
    fig = style.finish(fig, f"Receptive field over {layers} layers on {n:,} tokens. After the last: {told}.")
    return fig, pd.DataFrame(shares).rename_axis("layers")


def _panels(many: int, most: int = MOST):
    columns = min(many, most)
    rows, wide = -(-many // columns), min(2.4, 7.2 / MOST)
    fig, axes = style.subplots(rows, columns, figsize=(wide * columns + 0.3, (wide + 0.75) * rows), squeeze=False)
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
    deepest = max(1, int(count.max()) if count.size and deepest is None else deepest or 1)
    image = np.asarray(_cmap(pattern, deepest)(count / deepest))[..., :3]
    if shade:
        image[(count == 0).all(1)] = to_rgb(UNCOVERED)
    ax.imshow(image, interpolation="nearest")
    n = len(count)
    ax.set(xticks=[0, n - 1], yticks=[0, n - 1])
    ax.grid(False)


def _key(fig, pattern: Pattern, most: int, empty: bool = False) -> None:
    """What the colours of `_grid` say: how often a key is seen, and that a row sees nothing."""
    counts = sorted({*range(1, min(most, 4) + 1), most} - {0})
    colors = {f"seen {c} times" if c > 1 else "seen once": _cmap(pattern, most)(c / most) for c in counts}
    colors |= {"a row that sees nothing": UNCOVERED} if empty else {}
    handles = [Patch(facecolor=color, label=words) for words, color in colors.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _cmap(pattern: Pattern, deepest: int = 1):
    """White for nothing; the pattern's colour for one; towards black up to `deepest`."""
    color = style.family_color(type(pattern).__name__)
    dark = tuple(0.35 * c for c in to_rgb(color))
    if deepest == 1:
        return LinearSegmentedColormap.from_list("count", [(0, "white"), (1, color)])
    return LinearSegmentedColormap.from_list("count", [(0, "white"), (1 / deepest, color), (1, dark)])


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
    if max(size for _, size, *_ in sizes) < 1.05 * min(size for _, size, *_ in sizes):
        sizes = [(*sizes[0][:2], f"all {len(sizes)} patterns", "#000000")]
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
    last = table[table.n == table.n.max()]
    ends = ", ".join(f"{r.pattern} {r.pairs:,} pairs and {binary(r.predicted_bytes)}" for r in last.itertuples())
    return style.finish(fig, f"Pairs and modelled bytes against N. At N = {table.n.max():,}: {ends}.")


def times(table: pd.DataFrame):
    """Every sample of `workbench.probes.timing.compare`, a line an alternative; the bar is the median."""
    fig, ax = style.subplots(figsize=(7, 1.0 + 0.4 * len(table)))
    for y, r in enumerate(table.itertuples()):
        color = style.COLORS["muted"] if r.Index == "A/A" else style.COLORS["Dilated"]
        ax.plot(r.samples_ms, [y] * len(r.samples_ms), "o", color=color, alpha=0.5, ms=6, mew=0)
        ax.plot(r.median_ms, y, "|", color="black", ms=20, mew=2)
    names = [f"{table.index[0]}, again (A/A)" if name == "A/A" else name for name in table.index]
    medians = [f"{style.number(ms)} ms" for ms in table.median_ms]
    ax.set_yticks(range(len(table)), [f"{n}: {ms}" for n, ms in zip(names, medians, strict=True)])
    ax.set(xlabel="time per call (ms)", xlim=(0, None), ylim=(len(table) - 0.5, -0.5))
    told = ", ".join(f"{n} {ms}" for n, ms in zip(names, medians, strict=True))
    return style.finish(fig, f"Median times: {told}.")


def attention_maps(sources: dict[str, Tensor], qk: dict[str, Tensor]):
    """Per source, its grid and, head by head, dense attention's weights from the token in the middle.

    sources: name -> (rows, cols, channels). qk: name -> (1, rows * cols, heads, head_dim), queries and keys at once.
    """
    many = next(iter(qk.values())).shape[2]
    fig, axes = style.subplots(len(sources), many + 1, figsize=(9.5, 1.95 * len(sources)), squeeze=False)
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
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
    bar = fig.colorbar(image, ax=list(axes.flat), ticks=[0, 1], shrink=0.7)
    bar.ax.set_yticklabels(["no weight", "the most\nin a panel"])
    return style.finish(
        fig,
        f"Dense attention's weights from the middle of each grid, {many} heads: {', '.join(sources)}. Darker is more.",
    )


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
        for r in table[table.source == source].itertuples():
            y = names.index(r.pattern)
            if r.head == heads[0]:
                ax.barh(y, r.density, height=0.62, color="#d9d9d9", zorder=1)
            look = {"ms": 4 + 2 * heads.index(r.head), "mfc": "none", "mec": style.family_color(r.family), "mew": 1.6}
            ax.plot(r.mass, y, "o", **look)
        ax.set(title=source, xlabel="share of pairs (bar), of weight (rings)", xlim=(0, 1.04))
        ax.xaxis.set_major_formatter(PercentFormatter(1))
        ax.grid(False, axis="y")
    axes[0, 0].set_yticks(range(len(names)), names)
    axes[0, 0].set_ylim(len(names) - 0.45, -0.6)
    rings = [
        Line2D([], [], color="#444444", marker="o", mfc="none", mew=1.6, ls="", ms=4 + 2 * x, label=f"head {h}")
        for x, h in enumerate(heads)
    ]
    fig.legend(handles=rings, loc="outside lower center", ncols=len(rings))
    told = "; ".join(f"{s}, {p}: {r.mass:.0%} kept for {r.density:.0%} of pairs" for (s, p), r in means.iterrows())
    return style.finish(fig, f"Share of dense attention's weight that each pattern keeps, beside its cost. {told}.")
