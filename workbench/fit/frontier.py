"""The frontier: the longest sequence that runs on a budget of memory, predicted for any card, measured on this machine.

A prediction looks for it in traces of the program (`fit.estimate`), a measurement in calls, each in a fresh process
(`harness.processes`); one way of looking, `search.largest`, serves both. What stands in the way at the next length has
a name, the limiter: memory, time, validity (the call runs and computes wrongly), launch (the execution or the device
refuses such a size) or search (nothing does, up to the longest length asked for).
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import pandas as pd
import torch

from workbench.engines import dispatch
from workbench.fit import allocator, cards, estimate
from workbench.fit.search import Stopped, Tried, largest
from workbench.fit.tracer import uncollected
from workbench.fit.trial import probed
from workbench.harness import records
from workbench.harness.outcome import Outcome, sentence, status_of
from workbench.patterns import checks
from workbench.probes.case import Case

GRAIN = 128  # lengths are multiples of it
FIRST = 1024  # the length to begin a measurement with where nothing is known
FIRST_TRACED = 1 << 16  # the length to begin a prediction with
STEP = 0.005  # a search ends when the longest N that works and the shortest that fails are this share of N apart
STEPS = {"time": 0.1}  # the same where time is the limit: two runs of one call may differ by so much
Lengths = Callable[[int], Case]


@dataclass(frozen=True)
class Options:
    """How a search goes.

    limit_n, grain: lengths are multiples of grain, up to limit_n. first: where a prediction begins.
    step: a measurement ends when what works and what does not are this share of N apart, or a tenth where that is time;
        a prediction ends at a tenth of step, and at the grain where time or wrong results are the limit.
    """

    limit_n: int = 1 << 30
    grain: int = GRAIN
    first: int | None = None
    step: float = STEP


def search(
    case: Case | Lengths, *, card=None, budget_bytes: int | None = None, seconds=60.0, measure=False, recorder=None,
    say: Callable | None = print, **options,
) -> dict:  # fmt: skip
    """The largest N, a multiple of grain, whose call fits the budget and takes no more than `seconds`: a record's row.

    case: at any N, or a function of N that gives it, for a pattern that depends on N.
    card: a key of `cards.CARDS`, or a Card; for a case on CUDA by default the card in this machine. A case on the CPU
        has none: its card is in software (`VirtualCard`).
    budget_bytes: what the allocator may reserve, the CUDA context not in it; by default what the card has, less that.
    measure: do the calls, each in a fresh process; else the search is in traces alone.
    recorder: of records.start("frontier", ...); takes a row a probe ("stage": "probe"), as it is done, and the result
        ("stage": "search"). What it has settled, of an interrupted search too, is not measured again.
    say: takes the progress, a line a probe; None for silence. options: see `Options`.

    The row: n, the longest that works, measured or else predicted: 0 where not even a grain does, None where that is
    not known; predicted_n, measured_n; limiter, which is the measured one if there is one, and predicted_limiter;
    predicted_bytes (reserved) and predicted_ms at predicted_n; peak_bytes (requested), reserved_bytes and median_ms at
    n; probes: how many lengths were measured; error: what it is that limits or stopped it.
    An execution that cannot be traced is measured only: predicted_n is None, and predicted_error says why.
    Nothing but a limiter says that a length does not work: a probe that dies or times out is repeated once; where it
    dies again, or is refused at every length, the search ends with that status.
    ValueError for arguments that mean nothing, and for a case that a fresh process cannot be given.
    """
    how = Options(**options)
    at = lengths_of(case, how.grain, how.limit_n, how.step, seconds)
    example = at(FIRST) if callable(case) else case
    card = _card(card, example.device)
    asked = _asked(example, card, budget_bytes, seconds)
    space = {"limit_n": how.limit_n // how.grain * how.grain, "grain": how.grain}
    first = FIRST if example.nq == example.n else max(FIRST, example.nq + space["grain"])
    begin = how.first or max(first, FIRST_TRACED)
    predicted = _predicted(at, card, asked, space | {"first": begin, "step": how.step / 10})
    row = dict.fromkeys(FOUND) | {"measured": measure, "measured_n": None, "probes": 0}
    row |= {f"predicted_{x}": predicted.get(y) for x, y in PREDICTED.items()}
    if measure:
        guess = {"first": predicted["n"] or first, "near": bool(predicted["n"])}
        guess |= {"step": how.step, "steps": {"time": max(how.step, STEPS["time"])}}
        row |= _measured(at, asked, space | guess, recorder, say)
    else:
        row |= {x: y for x, y in predicted.items() if x != "milliseconds"}
    row["backend"] = row["backend"] or asked["asked"]
    shown = at(row["n"] or first).fields()
    shown |= {"n": row["n"]} | ({"nq": row["n"]} if shown["nq"] == shown["n"] else {})
    row = shown | asked | space | {"stage": "search", "step": how.step, "check": True} | row
    if say:
        say(words(row))
    if recorder is not None and not recorder.settled(**row):
        recorder.row(**row)
    return {"probe": "frontier"} | row


def _asked(example: Case, card, budget_bytes: int | None, seconds: float) -> dict:
    """The fields of a row that say what is searched for; ValueError where no budget is known."""
    capped = budget_bytes is not None
    if not capped and card is not None:
        budget_bytes = card.total_bytes - card.context_bytes
    if budget_bytes is None:
        raise ValueError(
            "card=None, budget_bytes=None: want a card, e.g. card='h100', for a case on device='cuda', or, for one on "
            "the CPU, the bytes that its tensors may take, e.g. budget_bytes=1 << 30"
        )
    return {
        "asked": example.fields()["backend"], "device": example.device, "card": card.key if card else cards.VIRTUAL,
        "budget_bytes": checks.whole("budget_bytes", budget_bytes, 1), "capped": capped, "seconds": seconds,
    }  # fmt: skip


def sweep(
    cases: Mapping[str, Case | Lengths], cards: Iterable = (None,), budgets: Iterable[int | None] = (None,), *,
    known: pd.DataFrame | None = None, within_s=math.inf, profile="quick", folder=None, say: Callable | None = print,
    **options,
) -> pd.DataFrame:  # fmt: skip
    """`search` for every case, card and budget: its rows, with `label`, the case's name.

    known: rows with `label` that were measured before; a search that they have, of the same sizes and budget, is
    predicted anew and has their measured_n, run_utc and run_commit; measured is whether it was in this call. within_s:
    after so long nothing more is measured, only predicted. options: `search`'s. A measurement is recorded (see
    `records.start` for profile and folder); interrupted and started again it goes on, and gives the same table.
    """
    measured, begin = options.pop("measure", False), time.monotonic()
    recorder = records.start("frontier", profile, folder) if measured else None
    cases = checks.named("cases", cases, "a Case or a function of N that gives one")
    cards, budgets = checks.listed("cards", cards), checks.listed("budgets", budgets)
    wanted, rows = list(itertools.product(cases.items(), cards, budgets)), []
    for number, ((label, case), card, budget) in enumerate(wanted, 1):
        if say:
            say(f"{number}/{len(wanted)}: {label}")
        earlier = _earlier(known, label, case, budget) if measured else {}
        again = measured and not earlier and time.monotonic() - begin < within_s
        to = {"measure": True, "recorder": recorder} if again else {}
        row = search(case, card=card, budget_bytes=budget, say=say, **to, **options)
        rows.append(row | earlier | {"label": label})
    return pd.DataFrame(rows)


def _earlier(known: pd.DataFrame | None, label: str, case: Case | Lengths, budget: int | None) -> dict:
    """What a row of `known` measured of this search; {} if none did."""
    if known is None or known.empty:
        return {}
    rows = known[(known["label"] == label) & (known["budget_bytes"] == budget) & known["measured_n"].notna()]
    for row in rows.to_dict("records"):
        fields = (case(int(row["n"])) if callable(case) else case.at(int(row["n"]))).fields()
        if all(row[x] == fields[x] for x in ("pattern_spec", "batch", "heads", "head_dim", "dtype", "mode", "causal")):
            names = ("n", "measured_n", "limiter", "status", "probes", "median_ms", "reserved_bytes")
            return {x: row.get(x) for x in (*names, "run_utc", "run_commit")}
    return {}


def limiters(rows: pd.DataFrame) -> pd.Series:
    """Predicted limiters, "untimed" for memory where no time is modelled at the longest n: time may come first."""
    untimed = rows["limiter"].eq("memory") & rows["n"].astype(float).gt(0) & rows["predicted_ms"].isna()
    return rows["limiter"].mask(untimed, "untimed")


def lengths_of(case: Case | Lengths, grain: int, limit_n: int, step: float, seconds: float) -> Lengths:
    """The case at any N; ValueError for what is none, and for lengths to search in that mean nothing."""
    if not callable(case) and not isinstance(case, Case):
        raise ValueError(f"case={case!r}: want a Case, or a function of N that gives one")
    checks.whole("limit_n", limit_n, checks.whole("grain", grain, 1))
    checks.number("step", step, most=0.99)
    checks.number("seconds", seconds)
    return case if callable(case) else case.at


def words(row: dict) -> str:
    """A search's row in a line."""
    if row["status"] != "ok":
        return f"  {row['status']}: {row['error']}"
    how = f"measured at {row['probes']} lengths" if row["measured"] else "predicted"
    limit = {"memory": f" ({row['budget_bytes'] / 2**30:.2f} GiB)", "time": f" ({row['seconds']:g} s)"}
    said = f": {row['error']}" if row["limiter"] in ("validity", "launch") else ""
    return f"  N = {row['n']:,}, {how}; limited by {row['limiter']}{limit.get(row['limiter'], '')}{said}"


