"""Several cards: what each strategy of using them gives, against one card on the same global N.

`sweep` measures strategies (`scaling.strategies`), a row each. Ranks run in a `Pool`, on CUDA with a card each, else as
processes over gloo. What they run is in `on_ranks`. How long a sequence can be is in `lengths`.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd

from workbench.fit.executions import aligned
from workbench.harness import records
from workbench.harness.narrate import beyond_noise
from workbench.harness.outcome import Outcome, attempt
from workbench.harness.ranks import JobOutcome, Pool
from workbench.patterns import checks
from workbench.probes.case import Case, case_of, source_of
from workbench.probes.timing import AA, speedup
from workbench.scaling import strategies as ways
from workbench.scaling.strategies import ONE, STRATEGIES

JOB_S = 600.0  # seconds that a job of the ranks may take
MEASURED = (
    "samples_ms", "median_ms", "speedup", "speedup_low", "speedup_high", "peak_bytes", "extra_bytes", "peak_by_card",
    "extra_by_card", "sent_bytes", "control_bytes", "planned_bytes", "busy", "kernel", "valid", "limiter",
    "max_abs_error", "errors", "compared", "compared_with", "unchecked",
)  # fmt: skip


def sweep(
    cases: Mapping[str, Case], nproc: int = 2, strategies: Iterable[str] | Callable = STRATEGIES, *, samples: int = 9,
    seconds: float = 20.0, within_s: float | None = None, profile="quick", folder=None, say: Callable | None = print,
) -> pd.DataFrame:  # fmt: skip
    """Measure every case by every strategy on nproc ranks and, always, on one device: a row each, and one of "A/A".

    cases: {label: case}. strategies: names, or a function of a case that gives them. samples: rounds of a case;
    seconds: after about so long no further round is begun.
    within_s: after so long no case is begun that has anything left to measure; calling again goes on with those.
    profile, folder: as in `records.start`.
    Rows become records when their case is measured, and settled ones are not measured again, whatever their label. A
    strategy that fails on any rank is a row with its status. ValueError for an unknown strategy, for cases on both CPU
    and CUDA, and for more ranks than cards.

    A row has the case's fields, label, nproc, world (1 for one device), strategy, status, error, pairs, and
    samples_ms: by round, the slowest rank's time; on one device rank 0 computes and the others wait
    speedup: over one device in the same round, with the 95% interval of its median; "A/A" is one device against itself
    peak_by_card, extra_by_card: peak bytes with and without the inputs; peak_bytes, extra_bytes: their maxima
    sent_bytes, control_bytes: by rank, data and agreement, counted at torch.distributed
    planned_bytes: by rank, data as in the plan; None for strategies without one
    busy: by card, the share of the time in which it computes; kernel: on CUDA, the one that took most of rank 0's time
    from_records: whether an earlier sweep measured it (not a field of the record)
    valid: whether the compared rows agree with one device's, None if unknown; if not, limiter is "validity" and the row
        has no time; max_abs_error; errors: by result [absolute, over what is allowed]; compared: how many rows;
        compared_with: one device; unchecked: why nothing was compared
    On cards times are taken in a pool of their own, in which no profiler ever ran.
    """
    wanted = _wanted(strategies, checks.named("cases", cases, "Case"))
    end = math.inf if within_s is None else time.monotonic() + checks.number("within_s", within_s, above=-1)
    samples, seconds = checks.whole("samples", samples, 1), checks.number("seconds", seconds)
    backend = backend_of(cases.values())
    recorder = records.start("scaling", profile, folder)
    say, rows = say or (lambda *_, **__: None), []
    with contextlib.ExitStack() as pools:
        for_facts = for_times = pools.enter_context(Pool(nproc, backend))
        if backend == "nccl":
            for_times = pools.enter_context(Pool(nproc, backend))
        for number, (label, case) in enumerate(cases.items(), 1):
            fields = {"stage": "sweep", "nproc": nproc, "check": True, "rounds": samples} | case.fields()
            known = {name: recorder.settled(**fields | who(name, nproc)) for name in (*wanted[label], AA)}
            todo = [name for name in wanted[label] if known[name] is None]
            if todo and time.monotonic() > end:
                say(f"{number}/{len(cases)}: {label}: not begun, time is over; run it again to go on", flush=True)
                continue
            say(f"{number}/{len(cases)}: {label}, N = {case.n:,}{'' if todo else ', from the records'}", flush=True)
            fresh = {}
            if todo or known[AA] is None and known[ONE]["status"] == "ok":
                facts = {ONE: known[ONE]} if known[ONE] else {}
                facts |= {name: _facts(name, case, nproc, for_facts) for name in todo}
                fresh = _times(facts, case, for_times, samples, seconds)
            fields["label"] = label
            rows += _recorded(known, fresh, lambda name, of=fields: of | who(name, nproc), recorder, say)
    return pd.DataFrame(rows)


def _recorded(known: dict, fresh: dict, fields: Callable[[str], dict], recorder, say: Callable) -> list[dict]:
    """A case's rows: those known from the records, and the fresh ones, which become records now."""
    rows = []
    for name, row in known.items():
        if row is None and name in fresh:
            row = recorder.row(**fields(name) | dict.fromkeys(MEASURED) | fresh[name])
            say(f"  {name}: {'wrong' if row['valid'] is False else row['status']}", flush=True)
        if row is not None:
            rows.append(row | {"label": fields(name)["label"], "from_records": known[name] is not None})
    return rows


