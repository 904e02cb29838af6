"""Pictures of several cards: the speed-up of each strategy, what each card does, and what many cards would give.

Each function draws from DataFrames alone (see `analysis.multicard` for the columns) and returns a Figure, whose label
is its alternative text.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from workbench.plots import style
from workbench.probes.timing import AA
from workbench.scaling.strategies import ONE, SHORT

# Paul Tol's medium-contrast scheme: colour-blind safe, and apart from the colours of patterns and of orderings.
COLORS = {
    "sequence": "#004488", "heads": "#6699CC", "context parallel": "#997700", "data parallel": "#994455",
    "distributed data parallel": "#EE99AA", ONE: "#000000",
}  # fmt: skip
MARKS = {"sequence": "o", "heads": "s", "context parallel": "D", "data parallel": "X", "distributed data parallel": "P"}
SCALINGS = {"strong": "strong: the same N on all ranks together", "weak": "weak: the same N per rank"}


def picture(path: str, machine: str = "h200x2") -> None:
    """Write the README's picture of several cards to `path`: speed-ups from the records of a machine kind."""
    from workbench.analysis import multicard

    rows = multicard.ok(multicard.recorded([machine])[0])
    rows = rows[rows["kind"].isin(multicard.KINDS)].sort_values("kind", key=lambda x: x.map(multicard.KINDS.index))
    first = rows.iloc[0]
    sizes = f"{first['dtype']}, {int(first['heads'])} heads x {int(first['head_dim'])}"
    style.save(speedups(rows), path, f"{int(rows['nproc'].max())} x {first['run_device']}, {sizes}")


def speedups(rows: pd.DataFrame, recorded: pd.DataFrame | None = None, most: Callable[[int], int] | None = None):
    """Speed-up over one device at the same N, with intervals: a column of panels for each pattern that some strategy
    ran, a row for each number of ranks and mode.

    rows, recorded: of `multicard.ok`; the recorded ones, of another machine, are drawn pale and hollow, with its name.
    most: the function of the number of ranks that gives the best speed-up possible here; drawn if below that number.
    """
    names = [x for x in COLORS if x != ONE and x in set(rows["strategy"])]
    names += sorted({*rows["strategy"]} - {*names, ONE, AA})
    drawn = rows[rows["strategy"].isin(names)]
    if drawn.empty:
        return style.blank("No way of using several ranks gave a right result here.")
    kinds = list(dict.fromkeys(drawn["kind"]))
    modes = [mode for mode in style.MODES if mode in set(drawn["mode"])]
    lines = [(world, mode) for world in sorted(set(drawn["nproc"])) for mode in modes]
    frames = [x for x in (recorded, rows) if x is not None and len(x)]
    widths = [2.1 if len({n for x in frames for n in x[x["kind"] == kind]["n"]}) > 1 else 1.5 for kind in kinds]
    fig, axes = style.subplots(
        len(lines), len(kinds), figsize=(1.3 + sum(widths), 1.2 + 2.6 * len(lines)), width_ratios=widths,
        squeeze=False, sharey="row", sharex="col",
    )  # fmt: skip
    words, handles = [], {}
    for place, kind in enumerate(kinds):
        lengths = sorted({int(n) for x in frames for n in x[x["kind"] == kind]["n"]})
        for ax, (world, mode) in zip(axes[:, place], lines, strict=True):
            every = [_of(x, kind, mode, world) for x in frames]
            if not any(x["strategy"].isin(names).any() for x in every):
                ax.text(0.5, 0.25, "no result", transform=ax.transAxes, ha="center", fontsize=9)
            _ideal(ax, world, most and most(world), labelled=place == 0)
            for some in every:
                pale = some is not every[-1]
                handles |= _lines(ax, some, names, lengths, pale)
                noise = some[some["strategy"] == AA]
                if len(noise) and not pale:
                    low, high = noise["speedup_low"].min(), noise["speedup_high"].max()
                    band = ax.axhspan(low, high, color="#777777", alpha=0.22, lw=0, zorder=0)
                    handles["one device against itself"] = band
            ax.set(xscale="log", ylim=(0, max(1.2 * world, 1.1 * every[-1]["speedup"].max())))
            last = every[-1][every[-1]["n"] == every[-1]["n"].max()]
            words += [f"{kind}, {style.MODES[mode]}, N = {r.n:,.0f}, {world:g} ranks, {r.strategy}: {r.speedup:.2f}"
                      for r in last.itertuples() if r.strategy in names]  # fmt: skip
        for ax in axes[:, place]:
            _lengths(ax, lengths)
        axes[-1, place].set_xlabel("N")
        axes[0, place].set_title(kind.replace(", ", ",\n"))
    for ax, (world, mode) in zip(axes[:, 0], lines, strict=True):
        ax.set_ylabel(f"{style.MODES[mode]}, {world:g} ranks:\nspeed-up over one device", fontsize=9)
    fig.legend(handles.values(), handles, loc="outside lower center", ncols=min(3, len(handles)), fontsize=9)
    return style.finish(fig, f"Speed-up over one device at the same N. At the longest: {'; '.join(words)}.")


