"""Pictures of several cards: the speed-up of each strategy, the link, what many would give, and what moves between
ranks by the order of a grid's cells.

Each function draws from DataFrames, plans and orderings alone (see `analysis.multicard` for the columns) and returns a
Figure, whose label is its alternative text.
"""

import itertools
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.ticker import FuncFormatter, PercentFormatter

from workbench.distributed import Plan, Shards
from workbench.harness.narrate import MODES, title
from workbench.patterns import Neighborhood
from workbench.plots import orderings, style
from workbench.probes.timing import AA
from workbench.scaling import link
from workbench.scaling.strategies import ONE, SHORT

# After Paul Tol: colour-blind safe, dark enough on white, and apart from the colours of patterns and of orderings.
COLORS = {
    "sequence": "#004488", "heads": "#4A7FB5", "context parallel": "#997700", "data parallel": "#882255",
    "distributed data parallel": "#CC6677", ONE: "#000000",
}  # fmt: skip
MARKS = {"sequence": "o", "heads": "s", "context parallel": "D", "data parallel": "X", "distributed data parallel": "P"}
SCALINGS = {"strong": "the same N on all ranks together", "weak": "the same N on each rank"}


def picture(path: str, machine: str = "h200x2") -> None:
    """Write the README's picture of several cards to `path`: speed-ups from the records of a machine kind."""
    from workbench.analysis import multicard

    rows = multicard.ok(multicard.recorded([machine]).rows)
    rows = rows[rows["kind"].isin(multicard.KINDS)].sort_values("kind", key=lambda x: x.map(multicard.KINDS.index))
    first, ours = rows.iloc[0], rows[rows["strategy"] == "sequence"]
    best = ours[ours["kind"] == "longnet-geometric"].nlargest(1, ["n", "speedup"]).iloc[0]
    said = f"LongNet, {style.length(best['n'])} tokens, {MODES[best['mode']]}: {best['speedup']:.2f} times"
    sizes = f"{first['dtype']}, {int(first['heads'])} heads x {int(first['head_dim'])}"
    over = f"{int(rows['nproc'].max())} x {style.device(rows)} against one"
    style.save(speedups(rows), path, f"{over}. {said}. ({sizes})")


def speedups(rows: pd.DataFrame):
    """Speed-up over one device at the same N, with intervals: a line for each pattern and N; panels by number of ranks,
    one below the other, and by mode. The grey box is one device against itself; at the right, the number of "sequence".

    rows: of `multicard.ok`.
    """
    there = set(rows["strategy"]) - {ONE, AA}
    names = [x for x in COLORS if x in there] + sorted(there - {*COLORS})
    drawn = rows[rows["strategy"].isin(names)]
    if drawn.empty:
        return style.blank("No way of using several ranks gave a right result here.")
    kinds = list(dict.fromkeys(drawn["kind"]))
    cases = sorted({*drawn[["kind", "n"]].itertuples(index=False, name=None)}, key=lambda x: (kinds.index(x[0]), x[1]))
    grid = worlds, modes = sorted(set(drawn["nproc"])), [mode for mode in MODES if mode in set(drawn["mode"])]
    size = 2.2 + 3.7 * len(modes), 0.4 + (0.9 + 0.42 * len(cases)) * len(worlds)
    fig, axes = style.subplots(*map(len, grid), figsize=size, squeeze=False, sharey=True)
    for ax, (world, mode) in zip(axes.flat, itertools.product(*grid), strict=True):
        of_panel = rows[(rows["nproc"] == world) & (rows["mode"] == mode)]
        for y, (kind, n) in enumerate(cases):
            _line(ax, y, of_panel[(of_panel["kind"] == kind) & (of_panel["n"] == n)], names)
        ax.axvline(world, color="#444444", lw=1.2, ls=(0, (6, 3)), zorder=1)
        style.note(ax, "ideal", (world, len(cases) - 0.6), (-3, 0), ha="right", fontsize=9, color="#444444")
        ax.axvline(1, color="#888888", lw=1, zorder=0)
        ax.set(xlim=(0, 1.28 * world), xticks=[x * world / 4 for x in range(5)], xlabel="speed relative to one device")
        ax.grid(False, axis="y")
        ranks = "cards" if str(of_panel["device"].iloc[0]).startswith("cuda") else "ranks"
        ax.set_title(f"{MODES[mode]}, {world:g} {ranks}")
    axes[0, 0].set_yticks(range(len(cases)), [f"{title(kind)}, {style.length(n)}" for kind, n in cases])
    axes[0, 0].set_ylim(len(cases) - 0.5, -0.5)
    words = SHORT | {"sequence": "sequence (in numbers at the right)"}
    looks = {words.get(x, x): {"color": COLORS.get(x, "#555555"), "marker": MARKS.get(x, "v")} for x in names}
    itself = {"one device against itself": {"marker": "s", "ms": 11, "color": "#777777", "alpha": 0.25}}
    style.key(fig, looks | (itself if AA in set(rows["strategy"]) else {}), 2)
    return style.finish(fig, "Speed relative to one device at the same N, for each way of using several.")


