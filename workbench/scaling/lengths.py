"""How long a sequence can be on one device, and on several ranks by a strategy of using them."""

from collections.abc import Callable

import pandas as pd

from workbench.fit.frontier import GRAIN, STEPS, Lengths, lengths_of
from workbench.fit.search import Stopped, Tried, largest
from workbench.fit.trial import COLD_S, SETUP_S
from workbench.harness import records
from workbench.harness.outcome import Outcome
from workbench.harness.ranks import Pool
from workbench.patterns import checks
from workbench.probes.case import Case
from workbench.scaling import strategies as ways
from workbench.scaling.strategies import ONE
from workbench.scaling.sweeps import ask, backend_of, who

CALL_S = 60.0  # seconds that a call whose length is tried may take
LIMIT_N = 1 << 30  # the longest sequence that is tried
FOUND = ("peak_bytes", "reserved_bytes", "median_ms")


def longest(
    case: Case | Lengths, nproc: int = 2, strategy: str = "sequence", *, budget_bytes: int | None = None,
    first: int = 1 << 14, step: float = 0.01, profile="quick", folder=None, say: Callable | None = print,
) -> pd.DataFrame:  # fmt: skip
    """The longest N that runs on one device, and on nproc ranks by a strategy: two rows, each with what limits it.

    case: one that is tried at other N (`Case.at`), or a function of N that gives it. budget_bytes: what a card's
    tensors may take; by default, on CUDA, the card's memory; required on the CPU, which has no such limit.
    first: the N per rank with which to begin; step: the search ends when what works and what does not are apart by this
    share of N. A call may take CALL_S.
    Each N is tried by ranks that keep nothing of another (by new ones after a failure), is a record (stage "length"),
    and is not tried again; results are records ("longest").
    A row: n, limiter (as in `frontier.search`), peak_bytes and reserved_bytes of the card that takes most, median_ms,
    ratio (n over that of one device).
    ValueError for arguments that make no sense, and on the CPU without a budget.
    """
    at = lengths_of(case, GRAIN, LIMIT_N, step, CALL_S)
    ways.check_name(strategy)
    nproc, first = checks.whole("nproc", nproc, 1), checks.whole("first", first, 1)
    if budget_bytes is not None:
        budget_bytes = checks.whole("budget_bytes", budget_bytes, 1)
    example = at(GRAIN)
    backend = backend_of([example])
    if budget_bytes is None and backend == "gloo":
        raise ValueError("budget_bytes=None: on the CPU want the bytes of a card in software, e.g. 1 << 28")
    recorder, rows = records.start("scaling", profile, folder), []
    asked = {"nproc": nproc, "budget_bytes": budget_bytes, "seconds": CALL_S}
    for name, world in ((ONE, 1), (strategy, nproc)):
        whose = who(name, world) | {"world": world} | asked
        with Pool(world, backend) as pool:
            found = largest(_lengths(at, whose, pool, recorder, say), first * world, LIMIT_N, GRAIN, step, STEPS)
        row = example.fields() | whose | {"stage": "longest", "grain": GRAIN, "step": step, "limit_n": LIMIT_N}
        row |= dict.fromkeys(FOUND) | found.fields()
        if row["nq"] == example.n:
            row["nq"] = row["n"]
        alone = rows[0]["n"] if rows else row["n"]
        row["ratio"] = row["n"] / alone if row["n"] and alone else None
        rows.append(recorder.row(**row))
        if say:
            say(f"{name} on {world}: N = {row['n']:,}, limited by {row['limiter']}" if row["status"] == "ok" else
                f"{name} on {world}: {row['status']}: {row['error']}", flush=True)  # fmt: skip
    return pd.DataFrame(rows)


def _lengths(at: Lengths, whose: dict, pool: Pool, recorder, say) -> Callable[[int], Tried]:
    """The function for `largest` that tries a length, unless the journal has its result."""

    def tried(n: int) -> Tried:
        case = at(n)
        key = case.fields() | whose | {"stage": "length"}
        row = next(iter(recorder.rows(**key)[::-1]), None)
        if row is None or row["status"] not in (*records.SETTLED, "timeout"):
            row = recorder.row(**key | _length(case, whose, pool))
            if say:
                say(f"  {whose['strategy']}, N = {n:,}: {row['status']}", flush=True)
        limiter = {"oom": "memory", "timeout": "time"}.get(row["status"])
        if row["status"] == "ok":
            limiter = "time" if row["median_ms"] > 1000 * whose["seconds"] else None
        elif limiter is None:
            raise Stopped(Outcome(row["status"], row["error"]))
        return Tried(limiter, row["load"], {x: row[x] for x in (*FOUND, "error")})

    return tried


def _length(case: Case, whose: dict, pool: Pool) -> dict:
    """A row's fields for one length: status and error, peaks, time and load (see `Tried`)."""
    limit = 2 * whose["seconds"] + COLD_S + SETUP_S
    outcome = ask(pool, "fits", case, whose["strategy"], whose["budget_bytes"], timeout_s=limit)
    row = dict.fromkeys((*FOUND, "load")) | {"status": outcome.status, "error": outcome.error}
    if outcome.status == "ok":
        row |= {x: max(rank[x] for rank in outcome.result) for x in ("peak_bytes", "reserved_bytes")}
        row["median_ms"] = max(rank["milliseconds"] for rank in outcome.result)
        budget = whose["budget_bytes"] or outcome.result[0]["card_bytes"]
        row["load"] = max(row["reserved_bytes"] / budget, row["median_ms"] / 1000 / whose["seconds"])
    return row
