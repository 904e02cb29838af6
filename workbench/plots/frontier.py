"""Pictures of what fits: the longest sequence against the budget, what limits it, and where the bytes go.

Each function draws from DataFrames or events alone (see `probes.frontier.search` for the columns) and returns a Figure
with its alternative text.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.ticker import PercentFormatter

from workbench.fit.frontier import limiters
from workbench.harness.narrate import binary, number, title
from workbench.plots import style

GIB = 1 << 30
LINES = {"eager": ":", "flash": "--", "flex": "--", "efficient": "-."}  # of a backend; the others are solid
PALETTE = ("#0072B2", "#56B4E9", "#A6CEE3", "#E69F00", "#F0E442", "#009E73", "#7FC97F", "#B2DF8A", "#D55E00", "#CC79A7",
           "#6A3D9A")  # of tensors, in order of birth  # fmt: skip
SIGNS = {"time": ("x", "limited by time ({:g} s)"), "validity": ("*", "wrong results beyond")}
LIMITS = {"memory": "#9ecae1", "untimed": "#d3c4e8", "time": style.COLORS["accent"], "validity": "#e7a5c6",
          "launch": "#c7b299", "search": "#dddddd", "refused": "white"}  # fmt: skip


def n_against_budget(rows: pd.DataFrame, recorded: pd.DataFrame | None = None):
    """The longest N against the budget, and beside it N's share of what the bytes of inputs and results alone allow.

    rows: of `frontier.sweep`, with `label`. A line is predicted, a filled marker measured; one of SIGNS tells what else
    than memory limits. recorded: measured rows of another machine, drawn pale and hollow, with its name. Lines are
    named at their ends, those of which no time is modelled so, too.
    """
    (fig, (longest, part)), ends = style.subplots(1, 2, figsize=(10.4, 4.2)), []
    for name, line, pale in _named(rows, recorded):
        share = _bytes_a_token(line) / line["budget_bytes"]
        _line(longest, line, 1, pale)
        color, last = _line(part, line, share, pale), line.iloc[-1]
        ends.append((last["budget_bytes"], last["n"] * share.iloc[-1], name, color))
    for ax in (longest, part):
        ax.set(xscale="log", xlabel="budget: what the allocator may reserve")
        style.log_ticks(ax.xaxis, binary, base=2, numticks=3)
    signs = {"line: predicted; filled: measured": "o"} if rows["measured_n"].notna().any() else {}
    for limiter, there in rows[rows["predicted_limiter"].isin(SIGNS)].groupby("predicted_limiter"):
        marker, words = SIGNS[limiter]
        signs[words.format(there["seconds"].iloc[0])] = marker
        for ax, scale in ((longest, 1), (part, _bytes_a_token(there) / there["budget_bytes"])):
            ax.plot(there["budget_bytes"], there["predicted_n"] * scale, marker, color="black", markersize=8)
    if signs:
        style.key(fig, {text: {"marker": x, "color": "#555555"} for text, x in signs.items()}, 3)
    longest.set(yscale="log", title="longest N (tokens)")
    style.log_ticks(longest.yaxis, style.length, base=2, numticks=12)
    part.set(title="of what inputs and results alone allow", ylim=(0, 1.05))
    part.yaxis.set_major_formatter(PercentFormatter(1))
    style.name_ends(part, ends)
    return style.finish(fig, "The longest N against the budget, and its share of what inputs and results alone allow.")


def _named(rows: pd.DataFrame, recorded: pd.DataFrame | None):
    """(name, its rows by budget, whether it is another machine's) of each line that is to be drawn."""
    for frame, pale in ((recorded, True), (rows, False)):
        for label, line in () if frame is None or frame.empty else frame.groupby("label", sort=False):
            line = line[line["predicted_n"].fillna(0).gt(0) | line["measured_n"].notna()].sort_values("budget_bytes")
            if len(line):
                said = "\n(time not modelled)" if "untimed" in [*limiters(line[line["measured_n"].isna()])] else ""
                yield title(label) + (f", {style.device(line)}" if pale else said), line, pale


def limiter_map(rows: pd.DataFrame):
    """A cell per card and way, six of which a phone shows: the longest N, coloured and named by what limits it.

    rows: of `frontier.sweep` with `label`, in the order in which cards and ways are to stand.
    """
    ran, where = rows["status"] == "ok", {"index": "card", "columns": "label"}
    limiter, count = limiters(rows).where(ran, "refused"), rows["n"].where(ran)
    count = count.map(lambda n: f"{n:,.0f}\n" if n < 1e6 else f"{n / 1e6:.2f}\nmillion\n", "ignore")
    words = count.fillna("") + limiter.map(lambda x: textwrap.fill(title(x), 9))
    named = {x: rows[x].map(title) for x in where.values()}
    rows = rows.assign(code=limiter.map(list(LIMITS).index), words=words, **named)
    shape = {"index": rows["card"].unique(), "columns": rows["label"].unique()}
    codes, texts = (rows.pivot(**where, values=x).reindex(**shape) for x in ("code", "words"))
    fig, ax = style.subplots(figsize=(1 + 0.6 * codes.shape[1], 1.6 + 0.66 * codes.shape[0]))
    sns.heatmap(codes, vmin=0, vmax=len(LIMITS) - 1, cmap=[*LIMITS.values()], cbar=False, linewidths=2, ax=ax, fmt="",
                annot=texts, annot_kws={"size": 9, "color": "black"}, xticklabels=True, yticklabels=True)  # fmt: skip
    ax.set(ylabel="", xlabel=f"longest N, and what limits it (time: {rows['seconds'].iloc[0]:g} s per call)")
    ax.xaxis.tick_top()
    ax.tick_params("x", rotation=90, length=0)
    ax.tick_params("y", rotation=0)
    return style.finish(fig, "A map of cards and ways: the longest N of each, and what limits it.")


def bytes_over_run(lives: Mapping[str, pd.DataFrame], most: int = 11):
    """A panel per way: what is alive after each allocation and free, a colour per tensor's name.

    lives: {way: `frontiers.alive`}. Names beyond the `most` largest are drawn as one, "others".
    """
    lives = {title(x): life.rename(columns=_short).T.groupby(level=0, sort=False).sum().T for x, life in lives.items()}
    size = pd.concat([life.max() for life in lives.values()]).groupby(level=0, sort=False).max()
    kept = set(size.nlargest(most).index)
    order = [name for name in size.index if name in kept]  # of birth
    colors = dict(zip(order, sns.color_palette(PALETTE, len(order)), strict=True)) | {"others": "#d0d0d0"}
    columns, rows = min(len(lives), 3), -(-len(lives) // 3)
    fig, axes = style.subplots(rows, columns, figsize=(10.4, 1.2 + 2.6 * rows), sharey=True, squeeze=False)
    for ax, (name, life) in zip(axes.flat, lives.items(), strict=False):
        own, at = [name for name in order if name in life], np.arange(1, len(life) + 1)
        layers = life[own].assign(others=life.drop(columns=own).sum(axis=1)) / GIB
        ax.stackplot(at, layers.T, step="post", linewidth=0, rasterized=True, colors=[colors[x] for x in layers])
        peak = layers.sum(axis=1).max()
        ax.axhline(peak, color="black", linewidth=1, linestyle="--")
        style.note(ax, f"peak {number(peak)} GiB", (at[-1], peak), (-3, 4), ha="right")
        made = np.flatnonzero((life.get("lse", life.get("out", life.iloc[:, 0])) > 0).to_numpy())
        if "dq" in life and len(made):
            ax.axvline(made[0] + 1, color="#666666", linewidth=1, linestyle=":")
            at_top = {"va": "top", "color": "#444444", "xycoords": ("data", "axes fraction")}
            style.note(ax, "backward from here", (made[0] + 1, 1), (3, 0), **at_top)
        ax.set(title=name, xlabel=f"{len(life):,} allocations and frees", xlim=(at[0], at[-1]), xticks=[])
    fig.supylabel("bytes of the tensors alive (GiB)", fontsize=10)
    axes[0, 0].set_ylim(0, 1.12 * max(life.sum(axis=1).max() for life in lives.values()) / GIB)
    for ax in axes.flat[len(lives) :]:
        ax.remove()
    style.key(fig, colors, 6)
    return style.finish(fig, f"Bytes alive over the run, by tensor: {', '.join(lives)}.")


def claimed(rows: pd.DataFrame):
    """A line per configuration of the reports: the longest N there, and here under the same cap, on a logarithmic axis;
    so narrow that a phone shows all of it. rows: of `claims.lengths`."""
    once, how = rows.drop_duplicates("preset"), "here" if rows["measured"].any() else "predicted"
    fig, ax = style.subplots(figsize=(3.7, 0.6 * len(once) + 1.6))
    ax.plot(once["theirs"], range(len(once)), "X", color="#777777", markersize=8, label="in the report")
    for label, line in rows.groupby("label", sort=False):
        look = style.family_look(line["pattern_spec"].iloc[0]["pattern"]) | {"mfc": "none", "ls": ""}
        ax.plot(line["n"].astype(float), range(len(once)), ms=8, label=f"{title(label)}, {how}", **look)
    names = [f"{x.preset.removeprefix('report-')}\n{x.heads} x {x.head_dim}, {x.dtype}" for x in once.itertuples()]
    ax.set(xscale="log", xlabel="longest N (tokens) under 8 GB", ylim=(len(once) - 0.5, -0.5))
    ax.set_yticks(range(len(once)), names)
    style.log_ticks(ax.xaxis, style.length, base=4, numticks=9)
    fig.legend(loc="outside lower center", ncols=2)
    return style.finish(
        fig, f"The longest N in the reports and under the same cap the longest {how}, by configuration."
    )


def _line(ax, line: pd.DataFrame, scale, pale: bool) -> str:
    """Draw predicted and measured N times scale; returns the colour."""
    backend = str(line["label"].iloc[0]).split(", ")[-1]
    look = style.family_look(line["pattern_spec"].iloc[0]["pattern"], pale)
    stroke = {"marker": None, "ls": LINES.get(backend, "-")}
    ax.plot(line["budget_bytes"], line["predicted_n"].astype(float) * scale, **look | stroke)
    if line["measured_n"].notna().any():
        ax.plot(line["budget_bytes"], line["measured_n"].astype(float) * scale, ms=6, **look | {"ls": ""})
    return look["color"]


def _bytes_a_token(rows: pd.DataFrame) -> pd.Series:
    """Of q, k, v and out, and in mode fwdbwd their gradients."""
    itemsize = rows["dtype"].map(lambda name: getattr(torch, name).itemsize)
    once = rows["batch"] * 2 * (rows["heads"] + rows["kv_heads"]) * rows["head_dim"] * itemsize
    return once * rows["mode"].map({"fwd": 1, "fwdbwd": 2})


def _short(name: str) -> str:
    """The name of a tensor without torch's long names of operators."""
    of_torch = r"_scaled_dot_product_(\w+?)_attention_?(\w*)"
    plain = re.sub(of_torch, lambda x: f"{title(x[1])}'s {x[2] or 'forward'}", name).strip("_")
    return "accumulators" if "zeros" in name else plain
