"""What notebook 04 asks of several cards: cases by name, sweeps and summaries, modelled curves, borders of shards."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pandas as pd
import torch

from workbench.distributed import Shards, plan
from workbench.harness import records
from workbench.harness.narrate import MODES, first_mode, listed, number, spread, title
from workbench.patterns import BlockSparse, Dense, Neighborhood, from_spec, layouts, orderings
from workbench.patterns.dilated import geometric
from workbench.probes import catalog
from workbench.probes.case import Case
from workbench.probes.timing import AA
from workbench.scaling import sweeps
from workbench.scaling.strategies import ONE, OURS, SHORT, STRATEGIES

MODELLED = ("dense", "longnet-geometric", "block-sparse")  # for which `many_ranks.curves` predicts
ORDERS = {"row_major": "row-major", "hilbert": "Hilbert"}
GRIDS = tuple(f"neighborhood, {x}" for x in ORDERS.values())
KINDS = (*MODELLED, *GRIDS)
BLOCK, RADIUS = 128, 8
SIZES = ("heads", "head_dim", "dtype")
CASE = ("kind", "n", "mode", "nproc")


def at(kind: str, first: int, **sizes) -> Callable[[int], Case]:
    """The function of N that makes the case of a kind: "dense"; "longnet-geometric", `geometric` with a shortest
    segment of `first`; "block-sparse", about 5 % of the blocks of 128: those near the diagonal, and every 32nd
    diagonal; or "neighborhood, row-major" and "neighborhood, Hilbert", all cells within 8 on the squarest grid of N
    cells, in that order. sizes: other arguments of `Case`."""
    makers = {
        "dense": lambda n: Dense(),
        "longnet-geometric": lambda n: geometric(n, first=first),
        "block-sparse": lambda n: BlockSparse(layouts.local(-(-n // BLOCK) // 107) | layouts.strided(32), BLOCK),
    }
    for name, order in zip(GRIDS, (orderings.row_major, orderings.hilbert), strict=True):
        makers[name] = lambda n, order=order: Neighborhood(catalog.grid(n), RADIUS, order(catalog.grid(n)))
    return lambda n: Case(makers[kind](n), n, **sizes)


def cases(lengths: Mapping[str, Sequence[int]], first: int, modes: Iterable[str] = ("fwd",), **sizes) -> dict:
    """{label: Case} for each kind, mode and N. lengths: {kind: N to measure}; sizes: as in `at`, but for the mode."""
    each = [(kind, mode, n) for kind, of_kind in lengths.items() for mode in modes for n in of_kind]
    return {f"{kind} {mode} {sizes.get('batch', 1)} x {n}": at(kind, first, mode=mode, **sizes)(n)
            for kind, mode, n in each}  # fmt: skip


def possible(nproc: Iterable[int]) -> list[int]:
    """Those numbers of ranks for which this machine has the cards, [1] if it has them for none; without CUDA all, since
    ranks are then processes."""
    cards = torch.cuda.device_count()
    return [x for x in nproc if not cards or x <= cards] or [1]


def sweep(chosen: Mapping[str, Case], worlds: Iterable[int], strategies=STRATEGIES, **options) -> pd.DataFrame:
    """The rows of `scaling.sweep` on each number of ranks, with `kind` (see `kinds`). Shares of the batch are measured
    for dense attention alone: for one sequence they are one device, whatever the pattern."""

    def of(case: Case) -> list[str]:
        return [x for x in strategies if x not in SHORT or isinstance(case.pattern, Dense)]

    frames = (sweeps.sweep(chosen, nproc, of, say=None, **options) for nproc in worlds)
    return kinds(pd.DataFrame([row for frame in frames for row in frame.to_dict("records")]))


def kinds(rows: pd.DataFrame) -> pd.DataFrame:
    """rows with a column `kind`: the pattern's name in `maker`, or else its own, with " causal" if it is."""
    return rows.assign(kind=[_kind(*x) for x in zip(rows["pattern_spec"], rows["pattern"], rows["n"], strict=True)])


