"""Pictures of speed: time against N, calls beside each other, and where sparse attention pays.

Each function draws from DataFrames alone (see `probes.speed.table` and `probes.suite.rates` for the columns) and
returns a Figure with its alternative text.
"""

import re
from collections.abc import Mapping

import numpy as np
import pandas as pd

from workbench.harness.narrate import MODES, number, title
from workbench.plots import style
from workbench.plots.orderings import color as color_of

LINES = {"cudnn": "-.", "flash": "--", "efficient": ":"}
KERNELS = {"fa4": "#1f4e79", "triton": style.COLORS["BlockSparse"], "flex": "#8a8a8a"}


def time_against_n(rows: pd.DataFrame, recorded: pd.DataFrame | None = None):
    """A panel a mode: milliseconds per call against N, both logarithmic; the bar is the 10-90 % range of the samples.

    `recorded` rows (another machine's, committed) are drawn pale with hollow markers. Lines are named at their ends.
    """
    modes = [mode for mode in MODES if mode in set(rows["mode"])]
    width = 7 if len(modes) == 1 else 9.5
    fig, axes = style.subplots(1, len(modes), figsize=(width, 4.6), sharey=True, squeeze=False)
    named = [(ax, _lines(ax, mode, rows, recorded)) for ax, mode in zip(axes[0], modes, strict=True)]
    for ax, ends in named:  # which share their limits
        style.name_ends(ax, ends)
    axes[0, 0].set_ylabel("time per call (ms)")
    return style.finish(fig, "Time per call of each pattern against N, logarithmic axes.")


def decoding(rows: pd.DataFrame, recorded: pd.DataFrame | None = None):
    """Milliseconds a token, and MiB held for it, against N; of `probes.decode.table`, `recorded` as above."""
    fig, axes = style.subplots(1, 2, figsize=(9.5, 4.6))
    frames = [x for x in (rows, recorded) if x is not None and len(x)]
    held = [x.assign(median_ms=m, samples_ms=[[y] for y in m]) for x in frames for m in [x["held_bytes"] / 2**20]]
    for ax, label, drawn in zip(axes, ("time per token (ms)", "keys and values (MiB)"), (frames, held), strict=True):
        ends = _lines(ax, "fwd", *drawn)
        ax.set(ylabel=label, title="")
        style.log_ticks(ax.yaxis, "{:,g}".format, subs=(1, 2, 5))
        style.name_ends(ax, ends)
    return style.finish(fig, "Time of a token and memory of its cache against N, logarithmic axes.")


def _lines(ax, mode: str, rows: pd.DataFrame, recorded: pd.DataFrame | None = None) -> list[tuple]:
    """Draw the lines of a mode; returns their ends, as `style.name_ends` takes them."""
    ends = []
    for frame, pale in ((recorded, True), (rows, False)):
        if frame is None or not len(frame):
            continue
        done = frame[(frame["status"] == "ok") & (frame["mode"] == mode)].sort_values("n")
        for (family, label, backend), line in done.groupby(["family", "label", "backend"], sort=False):
            color, look = style.family_color(family), style.family_look(family, pale)
            ax.plot(line["n"], line["median_ms"], LINES.get(backend, "-"), ms=5, **look)
            name = f"{label}, {title(backend)}" if family == "Dense" and backend != "cache" else label
            name = f"{name}, {style.device(line)}" if pale else name
            ends.append((line["n"].iloc[-1], line["median_ms"].iloc[-1], name, color))
            if not pale:
                low, high = np.transpose([np.quantile(s, [0.1, 0.9]) for s in line["samples_ms"]])
                ax.vlines(line["n"], low, high, color=color, alpha=0.5, linewidth=4)
    ax.set(xscale="log", yscale="log", xlabel="N (tokens)", title=MODES[mode])
    style.log_ticks(ax.xaxis, style.length, base=2, numticks=7)
    style.log_ticks(ax.yaxis, "{:,g}".format)
    return ends


