"""Several cards: what each way of using them gives, on the same global N, and beside it what one card does.

`sweep` measures, a row a strategy (`distributed.strategies`); `longest` finds how long a sequence can be. Ranks run in
a `Pool`, a card each where there is CUDA, else as processes over gloo. What they do is in `distributed.bench`.

Dimensions: B batch, N keys, H heads, D head_dim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd

from workbench import records
from workbench.distributed import strategies as ways
from workbench.distributed.bench import described
from workbench.distributed.pool import JobOutcome, Pool
from workbench.distributed.strategies import ONE, STRATEGIES
from workbench.narrate import beyond_noise
from workbench.probes.case import Case, source_of
from workbench.probes.fit import aligned
from workbench.probes.frontier import COLD_S, GRAIN, SETUP_S, TIME_STEP, Lengths
from workbench.probes.largest import Stopped, Tried, largest
from workbench.probes.outcome import Outcome, attempt
from workbench.probes.timing import AA, speedup

BENCH = "workbench.distributed.bench"
MEASURED = (
    "samples_ms", "median_ms", "speedup", "speedup_low", "speedup_high", "peak_bytes", "extra_bytes", "peak_by_card",
    "extra_by_card", "sent_bytes", "control_bytes", "planned_bytes", "busy", "valid", "limiter", "max_abs_error",
    "errors", "compared", "compared_with", "unchecked",
)  # fmt: skip


def sweep(
    cases: Mapping[str, Case], nproc: int = 2, strategies: Iterable[str] = STRATEGIES, *, samples: int = 9,
    seconds: float = 20.0, timeout_s: float = 600.0, within_s: float | None = None, profile="quick", folder=None,
    check=True, say: Callable | None = print,
) -> pd.DataFrame:  # fmt: skip
    """Every case by every strategy on nproc ranks, and on one device, which is always measured: a row each, and "A/A".

    samples, seconds: rounds of a case, and about how long no new one is begun; timeout_s: for any job of the ranks.
    within_s: after so long no case is begun that has something to measure; the same call again goes on with those.
    check: compare with the one-device result. profile, folder: as in `records.start`.
    Each row is a record once its case is measured, and what is settled is not measured again, whatever its label. A
    strategy that fails, on whichever rank, is a row with its status. ValueError for a strategy that is none, cases on
    CPU and CUDA together, and more ranks than cards.

    A row: a case's fields, label (its name), nproc, world (1 for one device), strategy, status, error, pairs;
    samples_ms: of each round the slowest rank's time, the call on one device being rank 0's while the others wait;
    speedup over one device in the same round, with the 95% interval of its median; "A/A" is one device against itself;
    peak_by_card, extra_by_card: peak bytes with and above the inputs; peak_bytes, extra_bytes: the largest of them;
    sent_bytes, control_bytes: by rank, data and agreement, counted at torch.distributed; planned_bytes: as the plan
        has it, None for strategies without one; busy: by card, the share of the time in which it computes;
    from_records: whether an earlier sweep measured it; no field of the record.
    valid: whether the sampled rows are the one device's, None where that is not known; limiter "validity": they are
        not, and there is no time for such a row; max_abs_error, errors ([absolute, over what is allowed] by result),
        compared (rows), compared_with (one device; or, where it cannot do a forward, float64), unchecked (why not).
    Memory, bytes and busy share are taken in another pool than times.
    """
    wanted = [ONE, *dict.fromkeys(x for x in strategies if x != ONE)]
    for name in wanted:
        if name not in STRATEGIES and ":" not in name:
            raise ValueError(f"strategy={name!r}: want one of {', '.join(STRATEGIES)}, or your own as module:function")
    backend = _backend(cases.values())
    recorder = records.start("scaling", profile, folder)
    rows, begin = [], time.monotonic()
    with Pool(nproc, backend) as for_facts, Pool(nproc, backend) as for_times:
        for number, (label, case) in enumerate(cases.items(), 1):
            fields = {"stage": "sweep", "nproc": nproc, "check": check} | case.fields()
            known = {name: _settled(recorder, fields | _who(name, nproc)) for name in (*wanted, AA)}
            todo = [name for name in wanted if known[name] is None]
            if todo and within_s is not None and time.monotonic() - begin > within_s:
                if say:
                    say(
                        f"{number}/{len(cases)}: {label}: not begun, the time is over; run it again to go on",
                        flush=True,
                    )
                continue
            if say:
                say(f"{number}/{len(cases)}: {label}, N = {case.n:,}{'' if todo else ', from the records'}", flush=True)
            fresh = {}
            if todo or known[AA] is None and known[ONE]["status"] == "ok":
                facts = {ONE: known[ONE]} if known[ONE] else {}
                facts |= {name: _facts(name, case, nproc, for_facts, check, timeout_s) for name in todo}
                fresh = _times(facts, case, for_times, samples, seconds, timeout_s)
            for name in (*wanted, AA):
                row = known[name]
                if row is None and name in fresh:
                    told = fields | {"label": label} | _who(name, nproc)
                    row = recorder.row(**told | dict.fromkeys(MEASURED) | fresh[name])
                    if say:
                        say(words(row), flush=True)
                if row is not None:
                    rows.append(row | {"label": label, "from_records": known[name] is not None})
    return pd.DataFrame(rows)


def _backend(cases: Iterable[Case]) -> str:
    kinds = {case.device.partition(":")[0] for case in cases}
    if len(kinds) != 1:
        raise ValueError(f"devices {sorted(kinds)}: want cases on one kind of device, 'cpu' or 'cuda'")
    return "nccl" if kinds == {"cuda"} else "gloo"


def _who(name: str, nproc: int) -> dict:
    source = source_of(name)  # of a user's: once edited it is another
    return {"strategy": name, "world": 1 if name in (ONE, AA) else nproc, "strategy_source": source}


def _settled(recorder, key: dict) -> dict | None:
    found = [row for row in recorder.rows(**key) if row["status"] in records.SETTLED]
    return found[-1] if found else None


# --- a case -----------------------------------------------------------------------------------------------------------


def _facts(name: str, case: Case, nproc: int, pool: Pool, check: bool, timeout_s: float) -> dict:
    """A row's fields but for time: status and error, memory, bytes, busy share, exactness."""
    refused = attempt(lambda: ways.check(name, case, nproc))
    pairs = attempt(lambda: case.pattern.pairs(case.n, case.heads, case.nq)).result
    row = {"status": refused.status, "error": refused.error, "pairs": pairs}
    if refused.status != "ok":
        return row
    plan = ways.plan(name, case, nproc)
    if plan is not None:
        sizes = (case.dtype.itemsize, case.head_dim, case.batch)
        row["planned_bytes"] = plan.bytes(*sizes, mode=case.mode).sum(1).tolist()
    outcome = _ask(pool, "facts", [described(case), name, check and name != ONE], timeout_s)
    row |= {"status": outcome.status, "error": outcome.error}
    return row | _together(name, outcome.result, check) if outcome.status == "ok" else row