def _wanted(strategies: Iterable[str] | Callable, cases: Mapping[str, Case]) -> dict[str, list[str]]:
    """By label, the strategies to measure, one device first."""
    found = {}
    for label, case in cases.items():
        names = checks.listed("strategies", strategies(case) if callable(strategies) else strategies)
        found[label] = [*dict.fromkeys([ONE, *names])]
    for name in {x for names in found.values() for x in names}:
        ways.check_name(name)
    return found


def backend_of(cases: Iterable[Case]) -> str:
    """The backend of a pool for cases; ValueError for what is no case, and for cases on several kinds of device."""
    kinds = {case_of(case).device.partition(":")[0] for case in cases}
    if len(kinds) != 1:
        raise ValueError(f"devices {sorted(kinds)}: want cases on one kind of device, 'cpu' or 'cuda'")
    return "nccl" if kinds == {"cuda"} else "gloo"


def who(name: str, nproc: int) -> dict:
    """The fields of a row that say which strategy it is, on how many ranks."""
    source = source_of(name)  # a user's strategy is another one once it has been edited
    return {"strategy": name, "world": 1 if name in (ONE, AA) else nproc, "strategy_source": source}


def _facts(name: str, case: Case, nproc: int, pool: Pool) -> dict:
    """A row's fields except times: status and error, memory, bytes, busy share, exactness."""
    outcome = ask(pool, "facts", case, name, name != ONE)
    pairs = attempt(lambda: case.pattern.pairs(case.n, case.heads, case.nq)).result
    row = {"status": outcome.status, "error": outcome.error, "pairs": pairs}
    plan, sizes = attempt(lambda: ways.plan(name, case, nproc)).result, (case.dtype.itemsize, case.head_dim, case.batch)
    if plan is not None:
        row["planned_bytes"] = plan.bytes(*sizes, mode=case.mode).sum(1).tolist()
    return row | _together(name, outcome.result) if outcome.status == "ok" else row


def _together(name: str, ranks: list[dict]) -> dict:
    """The ranks' facts as fields of a row."""
    first, row = ranks[0], {}
    for x, y in (("peak_bytes", "peak_by_card"), ("extra_bytes", "extra_by_card"), ("busy", "busy")):
        row[y] = first[x] if name == "data parallel" else [card for rank in ranks for card in rank[x]]
    row |= {"peak_bytes": max(row["peak_by_card"]), "extra_bytes": max(row["extra_by_card"])}
    row |= {x: [rank[x] for rank in ranks] for x in ("sent_bytes", "control_bytes")}
    if name == "data parallel":
        row["sent_bytes"] = None
    row |= {"kernel": first["kernel"], "unchecked": first["unchecked"]}
    row["compared"] = sum(rank["compared"] for rank in ranks)
    return row if name == ONE or row["unchecked"] else row | {"compared_with": "one device"} | _errors(ranks)


