"""What the notebook on frontiers asks: tables of predictions, traces and records, and their sentences."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import pandas as pd

from workbench.fit import cards, estimate, frontier
from workbench.fit.tracer import Event
from workbench.harness import records
from workbench.harness.narrate import counted, listed, title

PROMISED, RUNS, TOO_MUCH = "longest N by max_memory_allocated", "longest N that runs", "promised too much"
KINDS = {"Dense": "dense", "Dilated": "dilated", "BlockSparse": "blocks", "Neighborhood": "window-tokens"}


def wrong(kind: str) -> pd.DataFrame:
    """Calls measured on a machine kind that fitted and computed something else, the shortest of each way.

    elements: of q, of all its sequences; said: what the check found.
    """
    columns = ["way", "mode", "batch", "heads", "head_dim", "n", "elements"]
    rows = records.committed(kind, "frontier")
    if rows.empty:
        return pd.DataFrame(columns=[*columns, "said"])
    rows = rows[(rows["stage"] == "probe") & (rows["limiter"] == "validity")]
    rows = rows.assign(way=_labels(rows), elements=rows[["batch", "n", "heads", "head_dim"]].prod(axis=1))
    shortest = rows.sort_values("n").drop_duplicates(["way", "batch", "heads", "head_dim", "mode"])
    said = shortest["error"].str.split(";").str[0]
    return shortest[columns].astype(dict.fromkeys(columns[2:], "int64")).assign(said=said)


def recorded(kind: str) -> pd.DataFrame:
    """The frontiers that were measured on a machine kind and committed, with `label`, a row each; empty if none were.

    Of the sizes (batch, heads, head_dim, dtype and mode) that the most of them have.
    """
    rows = records.committed(kind, "frontier")
    if rows.empty:
        return rows.assign(label=None)
    rows = rows[(rows["stage"] == "search") & (rows["status"] == "ok") & rows["measured_n"].notna()]
    sizes = ["batch", "heads", "head_dim", "dtype", "mode"]
    rows = rows.assign(label=_labels(rows)).drop_duplicates(["label", "budget_bytes", *sizes], keep="last")
    return max(rows.groupby(sizes), key=lambda group: len(group[1]), default=(None, rows))[1].reset_index(drop=True)


def _labels(rows: pd.DataFrame) -> list[str]:
    return [f"{KINDS.get(spec['pattern'], spec['pattern'])}, {str(asked).split(':')[-1]}"
            for spec, asked in zip(rows["pattern_spec"], rows["asked"], strict=True)]  # fmt: skip


def scores_share(found: estimate.Estimate, n: int, heads: int) -> float:
    """The share of the peak that tensors of at least heads x n x n bytes have: the scores, and what is like them."""
    return sum(x for _, x in found.at_peak if x >= heads * n * n) / found.requested_bytes


def promised(found: Mapping[str, frontier.Lengths], card: str) -> pd.DataFrame:
    """A line per way: PROMISED, the longest N whose max_memory_allocated is within the card's memory, RUNS, the longest
    with room for the CUDA context and for what the allocator reserves, and by how much the first exceeds the second.
    """
    of, lines = cards.find(card), []
    for name, at in found.items():
        real = frontier.search(at, card=of, seconds=math.inf, limit_n=1 << 26, say=None)["n"]
        if not real:
            continue
        allocated = lambda x, at=at: estimate.trace(at(x * frontier.GRAIN), of).allocated_bytes  # noqa: E731
        fits = range(real // frontier.GRAIN, 2 * real // frontier.GRAIN)  # the first one does
        seen = frontier.GRAIN * (fits[0] - 1 + bisect_right(fits, of.total_bytes, key=allocated))
        lines.append({"way": title(name), PROMISED: seen, RUNS: real, TOO_MUCH: seen / real - 1})
    return pd.DataFrame(lines)


def numbers(traces: Mapping[str, estimate.Estimate]) -> pd.DataFrame:
    """A line per way: requested, allocated, reserved and device, bytes at the peak of what was traced."""
    kinds = ("requested", "allocated", "reserved", "device")
    return pd.DataFrame([{"way": title(name)} | {x: getattr(one, f"{x}_bytes") for x in kinds}
                         for name, one in traces.items()])  # fmt: skip


def peaks(traces: Mapping[str, estimate.Estimate]) -> pd.DataFrame:
    """The table of what is alive at each way's peak: a line per tensor, its bytes."""
    return pd.DataFrame([{"way": title(way), "tensor": name, "bytes at the peak": size}
                         for way, found in traces.items() for name, size in found.at_peak])  # fmt: skip


def alive(events: Sequence[Event]) -> pd.DataFrame:
    """Bytes alive after each event, a column a name of tensor (those of one name added up), in order of birth."""
    born = {event.id: event for event in events if event.nbytes >= 0}
    changes = [{born[x.id].name: x.nbytes if x.nbytes >= 0 else -born[x.id].nbytes} for x in events]
    return pd.DataFrame(changes).fillna(0).cumsum().astype("int64")


def _largest(lines: pd.DataFrame) -> pd.DataFrame:
    """The rows of a sweep at its largest budget, the longest N last."""
    return lines[lines["budget_bytes"] == lines["budget_bytes"].max()].dropna(subset="n").sort_values("n")


def at_most(lines: pd.DataFrame) -> pd.DataFrame:
    """The table of a sweep at its largest budget, a line per way: the longest N, and in times of the shortest there."""
    done = _largest(lines)
    return pd.DataFrame({
        "way": done["label"].map(title), "budget (GiB)": done["budget_bytes"] / 2**30,
        "longest_n": done["n"].astype(int), "limited by": frontier.limiters(done).map(title, na_action="ignore"),
        "times the shortest": done["n"] / done["n"].min(),
    })[::-1].set_index("way")  # fmt: skip


