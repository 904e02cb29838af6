"""The sentences of notebook 02, each computed from a frame of `workbench.analysis.locality`, whatever this says."""

import numpy as np
import pandas as pd

from workbench.harness.narrate import beyond_noise, listed, number, title


def pays(percents: pd.DataFrame) -> str:
    """From which side of the window on each order touches fewer blocks than row-major in all larger ones."""
    since = {}
    for order in percents.columns.drop("row_major"):
        fewer = percents[order] < percents["row_major"]
        sides = [side for side in fewer.index if fewer.loc[side:].all()]
        since.setdefault(f"from {sides[0]} x {sides[0]} on" if sides else "in none of these windows", []).append(order)
    parts = [f"{listed(map(title, orders))} **{when}**" for when, orders in since.items()]
    return f"These orders touch fewer blocks than row-major: {listed(parts)}."


def fastest(times: pd.DataFrame) -> str:
    """The speed of each order relative to row-major (rows of `timing.compare`), and whether one beats Hilbert."""
    again, orders = times.loc["A/A"], times.drop(index=["A/A", times.index[0]])
    told = listed(
        f"{title(x)} **{it['speedup']:.2f}** ({it['speedup_low']:.2f} to {it['speedup_high']:.2f}"
        f"{'' if beyond_noise(times, x) else ', within the noise'})"
        for x, it in orders.iterrows()
    )
    noise = f"row-major against itself {again['speedup_low']:.2f} to {again['speedup_high']:.2f}"
    first = orders.loc[orders["speedup"].idxmax()]
    beaten = f" Here {title(first.name)} is faster than Hilbert."
    beaten *= bool(first["speedup_low"] > orders.loc["hilbert", "speedup_high"])
    return f"Speed relative to row-major, by paired rounds: {told}; {noise}.{beaten}"


def same_results(worst: float, largest: float) -> str:
    """How far results under different orders are apart, in words."""
    agree = "agree" if worst <= 1e-4 * largest else "**disagree**"  # as NaN does
    apart = f"at most **{worst:.0e}** apart, in values of up to {largest:.1f}"
    return f"Put back on the grid, the results of all orders {agree}: they are {apart}."


def surroundings(seen: pd.DataFrame) -> str:
    """What a token sees of its surroundings under each order: `neighbours` as a table, a line a branch, "any" last."""
    every = seen.loc["any"].round(2)
    best = listed(map(title, every.index[every == every.max()]))
    hilbert, rows = ([f"{x:.0%}" for x in seen[order]] for order in ("hilbert", "row_major"))
    return (
        f"Over all branches a token sees **{hilbert[-1]}** of its surroundings under Hilbert and **{rows[-1]}** in "
        f"row-major; most under {best}. By the shortest segments alone {hilbert[0]} against {rows[0]}, by the longest "
        f"{hilbert[-2]} against {rows[-2]}."
    )


def areas(known: dict, layers: int) -> str:
    """How many cells a token knows after some layers under each order, and the box they lie in (`field_on_grid`)."""
    shares, boxes = {}, {}
    for name, grid in known.items():
        cells = np.argwhere(grid >= 0)
        box = " x ".join(str(side + 1) for side in np.ptp(cells, axis=0))
        shares.setdefault(f"{len(cells) / np.isfinite(grid).sum():.0%}", []).append(title(name))
        boxes.setdefault(f"**{box}**", []).append(title(name))
    shares, boxes = (", ".join(f"{x} ({listed(names)})" for x, names in some.items()) for some in (shares, boxes))
    return f"After {layers} layers a token knows {shares} of the cells. They lie in a box of {boxes}."


# The rows of the summary, which the verdict reads.
LOWER, HIGHER = ", lower is better", ", higher is better"
BLOCKS, ATTENTION, MOVED = f"blocks touched (%){LOWER}", f"attention (ms){LOWER}", f"permutation (ms){LOWER}"
SHARDS, SPEED = f"cells from other shards{LOWER}", f"speed relative to row-major{HIGHER}"
ALIKE, SEEN = f"tokens until half alike{HIGHER}", f"surroundings that LongNet sees (%){HIGHER}"


def best(summary: pd.DataFrame) -> pd.DataFrame:
    """bool: where a row that all orders have is best, in the digits shown. Orders alike to the end have no ALIKE."""
    known = summary.T.fillna({ALIKE: np.inf}).T.dropna()
    tops = known.max(axis=1).where(known.index.str.endswith(HIGHER), known.min(axis=1)).map(number)
    return known.map(number).eq(tops, axis=0).reindex(summary.index, fill_value=False)


def verdict(summary: pd.DataFrame, times: pd.DataFrame, line: dict[str, float], percents: pd.DataFrame) -> list[str]:
    """What the notebook found, in sentences: a summary with a row a measure and a column an order, the times that it is
    made of, the percent of blocks on a line in natural order and in Hilbert's, and that of windows by their side."""
    blocks = summary.loc[BLOCKS].sort_values()
    told = listed(f"{share:.1f}% ({title(x)})" for x, share in blocks.items())
    fewer = percents.drop(columns="row_major").max(axis=1) < percents["row_major"]  # under all of them
    side = next((side for side in fewer.index if fewer.loc[side:].all()), None)
    wide = f" As counted on the grid, it does in windows of {side} x {side} cells and more." if side else ""
    saves = "Any order that keeps blocks compact saves work"
    claim = saves if (blocks < 0.8 * blocks["row_major"]).sum() > 1 else "No choice of order saves much work"
    moved, slowest = (number(x) for x in (summary.loc[MOVED].max(), summary.loc[ATTENTION].min()))
    end = "leave a line in its natural order" if line["hilbert"] > line["natural"] else "here even that costs nothing"
    ratio = f"{line['hilbert']:.1f}% of the blocks against {line['natural']:.1f}%"
    return [
        f"**{claim}**: on the photograph the same attention touches {told} of the blocks.{wide * (claim is saves)}",
        fastest(times),
        f"Permuting q, k, v and the result takes at most {moved} ms, once for a whole network; one call of attention "
        f"takes {slowest} ms or more, and the result is the same.",
        f"Patches stay half alike over the most tokens under {_leader(summary, ALIKE)}; "
        f"a shard needs the fewest cells of others under {_leader(summary, SHARDS)}.",
        f"On a line, where neighbours are already close, Hilbert's order touches {ratio}: {end}.",
    ]


def _leader(summary: pd.DataFrame, row: str) -> str:
    """The best order of a row of the summary, ties included, and row-major's value beside."""
    said = summary.loc[row].map("{:,.0f}".format, "ignore").fillna("more than was looked at")
    first = said[best(summary).loc[row]]
    return f"**{listed(map(title, first.index))}** ({first.iloc[0]}; row-major {said['row_major']})"