def _together(name: str, ranks: list[dict], check: bool) -> dict:
    """The ranks' facts as fields of a row."""
    by_card = {x: ranks[0][x] if name == "data parallel" else [y for rank in ranks for y in rank[x]]
               for x in ("peak_bytes", "extra_bytes", "busy")}  # fmt: skip
    row = {"peak_by_card": by_card["peak_bytes"], "extra_by_card": by_card["extra_bytes"], "busy": by_card["busy"]}
    row |= {x: max(by_card[x]) for x in ("peak_bytes", "extra_bytes")}
    row |= {x: [rank[x] for rank in ranks] for x in ("sent_bytes", "control_bytes")}
    if name == "data parallel":
        row["sent_bytes"] = None
    row |= {x: ranks[0][x] for x in ("unchecked", "compared_with")}
    row["compared"] = sum(rank["compared"] for rank in ranks)
    if not check or name == ONE or row["unchecked"]:
        return row
    results = sorted({x for rank in ranks for x in rank["errors"]})
    errors = {x: [max(rank["errors"].get(x, [0, 0])[y] for rank in ranks) for y in (0, 1)] for x in results}
    worst = max(errors, key=lambda x: errors[x][1])
    row |= {"errors": errors, "max_abs_error": max(x for x, _ in errors.values()), "valid": errors[worst][1] <= 1}
    if not row["valid"]:
        off, times = errors[worst]
        row["limiter"] = "validity"
        other = "one device's" if row["compared_with"] == "one device" else row["compared_with"]
        row["error"] = f"wrong: {worst} is off {other} by up to {off:.3g}, {times:.3g} times what is allowed"
    return row


