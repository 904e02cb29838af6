"""The sentences of notebook 02, each computed from a frame of `workbench.analysis.locality`, whatever this says."""

import numpy as np
import pandas as pd

from workbench.harness.narrate import beyond_noise, listed, number, title


def pays(percents: pd.DataFrame) -> str:
    """From which side of the window on each order touches fewer blocks than row-major in all larger ones."""
    since = {}
    for order in percents.columns.drop("row_major"):
        gain = percents["row_major"] / percents[order]
        sides = [side for side in gain.index if (gain.loc[side:] > 1).all()]
        since.setdefault(f"from {sides[0]} x {sides[0]} on" if sides else "in none of these windows", []).append(order)
    parts = [f"{listed(map(title, orders))} **{when}**" for when, orders in since.items()]
    return f"These orders touch fewer blocks than row-major: {listed(parts)}."


def fastest(times: pd.DataFrame) -> str:
    """Which orders are faster than row-major beyond the noise (rows of `timing.compare`), and which beats Hilbert."""
    again, orders = times.loc["A/A"], times.drop(index="A/A")
    won = [x for x in orders.index[1:] if beyond_noise(times, x) and orders.loc[x, "speedup"] > 1]
    noise = f"row-major against itself {again['speedup_low']:.2f} to {again['speedup_high']:.2f}"
    if not won:
        return f"No order is faster than row-major beyond the noise ({noise})."
    best = orders.loc[won, "speedup"].idxmax()
    told = ", ".join(f"{title(x)} **{orders.loc[x, 'speedup']:.2f}** ({orders.loc[x, 'speedup_low']:.2f} to "
                     f"{orders.loc[x, 'speedup_high']:.2f})" for x in won)  # fmt: skip
    others = [title(x) for x in orders.index[1:] if x not in won]
    told += f"; not beyond the noise: {listed(others)}" if others else ""
    said = f"Speed relative to row-major, by paired rounds: {told} ({noise})."
    if best != "hilbert" and "hilbert" in orders.index:
        apart = orders.loc[best, "speedup_low"] > orders.loc["hilbert", "speedup_high"]
        said += f" {title(best)} is faster than Hilbert here." if apart else ""
    return said


def same_results(worst: float, largest: float) -> str:
    """How far results under different orders are apart, in words."""
    if not worst <= 1e-4 * max(largest, 1e-30):  # or NaN
        return f"**The orders disagree**: by {worst:.0e}, in values of up to {largest:.1f}."
    agree = "exactly" if worst == 0 else f"within **{worst:.0e}**"
    return f"Put back on the grid, all orders agree {agree} (values up to {largest:.1f})."


def surroundings(seen: pd.DataFrame) -> str:
    """What a token sees of its surroundings under each order: `neighbours` as a table, a line a branch, "any" last."""
    any_, branches = seen.loc["any"], seen.drop(index="any")
    best = listed(title(x) for x in any_.index[any_.round(2) == any_.round(2).max()])
    said = (
        f"Over all branches a token sees **{any_['hilbert']:.0%}** of its surroundings under Hilbert and "
        f"**{any_['row_major']:.0%}** in row-major; most under {best}."
    )
    for which, line in (("shortest", branches.iloc[0]), ("longest", branches.iloc[-1])) if len(branches) > 1 else ():
        said += f" By the {which} segments alone {line['hilbert']:.0%} against {line['row_major']:.0%}."
    return said


def areas(known: dict, layers: int) -> str:
    """How many cells a token knows after some layers under each order, and the box they lie in (`field_on_grid`)."""
    shares = {name: (grid >= 0).sum() / np.isfinite(grid).sum() for name, grid in known.items()}
    boxes = {}
    for name, grid in known.items():
        rows, cols = np.nonzero(grid >= 0)
        box = f"{np.ptp(rows) + 1} x {np.ptp(cols) + 1}"
        boxes.setdefault(box, []).append(title(name))
    shapes = ", ".join(f"**{box}** ({listed(names)})" for box, names in boxes.items())
    if max(shares.values()) - min(shares.values()) < 0.005:
        same = f"After {layers} layers a token knows {max(shares.values()):.0%} of the cells, as many in every order"
        return f"{same}; only the shape differs: they lie in a box of {shapes} cells."
    told = ", ".join(f"{share:.0%} ({title(name)})" for name, share in shares.items())
    return f"After {layers} layers a token knows {told} of the cells. They lie in a box of {shapes}."


# The rows of the summary, which the verdict reads.
BLOCKS, SPEED, MOVED = "blocks touched (%)", "speed relative to row-major", "permutation (ms)"
ATTENTION, ALIKE, SHARDS = "attention (ms)", "tokens until half alike", "cells from other shards"


def verdict(summary: pd.DataFrame, times: pd.DataFrame, line: dict[str, float]) -> list[str]:
    """What the notebook found, in sentences: a summary with a row a measure and a column an order, the times that it is
    made of, and the percent of blocks on a line in its natural order and in Hilbert's."""
    blocks = summary.loc[BLOCKS].sort_values()
    good = [x for x in blocks.index if blocks[x] < 0.8 * blocks["row_major"]]
    told = ", ".join(f"{share:.1f}% ({title(x)})" for x, share in blocks.items())
    claim = "Any order that keeps blocks compact saves work" if len(good) > 1 else "No choice of order saves much work"
    said = [f"**{claim}**: the same attention touches {told} of the blocks.", fastest(times)]
    moved, slowest = summary.loc[MOVED].max(), summary.loc[ATTENTION].min()
    if pd.notna(moved):
        said.append(f"Permuting q, k, v and the result takes at most {number(moved)} ms, once for a whole network; one "
                    f"call of attention takes {number(slowest)} ms or more, and the result is the same.")  # fmt: skip
    said.append(f"Long runs: most tokens that stay half alike under {_leader(summary.loc[ALIKE], True)}, fewest cells "
                f"that a shard needs from others under {_leader(summary.loc[SHARDS], False)}.")  # fmt: skip
    end = "leave a line in its natural order" if line["hilbert"] > line["natural"] else "here even that costs nothing"
    ratio = f"{line['hilbert']:.1f}% of the blocks against {line['natural']:.1f}%"
    return [*said, f"On a line, where neighbours are already close, Hilbert's order touches {ratio}: {end}."]


def _leader(row: pd.Series, larger: bool) -> str:
    """The best order of a row of the summary, ties included, and row-major's value beside."""
    values = row.astype(float).fillna(float("inf") if larger else float("nan"))
    best = values.max() if larger else values.min()
    names = listed(title(x) for x in values.index[values == best])
    shown = "more than was looked at" if best == float("inf") else f"{best:,.0f}"
    return f"**{names}** ({shown}; row-major {values['row_major']:,.0f})"
