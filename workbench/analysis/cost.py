"""What a pattern costs as its sequence grows, by counting and by a model: nothing here is measured.

Dimensions: N tokens, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd
import torch

from workbench.harness.narrate import listed, number
from workbench.patterns import Dense, Dilated, Pattern


def table(
    makers: Mapping[str, Callable[[int], Pattern]],
    lengths: Iterable[int],
    *,
    heads: int,
    head_dim: int,
    dtype=torch.float32,
) -> pd.DataFrame:
    """One row a (pattern, length): pairs (exact), predicted_bytes and scores_bytes (modelled, hence measured=False).

    makers: name -> a function of N that returns the pattern.
    """
    rows = []
    for name, make in makers.items():
        for n in lengths:
            pattern = make(n)
            rows.append({
                "pattern": name, "family": type(pattern).__name__, "n": n, "heads": heads, "head_dim": head_dim,
                "dtype": str(dtype).removeprefix("torch."), "causal": pattern.causal, "pairs": pattern.pairs(n, heads),
                "predicted_bytes": predicted_bytes(pattern, n, heads, head_dim, dtype),
                "scores_bytes": heads * n * n * dtype.itemsize, "measured": False,
            })  # fmt: skip
    return pd.DataFrame(rows)


def predicted_bytes(pattern: Pattern, n: int, heads: int, head_dim: int, dtype=torch.float32) -> int:
    """A fused forward's memory, modelled: q, k, v, out, the log-sum-exp, and the index of visible blocks, if any.

    Chunks of scores or of gathered keys are left out: they have a fixed size, whatever the length.
    """
    tokens = 4 * n * heads * head_dim * dtype.itemsize
    lse = n * heads * (8 if dtype == torch.float64 else 4)
    index = 0 if isinstance(pattern, Dense | Dilated) else pattern.blocks(n, heads).nbytes
    return tokens + lse + index


def growth(table: pd.DataFrame) -> pd.Series:
    """pattern -> the x of pairs ~ N^x, between the shortest and the longest length of `table`."""
    table = table.sort_values("n", kind="stable")
    ends = table.groupby("pattern", sort=False)[["n", "pairs"]].agg(["first", "last"])
    rise = np.log(ends.xs("last", axis=1, level=1) / ends.xs("first", axis=1, level=1))
    return rise.pairs / rise.n


def rises(table: pd.DataFrame) -> str:
    """`growth` in a sentence."""
    if table["n"].nunique() < 2:
        return "One length alone shows no growth."
    return f"Pairs grow as $N$ to the power {', '.join(f'**{x:.2f}** ({name})' for name, x in growth(table).items())}."


def extremes(table: pd.DataFrame) -> str:
    """Who has the most and the fewest pairs and bytes at the longest N, in a sentence."""
    last = table[table["n"] == table["n"].max()].set_index("pattern")
    pairs, size = last["pairs"].astype(float), last["predicted_bytes"].astype(float)
    if pairs.min() == pairs.max():
        said = "all patterns compute as many pairs"
    else:
        times = f"**{number(pairs.max() / pairs.min())} times**"
        said = f"{pairs.idxmax()} computes {times} as many pairs as {pairs.idxmin()}"
    if size.max() < 1.5 * size.min():
        return f"At N = {last['n'].iloc[0]:,} {said}; all need about the same {size.max() / 1e9:.3g} GB."
    need = f"{size.idxmax()} needs **{number(size.max() / size.min())} times** the bytes of {size.idxmin()}"
    return f"At N = {last['n'].iloc[0]:,} {said}; {need}."


def layers(depths: Mapping[str, int | None]) -> str:
    """How many layers each pattern takes until every token can depend on every other (`reach.depth`)."""
    never = [name for name, x in depths.items() if x is None]
    done = ", ".join(f"{name} **{x}**" for name, x in depths.items() if x is not None)
    said = [f"Layers until every token can depend on every other: {done}."] if done else []
    return " ".join(said + [f"No number of layers is enough for {listed(never)}."] * bool(never))