def _card(card, device: str):
    if card is not None:
        return cards.find(card)
    return cards.from_device(device) if device.startswith("cuda") else None


FOUND = ("backend", "kernel", "peak_bytes", "reserved_bytes", "extra_bytes", "median_ms", "valid")
PREDICTED = {"n": "n", "limiter": "limiter", "error": "error", "bytes": "reserved_bytes", "ms": "milliseconds"}


def _predicted(at: Lengths, card, asked: dict, where: dict) -> dict:
    """A search's fields, from traces."""

    def tried(n: int) -> Tried:
        try:
            found = _trace(at(n), card)
        except (Exception, SystemExit) as error:
            why = Outcome(status_of(error), sentence(error))
            raise Stopped(why, always=isinstance(error, estimate.CannotTrace)) from None
        reserved = reserves(found, asked["budget_bytes"])
        lateness = (found.milliseconds or 0) / 1000 / asked["seconds"]
        slow = "time" if lateness > 1 else None
        limiter = "memory" if reserved is None else "validity" if found.wrong else slow
        return Tried(limiter, max((reserved or found.reserved_bytes) / asked["budget_bytes"], lateness), {
            "backend": found.backend, "kernel": found.kernel, "milliseconds": found.milliseconds,
            "peak_bytes": found.requested_bytes, "extra_bytes": found.requested_bytes - found.inputs_bytes,
            "reserved_bytes": reserved, "error": found.wrong if limiter == "validity" else None,
        })  # fmt: skip

    with uncollected():
        return largest(tried, steps={"time": 0, "validity": 0}, **where).fields()