def _times(facts: dict[str, dict], case: Case, pool: Pool, samples: int, seconds: float, timeout_s: float) -> dict:
    """The rows' fields with time, of those that can run and are right, and A/A's where one device could run."""
    able = [name for name, row in facts.items() if row["status"] == "ok" and row.get("valid") is not False]
    rows = dict(facts)
    if not able:
        return rows
    outcome = _ask(pool, "times", [described(case), able, samples, seconds], timeout_s)
    if outcome.status != "ok":
        return rows | {name: rows[name] | {"status": outcome.status, "error": outcome.error} for name in able}
    taken = {name: np.max([rank[name] for rank in outcome.result], axis=0).tolist() for name in outcome.result[0]}
    if ONE in able:
        rows[AA] = {"status": "ok", "error": None, "pairs": facts[ONE]["pairs"]}
    else:
        del taken[AA]
    for name, mine in taken.items():
        rows[name] = rows[name] | {"samples_ms": mine, "median_ms": float(np.median(mine))}
        if ONE in able:
            rows[name] |= speedup(taken[ONE], mine)
    return rows


def _ask(pool: Pool, function: str, arguments: list, timeout_s: float) -> JobOutcome | Outcome:
    """A job's outcome; a ValueError before any rank starts, such as for a module that is not there, is one, too."""
    try:
        return pool.attempt(f"{BENCH}:{function}", arguments, timeout_s)
    except ValueError as error:
        return Outcome("refused", str(error))


def words(row: dict) -> str:
    """A row in a few words: the strategy with its time and speed-up, or what became of it; `table` says why."""
    if row["status"] != "ok":
        return f"  {row['strategy']}: {'failed' if row['status'] == 'killed' else row['status']}"
    if row["valid"] is False or row["median_ms"] is None:
        return f"  {row['strategy']}: {'wrong' if row['valid'] is False else 'not timed'}"
    faster = "" if row["speedup"] is None else f", {row['speedup']:.2f}x"
    return f"  {row['strategy']}: {row['median_ms']:.4g} ms{faster}"


def table(rows: pd.DataFrame) -> str:
    """A sweep's rows as text: speed-up with its interval, and of the card or rank that has most, MiB at the peak and
    sent; busy by card. A note has why a row has no time, or was not compared, whether its speed-up is within the noise
    (see `beyond_noise`), and whether it is from the records."""
    if rows.empty:
        return "nothing was measured"
    lines, beside = [], {x: group.set_index("strategy") for x, group in rows.groupby(["label", "nproc"])}
    for row in rows.to_dict("records"):
        timed, sent = row["status"] == "ok" and pd.notna(row["speedup"]), row["sent_bytes"]
        interval = (row["speedup"], row["speedup_low"], row["speedup_high"])
        busy = row["busy"] if isinstance(row["busy"], list) else []
        times = beside[row["label"], row["nproc"]]
        notes = [row[x] for x in ("error", "unchecked") if isinstance(row[x], str)]
        if row["strategy"] == AA:
            notes.append("one device against itself")
        elif timed and row["strategy"] != ONE and AA in times.index and not beyond_noise(times, row["strategy"]):
            notes.append("within the noise (A/A)")
        lines.append({
            "case": row["label"], "strategy": row["strategy"],
            "ms": _number(row["median_ms"], ",.4g"),
            "speed-up": "{:.2f} ({:.2f} to {:.2f})".format(*interval) if timed else "",
            "peak MiB": _number(row["peak_bytes"], ",.1f", 2**20),
            "sent MiB": _number(max(sent), ",.2f", 2**20) if isinstance(sent, list) else "",
            "busy": " ".join(_number(x, ".0%") or "?" for x in busy),
            "note": "; ".join(notes + ["from the records"] * row["from_records"]),
        })  # fmt: skip
    return aligned(pd.DataFrame(lines), ("case", "strategy", "note"))


def failed(rows: pd.DataFrame) -> bool:
    """Whether a strategy is wrong, or has failed for another reason than that it is not for such a case or machine."""
    return len(rows) > 0 and bool(
        (~rows["status"].isin(["ok", "refused", "unsupported"]) | (rows["limiter"] == "validity")).any()
    )


def _number(x, form: str, unit: float = 1) -> str:
    return "" if x is None or x != x else format(x / unit, form)


# --- length -----------------------------------------------------------------------------------------------------------


