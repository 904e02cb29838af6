"""Pictures of speed: time against N, the rate beside the device's ceiling, and where sparse attention pays.

Each function draws from DataFrames alone (see `probes.speed.table` for the columns) and returns a Figure with its
alternative text.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator

from workbench.harness.narrate import first_mode
from workbench.plots import style
from workbench.plots.style import MARKERS, MODES

LINES = {"cudnn": "-", "sdpa": "-", "flash": "--", "efficient": ":"}


def time_against_n(rows: pd.DataFrame, recorded: pd.DataFrame | None = None):
    """A panel a mode: milliseconds a call against N, both logarithmic; the bar is the 10-90 % range of the samples.

    `recorded` rows (another machine's, committed) are drawn pale with hollow markers.
    """

    def draw(ax, line, pale):
        samples = [np.quantile(s, [0.1, 0.9]) for s in line["samples_ms"]]
        _line(ax, line, line["median_ms"], pale)
        if not pale:
            low, high = np.transpose(samples)
            ax.vlines(line["n"], low, high, color=style.family_color(line["family"].iloc[0]), alpha=0.5, linewidth=4)

    fig = _panels(rows, recorded, draw, "time per call (ms)")
    slow = _last(rows)
    ends = ", ".join(f"{r.label} {r.median_ms:,.1f} ms" for r in slow.itertuples()) or "nothing ran"
    return style.finish(fig, f"Time per call against N, logarithmic axes. At the longest N: {ends}.")


def rate(rows: pd.DataFrame, ceilings: dict, recorded: pd.DataFrame | None = None, recorded_ceilings=None):
    """A panel a mode: TFLOP/s over attended pairs against N, and the measured matmul ceiling of the dtype as a line."""

    def draw(ax, line, pale):
        _line(ax, line, line["tflops"], pale)

    fig = _panels(rows, recorded, draw, "TFLOP/s over attended pairs")
    for ax in fig.axes:
        for best, frame, color in ((ceilings, rows, "#444444"), (recorded_ceilings, recorded, "#aaaaaa")):
            if best is not None and frame is not None and len(frame):
                dtype = frame["dtype"].iloc[0]
                top = best["matmul_tflops"].get(dtype)
                if top is None:
                    continue
                ax.axhline(top, color=color, linewidth=1.2, linestyle=(0, (6, 3)))
                text = f"{dtype} matmul here" if frame is rows else f"{dtype} matmul, {style.device(frame)}"
                look = {"fontsize": 8, "color": color, "bbox": {"color": "white", "alpha": 0.8, "pad": 1}}
                style.note(ax, text, (0.01, top), (0, 4), xycoords=("axes fraction", "data"), **look)
        ax.margins(y=0.15)
    ends = ", ".join(f"{r.label} {r.tflops:.3g}" for r in _last(rows).itertuples()) or "nothing ran"
    return style.finish(fig, f"Rate over attended pairs against N in TFLOP/s. At the longest N: {ends}.")


def break_even(rows: pd.DataFrame):
    """Speed-up over the fastest dense kernel against sparsity, its 95% interval, and what the pairs alone promise."""
    fig, ax = style.subplots(figsize=(6.4, 4))
    sparse = rows[~rows["name"].isin(["dense", "A/A"])].sort_values("sparsity")
    noise = rows[rows["name"] == "A/A"]
    x = sparse["sparsity"] * 100
    ax.axhline(1, color="black", linewidth=1)
    band = {"color": "#777777", "alpha": 0.5, "linewidth": 0, "label": "dense against itself"}
    ax.axhspan(noise["speedup_low"].min(), noise["speedup_high"].max(), **band)
    ax.plot(x, sparse["ideal"], color=style.COLORS["muted"], linestyle="--", label="fewer pairs, same rate")
    ends = sparse["speedup"] - sparse["speedup_low"], sparse["speedup_high"] - sparse["speedup"]
    color = style.COLORS["BlockSparse"]
    ax.errorbar(x, sparse["speedup"], yerr=ends, color=color, marker="^", capsize=3, label="measured, 95% interval")
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(0.5, 1, 2, 5)))
    style.log_ticks(ax.yaxis, "{:g}x".format)
    ax.set(xlabel="sparsity (% of block pairs left out)", ylabel="speed relative to dense")
    ax.set_title(f"N = {rows['n'].iloc[0]:,}: when leaving blocks out pays")
    ax.legend(loc="upper left")
    points = ", ".join(f"{r.sparsity:.0%}: {r.speedup:.2f}x" for r in sparse.itertuples())
    return style.finish(fig, f"Speed-up over dense attention against sparsity: {points}.")


def against_dense(rows: pd.DataFrame):
    """A panel a mode: each LongNet group's rate over that of dense attention of its sizes, in the same run.

    rows: of `probes.suite.rates`, those whose `suite` begins with "longnet".
    """
    ours = rows[(rows["label"] == "workbench") & rows["suite"].str.startswith("longnet")]
    modes = [mode for mode in MODES if mode in set(ours["mode"])]
    fig, axes = style.subplots(1, len(modes), figsize=(4.8 * len(modes), 3.9), sharey=True, squeeze=False)
    words = []
    for ax, mode in zip(axes[0], modes, strict=True):
        chosen = ours[ours["mode"] == mode].sort_values(
            ["causal", "head_dim", "heads"], ascending=[False, False, False]
        )
        names = [_sizes(row) for row in chosen.itertuples()]
        places = {name: y for y, name in enumerate(dict.fromkeys(names))}
        for n, marker, color in zip(sorted(set(chosen["n"])), "os^", ("#9ecae1", style.COLORS["Dilated"], "black"),
                                    strict=False):  # fmt: skip
            some = chosen["n"] == n
            y = [places[name] for name, keep in zip(names, some, strict=True) if keep]
            label = f"N = {style.length(n)}"
            ax.scatter(chosen["of_dense"][some], y, marker=marker, s=60, color=color, label=label, zorder=3)
        ax.axvline(1, color="black", linewidth=1)
        most = max(1.15, 1.05 * ours["of_dense"].max())
        ax.set(yticks=list(places.values()), yticklabels=list(places), xlim=(0, most), title=MODES[mode])
        ax.set_xlabel("rate over attended pairs / dense cuDNN's at 16K")
        words += [f"{_sizes(r)}, {MODES[mode]}, N = {style.length(r.n)}: {r.of_dense:.2f}" for r in chosen.itertuples()]
    axes[0, 0].legend(loc="lower left")
    return style.finish(fig, "Rate over attended pairs against dense attention's: " + "; ".join(words) + ".")


def times_faster(rows: pd.DataFrame):
    """Bars: how many times faster than dense attention each alternative is, with the 95% interval, a panel a group.

    rows: of `probes.suite.rates`, groups whose baseline is dense attention at the same N.
    """
    compared = set(rows.loc[rows["label"] == rows["against"], "suite"])
    names = [x for x in dict.fromkeys(rows.sort_values("n", kind="stable")["suite"]) if x in compared]
    if not names:
        return style.blank("Dense attention was not timed beside these.")
    fig, axes = style.subplots(1, len(names), figsize=(2.6 * len(names) + 1, 3.6), squeeze=False)
    colors = {"fa4": "#1f4e79", "triton": style.COLORS["BlockSparse"], "flex": "#9a9a9a"}
    words = []
    for ax, name in zip(axes[0], names, strict=True):
        group = rows[(rows["suite"] == name) & (rows["label"] != "A/A") & (rows["label"] != rows["against"])]
        dense = rows[(rows["suite"] == name) & (rows["label"] == rows["against"])].iloc[0]
        ideal = dense["pairs"] / group["pairs"].iloc[0]
        ends = group["speedup"] - group["speedup_low"], group["speedup_high"] - group["speedup"]
        shade = [colors.get(x, style.COLORS["Dilated"]) for x in group["label"]]
        bars = ax.bar(group["label"].str.replace(", ", ",\n"), group["speedup"], yerr=ends, color=shade, capsize=3)
        ax.bar_label(bars, [_gained(r) for r in group.itertuples()], padding=2, fontsize=9)
        ax.axhline(ideal, color=style.COLORS["muted"], linestyle="--")
        look = {"xycoords": ("axes fraction", "data"), "fontsize": 8, "color": "#555555"}
        style.note(ax, f"pairs alone: {ideal:.1f}x", (0.02, ideal), (0, 3), **look)
        n = style.length(group["n"].iloc[0])
        ax.set_title(f"{group['pattern'].iloc[0]}, N = {n}\n{MODES[group['mode'].iloc[0]]}", fontsize=10)
        ax.set_ylim(0, 1.18 * max(ideal, group["speedup_high"].max()))
        ax.tick_params(axis="x", labelsize=9)
        words += [f"{name}, {r.label}: {_gained(r, 2)}".replace("\n", " ") for r in group.itertuples()]
    axes[0, 0].set_ylabel("speed relative to dense cuDNN")
    return style.finish(fig, "Speed-up over dense attention of the same length: " + "; ".join(words) + ".")


def _gained(row, digits: int = 1) -> str:
    noise = "\nin the noise" if row.speedup_low <= 1 <= row.speedup_high else ""
    return f"{row.speedup:.{digits}f}x{noise}"


def beside_peers(rows: pd.DataFrame):
    """Bars: the rate over attended pairs (TFLOP/s) of each alternative, a panel a group."""
    names = list(dict.fromkeys(rows["suite"]))
    fig, axes = style.subplots(1, len(names), figsize=(2.7 * len(names) + 1, 3.6), sharey=True, squeeze=False)
    words = []
    for ax, name in zip(axes[0], names, strict=True):
        group = rows[(rows["suite"] == name) & (rows["label"] != "A/A")]
        shade = [style.COLORS["Dilated"] if x == "workbench" else "#9a9a9a" for x in group["label"]]
        bars = ax.bar(group["label"].str.replace(" ", "\n"), group["tflops"], color=shade)
        ax.bar_label(bars, fmt="%.0f", padding=2)
        n = group["n"].max()
        ax.set_title(f"N = {style.length(n)}\n{MODES[group['mode'].iloc[0]]}", fontsize=10)
        ax.tick_params(axis="x", labelsize=8)
        words += [f"{name}, {r.label}: {r.tflops:.0f}" for r in group.itertuples()]
    axes[0, 0].set_ylabel("TFLOP/s over attended pairs")
    axes[0, 0].set_ylim(0, 1.12 * rows["tflops"].max())
    return style.finish(fig, "Rates in TFLOP/s: " + "; ".join(words) + ".")


def _sizes(row) -> str:
    rates = "paper" if "paper" in row.suite else "pow2"
    return f"{rates} {int(row.heads)}x{int(row.head_dim)}" + (", causal" if row.causal else "")


def picture(path: str, kind: str = "h100x1") -> None:
    """The README's picture: time against N from the records committed for a machine kind, written to `path`."""
    from workbench.probes import speed

    rows, _ = speed.recorded(kind)
    first = rows.iloc[0]
    sizes = f"{int(first['heads'])} heads x {int(first['head_dim'])}"
    style.save(time_against_n(rows), path, f"{first['run_device']}, {first['dtype']}, {sizes}")


def _panels(rows, recorded, draw, ylabel):
    modes = [mode for mode in MODES if mode in set(rows["mode"])]
    fig, axes = style.subplots(1, len(modes), figsize=(4.4 * len(modes), 4.6), sharey=True, squeeze=False)
    for ax, mode in zip(axes[0], modes, strict=True):
        for frame, pale in ((recorded, True), (rows, False)):
            if frame is None or not len(frame):
                continue
            done = frame[(frame["status"] == "ok") & (frame["mode"] == mode)]
            for _, line in done.groupby(["family", "label", "backend"], sort=False):
                draw(ax, line.sort_values("n"), pale)
        ax.set(xscale="log", yscale="log", xlabel="N (tokens)", title=MODES[mode])
        ax.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
        style.log_ticks(ax.xaxis, style.length)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axes[0, 0].set_ylabel(ylabel)
    handles = {}
    for ax in axes[0]:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    order = sorted(handles, key=lambda label: (" · " in label, label))
    fig.legend([handles[x] for x in order], order, loc="outside lower center", ncols=min(3, len(order)), fontsize=9)
    return fig


def _line(ax, line, y, pale):
    first = line.iloc[0]
    label = f"{first['label']} ({first['backend']})" + (f" · {style.device(line)}" if pale else "")
    ax.plot(
        line["n"], y, LINES.get(first["backend"], "-"), label=label, color=style.family_color(first["family"]),
        marker=MARKERS.get(first["family"], "v"), markersize=5, linewidth=1.1 if pale else 1.8,
        alpha=0.45 if pale else 1, markerfacecolor="white" if pale else None,
    )  # fmt: skip


def _last(rows):
    """The rows of the longest N, of the first mode that ran."""
    done = first_mode(rows[rows["status"] == "ok"])
    return done[done["n"] == done["n"].max()]