def _kind(spec: dict, name: str, n: int) -> str:
    found, causal = {"Dense": "dense", "BlockSparse": "block-sparse"}.get(spec["pattern"], name), spec.get("causal")
    if spec["pattern"] == "Dilated" and spec == geometric(int(n), causal, spec["segment_lengths"][0]).spec():
        found = "longnet-geometric"
    if spec["pattern"] == "Neighborhood" and spec["radius"] == [RADIUS] * 2 and math.prod(spec["shape"]) == n:
        order = (spec.get("ordering") or {}).get("ordering")
        found = f"neighborhood, {ORDERS[order]}" if order in ORDERS else name
    return f"{found} causal" if causal else found


class Recorded(NamedTuple):
    """What is committed of a machine: sweeps, as of `sweep`; the newest messages of `link.measure`; the newest
    timelines; sweeps of all commits. Each may be empty."""

    rows: pd.DataFrame
    link: pd.DataFrame
    timelines: pd.DataFrame
    runs: pd.DataFrame


def recorded(machines: Iterable[str]) -> Recorded:
    """The records of the first of these machine kinds that has sweeps; nothing if none has. All but `runs` are of one
    commit, and the sweeps of batch 1 and of one number of heads, head_dim and dtype: of those that measured the most of
    the patterns in KINDS the newest. The newest row if a case was measured more than once."""
    for machine in machines:
        every = records.committed(machine, "scaling")
        rows = every[every["stage"].eq("sweep") & every["batch"].eq(1)] if len(every) else every
        if len(rows):
            rows = runs = kinds(rows).query("kind in @KINDS")
            alike = [x for _, x in rows.groupby(["run_commit", *SIZES])]
            rows = max(alike, key=lambda x: (x["kind"].nunique(), x["run_utc"].max(), len(x)), default=rows)
            rows = rows.drop_duplicates([*CASE, "strategy"], keep="last")
            every = every[every["run_commit"].isin(rows["run_commit"])]
            others = (_newest(every[every["stage"].isin(x)]) for x in (["link", "cost"], ["spans"]))
            return Recorded(rows.reset_index(drop=True), *others, runs)
    return Recorded(*(pd.DataFrame() for _ in range(4)))


def _newest(rows: pd.DataFrame) -> pd.DataFrame:
    """Those of the newest run."""
    return rows[rows["run_utc"] == rows["run_utc"].max()].dropna(axis="columns", how="all") if len(rows) else rows


