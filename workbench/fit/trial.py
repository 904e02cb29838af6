"""One length tried: the call in a fresh process, on a card with a budget of memory and with a limit in time.

Where there is no CUDA the card is in software (`VirtualCard`). What a call took, or what ended it, is a record's row.
"""

import contextlib
import signal
import time

import psutil
import torch

from workbench.fit.virtual_card import VirtualCard
from workbench.harness import processes, records
from workbench.harness.outcome import Outcome, attempt
from workbench.probes import validity
from workbench.probes.case import Case

PAIRS = {"cpu": 1 << 26, "cuda": 1 << 32}  # of (query, key), for the check of dk and dv: a second or two
SLACK_BYTES = 1 << 30  # memory that a process on the CPU may take beside its tensors before it is killed
COLD_S = 30.0  # seconds that a first call on a card may take beyond the limit, to load or compile its kernels
SETUP_S = 600.0  # seconds for making the inputs and checking rows
LAUNCH = ("invalid configuration argument", "invalid argument", "too many resources", "out of resource", "32-bit ind",
          "32bit ind")  # fmt: skip


def probed(case: Case, asked: dict, recorder, say) -> dict:
    """The row of a length: from the journal if that settles it, else of a probe, or of two where one is not enough.

    A time-out is settled by two, and so is a launch that failed; what dies is asked again by every search.
    """
    fields = case.fields() | asked | {"stage": "probe", "check": True}
    key = {x: y for x, y in fields.items() if x != "backend"}
    known = recorder.rows(**key) if recorder is not None else []
    if settled := [row for row in known if row["status"] in records.SETTLED or row["limiter"] == "launch"]:
        return settled[-1]
    late = [row for row in known if row["status"] == "timeout"]
    while len(late) < 2:
        row = fields | _probe(case, asked)
        if recorder is not None:
            row = recorder.row(**row)
        if say:
            say(_probe_words(row))
        late.append(row)
        if row["status"] not in ("killed", "timeout") or row["limiter"] == "launch":
            break
    return late[-1]


def _probe(case: Case, asked: dict) -> dict:
    """What a row says about a call in a fresh process."""
    cuda, seconds = case.device.startswith("cuda"), asked["seconds"]
    cap = int(0.9 * psutil.virtual_memory().available)  # of this machine, whatever is asked of the card
    if not cuda:
        cap = min(cap, 5 * asked["budget_bytes"] // 4 + SLACK_BYTES)
    budget = asked["budget_bytes"] if asked["capped"] or not cuda else None
    arguments = (case, budget, seconds)
    outcome = processes.run(f"{__name__}:call", arguments, seconds + COLD_S + SETUP_S, cap)
    if outcome.status == "killed" and "SIGALRM" in outcome.error:
        outcome = Outcome("timeout", f"the call took more than {seconds:g} s")
    row = {"status": outcome.status, "error": outcome.error, "limiter": None, "load": None, "valid": None}
    row |= dict.fromkeys(("median_ms", "samples_ms", "peak_bytes", "reserved_bytes", "extra_bytes"))
    if outcome.status != "ok":
        launch = outcome.status == "killed" and any(x in outcome.error.lower() for x in LAUNCH)
        row["limiter"] = "launch" if launch else {"oom": "memory", "timeout": "time"}.get(outcome.status)
        return row
    row |= outcome.result
    lateness = row["median_ms"] / 1000 / seconds
    row["load"] = max(row["reserved_bytes"] / asked["budget_bytes"], lateness)
    row["limiter"] = "validity" if row["valid"] is False else "time" if lateness > 1 else None
    return row


def _probe_words(row: dict) -> str:
    if row["status"] != "ok":
        return f"  N = {row['n']:,}: {row['status']}: {row['error'].partition('. ')[0]}"
    what = f"{row['reserved_bytes'] / 2**30:.2f} GiB reserved, {row['median_ms']:.3g} ms"
    return f"  N = {row['n']:,}: {row['limiter'] or 'works'}, {what}" + (f": {row['error']}" if row["error"] else "")


def call(case: Case, budget_bytes: int | None, seconds: float) -> dict:
    """In a fresh process: the call on a card of so many bytes, and what it took; the process ends if that is too long.

    Memory is read after the first call. On CUDA time is the second call's, which compiles nothing.
    """
    cuda, made = case.device.startswith("cuda"), []
    random = torch.Generator(case.device).manual_seed(case.seed)

    def make(shape):
        made.append(torch.randn(shape, generator=random, device=case.device, dtype=case.dtype))
        return made[-1]

    def timed(limit: float):
        signal.setitimer(signal.ITIMER_REAL, min(limit, 1e6))  # SIGALRM ends the process, also within a kernel
        begin = time.perf_counter()
        result = work()
        if cuda:
            torch.cuda.synchronize()
        signal.setitimer(signal.ITIMER_REAL, 0)
        return result, 1000 * (time.perf_counter() - begin)

    with card_of(budget_bytes, cuda) as used:
        work, backend = case.prepare_from(make)
        inputs = used()["peak_bytes"]
        result, milliseconds = timed(seconds + cuda * COLD_S)
        found = used()
        if cuda:  # a second call for its time alone: the pieces that the first has left must not be what it fails for
            del result
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0)
            result, milliseconds = timed(seconds)
    found |= {"backend": backend, "extra_bytes": found["peak_bytes"] - inputs}
    found |= {"median_ms": milliseconds, "samples_ms": [milliseconds]}
    results = [*result] if case.mode == "fwdbwd" else [result]
    del result  # `_valid` may let go of what is on the card
    return found | _valid(case, made, results)


@contextlib.contextmanager
def card_of(budget_bytes: int | None, cuda: bool):
    """A card with so much memory for the allocator, in software on the CPU; yields what reads the peaks."""
    if cuda:
        if budget_bytes is not None:
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, (budget_bytes + 0.5) / total))  # not a byte less

        def used():
            stats = torch.cuda.memory_stats()
            names = {"peak_bytes": "requested_bytes", "reserved_bytes": "reserved_bytes"}
            return {x: stats[f"{y}.all.peak"] for x, y in names.items()}

        yield used
        torch.cuda.set_per_process_memory_fraction(1.0)  # the check of the rows is not on the budget
        return
    with VirtualCard(budget_bytes / 2**30) as card:
        yield lambda: {"peak_bytes": card.peak_requested_bytes, "reserved_bytes": card.peak_reserved_bytes}


def _valid(case: Case, made: list, results: list) -> dict:
    """valid: whether sampled rows are right, None where there was no memory to tell, or where dk and dv have too many
    softmaxes behind them to be checked; error: what is wrong, or was not checked.

    Where the call has left no room for that on the card, its tensors move to the host's memory, if they fit there.
    """
    names = ("dq", "dk", "dv") if case.mode == "fwdbwd" else ("out",)
    pairs = PAIRS.get(made[0].device.type) if case.mode == "fwdbwd" else None
    check = lambda: validity.check(case.pattern, dict(zip(names, results, strict=True)), made, pairs=pairs)  # noqa: E731
    outcome = attempt(check)
    size = sum(x.numel() * x.element_size() for x in (*made, *results))
    if outcome.status == "oom" and made[0].is_cuda and size < 0.8 * psutil.virtual_memory().available:
        for tensors in (results, made):
            for i, x in enumerate(tensors):
                tensors[i] = x.detach().cpu()
        outcome = attempt(check)
    if outcome.status == "ok":
        found = outcome.result
        return {"valid": False if found.wrong else found.ok or None, "error": None if found.ok else str(found)}
    return {"valid": None if outcome.status == "oom" else False, "error": f"rows not checked: {outcome.error}"}