def each_call(table: pd.DataFrame, notes: Mapping[str, str] | None = None):
    """Every sample of `probes.timing.compare`, a line an alternative, its colour that of its order if it is one; the
    bar is the median. notes: name of an alternative -> what is said of it beside its median."""
    fig, ax = style.subplots(figsize=(7, 1.0 + 0.4 * len(table)))
    names, first = [], table.index[0]
    for y, row in enumerate(table.itertuples()):
        of = first if row.Index == "A/A" else row.Index
        ax.plot(row.samples_ms, [y] * len(row.samples_ms), "o", color=color_of(of), alpha=0.5, ms=6, mew=0)
        ax.plot(row.median_ms, y, "|", color="black", ms=20, mew=2)
        again, note = ", again (A/A)" * (row.Index == "A/A"), f",\n{notes[of]}" if notes else ""
        names.append(f"{title(of)}{again}: {number(row.median_ms)} ms{note}")
    ax.set_yticks(range(len(table)), names)
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.set(xlabel="time per call (ms)", xlim=(0, None), ylim=(len(table) - 0.5, -0.5))
    return style.finish(fig, f"The times of every call, against {title(first)}: {'; '.join(names)}.")


def break_even(rows: pd.DataFrame):
    """Speed relative to dense attention against the share of blocks that is kept, both logarithmic: fewer pairs at the
    same rate are a straight line. Bars are 95 % intervals."""
    fig, ax = style.subplots(figsize=(7, 4))
    sparse = rows[~rows["name"].isin(["dense", "A/A"])].sort_values("sparsity")
    noise = rows[rows["name"] == "A/A"]
    x = 1 - sparse["sparsity"]
    ends = np.array([1.1, x.min() / 1.3])
    ax.axhspan(noise["speedup_low"].min(), noise["speedup_high"].max(), color="#777777", alpha=0.4, linewidth=0)
    ax.axhline(1, color="black", linewidth=1)
    ax.plot(ends, 1 / ends, color=style.COLORS["muted"], linestyle="--")
    bars = style.whiskers(sparse["speedup"], sparse["speedup_low"], sparse["speedup_high"])
    ax.errorbar(x, sparse["speedup"], yerr=bars, color=style.COLORS["BlockSparse"], marker="^", capsize=3)
    ax.set(xscale="log", yscale="log", xlim=ends, xlabel="blocks kept", ylabel="speed relative to dense")
    style.log_ticks(ax.xaxis, lambda x: f"{100 * x:.3g}%", subs=(1, 2, 5))
    style.log_ticks(ax.yaxis, "{:g}x".format, subs=(0.5, 1, 2, 5))
    places = [(ends[1], 1 / ends[1], "fewer pairs,\nsame rate", "#666666")]
    places.append((ends[1], 1, "dense against itself", "#555555"))
    places += [(x[at], sparse.loc[at, "speedup"], "measured", style.COLORS["BlockSparse"]) for at in x.index[-1:]]
    style.name_ends(ax, places)
    return style.finish(fig, "Speed relative to dense attention against the share of blocks that is kept.")


def against_dense(rows: pd.DataFrame):
    """A panel a mode: each LongNet group's rate over that of dense attention of its sizes, in the same run.

    rows: of `probes.suite.rates`. The colour is the kernel, the marker is N.
    """
    ours = rows[rows["suite"].str.startswith("longnet") & (rows["label"] != "A/A") & (rows["label"] != rows["against"])]
    modes, names = [mode for mode in MODES if mode in set(ours["mode"])], sorted(set(ours["what"]))
    fig, axes = style.subplots(1, len(modes), figsize=(9.5, 0.5 * len(names) + 1.6), sharey=True, squeeze=False)
    markers = dict(zip(sorted(set(ours["n"])), "os^D", strict=False))
    for ax, mode in zip(axes[0], modes, strict=True):
        for row in ours[ours["mode"] == mode].itertuples():
            y = names.index(row.what) + 0.17 * (2 * list(markers).index(row.n) - len(markers) + 1)
            color = KERNELS.get(row.backend, "#555555")
            ax.plot(row.of_dense, y, markers[row.n], markersize=7, color=color, zorder=3)
        ax.axvline(1, color="black", linewidth=1)
        lines = [re.sub(r", (?=\d)", "\n", name) for name in names]
        ax.set(yticks=range(len(names)), yticklabels=lines, title=MODES[mode], ylim=(len(names) - 0.5, -0.5))
        ax.set(xlabel="rate per pair, relative to dense", xlim=(0, max(1.15, 1.06 * ours["of_dense"].max())))
    looks = {title(x): {"marker": "o", "color": KERNELS.get(x, "#555555")} for x in dict.fromkeys(ours["backend"])}
    looks |= {f"N = {style.length(n)}": {"marker": marker, "color": "#555555"} for n, marker in markers.items()}
    style.key(fig, looks, len(looks))
    return style.finish(fig, "Rate over attended pairs, relative to dense attention's, by LongNet setting and mode.")


