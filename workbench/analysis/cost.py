"""What a pattern costs as its sequence grows, by counting and by a model: nothing here is measured."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd

from workbench.harness.narrate import binary, listed, number, times
from workbench.patterns import Dense, Dilated, Pattern


def table(
    makers: Mapping[str, Callable[[int], Pattern]], lengths: Iterable[int], *, heads: int, head_dim: int
) -> pd.DataFrame:
    """One row a (pattern, length), float32: pairs (exact), predicted_bytes and scores_bytes (modelled).

    makers: name -> a function of N that returns the pattern.
    """
    made = ((name, make(n), n) for name, make in makers.items() for n in lengths)
    return pd.DataFrame([
        {
            "pattern": name, "family": type(pattern).__name__, "n": n, "heads": heads, "head_dim": head_dim,
            "causal": pattern.causal, "pairs": pattern.pairs(n, heads),
            "predicted_bytes": predicted_bytes(pattern, n, heads, head_dim), "scores_bytes": 4 * heads * n * n,
        }
        for name, pattern, n in made
    ])  # fmt: skip


def predicted_bytes(pattern: Pattern, n: int, heads: int, head_dim: int) -> int:
    """A float32 forward's memory, fused, modelled: q, k, v, out, log-sum-exp, and the index of visible blocks, if any.

    Chunks of scores or of gathered keys are left out: they have a fixed size, whatever the length.
    """
    index = 0 if isinstance(pattern, Dense | Dilated) else pattern.blocks(n, heads).nbytes
    return 4 * n * heads * (4 * head_dim + 1) + index


def growth(table: pd.DataFrame) -> pd.Series:
    """pattern -> the x of pairs ~ N^x, between the shortest and the longest length of `table`."""
    by = table.sort_values("n", kind="stable").groupby("pattern", sort=False)[["n", "pairs"]]
    rise = np.log(by.last() / by.first())
    return rise.pairs / rise.n


def extremes(table: pd.DataFrame) -> str:
    """Who has the most and the fewest pairs and bytes at the longest N, in a sentence."""
    last = table[table["n"] == table["n"].max()].set_index("pattern")
    pairs, size = last["pairs"].astype(float), last["predicted_bytes"].astype(float)
    low, high = (f"**{binary(x)}**" for x in (size.min(), size.max()))
    memory = f"all need {low}" if low == high else f"they need {low} ({size.idxmin()}) to {high} ({size.idxmax()})"
    most = f"the most pairs ({pairs.idxmax()}) are **{number(pairs.max() / pairs.min())} times** the fewest"
    return f"At N = {last['n'].iloc[0]:,} {most} ({pairs.idxmin()}); {memory} of memory."


def glance(patterns: Mapping[str, Pattern], n: int, heads: int, depths: Mapping[str, int | None]) -> pd.DataFrame:
    """A row a pattern: percent of pairs, rows that see nothing, and `reach.depth` (NaN where no number is enough)."""
    shares = [100 * p.density(n, heads) for p in patterns.values()]
    empty = [p.uncovered(n, heads) for p in patterns.values()]
    shown = {"pairs seen (%)": shares, "rows without a key": empty, "layers to reach all": depths.values()}
    return pd.DataFrame(shown, pd.Index(patterns, name="pattern")).astype({"layers to reach all": float})


def beyond(table: pd.DataFrame) -> str:
    """Which patterns have more pairs than dense attention, where; "" where none has."""
    wide = table.pivot(index="n", columns="pattern", values="pairs").astype(float)
    more = wide.div(wide["dense"], axis=0).stack()
    said = [f"{times(x, '.2f')} many under {name} at N = {n:,}" for (n, name), x in more[more >= 1.005].items()]
    because = "a key that several branches see counts once for each branch"
    return f"A sparse pattern can have more pairs than dense attention: {listed(said)}; {because}." if said else ""


def layers(depths: Mapping[str, int | None]) -> str:
    """How many layers each pattern takes until every token can depend on every other (`reach.depth`)."""
    done = ", ".join(f"{name} **{x or 'never'}**" for name, x in depths.items())
    return f"Layers until every token can depend on every other: {done}."


def worth(masses: pd.DataFrame) -> pd.DataFrame:
    """Per source and pattern: percent of pairs, percent of weight kept, and weight per pair in times the mean, best
    first. masses: a row a source, pattern and head, with density and mass."""
    mean = masses.assign(gain=masses.mass / masses.density).groupby(["source", "pattern"])[["density", "mass", "gain"]]
    shown = mean.mean().sort_values(["source", "gain"], ascending=False)
    shown[["density", "mass"]] *= 100
    return shown.rename(columns={"density": "pairs (%)", "mass": "weight kept (%)", "gain": "worth of a pair"})


def best_and_worst(worth: pd.DataFrame, source: str) -> str:
    """The pattern whose pairs hold most weight on a source, and the one whose hold least (rows of `worth`)."""
    gain = worth["worth of a pair"][source]
    most, least = f"{gain.max():.1f} times", f"{gain.min():.1f} times"
    on = f"On the {source} a pair of the {gain.idxmax()} pattern holds **{most}** the mean weight"
    return f"{on}, one of the {gain.idxmin()} pattern **{least}**."