def _of(rows: pd.DataFrame, kind: str, mode: str, world: int) -> pd.DataFrame:
    return rows[(rows["kind"] == kind) & (rows["mode"] == mode) & (rows["nproc"] == world)].sort_values("n")


def _ideal(ax, world: int, most: int | None, labelled: bool) -> None:
    ax.axhline(1, color="black", lw=0.8, zorder=1)
    ax.axhline(world, color="#444444", lw=1.2, ls=(0, (6, 3)), zorder=1)
    notes = {world: "ideal"}
    if most is not None and 1 < most < world:
        ax.axhline(most, color=style.COLORS["accent"], lw=1.2, ls=(0, (6, 3)), zorder=1)
        notes[most] = "what this machine allows"
    for y, note in notes.items() if labelled else ():
        look = {"xycoords": ("axes fraction", "data"), "fontsize": 8, "color": "#444444"}
        style.note(ax, note, (0.02, y), (0, 3), **look)


def _lines(ax, rows: pd.DataFrame, names: list[str], lengths: list[int], pale: bool) -> dict:
    """Draw each strategy's points, side by side at the same N. Returns {name: its mark in the legend}."""
    span, found = max(lengths) / min(lengths) if len(lengths) > 1 else 2, {}
    for x, name in enumerate(names):
        some = rows[rows["strategy"] == name]
        if some.empty:
            continue
        place = some["n"] * span ** (0.035 * (x - (len(names) - 1) / 2))
        ends = some["speedup"] - some["speedup_low"], some["speedup_high"] - some["speedup"]
        color = COLORS.get(name, "#555555")
        look = {"color": color, "marker": MARKS.get(name, "v"), "ms": 6, "lw": 1, "alpha": 0.55 if pale else 1}
        look |= {"markerfacecolor": "white"} if pale else {}
        ax.errorbar(place, some["speedup"], yerr=ends, elinewidth=1.5, capsize=2, **look)
        found[SHORT.get(name, name) + (f" · {style.device(some)}" if pale else "")] = Line2D([], [], **look)
    return found


def _lengths(ax, lengths: list[int]) -> None:
    """Ticks at the lengths that were measured, as far as there is room for labels."""
    low, high = min(lengths), max(lengths)
    edge = max(1.4, (high / low) ** 0.12)
    ax.set_xlim(low / edge, high * edge)
    style.log_ticks(ax.xaxis, style.length, style.apart(lengths, max(1.25, (high / low) ** 0.3)))


def cards(rows: pd.DataFrame, what: str = "card"):
    """For each strategy and card a bar of its memory at the peak, of what it sends, and of its share of time computing.

    rows: of `multicard.ok`, of one case and one number of ranks. what: the word for a card in the legend and text.
    """
    order = [*COLORS, *sorted({*rows["strategy"]} - {*COLORS})]
    rows = rows[rows["strategy"] != AA].set_index("strategy")
    names = [x for x in order if x in rows.index]
    if not names:
        return style.blank("Nothing gave a right result here.")
    world = int(rows["nproc"].iloc[0])
    shades = sns.color_palette(style.SEQUENTIAL, world + 1)[1:]
    panels = {"peak_by_card": ("at the peak (MiB)", 2**20), "sent_bytes": ("sent (MiB)", 2**20),
              "busy": ("computing, of the time", 1)}  # fmt: skip
    high = 0.8 / world
    fig, axes = style.subplots(1, 3, figsize=(10, 1.5 + len(names) * (0.3 + 0.13 * world)), sharey=True)
    words = []
    for ax, (column, (label, unit)) in zip(axes, panels.items(), strict=True):
        largest = 0
        for y, name in enumerate(names):
            values = rows[column][name]
            if not isinstance(values, list):
                ax.text(0, y, "  not counted", va="center", fontsize=8, color="#777777")
                continue
            values = [x / unit if x is not None else np.nan for x in values + [0] * (world - len(values))]
            places = [y + high * (card - (world - 1) / 2) for card in range(world)]
            bars = ax.barh(places, values, high, color=shades, lw=0)
            ax.bar_label(bars, [_told(x, column) for x in values], padding=2, fontsize=8)
            largest = max(largest, *np.nan_to_num(values))
            words.append(f"{name}, {label}: {', '.join(_told(x, column) for x in values)}")
        ax.set(xlabel=label, xlim=(0, 1.25 * largest or 1))
        # a label at the right end would touch the next panel's
        ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], prune="upper"))
        ax.grid(False, axis="y")
    axes[0].set(yticks=range(len(names)), yticklabels=[SHORT.get(x, x) for x in names])
    axes[0].invert_yaxis()
    axes[2].set(xlim=(0, max(1.2, 1.2 * largest)), xticks=(0, 0.25, 0.5, 0.75, 1))
    axes[2].xaxis.set_major_formatter(PercentFormatter(1))
    patches = [Patch(color=shade, label=f"{what} {card}") for card, shade in enumerate(shades)]
    fig.legend(handles=patches, loc="outside lower center", ncols=world, fontsize=9)
    first = rows.iloc[0]
    axes[0].set_title(f"{first['kind']}, {style.MODES[first['mode']]}, N = {int(first['n']):,}")
    return style.finish(fig, f"By {what}, {first['kind']}, N = {int(first['n']):,}. {'; '.join(words)}.")


