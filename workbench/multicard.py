"""What the notebook on several cards asks: cases by name, rows of every world, curves beside points, borders of shards.

Dimensions: B batch, N positions, H heads, D head_dim, P ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager

import pandas as pd
import torch

from workbench import orderings, records
from workbench.distributed import Shards, plan
from workbench.distributed.strategies import ONE, OURS, SHORT, STRATEGIES
from workbench.patterns import BlockSparse, Dense, Neighborhood, Pattern, from_spec, layouts
from workbench.patterns.dilated import geometric
from workbench.probes import link, scaling
from workbench.probes.case import Case
from workbench.probes.timing import AA, speedup

KINDS = ("dense", "longnet", "block-sparse")
BLOCK = 128
LONGEST = 1 << 20  # positions up to which lists of visible blocks are made for a curve
SIZES = ("heads", "head_dim", "dtype")


def maker(kind: str, first: int = 4096) -> Callable[[int], Pattern]:
    """A pattern for N positions, by its name: dense; longnet, `geometric` from segments of `first` on; or block-sparse,
    5 % of the blocks of 128: those near the diagonal, and every 32nd beside. ValueError for another name."""
    made = {
        "dense": lambda n: Dense(),
        "longnet": lambda n: geometric(n, first=first),
        "block-sparse": lambda n: BlockSparse(layouts.local(-(-n // BLOCK) // 107) | layouts.strided(32), BLOCK),
    }
    if kind not in made:
        raise ValueError(f"pattern={kind!r}: want one of {', '.join(KINDS)}")
    return made[kind]


def at(kind: str, first: int, **sizes) -> Callable[[int], Case]:
    """The case of a kind at any N. sizes: heads, head_dim, dtype, mode, device and batch of `Case`."""
    make = maker(kind, first)
    return lambda n: Case(make(n), n, **sizes)


def cases(lengths: Mapping[str, Sequence[int]], first: int, modes: Iterable[str] = ("fwd",), **sizes) -> dict:
    """{label: Case}. lengths: {a kind: its N}; sizes: as in `at`, all but the mode."""
    found = {}
    for kind, of_kind in lengths.items():
        for mode in modes:
            made = at(kind, first, mode=mode, **sizes)
            found |= {f"{kind} {mode} {sizes.get('batch', 1)} x {n}": made(n) for n in of_kind}
    return found


def possible(nproc: Iterable[int]) -> list[int]:
    """The numbers of ranks that this machine has a card for, [1] where it has for none; without CUDA, all: they are
    processes."""
    cards = torch.cuda.device_count()
    return [x for x in nproc if not cards or x <= cards] or [1]


def processors() -> int:
    """The processors that ranks without cards share."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most(world: int) -> int:
    """The speed-up that so many ranks can have here at best: no more than there are cards, or processors."""
    return min(world, torch.cuda.device_count() or processors())


def sweep(chosen: Mapping[str, Case], worlds: Iterable[int], strategies=STRATEGIES, **options) -> pd.DataFrame:
    """`scaling.sweep` on each number of ranks: its rows, with `kind` (see `kinds`)."""
    frames = (scaling.sweep(chosen, nproc, strategies, say=None, **options) for nproc in worlds)
    return kinds(pd.DataFrame([row for frame in frames for row in frame.to_dict("records")]))


def kinds(rows: pd.DataFrame) -> pd.DataFrame:
    """With a column `kind`: what a pattern is called here (see `maker`), or its own name."""
    return rows.assign(kind=[_kind(*x) for x in zip(rows["pattern_spec"], rows["pattern"], rows["n"], strict=True)])


def _kind(spec: dict, name: str, n: int) -> str:
    found, causal = {"Dense": "dense", "BlockSparse": "block-sparse"}.get(spec["pattern"], name), spec.get("causal")
    if spec["pattern"] == "Dilated" and spec == geometric(int(n), causal, spec["segment_lengths"][0]).spec():
        found = "longnet"
    return f"{found} causal" if causal else found


def recorded(machines: Iterable[str]) -> tuple[pd.DataFrame, float | None]:
    """What is committed for the first of these machine kinds that has sweeps: rows as `sweep` gives them, the newest of
    each, and the link's bytes a second. (empty, None) if none has; of one sequence, and of the heads and dtype that the
    most rows have."""
    for machine in machines:
        journals = sorted((records.default_folder() / machine).glob("*-scaling-*.jsonl"))
        every = records.load(*journals) if journals else pd.DataFrame(columns=["stage"])
        rows = every[every["stage"].eq("sweep")]
        if len(rows):
            rows = kinds(rows[rows["batch"] == 1]).sort_values("run_utc", kind="stable")
            rows = rows.drop_duplicates(["kind", "n", "mode", "nproc", "strategy", *SIZES], keep="last")
            most_rows = max((x for _, x in rows.groupby(list(SIZES))), key=len)
            return most_rows.reset_index(drop=True), rate(every[every["stage"].eq("link")])
    return pd.DataFrame(), None


