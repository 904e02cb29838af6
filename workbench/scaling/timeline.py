"""What each rank does during one call over several ranks: it computes, packs, and exchanges, by torch's profiler.

On cards the events are kernels: NCCL's exchange; of the others, those on the stream that works longest compute, and
those beside it pack rows. On a CPU they are torch's operations: copies outside of attention calls pack, the others
compute, and gloo's transfers, which run in threads of their own, exchange.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import pandas as pd
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from workbench.harness import records
from workbench.harness.ranks import Pool
from workbench.probes.case import Case
from workbench.scaling import strategies as ways
from workbench.scaling.on_ranks import barrier, covered, job, kernels
from workbench.scaling.sweeps import ask, backend_of, who

STAGES = ("compute", "pack", "exchange")
COPIES = tuple(f"aten::{x}" for x in ("copy_", "cat", "clone", "contiguous", "index", "index_select", "index_copy_"))
SHORTEST = 1 / 1000  # of the call: shorter events are not kept
CALLS = 2  # before the one that is recorded: they make the plan and warm up


def measure(
    cases: Mapping[str, Case], nproc: int = 2, strategies: Iterable[str] = ways.OURS, *, profile="quick", folder=None,
    skip: Collection[tuple[str, str]] = (),
) -> pd.DataFrame:  # fmt: skip
    """Record one call of each case by each strategy on nproc ranks: a row and record (stage "spans") each.

    A row has the case's fields, label, nproc, strategy, status, error, milliseconds (from the first event to the end of
    the last one, on any rank), and events: by rank, a list of [stage, name, start, duration] in microseconds, in order,
    from the first event of all on. The ranks are on one machine and share its clock.
    skip: (label, strategy) of what is passed over, such as what gave a wrong result.
    ValueError for a case with a backward.
    """
    for case in cases.values():
        if case.mode != "fwd":
            raise ValueError(f"mode={case.mode!r}: want 'fwd', one forward")
    rows, recorder = [], records.start("scaling", profile, folder)
    with Pool(nproc, backend_of(cases.values())) as pool:
        for label, case in cases.items():
            for name in (x for x in strategies if (label, x) not in skip):
                row = case.fields() | who(name, nproc) | {"stage": "spans", "label": label, "nproc": nproc}
                outcome = ask(pool, "one_call", case, name, module="timeline")
                row |= {"status": outcome.status, "error": outcome.error, "milliseconds": None, "events": None}
                if outcome.status == "ok":
                    row |= together(outcome.result)
                rows.append(recorder.row(**row))
    return pd.DataFrame(rows)


def together(ranks: list[list]) -> dict:
    """The ranks' events, with times in nanoseconds of a common clock, as fields of a row."""
    first = min((x[2] for events in ranks for x in events), default=0)
    last = max((x[2] + x[3] for events in ranks for x in events), default=0)
    ranks = [[x for x in events if x[3] >= SHORTEST * (last - first)] for events in ranks]
    kept = [[[*what, (start - first) / 1e3, took / 1e3] for *what, start, took in events] for events in ranks]
    # what is not kept is no part of the call: the barrier behind it fills a number, long after its last event
    return {"milliseconds": max((sum(x[2:]) for events in kept for x in events), default=0) / 1e3, "events": kept}


@job
def one_call(case: Case, strategy: str) -> list[list]:
    """[stage, name, start, duration] of what this rank does in one call, in nanoseconds of the machine's clock."""
    work = ways.prepare(strategy, case, dist.get_rank(), dist.get_world_size())
    cuda = case.device.startswith("cuda")
    with work.context():
        for _ in range(CALLS):
            work()
        for _ in range(2):  # the first profile of a process sets the profiler up while the call runs
            with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
                barrier(case.device)
                work()
                barrier(case.device)
    found = of_card(kernels(seen)) if cuda else of_processor(seen.profiler.kineto_results.events())
    return sorted((event for event in found if event[3] > 0), key=lambda x: x[2])


def of_card(events: list[tuple[str, int, int, int, int]]) -> list[list]:
    """Stages of `on_ranks.kernels` between the barriers around the call: all-reduces, of which no call has one."""
    fences = [(start, start + took) for name, _, _, start, took in events if "AllReduce" in name and "Kernel" in name]
    if len(fences) > 1:
        events = [x for x in events if fences[0][1] <= x[3] < fences[-1][0]]
    busy: dict[int, int] = defaultdict(int)
    for name, _, stream, _, took in events:
        busy[stream] += 0 if name.startswith("nccl") else took
    longest, found = max(busy, key=busy.get, default=0), []
    for name, _, stream, start, took in events:
        if not name.startswith("nccl"):
            found.append(["compute" if stream == longest else "pack", name, start, took])
        elif "Kernel" in name:  # others are ranges around a kernel
            found.append(["exchange", name, start, took])
    return found


def of_processor(events) -> list[list]:
    """Stages of the profiler's events of operations: the outermost ones of torch in the thread that calls, within
    "Attend", the call; and gloo's transfers."""
    main = next((x.start_thread_id() for x in events if x.name() == "Attend"), None)
    attend = [_span(x) for x in events if x.name() == "Attend"]
    inside = [_span(x) for x in events if x.name().startswith("workbench::")]
    found, end = [], 0
    for event in sorted(events, key=lambda x: (x.start_ns(), -x.duration_ns())):
        name, (start, stop) = event.name(), _span(event)
        if not any(a <= start <= b for a, b in attend):
            continue
        if name.startswith("gloo:"):
            if "barrier" not in name:
                found.append(["exchange", name, start, stop - start])
        elif name.startswith("aten::") and event.start_thread_id() == main and start >= end:
            packs = name in COPIES and not any(a <= start < b for a, b in inside)
            found.append(["pack" if packs else "compute", name, start, stop - start])
            end = stop
    return found


def _span(event) -> tuple[int, int]:
    return event.start_ns(), event.start_ns() + event.duration_ns()


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """What a call's time goes to: a row for each timeline and rank, in milliseconds: call; compute, pack and exchange,
    the time in which any such event runs; beside, the part of the exchange during which the rank also computes."""
    found = []
    for row in rows[rows["status"].eq("ok")].to_dict("records") if len(rows) else ():
        for rank, events in enumerate(row["events"]):
            spans = {x: [(start, start + took) for stage, _, start, took in events if stage == x] for x in STAGES}
            ms = {x: covered(spans[x]) / 1e3 for x in STAGES}
            beside = ms["compute"] + ms["exchange"] - covered(spans["compute"] + spans["exchange"]) / 1e3
            line = {"label": row["label"], "strategy": row["strategy"], "rank": rank, "call": row["milliseconds"]} | ms
            found.append(line | {"beside": max(0.0, round(beside, 6))})
    return pd.DataFrame(found, columns=["label", "strategy", "rank", "call", *STAGES, "beside"])