def curves(modelled: pd.DataFrame, measured: pd.DataFrame | None = None):
    """Efficiency, speed-up over the number of ranks, against the number of ranks: bands are modelled, markers measured.

    modelled: of `multicard.curves`; a band goes from the exchange hidden behind the computation (the line) down to none
    of it hidden. measured: of `multicard.efficiency`.
    """
    if modelled.empty:
        return style.blank("No forward of one device ran: there is no rate from which to model many.")
    fig, axes = style.subplots(1, 2, figsize=(9.6, 4.4), sharey=True)
    handles, words = {}, []
    for ax, (scaling, title) in zip(axes, SCALINGS.items(), strict=True):
        for shift, (kind, line) in enumerate(modelled[modelled["scaling"] == scaling].groupby("kind", sort=False)):
            color = style.family_color(line["pattern_spec"].iloc[0]["pattern"])
            line = line[line["status"] == "ok"].sort_values("world")
            ax.plot(line["world"], line["efficiency"], ls="--", lw=1.6, color=color)
            ax.fill_between(line["world"], line["least"], line["efficiency"], color=color, alpha=0.15, lw=0)
            handles[f"{kind}, modelled"] = Line2D([], [], ls="--", lw=1.6, color=color)
            words += [f"{kind}, {scaling}, {r.world} ranks: {r.least:.0%} to {r.efficiency:.0%} modelled"
                      for r in line.tail(1).itertuples()]  # fmt: skip
            if measured is None:
                continue
            points = measured[(measured["kind"] == kind) & (measured["scaling"] == scaling)]
            for world, some in points.groupby("world"):
                place = [world * 1.09 ** (x + shift) for x in range(len(some))]  # beside those of other patterns
                ends = some["efficiency"] - some["low"], some["high"] - some["efficiency"]
                ax.errorbar(place, some["efficiency"], yerr=ends, fmt="o", ms=6, capsize=2, color=color)
                handles[f"{kind}, measured"] = Line2D([], [], ls="", marker="o", color=color)
                words += [f"{kind}, {scaling}, {world} ranks: {x:.0%} measured" for x in some["efficiency"]]
        ax.axhline(1, color="#444444", lw=1.2, ls=(0, (6, 3)))
        ax.set(xscale="log", title=title, xlabel="ranks", ylim=(0, 1.15))
        ax.title.set_fontsize(10)
        rank_ticks(ax, modelled["world"])
    axes[0].set_ylabel("speed-up over the number of ranks")
    axes[0].yaxis.set_major_formatter(PercentFormatter(1))
    order = sorted(handles, key=lambda x: ("measured" in x, list(handles).index(x)))
    fig.legend([handles[x] for x in order], order, loc="outside lower center", ncols=3, fontsize=9)
    return style.finish(fig, f"Speed-up over the number of ranks. {'; '.join(words)}.")


def rank_ticks(ax, worlds) -> None:
    """Ticks at powers of two, as many as there is room for."""
    powers = [1 << x for x in range(int(max(worlds)).bit_length()) if min(worlds) <= 1 << x]
    style.log_ticks(ax.xaxis, "{:,.0f}".format, powers[:: -(-len(powers) // 7)])


def _told(x: float, column: str) -> str:
    """A number beside a bar."""
    return "?" if np.isnan(x) else f"{x:.0%}" if column == "busy" else style.number(round(x, 2))