def _both(measured: pd.DataFrame) -> pd.DataFrame:
    """The searches that have a prediction and a measurement; off: by how much of it the first exceeds the second."""
    done = measured.dropna(subset=["measured_n", "predicted_n"])
    return done.assign(off=done["predicted_n"] / done["measured_n"] - 1)


def against_measured(measured: pd.DataFrame) -> pd.DataFrame:
    """The table of what was predicted and measured, a line per search."""
    both = _both(measured)
    return pd.DataFrame({
        "way": both["label"].map(title), "budget (MiB)": both["budget_bytes"] / 2**20,
        "predicted N": both["predicted_n"], "measured N": both["measured_n"], "off (%)": 100 * both["off"],
        "limited by": both["limiter"].map(title, na_action="ignore"), "probes": both["probes"],
    }).set_index("way")  # fmt: skip


def most(lines: pd.DataFrame, card: str) -> str:
    """The least and the most that ways take at the largest budget, apart from those that write all N x N scores."""
    done = _largest(lines)
    if done.empty:
        return f"On {card} none of these ways runs with the largest budget."
    done = done.assign(by=frontier.limiters(done).map(_named))
    eager = done["label"].str.endswith(", eager")
    ends = pd.concat([done[~eager][:1], done[~eager][1:][-1:]]).itertuples()  # one where there is but one
    others = " to ".join(f"**{int(x.n):,}** ({title(x.label)}, limited by {x.by})" for x in ends)
    said = [f"what writes no N x N scores takes {others} tokens"] * bool(others)
    said += [f"{title(x.label)} writes them and takes **{int(x.n):,}**" for x in done[eager].itertuples()]
    where = f"the memory and speed of {card}, {done['budget_bytes'].iloc[0] / 2**30:g} GiB for tensors"
    return f"Predicted for {where}: {'; '.join(said)}."


def _named(limiter) -> str:
    return title(limiter) if isinstance(limiter, str) and limiter != "search" else "nothing as far as was searched"


def agreement(measured: pd.DataFrame) -> list[str]:
    """How the predictions compare with what was measured, and what was not."""
    done = _both(measured)
    said = [f"Not measured, {title(x.label)}: {x.error}" for x in measured[measured["status"] != "ok"].itertuples()]
    if done.empty:
        return ["No search has both a prediction and a measurement.", *said]
    worst = done["off"].abs().max()
    off = "all are equal" if worst == 0 else f"at worst off by {worst:.2%}"
    searches = f"{len(done)} search{'es' * (len(done) > 1)}"
    within = f"In **{right(measured)} of {searches}** the prediction is within a step of what was measured"
    return [f"{within} {whence(done)}; {off}.", *said]


def whence(measured: pd.DataFrame, commits=False) -> str:
    """Whether searches (rows of `frontier.sweep`) were measured in this run or are on record, of when, in words."""
    done = measured[measured["measured_n"].notna()]
    old = done[done["measured"].ne(True)]
    if old.empty:
        return "in this run" * bool(len(done))
    ends = " to ".join(dict.fromkeys(old["run_utc"].str[:10].agg(["min", "max"])))
    of = f"on record of {ends}" + f", commits {listed(old['run_commit'].unique())}" * commits
    return f"before ({len(old)}, {of})" + f" and in this run ({len(done) - len(old)})" * (len(done) > len(old))


def right(measured: pd.DataFrame) -> int:
    """In how many searches the prediction is within a step of what was measured."""
    done = _both(measured)
    return int((done["off"].abs() <= done["step"] + done["grain"] / done["measured_n"]).sum())


def overpromised(lines: pd.DataFrame, card: str) -> str:
    """`promised` in a sentence."""
    if lines.empty:
        return f"None of these ways runs on {card}."
    worst = lines.loc[lines[TOO_MUCH].idxmax()]
    much = f"up to **{worst[TOO_MUCH]:.1%}** more tokens than run ({worst['way']})"
    return f"On {card} (predicted, by memory alone), what `max_memory_allocated` reports promises {much}."


def limits(table: pd.DataFrame) -> str:
    """What limits the cells of a map (rows of `frontier.sweep`), in a sentence."""
    done = table[table["status"] == "ok"]
    by = ", ".join(f"{_named(x)} {n}" for x, n in frontier.limiters(done).value_counts().items())
    return f"What limits the {counted(len(done), 'frontier')} here: {by or 'none of these ways runs'}."


def autos(table: pd.DataFrame) -> str:
    """Which kernel `auto` takes for dense attention at the longest N (rows of `frontier.sweep`), in a sentence."""
    dense = table[table["label"].eq("dense, auto") & table["n"].gt(0) & table["kernel"].notna()]
    on = dense["card"].map(title).groupby(dense["kernel"].map(title), sort=False).agg(listed)
    return f"At these lengths dense, auto is {'; '.join(f'{x} on {y}' for x, y in on.items())}." * bool(len(on))


def beyond(table: pd.DataFrame, heads: int, head_dim: int) -> str:
    """How many frontiers (rows of `frontier.sweep`) are where a tensor has 2^31 elements or more, in a sentence."""
    n, done = 2**31 // (heads * head_dim), table[table["status"] == "ok"]
    at = f"With {counted(heads, 'head')} x {head_dim} a tensor has that many elements at **N = {n:,}**"
    far = f"{int((done['n'].fillna(0) > n).sum())} of {len(done)}"
    return f"{at}. Of the frontiers above {far} lie beyond it: measure before you rely on such a length."