def _line(ax, y: int, rows: pd.DataFrame, names: list[str]) -> None:
    """One case: a mark for each strategy, a little apart, and the box of one device against itself."""
    by = rows.drop_duplicates("strategy", keep="last").set_index("strategy")
    if AA in by.index:
        low, high = by.loc[AA, ["speedup_low", "speedup_high"]]
        ax.barh(y, high - low, 0.8, left=low, color="#777777", alpha=0.25, lw=0, zorder=0)
    for x, name in enumerate(name for name in names if name in by.index):
        it, place = by.loc[name], y + 0.13 * (x - (len(names) - 1) / 2)
        ends = style.whiskers(it[["speedup"]], it["speedup_low"], it["speedup_high"])
        look = {"color": COLORS.get(name, "#555555"), "marker": MARKS.get(name, "v"), "ms": 6, "ls": ""}
        ax.errorbar(it["speedup"], place, xerr=ends, elinewidth=1.5, capsize=2, **look)
    at = {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": 9}
    if "sequence" in by.index:
        ax.text(1, y, f"{by.loc['sequence', 'speedup']:.2f}", color=COLORS["sequence"], ha="right", **at)
    elif by.empty:
        ax.text(0.02, y, "not measured", color="#666666", bbox={"color": "white", "pad": 1}, **at)


def curves(modelled: pd.DataFrame, measured: pd.DataFrame):
    """Efficiency, speed-up over the number of ranks, against the number of ranks: lines are modelled, markers measured.

    modelled: of `many_ranks.curves`; a line takes what is computed and what moves one after the other, and the band
    above it goes to where all that moves is hidden. measured: of `many_ranks.efficiency`.
    """
    if modelled.empty:
        return style.blank("No forward of one device ran on enough tokens: there is no rate from which to model many.")
    fig, axes = style.subplots(1, 2, figsize=(9.6, 3.8))
    specs = modelled.drop_duplicates("kind").set_index("kind")["pattern_spec"]
    colors = specs.map(lambda spec: style.family_color(spec["pattern"]))
    for ax, (scaling, words) in zip(axes, SCALINGS.items(), strict=True):
        for shift, (kind, color) in enumerate(colors.items()):
            line = modelled[(modelled["kind"] == kind) & (modelled["scaling"] == scaling)].sort_values("world")
            ax.plot(line["world"], line["efficiency"], ls="--", lw=1.6, color=color)
            ax.fill_between(line["world"], line["efficiency"], line["most"], color=color, alpha=0.15, lw=0)
            points = measured[(measured["kind"] == kind) & (measured["scaling"] == scaling)]
            place = points["world"] * 1.08**shift  # beside those of other patterns
            ends = style.whiskers(points["efficiency"], points["low"], points["high"])
            ax.errorbar(place, points["efficiency"], yerr=ends, fmt="o", ms=6, capsize=2, color=color)
        ax.axhline(1, color="#444444", lw=1.2, ls=(0, (6, 3)))
        ax.set(xscale="log", title=f"{scaling}: {words}", xlabel="ranks", ylim=(0, 1.15), ylabel="speed-up / ranks")
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        style.log_ticks(ax.xaxis, "{:,.0f}".format, base=2, numticks=7)
    looks = {title(kind): {"ls": "--", "lw": 1.6, "color": color} for kind, color in colors.items()}
    style.key(fig, looks | ({"measured": {"marker": "o", "color": "#555555"}} if len(measured) else {}), 2)
    return style.finish(fig, "Speed-up over the number of ranks: lines are modelled, markers measured.")


def messages(links: Mapping[str, pd.DataFrame]):
    """Bandwidth against the size of a message: measured markers with the range of all samples, the fit, and what bounds
    it, the latency for short messages and the bandwidth for long ones. links: {name: rows of `link.measure`}."""
    (fig, ax), looks = style.subplots(figsize=(4.6, 3.8)), {}
    for (name, rows), color in zip(links.items(), ("#0072B2", "#D55E00", "#009E73"), strict=False):
        rates, rows = link.fit(rows), rows[rows["stage"].eq("link") & rows["status"].eq("ok")]
        size, each = rows["message_bytes"].to_numpy(float), rows["samples_ms"].tolist()
        speed = rows["bytes_per_second"].to_numpy(float) / 1e9
        least, most = (size / np.array([end(x) for x in each]) / 1e6 for end in (max, min))
        ax.errorbar(size, speed, yerr=style.whiskers(speed, least, most), fmt="o", ms=6, capsize=2, color=color)
        looks[name if rates is None else f"{name}: {rates.bytes_per_second / 1e9:.3g} GB/s"] = color
        if rates is None:
            continue
        at = np.geomspace(size.min() / 2, size.max() * 4, 60)
        ax.plot(at, at / rates.message_s(at) / 1e9, color=color, lw=1.6)
        top = rates.bytes_per_second / 1e9
        ax.axhline(top, color=color, lw=1, ls=":")
        if rates.latency_s > 0:
            short = at[at / rates.latency_s / 1e9 < top]
            ax.plot(short, short / rates.latency_s / 1e9, color=color, lw=1, ls=":")
    ax.set(xscale="log", yscale="log", xlabel="bytes that each rank sends", ylabel="GB/s")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    sizes = sorted({int(x) for rows in links.values() for x in rows[rows["stage"].eq("link")]["message_bytes"]})
    style.log_ticks(ax.xaxis, lambda x: f"{x / 2**20:g} MiB" if x >= 1 << 20 else f"{x / 2**10:g} KiB", sizes)
    style.key(fig, looks, 1)
    return style.finish(fig, f"Bandwidth against message size, measured and fitted: {', '.join(links)}.")


def borders(rows: pd.DataFrame):
    """For each order of a 2-D neighborhood's cells, against the number of ranks: the bytes that a forward moves, and
    the rows that a rank gets over those that it holds. rows: of `multicard.borders`."""
    rows = rows.assign(mib=rows["bytes"] / 2**20)
    fig, axes = style.subplots(1, 2, figsize=(9.4, 3.6))
    titles = {"mib": "MiB moved, all ranks together", "halo": "rows that a rank gets, over those it holds"}
    for ax, (column, words) in zip(axes, titles.items(), strict=True):
        for name, line in rows.groupby("order", sort=False):
            look = {"color": orderings.color(name), "marker": orderings.MARKERS.get(name, "o"), "ms": 5}
            ax.plot(line["world"], line[column], **look)
            style.note(ax, title(name), (line["world"].iloc[-1], line[column].iloc[-1]), (0, 6), ha="right",
                       color=orderings.color(name))  # fmt: skip
        ax.set(xscale="log", yscale="log", xlabel="ranks", title=words)
        ax.margins(y=0.12)  # room for the names
        style.log_ticks(ax.xaxis, "{:,.0f}".format, base=2, numticks=7)
        style.log_ticks(ax.yaxis, "{:,g}".format, subs=(1, 2, 5), numticks=15)
    axes[1].axhline(1, color="#666666", lw=0.8)
    return style.finish(fig, "Bytes that a forward moves against the number of ranks, a line per order of the cells.")


def shards(orders, world: int, radius: int):
    """A panel for each ordering of a 2-D grid: the shards, that of the rank in the middle in full colour, and the cells
    that it gets. orders: of `workbench.orderings`, of one shape; radius: of the neighborhood."""
    rank = world // 2
    fig, axes = style.subplots(1, len(orders), figsize=(2.25 * len(orders) + 0.1, 3.6), squeeze=False)
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
            lines, one, other = ((ax.hlines, y, x), (ax.vlines, x, y))[axis]
            lines(one, other - 0.5, other + 0.5, color="#b5b5b5", lw=0.5)
        ax.set(title=f"{title(order.name)}: gets {got.sum():,}\nfor {(owner == rank).sum():,} of its own",
               xticks=[], yticks=[])  # fmt: skip
        ax.grid(False)
    colors = {f"rank {rank}, {title(order.name)}": orderings.color(order.name) for order in orders}
    colors[f"cells of others that it needs, radius {radius}"] = style.COLORS["accent"]
    style.key(fig, colors | {"other ranks, in two greys": "#ededed"}, 1)
    return style.finish(fig, f"Shards of a grid on {world} ranks, and the cells that rank {rank} gets, by order.")
