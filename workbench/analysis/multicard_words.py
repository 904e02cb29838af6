"""The sentences of notebook 04: each is computed from rows of a sweep (`analysis.multicard`), whatever these say.

A function returns a sentence, or a list of them that may be empty. what: the word for a rank, "card" or "rank".
"""

import pandas as pd

from workbench.analysis.multicard import ORDERS, SIZES, mib, of_patterns, ok, relative
from workbench.harness.narrate import MODES, counted, listed, number, spread, times, title
from workbench.probes.timing import AA
from workbench.scaling.strategies import ONE, SHORT

CASE = ["kind", "n", "mode"]
UNEQUAL = 1.1  # what should be equal and differs by more than this factor was disturbed


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """What dividing the sequence gives in each case of one, on the number of ranks where it took the least time.

    faster: beyond the noise, in less time than one device took in any run of the case, and not more times as fast as
    ranks can be. The noise is one device's against itself, and that of shares of the batch, which leave one sequence
    on one device. rival, rival_speedup: the strategy that is ahead of it by more than both intervals, or None.
    """
    done, found = ok(rows), []
    for case, group in done.groupby(CASE, sort=False):
        ours, alone = group[group["strategy"] == "sequence"], group[group["strategy"] == ONE]
        if ours.empty:
            continue
        best = ours.loc[ours["median_ms"].idxmin()]
        run = group[group["nproc"] == best["nproc"]].drop_duplicates("strategy").set_index("strategy")
        noise = max([1, *run[run.index.isin([AA, *SHORT])]["speedup_high"].dropna()])
        possible = best["speedup"] < UNEQUAL * best["nproc"]  # more: the run's baseline was disturbed
        faster = best["speedup_low"] > noise and possible and not (alone["median_ms"] <= best["median_ms"]).any()
        ahead = run.drop(["sequence", ONE, AA, *SHORT], errors="ignore")
        ahead = ahead[ahead["speedup_low"] > best["speedup_high"]].sort_values("speedup")
        name, rate = (ahead.index[-1], ahead["speedup"].iloc[-1]) if len(ahead) else (None, None)
        found.append([*case, best["nproc"], best["speedup"], bool(faster), name, rate])
    return pd.DataFrame(found, columns=[*CASE, "nproc", "speedup", "faster", "rival", "rival_speedup"])


def by_sequence(rows: pd.DataFrame, what: str = "card") -> list[str]:
    """What dividing the sequence gives, from its best to its least case, and where another way is ahead."""
    found = gains(rows)
    if found.empty:
        return ["Dividing the sequence gave no right result here: there is no speed-up to tell."]
    won = found[found["faster"]]
    if won.empty:
        cases = counted(len(found), "case")
        return [f"Dividing the sequence makes none of {cases} faster than one device here, beyond the noise."]
    most, ranks = won.loc[won["speedup"].idxmax()], sorted({int(x) for x in won["nproc"]})
    said = (
        f"Dividing the sequence over {listed(ranks)} {what}s is faster than one device in **{len(won)} of "
        f"{counted(len(found), 'case')}**: **{spread(won['speedup'].min(), won['speedup'].max())} times** as fast, "
        f"the most for {_case(most)}."
    )
    behind = found[found["rival"].notna()]
    if len(behind):
        x = behind.loc[(behind["speedup"] / behind["rival_speedup"]).astype(float).idxmin()]
        rates = f"{x['rival']} {x['rival_speedup']:.2f}, sequence {x['speedup']:.2f}"
        where = f"in {counted(len(behind), 'case')}, the most for {_case(x)} ({rates})"
        said += f" Another way is ahead, beyond the intervals, {where}."
    return [said]


def _case(row) -> str:
    return f"{title(row['kind'])}, {MODES.get(row['mode'], row['mode'])}, N = {int(row['n']):,}"


COSTS = {"context parallel": ("peak", "Context parallel holds", "memory"),
         "heads": ("sent", "Dividing the heads sends", "bytes")}  # fmt: skip


def costs(rows: pd.DataFrame) -> list[str]:
    """What other ways cost beside dividing the sequence: the memory of context parallel and the bytes that heads send,
    over those of "sequence", as a range over cases and at the case with the largest."""
    done, said = relative(rows), []
    for name, (column, does, noun) in COSTS.items():
        ratio = done[done["strategy"] == name][f"{column} over sequence's"].dropna()
        if ratio.empty or ratio.max() <= UNEQUAL:
            continue
        most = done.loc[ratio.idxmax()]
        ends = " to ".join(dict.fromkeys([number(ratio.min()), number(ratio.max())]))
        sizes = f"{mib(most[column])} against {mib(most[column] / ratio.max())} MiB"
        said.append(f"{does} **{ends} times** the {noun} of dividing the sequence; most for {_case(most)}: {sizes}.")
    return said


def between_runs(rows: pd.DataFrame) -> list[str]:
    """How far apart the speed-ups are of cases that several runs measured. rows: `multicard.Recorded.runs`."""
    ours = ok(rows[rows["strategy"] == "sequence"])
    cases = [x for _, x in ours.groupby([*CASE, *SIZES, "nproc"]) if x["run"].nunique() > 1]
    if not cases:
        return []
    apart = pd.Series([x["speedup"].max() / x["speedup"].min() - 1 for x in cases])
    within = pd.Series([(x["speedup_high"] / x["speedup_low"]).median() - 1 for x in cases])
    inside = f"(the median of {counted(len(cases), 'case')}); within one run its interval is {within.median():.0%} wide"
    return [
        f"Between runs, some of them of earlier code, a case's speed-up differs by **{apart.median():.0%}** {inside}."
    ]