def reserves(found: estimate.Estimate, budget_bytes: int) -> int | None:
    """Bytes that the allocator comes to reserve within a budget, giving back what it keeps where it must; None where
    what was traced does not fit."""
    if found.reserved_bytes <= budget_bytes:
        return found.reserved_bytes
    try:
        return allocator.replay(found.events, limit=budget_bytes).peak_reserved
    except allocator.OutOfMemory:
        return None


def _trace(case: Case, card, **place) -> estimate.Estimate:
    """The estimate of a case, or of a rank's share of it.

    On the CPU with the backend that "auto" means there, and of tensors only: what a kernel takes for itself is not on a
    `VirtualCard`, and how long it takes on a real one says nothing.
    """
    if case.device.startswith("cuda"):
        return estimate.trace(case, card, **place)
    if case.backend == "auto":
        q, k = (torch.empty(1, 1, h, case.head_dim, dtype=case.dtype) for h in (case.heads, case.kv_heads))
        case = replace(case, backend=dispatch.choose("auto", q, k, k, case.pattern)[0])
    card = cards.find("h100") if card is None else card
    return estimate.trace(case, replace(card, key=cards.VIRTUAL, matmul_tflops={}), **place)


def _measured(at: Lengths, asked: dict, where: dict, recorder, say) -> dict:
    """A search's fields, from probes, each of which is a row of the journal."""

    def tried(n: int) -> Tried:
        row = probed(at(n), asked, recorder, say)
        if row["limiter"] is None and row["status"] != "ok":
            raise Stopped(Outcome(row["status"], row["error"]))
        return Tried(row["limiter"], row["load"], {x: row.get(x) for x in (*FOUND, "error")})

    found = largest(tried, **where)
    return found.fields() | {"measured_n": found.fields()["n"], "probes": len(found.tried)}
