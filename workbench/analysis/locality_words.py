"""The sentences of notebook 02, each computed from a frame of `workbench.analysis.locality`, whatever this says."""

from __future__ import annotations

import pandas as pd

from workbench.harness.narrate import beyond_noise, listed, spread


def label(order: str) -> str:
    """An ordering's name as it is written in figures and sentences: row-major, tiles 8x16, Hilbert."""
    kind, _, rest = order.partition("-")
    names = {"row_major": "row-major", "morton": "Morton", "hilbert": "Hilbert"}
    return " ".join([names.get(kind, kind), *([rest] if kind == "tiles" and rest else [])])


def _best(values: pd.Series, digits: int = 2) -> str:
    """The names of the largest, ties in what is shown included."""
    return listed(label(x) for x in values.index[values.round(digits) == values.round(digits).max()])


def smooth(frame: pd.DataFrame) -> str:
    """Which orders never jump (rows of `steps`), and how short row-major's steps are on average."""
    frame = frame.set_index("order") if "order" in frame else frame
    never = [label(x) for x in frame.index[frame["jumps"] == 0]]
    verb = "never jump" if len(never) > 1 else "never jumps"
    said = f"**{listed(never)}** {verb}" if never else "**Every order** jumps somewhere"
    mean = frame["mean"]["row_major"]
    return f"{said}. Row-major's mean step is {mean:.2f} cells: short steps alone do not make an order good."


def compact(box: pd.Series, near: pd.Series, length: int) -> str:
    """How large a box `length` tokens need, and how many adjacent cells are within so many tokens, by order."""
    said = (
        f"{length:,} consecutive tokens lie in a box of side **{box['hilbert']:.0f}** under Hilbert and "
        f"{box['row_major']:.0f} under row-major. Of all adjacent cells {near['hilbert']:.0%} are within {length:,} "
        f"tokens of each other under Hilbert, {near['row_major']:.0%} in row-major"
    )
    seams = ": no curve keeps all neighbours close, each has seams"
    return said + seams * bool(near["hilbert"] < near["row_major"]) + "."


def fewest(percents: pd.DataFrame) -> str:
    """Which orders touch the fewest blocks (a line a window, a column an order), and how row-major compares."""
    shown = percents.round(2)
    wins = shown.eq(shown.min(axis=1), axis=0).sum()
    counts = ", ".join(f"{label(x)} in {n}" for x, n in wins.sort_values(ascending=False).items() if n)
    compact = percents.drop(columns="row_major")
    ratio = percents["row_major"] / compact.max(axis=1)
    said = f"Fewest blocks, ties counted for each, of {len(percents)} windows: {counts}. "
    times = f"**{spread(ratio.min(), ratio.max(), '.1f')} times**"
    return said + f"Row-major touches {times} as many as the worst of {listed(map(label, compact))}."


def pays(percents: pd.DataFrame) -> str:
    """From which side of the window on each order touches fewer blocks than row-major in all larger ones."""
    since = {}
    for order in percents.columns.drop("row_major"):
        gain = percents["row_major"] / percents[order]
        sides = [side for side in gain.index if (gain.loc[side:] > 1).all()]
        since.setdefault(f"from {sides[0]} x {sides[0]} on" if sides else "in none of these windows", []).append(order)
    parts = [f"{listed(map(label, orders))} **{when}**" for when, orders in since.items()]
    return f"On this grid fewer blocks than row-major's are touched by {listed(parts)}."


def fastest(times: pd.DataFrame) -> str:
    """Which orders are faster than row-major beyond the noise (rows of `timing.compare`), and which beats Hilbert."""
    again, orders = times.loc["A/A"], times.drop(index="A/A")
    won = [x for x in orders.index[1:] if beyond_noise(times, x) and orders.loc[x, "speedup"] > 1]
    noise = f"row-major against itself {again['speedup_low']:.2f} to {again['speedup_high']:.2f}"
    if not won:
        return f"No order is faster than row-major beyond the noise ({noise})."
    best = orders.loc[won, "speedup"].idxmax()
    told = ", ".join(f"{label(x)} **{orders.loc[x, 'speedup']:.2f}** ({orders.loc[x, 'speedup_low']:.2f} to "
                     f"{orders.loc[x, 'speedup_high']:.2f})" for x in won)  # fmt: skip
    said = f"Beyond the noise ({noise}), times as fast as row-major, by paired rounds: {told}."
    if best != "hilbert" and "hilbert" in orders.index:
        apart = orders.loc[best, "speedup_low"] > orders.loc["hilbert", "speedup_high"]
        said += f" {label(best)} is faster than Hilbert here." if apart else ""
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
    said = (
        f"Over all branches a token sees **{any_['hilbert']:.0%}** of its surroundings under Hilbert and "
        f"**{any_['row_major']:.0%}** in row-major; the most of all under {_best(any_)}."
    )
    for which, line in (("shortest", branches.iloc[0]), ("longest", branches.iloc[-1])) if len(branches) > 1 else ():
        said += f" By the {which} segments alone {line['hilbert']:.0%} against {line['row_major']:.0%}."
    return said


def verdict(percents: pd.DataFrame, times: pd.DataFrame, line: float) -> str:
    """What the notebook found: blocks touched on a grid, time, and (line) Hilbert's blocks over the natural order's."""
    mean = (percents["row_major"] / percents.drop(columns="row_major").T).T.mean().sort_values(ascending=False)
    good = [label(x) for x in mean.index[mean > 1.05]]
    grid = "On a grid, no order touches clearly fewer blocks than row-major"
    if good:
        share = f"on average 1/{mean.max():.1f} under {label(mean.index[0])}"
        grid = f"On a grid, {listed(good)} touch fewer blocks than row-major for the same result, {share}"
    end = "leave the order of a line alone" if line > 1 else "here even that costs nothing"
    pace = fastest(times).replace("**", "")
    return f"**{grid}. {pace} On a line, Hilbert's order touches {line:.1f} times as many: {end}.**"