def longest(
    case: Case | Lengths, nproc: int = 2, strategy: str = "sequence", *, budget_bytes: int | None = None,
    seconds: float = 60.0, first: int = 1 << 14, limit_n: int = 1 << 30, grain: int = GRAIN, step: float = 0.01,
    profile="quick", folder=None, say: Callable | None = print,
) -> pd.DataFrame:  # fmt: skip
    """The longest N that runs on one device, and on nproc by a strategy: two rows, with what stands in the way of more.

    case: at any N, or a function of N that gives it. budget_bytes: what a card's tensors may take; on CUDA by default
    the card's memory, on the CPU the size of a card in software, without which there is no limit to find.
    seconds: what a call may take. first: where to begin; step: how far apart, as a share of N, what works and what does
    not are left. Each length tried is a record (stage "length") and is not tried again; so are the results ("longest").
    A row: n, limiter (as `frontier.search` has it), peak_bytes and reserved_bytes of the card that takes most,
    median_ms, ratio (n over the one device's).
    ValueError for arguments that mean nothing, and on the CPU without a budget.
    """
    at = case if callable(case) else case.at
    example = at(grain)
    if budget_bytes is None and _backend([example]) == "gloo":
        raise ValueError("budget_bytes=None: on the CPU want the bytes of a card in software, e.g. 1 << 28")
    if grain < 1 or limit_n < grain or not 0 < step < 1 or not seconds > 0:
        asked = f"grain={grain}, limit_n={limit_n}, step={step}, seconds={seconds}"
        raise ValueError(f"{asked}: want 1 <= grain <= limit_n, a step between 0 and 1, and seconds above 0")
    recorder, rows = records.start("scaling", profile, folder), []
    asked = {"nproc": nproc, "budget_bytes": budget_bytes, "seconds": seconds}
    for name, world in ((ONE, 1), (strategy, nproc)):
        who = {"strategy": name, "world": world} | asked
        with Pool(world, _backend([example])) as pool:
            found = largest(_lengths(at, who, pool, recorder, say), first * world, limit_n, grain, step, TIME_STEP)
        row = example.fields() | who | {"stage": "longest", "grain": grain, "step": step, "limit_n": limit_n}
        row |= {"peak_bytes": None, "reserved_bytes": None, "median_ms": None} | found.fields()
        if row["nq"] == example.n:
            row["nq"] = row["n"]
        alone = rows[0]["n"] if rows else row["n"]
        row["ratio"] = row["n"] / alone if row["n"] and alone else None
        rows.append(recorder.row(**row))
        if say:
            say(f"{name} on {world}: N = {row['n']:,}, limited by {row['limiter']}" if row["status"] == "ok" else
                f"{name} on {world}: {row['status']}: {row['error']}", flush=True)  # fmt: skip
    return pd.DataFrame(rows)


def _lengths(at: Lengths, who: dict, pool: Pool, recorder, say) -> Callable[[int], Tried]:
    """For `largest`: tries a length, unless the journal has it."""
    works = set()

    def tried(n: int) -> Tried:
        case = at(n)
        key = case.fields() | who | {"stage": "length"}
        row = next(iter(recorder.rows(**key)[::-1]), None)
        if row is None or row["status"] not in (*records.SETTLED, "timeout"):
            row = recorder.row(**key | _length(case, who, pool))
            if say:
                say(f"  {who['strategy']}, N = {n:,}: {row['status']}", flush=True)
        limiter = {"oom": "memory", "timeout": "time"}.get(row["status"])
        if row["status"] in ("refused", "unsupported") and works:
            limiter = "launch"
        elif row["status"] == "ok":
            limiter = "time" if row["median_ms"] > 1000 * who["seconds"] else None
        elif limiter is None:
            raise Stopped(Outcome(row["status"], row["error"]))
        if limiter is None:
            works.add(n)
        return Tried(limiter, row["load"], {x: row[x] for x in ("peak_bytes", "reserved_bytes", "median_ms", "error")})

    return tried


def _length(case: Case, who: dict, pool: Pool) -> dict:
    """A row's fields about a length: status and error, peaks, time and load (see `Tried`)."""
    row = dict.fromkeys(("peak_bytes", "reserved_bytes", "median_ms", "load"))
    refused = attempt(lambda: ways.check(who["strategy"], case, who["world"]))
    if refused.status != "ok":
        return row | {"status": refused.status, "error": refused.error}
    arguments = [described(case), who["strategy"], who["budget_bytes"]]
    outcome = _ask(pool, "fits", arguments, 2 * who["seconds"] + COLD_S + SETUP_S)
    row |= {"status": outcome.status, "error": outcome.error}
    if outcome.status == "ok":
        row |= {x: max(rank[x] for rank in outcome.result) for x in ("peak_bytes", "reserved_bytes")}
        row["median_ms"] = max(rank["milliseconds"] for rank in outcome.result)
        budget = who["budget_bytes"] or outcome.result[0]["card_bytes"]
        row["load"] = max(row["reserved_bytes"] / budget, row["median_ms"] / 1000 / who["seconds"])
    return row
