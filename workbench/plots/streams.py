"""Pictures of a stream: memory and time against the number of tokens, across the point where the card ends."""

import pandas as pd

from workbench.fit import cards
from workbench.plots import style

LONGNET = style.family_color("Dilated")


def against_n(plans: pd.DataFrame, runs: pd.DataFrame, card: str):
    """Left the GiB on the card, right the seconds; lines are planned, dots measured.

    plans: of `analysis.streams.planned`; runs: of its `measured`, or no rows.
    """
    fig, (memory, time) = style.subplots(1, 2, figsize=(9.4, 3.6))
    memory.plot(plans["n"], plans["in_memory_gib"], color=style.COLORS["muted"], ls="--", label="in memory")
    memory.plot(plans["n"], plans["streamed_gib"], color=LONGNET, label="streamed")
    memory.axhline(cards.find(card).total_bytes / 2**30, color="#444444", lw=1, label=f"all of an {card.upper()}")
    time.plot(plans["n"], plans["traffic_s"], color=style.COLORS["accent"], ls=":", label="copies")
    if plans["products_s"].notna().any():
        time.plot(plans["n"], plans["products_s"], color=LONGNET, label="products")
    looks = {"in memory": ("o", {"mfc": "none", "ms": 9}), "streamed": ("s", {"ms": 4}), "layer": ("D", {"ms": 5})}
    for x, some in runs[runs["mode"].eq("fwd")].groupby("execution") if len(runs) else ():
        marker, look = looks[x]  # where two are at one place, one is around the other
        color = style.COLORS["muted"] if x == "in memory" else LONGNET
        time.plot(some["n"], some["seconds"], marker, color=color, label=f"{x}, measured", **look)
    for ax, what in ((memory, "GiB on the card"), (time, "seconds")):
        ax.set(xscale="log", yscale="log", xlabel="tokens", title=what)
        style.log_ticks(ax.xaxis, style.length, [*plans["n"]])
        style.log_ticks(ax.yaxis, "{:,g}".format)
        ax.legend()
    return style.finish(fig, "Memory on the card and time of a forward against the number of tokens: plans and runs.")