def ok(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that ran and are not known to be wrong."""
    return rows[rows["status"].eq("ok") & rows["median_ms"].notna() & ~rows["valid"].eq(False)]


def summary(rows: pd.DataFrame, cell: Callable[[dict], str]) -> pd.DataFrame:
    """A table with a line for each case and number of ranks, and a column for each strategy that ran, filled by `cell`
    of the row; with columns `mode` and `ranks` only if there are several."""
    done = ok(rows[rows["strategy"] != AA])
    cells = [cell(row) for row in done.to_dict("records")]
    done = done.assign(kind=done["kind"].map(title), mode=done["mode"].map(MODES))
    names = {"kind": "pattern", "mode": "mode", "n": "N", "nproc": "ranks"}
    frame = done[[*names, "strategy"]].rename(columns=names).assign(cell=cells)
    table = frame.pivot_table("cell", list(names.values()), "strategy", aggfunc="last", sort=False)
    ours = [x for x in (ONE, *OURS) if x in table]  # these come first
    table = table[[*ours, *(x for x in table if x not in ours)]]
    table = table.reset_index().rename_axis(columns=None).rename(columns=SHORT)
    return table.drop(columns=[x for x in ("mode", "ranks") if table[x].nunique() < 2]).set_index("pattern")


def time_and_speedup(row: dict) -> str:
    """For `summary`: the median in milliseconds, and the speed-up over one device."""
    faster = "" if row["strategy"] == ONE else f" ({row['speedup']:.2f}x)"
    return f"{number(row['median_ms'])}{faster}"


def peak_and_sent(row: dict) -> str:
    """For `summary`: MiB at the peak of the card that has most and, if any are sent, MiB sent by the one that does so
    most."""
    sent = row.get("sent_bytes")
    sends = f" ({mib(max(sent))})" if isinstance(sent, list) and any(sent) else ""
    return mib(row["peak_bytes"]) + sends


def busy(row: dict) -> str:
    """For `summary`: the shares of the time in which a rank computes, from the least to the largest."""
    known = _busy(row)
    return spread(known[0], known[-1], ".0%") if known else "?"


def _busy(row: dict) -> list[float]:
    """The shares of the time in which a rank computes that are known, in ascending order."""
    return sorted(x for x in row["busy"] if x is not None) if isinstance(row["busy"], list) else []


def mib(x: float) -> str:
    """Bytes in MiB, three digits or all of a whole number's."""
    return "?" if pd.isna(x) else f"{x / 2**20:,.0f}" if x >= 100 << 20 else f"{x / 2**20:.3g}"


def missing(rows: pd.DataFrame) -> list[str]:
    """A sentence for each strategy with rows that are wrong or did not run: its patterns, and the first reason."""
    off, said = rows[~rows.index.isin(ok(rows).index)], []
    for (wrong, _), group in off.groupby([off["valid"].eq(False), off["status"]], sort=False):
        head = "Wrong, so left out" if wrong else "Not measured"
        whys = group.drop_duplicates("strategy")["error"].astype(str).str.removeprefix("wrong: ")
        said += [f"{head}: {who}: {why}." for who, why in zip(of_patterns(group), whys, strict=True)]
    return said


def of_patterns(rows: pd.DataFrame) -> list[str]:
    """Each strategy of rows with its patterns, in words: "sequence for dense and block-sparse"."""
    return [f"{SHORT.get(x, x)} for {listed(dict.fromkeys(map(title, kinds)))}"
            for x, kinds in rows.groupby("strategy", sort=False)["kind"]]  # fmt: skip


def wrong(rows: pd.DataFrame) -> set[tuple[str, str]]:
    """(kind, strategy) of what gave a wrong result."""
    off = rows[rows["valid"].eq(False)]
    return {*zip(off["kind"], off["strategy"], strict=True)}


def by_batch(rows: pd.DataFrame) -> pd.DataFrame:
    """What dividing the batch gives, compared with dividing the sequence: a row for each batch size (`sequences`), N,
    number of ranks and strategy of the forwards that ran. busiest, idlest: the largest and the least share of the time
    in which a card computes; speed-up, and its interval, low to high; peak: the largest of a card over that of one
    device; work: the time in which the idlest computes over its share of one device's."""
    done = ok(rows[rows["mode"] == "fwd"])
    peak = done["peak_bytes"] / _same_case(done, "peak_bytes", ONE, ["batch", "n", "nproc"])
    done = done.assign(peak=peak)[done["strategy"].isin([*SHORT, "sequence"])]
    busy = [_busy(row) or [math.nan] for row in done.to_dict("records")]
    busiest, idlest = (pd.Series([x[at] for x in busy], done.index, dtype=float) for at in (-1, 0))
    return pd.DataFrame({
        "sequences": done["batch"], "N": done["n"], "ranks": done["nproc"], "strategy": done["strategy"].replace(SHORT),
        "busiest": busiest, "idlest": idlest, "speed-up": done["speedup"], "low": done["speedup_low"],
        "high": done["speedup_high"], "work": idlest * done["nproc"] / done["speedup"], "peak": done["peak"],
    })  # fmt: skip


def _same_case(rows: pd.DataFrame, column: str, strategy: str, case: Sequence[str]) -> pd.Series:
    """For each row, the column of this strategy where the columns `case` are the same; NaN where there is none."""
    return rows[column].where(rows["strategy"] == strategy).groupby([rows[x] for x in case]).transform("first")


def relative(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that ran, with peak and sent, bytes of the fullest rank and of the busiest sender, and both over those
    of "sequence" in the same case (empty where it sends nothing)."""
    done = ok(rows)
    sent = [max(x, default=0) if isinstance(x, list) else None for x in done["sent_bytes"]]
    done = done.assign(peak=done["peak_bytes"], sent=pd.Series(sent, done.index, dtype=float))
    for column in ("peak", "sent"):
        ours = _same_case(done, column, "sequence", CASE)
        done[f"{column} over sequence's"] = done[column] / ours.where(ours > 0)
    return done


def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows without what is no single value, what is empty, and what says where a record is from: to be saved beside a
    figure."""
    single = rows[[x for x in rows if not x.startswith("run") and x not in ("probe", "stage", "pattern_spec")]]
    single = single[[x for x in single if not single[x].map(lambda y: isinstance(y, (list, dict))).any()]]
    return single.dropna(axis="columns", how="all")


def longest(rows: pd.DataFrame) -> pd.DataFrame:
    """`scaling.lengths.longest` as a table."""
    names = {"strategy": "strategy", "world": "ranks", "n": "longest N", "limiter": "limited by"}
    found = rows[[*names]].rename(columns=names)
    found[["budget MiB", "peak MiB", "reserved MiB"]] = rows[["budget_bytes", "peak_bytes", "reserved_bytes"]] / 2**20
    found["limited by"] = found["limited by"].map(title, na_action="ignore")
    return found.assign(**{"times one device's": rows["ratio"]}).set_index("strategy")


@contextmanager
def one_thread():
    """Have torch use one thread: in many small operations, waiting for threads would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def moved(rows: pd.DataFrame, world: int) -> pd.DataFrame:
    """What a forward moves on so many ranks, from the plans of each pattern's longest sequence: MiB sent by all ranks
    and by the one that sends most, rows that ranks get over those that they hold, exchanges, and the most pairs of a
    rank over the mean."""
    found = []
    for row in first_mode(rows).sort_values("n").drop_duplicates("kind", keep="last").sort_index().to_dict("records"):
        n, heads, kv_heads, nq, head_dim = (int(row[x]) for x in ("n", "heads", "kv_heads", "nq", "head_dim"))
        its = plan(from_spec(row["pattern_spec"]), Shards.even(n, world), heads, kv_heads, nq)
        itemsize = getattr(torch, row["dtype"]).itemsize
        sent = its.bytes(itemsize, head_dim)
        found.append({
            "pattern": title(row["kind"]), "N": n, "MiB, all ranks": int(sent.sum()) / 2**20,
            "MiB, busiest sender": int(sent.sum(1).max()) / 2**20,
            "rows got over rows held": int(sent.sum()) / (2 * n * kv_heads * head_dim * itemsize),
            "exchanges": len(its.stages), "most pairs over the mean": its.balance,
        })  # fmt: skip
    return pd.DataFrame(found).set_index("pattern") if found else pd.DataFrame()


def orders(rows: pd.DataFrame, device: str) -> pd.DataFrame:
    """The neighborhoods that were measured on a device: a row for each N, mode, number of ranks and order, with the
    times on one device and on all ranks, the speed-up with its interval, and what the busiest sender sends."""
    if rows.empty:
        return pd.DataFrame()
    done = ok(rows[rows["kind"].isin(GRIDS)])
    done = done.assign(alone=_same_case(done, "median_ms", ONE, CASE))
    ours = done[done["strategy"].eq("sequence") & done["alone"].notna()]
    return pd.DataFrame({
        "device": device, "order": ours["kind"].str.removeprefix("neighborhood, "), "N": ours["n"].astype(int),
        "mode": ours["mode"].map(MODES), "ranks": ours["nproc"].astype(int), "one device (ms)": ours["alone"],
        "all ranks (ms)": ours["median_ms"], "speed-up": ours["speedup"], "low": ours["speedup_low"],
        "high": ours["speedup_high"], "MiB, busiest sender": ours["sent_bytes"].map(max) / 2**20,
    }).set_index("device")  # fmt: skip


@one_thread()
def borders(shape, radius: int, names, worlds, *, heads: int, head_dim: int, itemsize: int) -> pd.DataFrame:
    """What a forward of a 2-D neighborhood moves, from plans alone: a row for each order of cells and number of ranks.

    names: of orders in `orderings`. A row: order, world; bytes, by all ranks; halo, the rows that ranks get over those
    that they hold, the mean.
    """
    found, n = [], shape[0] * shape[1]
    for name in names:
        pattern = Neighborhood(tuple(shape), radius, getattr(orderings, name)(tuple(shape)))
        for world in worlds:
            got = int(plan(pattern, Shards.even(n, world), heads).bytes(itemsize, head_dim).sum())
            halo = got / (2 * n * heads * head_dim * itemsize)
            found.append({"order": name, "world": world, "bytes": got, "halo": halo})
    return pd.DataFrame(found)