def headline(rows: pd.DataFrame, what: str = "card") -> str:
    """The page in a few words: the range of speed-ups by "sequence" where it is faster."""
    found = gains(rows)
    won = found[found["faster"].astype(bool)]
    if won.empty:
        return "dividing the sequence: no gain"
    gain = spread(won["speedup"].min(), won["speedup"].max())
    return f"dividing the sequence: {gain} times on {counted(int(won['nproc'].max()), what)}"


def compared(rows: pd.DataFrame) -> str:
    """How many results are those of one device; which are not is `multicard.missing`'s to say."""
    checked = rows["valid"].dropna()
    return f"Compared with one device: **{checked.sum()} of {len(checked)}** results agree up to rounding."


# How names of kernels tell which engine they are of, the first that fits.
ENGINES = {
    "pytorch_flash": "FlashAttention-2", "fmha": "torch's memory-efficient attention", "cudnn": "cuDNN",
    "kernel_cutlass": "FlashAttention-4", "fa4": "FlashAttention-4", "Sm90": "FlashAttention-4",
    "forward_kernel": "Triton", "dq_kernel": "Triton", "dkdv_kernel": "Triton",
}  # fmt: skip


def computed_by(rows: pd.DataFrame) -> list[str]:
    """Which engine's kernels took most of a card's time, by strategy and pattern; nothing where none was seen."""
    seen = rows.dropna(subset="kernel")
    engines = seen["kernel"].map(lambda kernel: next((x for part, x in ENGINES.items() if part in kernel), kernel[:60]))
    by = seen.groupby(engines, sort=False)
    return [f"**{engine}** takes most of the time of {'; '.join(of_patterns(group))}." for engine, group in by]


def about(rows: pd.DataFrame, device: str = "") -> str:
    """For a caption: dtype, heads and device of rows; the device of recorded rows is their own, with the date."""
    first = rows.iloc[0]
    sizes = f"{first['dtype']}, {counted(int(first['heads']), 'head')} x {int(first['head_dim'])}"
    if "run_device" in rows:
        device = f"{int(rows['nproc'].max())} x {first['run_device']}, recorded {str(rows['run_utc'].max())[:10]}"
    return f"{sizes}; {device}"


def as_planned(rows: pd.DataFrame) -> str:
    """In how many of the rows that have a plan every rank sent exactly its bytes."""
    done = rows[rows["status"].eq("ok") & rows["planned_bytes"].notna()]
    same = (done["sent_bytes"] == done["planned_bytes"]).sum()
    return f"In **{same} of {len(done)} calls** every rank sent as many bytes as its plan says, to the byte."


def uneven(shares: pd.DataFrame, what: str = "card") -> list[str]:
    """A warning for each row whose ranks had equal shares of the batch and took unequal time: it is about a slow rank,
    not about the strategy."""
    equal = shares[shares["strategy"].eq("DDP") & (shares["sequences"] % shares["ranks"] == 0)]
    slow = equal[equal["busiest"].astype(float) > UNEQUAL * equal["idlest"].astype(float)]
    return [
        f"**Not a fair row:** with {counted(int(row.sequences), 'sequence')}, DDP gave each {what} as much to do, but "
        f"one computed {row.busiest:.0%} of the time and another {row.idlest:.0%}. One {what} was slow: measure again."
        for row in slow.itertuples()
    ]


def longest(rows: pd.DataFrame, budget_mib: float, step: float, what: str = "card") -> str:
    """`scaling.lengths.longest` in a sentence."""
    done = rows[rows["status"].eq("ok") & rows["n"].gt(0)] if len(rows) else rows
    if len(done) < 2:
        return "The search ended without a longest sequence on one device and on several: there is nothing to compare."
    alone, many = done.iloc[0], done.iloc[-1]
    return (
        f"With {budget_mib:,g} MiB for tensors on each of {counted(int(many['world']), what)}, the longest N is "
        f"{times(many['n'] / alone['n'], '.2f')} long as that of one: {int(many['n']):,} against {int(alone['n']):,}, "
        f"each found to within {step:.0%}."
    )


def orders(measured: pd.DataFrame) -> list[str]:
    """`multicard.orders` in sentences: what the order of a grid's cells gives on one device and on several."""
    said = []
    for (device, n, mode, world), group in measured.groupby(["device", "N", "mode", "ranks"]) if len(measured) else ():
        by = group.set_index("order")
        if {*by.index} != {*ORDERS.values()}:
            continue
        slow, fast = (by.loc[x, "speed-up"] for x in ORDERS.values())
        less = ": too little work is left, one device alone is faster" * bool(by.loc["Hilbert", "high"] < 1)
        said.append(f"{device}, N = {n:,}, {mode}: dividing among {world} gives **{slow:.2f} times** in row-major "
                    f"order and **{fast:.2f}** along the Hilbert curve{less}.")  # fmt: skip
    return said


def fewer_bytes(moved: pd.DataFrame) -> str:
    """`multicard.borders` in a sentence: the bytes along a Hilbert curve over those in row-major order."""
    by = moved.set_index(["world", "order"])["bytes"].unstack()
    by = by[by["row_major"] > 0]
    if by.empty:
        return "In neither order do any bytes move."
    share = by["hilbert"] / by["row_major"]
    least, last = share.idxmin(), share.index[-1]
    words = f"Along the Hilbert curve **{share[least]:.0%}** of row-major's bytes move on {counted(least, 'rank')}"
    return words + (f", and {share[last]:.0%} on {last:,}." if last != least else ".")