def times_faster(rows: pd.DataFrame):
    """Dots on a logarithmic axis: the speed of each alternative relative to dense attention, with the 95% interval.

    rows: of `probes.suite.rates`, groups whose baseline is dense attention of the same N. The grey mark is what the
    pairs alone would give. A gain that dense attention against itself reaches, too, is named as noise.
    """
    compared = set(rows.loc[rows["label"] == rows["against"], "suite"])
    some = rows[rows["suite"].isin(compared) & (rows["label"] != "A/A") & (rows["label"] != rows["against"])]
    if some.empty:
        return style.blank("Dense attention was not timed beside these.")
    some = some.sort_values(["what", "mode", "n"], kind="stable")
    fig, ax = style.subplots(figsize=(9.5, 0.33 * len(some) + 0.5 * some["suite"].nunique() + 1))
    y, places, labels, across = 0.0, [], [], ax.get_yaxis_transform()
    for suite, group in some.groupby("suite", sort=False):
        dense = rows[(rows["suite"] == suite) & (rows["label"] == rows["against"])].iloc[0]
        ideal, first = dense["pairs"] / group["pairs"].iloc[0], group.iloc[0]
        head = f"{first['what']}\n{MODES[first['mode']]}, N = {style.length(first['n'])}"
        style.note(ax, head, (0, y), (-80, 0), xycoords=across, weight="bold", va="center",
                   backgroundcolor="white", in_layout=False)  # fmt: skip
        ax.plot([ideal, ideal], [y + 0.6, y + len(group) + 0.4], color=style.COLORS["muted"], linewidth=3)
        for row in group.itertuples():
            y += 1
            noise = " (noise)" * row.in_noise
            ends = style.whiskers(np.array([row.speedup]), row.speedup_low, row.speedup_high)
            ax.errorbar(row.speedup, y, xerr=ends, color=KERNELS.get(row.backend, "#555555"), marker="o", capsize=3)
            ax.annotate(f"{row.speedup:.1f}x{noise}", (1.02, y), xycoords=across, fontsize=9, va="center")
            places.append(y)
            labels.append(title(row.backend) + ", CUDA graph" * (row.graph is True))
        y += 1.6
    ax.axvline(1, color="black", linewidth=1)
    ax.set(xscale="log", yticks=places, yticklabels=labels, ylim=(y - 0.7, -0.7), xlabel="speed relative to dense")
    ax.set_xlim(min(0.8, 0.8 * some["speedup_low"].min()))
    style.log_ticks(ax.xaxis, "{:g}x".format, subs=(1, 2, 5))
    return style.finish(fig, "Speed relative to dense attention of the same length, a line per alternative.")


def picture(path: str, kind: str = "h200x1") -> None:
    """The README's picture: time against N from the records committed for a machine kind, written to `path`."""
    from workbench.probes import speed

    rows, _ = speed.recorded(kind)
    first = rows.iloc[0]
    fig = time_against_n(rows)
    for ax, mode in zip(fig.axes, [mode for mode in MODES if mode in set(rows["mode"])], strict=True):
        done = rows[(rows["status"] == "ok") & (rows["mode"] == mode) & (rows["n"] == rows["n"].max())]
        done = done.sort_values("median_ms").drop_duplicates("family").set_index("family")
        (dense, dilated), at = done.loc[["Dense", "Dilated"], "median_ms"], done["n"].iloc[0]
        ax.annotate("", (at, dilated), (at, dense), arrowprops={"arrowstyle": "<->", "color": "#444444"})
        by = title(done.loc["Dense", "backend"])
        text = f"dilated at {style.length(at)}:\n{dense / dilated:.0f} times as fast\nas dense\n({by})"
        ax.text(0.04, 0.96, text, transform=ax.transAxes, va="top", fontsize=11, weight="bold")
    style.save(fig, path, "{run_device}, {dtype}, {heads:g} heads x {head_dim:g}".format(**first))