def rate(messages: pd.DataFrame) -> float | None:
    """Bytes a second that a rank sends by the largest messages of `link.measure`; None where there is none."""
    done = messages[messages["status"].eq("ok")] if len(messages) else messages
    return float(done.sort_values("message_bytes")["bytes_per_second"].iloc[-1]) if len(done) else None


# --- what a sweep says ------------------------------------------------------------------------------------------------


def ok(rows: pd.DataFrame) -> pd.DataFrame:
    """Those that ran and are right."""
    valid = rows["valid"] if "valid" in rows else pd.Series(None, rows.index, dtype=object)
    return rows[rows["status"].eq("ok") & rows["median_ms"].notna() & ~valid.eq(False)]


def summary(rows: pd.DataFrame, cell: Callable[[dict], str]) -> pd.DataFrame:
    """A line a case and number of ranks, a column a strategy that ran, in each place what `cell` says of the row; a
    column `mode` where there are two, and `ranks` where they differ."""
    done = ok(rows[rows["strategy"] != AA])
    cells = [cell(row) for row in done.to_dict("records")]
    names = {"kind": "pattern", "mode": "mode", "n": "N", "nproc": "ranks"}
    frame = done[[*names, "strategy"]].rename(columns=names).assign(cell=cells)
    table = frame.pivot_table("cell", list(names.values()), "strategy", aggfunc="last", sort=False)
    ours = [x for x in (ONE, *OURS) if x in table]  # the others beside them
    table = table[[*ours, *(x for x in table if x not in ours)]]
    table = table.reset_index().rename_axis(columns=None).rename(columns=SHORT)
    return table.drop(columns=[x for x in ("mode", "ranks") if table[x].nunique() < 2])


def time_and_speedup(row: dict) -> str:
    """For `summary`: the median in milliseconds, and times faster than one device."""
    faster = "" if row["strategy"] == ONE else f" ({row['speedup']:.2f}x)"
    return f"{row['median_ms']:,.3g}{faster}"


def peak_and_sent(row: dict) -> str:
    """For `summary`: MiB of the card that has most, at the peak and, if it sends any, sent."""
    sent = row.get("sent_bytes")
    sends = f" ({_mib(max(sent))})" if isinstance(sent, list) and any(sent) else ""
    return _mib(row["peak_bytes"]) + sends


def _mib(x: float) -> str:
    return f"{x / 2**20:,.0f}" if x >= 100 << 20 else f"{x / 2**20:.3g}"


def missing(rows: pd.DataFrame) -> list[str]:
    """Why strategies are not among the rows that ran: a sentence for each, of the first case."""
    off = rows[~rows.index.isin(ok(rows).index)].drop_duplicates("strategy")
    return [f"`{row.strategy}`: {row.error}" for row in off.itertuples()]


def exactly_planned(rows: pd.DataFrame) -> tuple[int, int]:
    """(rows in which every rank sent exactly the bytes of the plan, rows that have a plan)."""
    done = rows[rows["status"].eq("ok") & rows["planned_bytes"].notna()]
    return sum(a == b for a, b in zip(done["sent_bytes"], done["planned_bytes"], strict=True)), len(done)


def by_batch(rows: pd.DataFrame) -> pd.DataFrame:
    """What dividing the batch gives, beside the sequence: of the forwards a row a number of sequences, N, ranks and a
    strategy that ran. busiest, idlest: the shares of the time in which the card computes that does so most, and least;
    speed-up; peak: the largest of a card over one device's."""
    done, lines = ok(rows[rows["mode"] == "fwd"]), []
    for (batch, n, world), group in done.groupby(["batch", "n", "nproc"], sort=False):
        one = group[group["strategy"] == ONE]
        for row in group[group["strategy"].isin([*SHORT, "sequence"])].to_dict("records"):
            busy = sorted(x for x in row["busy"] if x is not None)
            lines.append({
                "sequences": batch, "N": n, "ranks": world, "strategy": SHORT.get(row["strategy"], row["strategy"]),
                "busiest": busy[-1] if busy else None, "idlest": busy[0] if busy else None,
                "speed-up": row["speedup"], "peak": row["peak_bytes"] / one["peak_bytes"].iloc[0] if len(one) else None,
            })  # fmt: skip
    return pd.DataFrame(lines)