def _errors(ranks: list[dict]) -> dict:
    """The largest errors of the ranks, and whether they are allowed, as fields of a row."""
    results = sorted({x for rank in ranks for x in rank["errors"]})
    errors = {x: np.max([rank["errors"].get(x, [0, 0]) for rank in ranks], axis=0).tolist() for x in results}
    worst = max(errors, key=lambda x: errors[x][1])
    off, times = errors[worst]
    row = {"errors": errors, "max_abs_error": max(x for x, _ in errors.values()), "valid": times <= 1}
    if not row["valid"]:
        row["limiter"] = "validity"
        row["error"] = f"wrong: {worst} is off one device's by up to {off:.3g}, {times:.3g} times what is allowed"
    return row


def _times(facts: dict[str, dict], case: Case, pool: Pool, samples: int, seconds: float) -> dict:
    """The rows' fields with times, for strategies that ran and are right; and those of A/A, if one device ran."""
    able = [name for name, row in facts.items() if row["status"] == "ok" and row.get("valid") is not False]
    rows = dict(facts)
    if not able:
        return rows
    outcome = ask(pool, "times", case, able, samples, seconds)
    if outcome.status == "oom":  # each is able, but not beside the inputs of the others
        outcome = ask(pool, "times", case, able, samples, seconds, False)
    if outcome.status != "ok":
        return rows | {name: rows[name] | {"status": outcome.status, "error": outcome.error} for name in able}
    taken = {name: np.max([rank[name] for rank in outcome.result], axis=0).tolist() for name in outcome.result[0]}
    if ONE not in able:
        del taken[AA]
    again = {"status": "ok", "error": None, "pairs": facts[able[0]]["pairs"]}
    for name, mine in taken.items():
        rows[name] = rows.get(name, again) | {"samples_ms": mine, "median_ms": float(np.median(mine))}
        rows[name] |= speedup(taken[ONE], mine) if ONE in able else {}
    return rows


def ask(
    pool: Pool, function: str, case: Case, strategy: str | list[str], *more, timeout_s=JOB_S, module="on_ranks"
) -> JobOutcome | Outcome:
    """The outcome of a job of a module of `scaling` with a case and a strategy, or several: "refused" or "unsupported"
    where a strategy cannot do the case, or the case cannot be sent."""
    for name in [strategy] if isinstance(strategy, str) else ():  # of several, each has run alone
        if (refused := attempt(lambda name=name: ways.check(name, case, pool.nproc))).status != "ok":
            return refused
    try:
        return pool.attempt(f"workbench.scaling.{module}:{function}", [case, strategy, *more], timeout_s)
    except ValueError as error:
        return Outcome("refused", str(error))


def table(rows: pd.DataFrame) -> str:
    """A sweep's rows as text: times; speed-ups with their intervals; MiB at the peak, and sent, of the card or rank
    that has most; busy shares by card. The note says why a row has no time or was not compared, whether its speed-up is
    within the noise (see `beyond_noise`), and whether it is from the records."""
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
            "case": row["label"], "strategy": row["strategy"], "ms": _number(row["median_ms"], ",.4g"),
            "speed-up": "{:.2f} ({:.2f} to {:.2f})".format(*interval) if timed else "",
            "peak MiB": _number(row["peak_bytes"], ",.1f", 2**20),
            "sent MiB": _number(max(sent), ",.2f", 2**20) if isinstance(sent, list) else "",
            "busy": " ".join(_number(x, ".0%") or "?" for x in busy),
            "note": "; ".join(notes + ["from the records"] * row["from_records"]),
        })  # fmt: skip
    return aligned(pd.DataFrame(lines), ("case", "strategy", "note"))


def failed(rows: pd.DataFrame) -> bool:
    """Whether some strategy gave a wrong result, or failed though it is meant for the case and the machine."""
    good = ("ok", "refused", "unsupported")
    return any(row["status"] not in good or row["limiter"] == "validity" for row in rows.to_dict("records"))


def _number(x, form: str, unit: float = 1) -> str:
    return "" if x is None or x != x else format(x / unit, form)