# --- many ranks -------------------------------------------------------------------------------------------------------


def efficiency(rows: pd.DataFrame, strategy: str = "sequence") -> pd.DataFrame:
    """Measured forwards: what a rank does in a second over what one device does, with its interval.

    A row: kind, scaling, world, n, efficiency, low, high. "strong": against one device at the same N, at the longest.
    "weak": where N / world is the shortest, against one device at that, in another round: by pairs, of which dense
    attention has more a position where there are more positions.
    """
    done, found = ok(rows[rows["mode"] == "fwd"]), []
    for (kind, world), group in done.groupby(["kind", "nproc"], sort=False):
        one = group[group["strategy"] == ONE].sort_values("n").head(1).to_dict("records")
        for row in group[group["strategy"] == strategy].to_dict("records"):
            line = {"kind": kind, "world": world, "n": row["n"]}
            if row["n"] == group["n"].max():
                found.append(line | {"scaling": "strong"} | _shares(row, world))
            if one and one[0]["n"] * world == row["n"]:
                samples = min(len(one[0]["samples_ms"]), len(row["samples_ms"]))
                ratio = speedup(one[0]["samples_ms"][:samples], row["samples_ms"][:samples])
                found.append(line | {"scaling": "weak"} | _shares(ratio, world * one[0]["pairs"] / row["pairs"]))
    return pd.DataFrame(found, columns=["kind", "scaling", "world", "n", "efficiency", "low", "high"])


def _shares(ratio: dict, of: float) -> dict:
    names = {"efficiency": "speedup", "low": "speedup_low", "high": "speedup_high"}
    return {x: ratio[y] / of for x, y in names.items()}


@contextmanager
def one_thread():
    """For many small operations: threads that wait for a busy machine would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def curves(rows: pd.DataFrame, bytes_per_second: float, worlds: Iterable[int], first: int) -> pd.DataFrame:
    """`link.modelled` of the longest forward of each kind, strong, and of the shortest, weak, from the rate that one
    device had there and a link's: rows with `kind`, all of them modelled."""
    alone, found = ok(rows[rows["mode"].eq("fwd") & rows["strategy"].eq(ONE) & rows["kind"].isin(KINDS)]), []
    for kind, group in alone.groupby("kind", sort=False):
        group = group.sort_values("n")
        for scaling_, one in (("strong", group.iloc[-1]), ("weak", group.iloc[0])):
            n, sizes = int(one["n"]), {"heads": int(one["heads"]), "head_dim": int(one["head_dim"])}
            make = at(kind, first, dtype=one["dtype"], **sizes)
            some = [x for x in worlds if kind != "block-sparse" or scaling_ == "strong" or n * x <= LONGEST]
            pairs = one["pairs"] / one["median_ms"] * 1000
            curve = link.modelled(make(n), pairs, bytes_per_second, some, at=make, scaling=scaling_)
            found.append(curve.assign(kind=kind))
    return pd.concat(found, ignore_index=True)


def plans(rows: pd.DataFrame, world: int) -> dict:
    """{kind: its plan on so many ranks}, of the longest forward of each."""
    longest = rows[rows["mode"] == "fwd"].sort_values("n").drop_duplicates("kind", keep="last").sort_index()
    return {
        row["kind"]: plan(from_spec(row["pattern_spec"]), Shards.even(row["n"], world), row["heads"])
        for row in longest.to_dict("records")
    }


@one_thread()
def borders(
    shape: Sequence[int], radius: int, names: Iterable[str], worlds: Iterable[int], *, heads: int, head_dim: int,
    itemsize: int,
) -> pd.DataFrame:  # fmt: skip
    """What a forward of a neighborhood moves by the order of its cells: a row an order and number of ranks.

    names: of `orderings`. bytes: of all ranks; most: that one gets at most; halo: rows that a rank gets over those that
    it holds, the mean. From plans alone: nothing is measured.
    """
    found, n = [], shape[0] * shape[1]
    for name in names:
        pattern = Neighborhood(tuple(shape), radius, getattr(orderings, name)(tuple(shape)))
        for world in worlds:
            got = plan(pattern, Shards.even(n, world), heads).bytes(itemsize, head_dim).sum(0)
            line = {"order": name, "world": world, "bytes": int(got.sum()), "most": int(got.max())}
            found.append(line | {"halo": float(got.sum()) / (2 * n * heads * head_dim * itemsize)})
    return pd.DataFrame(found)
