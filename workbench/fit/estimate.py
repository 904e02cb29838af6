"""What a call needs on a card that need not be there: bytes from a trace of the program itself, time from ceilings.

The trace (`probes.trace`) gives every tensor's life in order; a replica of torch's caching allocator replays them
(`probes.allocator`), and four numbers come out: requested, allocated (rounded), reserved (segments), and what the
device must have (and the context). Nothing is fitted but what kernels take below the dispatcher (`probes.scratch`),
which was measured. Time is modelled, and says so: attended pairs over the rate that the same execution reached on an
H100 at such a length, as a share of the card's ceiling.
"""

from __future__ import annotations

import copy
import functools
import gc
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from workbench.engines import torch_rules
from workbench.fit import allocator, cards, fake_ranks, tracer
from workbench.fit.tracer import CannotTrace, Event
from workbench.harness.outcome import attempt
from workbench.patterns import Dense, Neighborhood, checks
from workbench.probes import roofline
from workbench.probes.case import Case

EFFICIENCY = Path(__file__).with_name("efficiency.json")
KEPT = 512  # traces
NAMES = ("q", "k", "v", "gradient of out")


class Life(NamedTuple):
    """A trace (`trace.Traced`) of a call by a backend; strategy: the one that a rank of several took."""

    events: list[Event]
    before: int
    wrong: str | None
    kernel: str | None
    backend: str
    strategy: str | None = None


@dataclass(frozen=True)
class Estimate:
    """Bytes at the peak of a call, inputs included, and modelled time (None where no such execution was measured).

    requested: what the tensors hold; allocated: rounded by the allocator; reserved: its segments; device: and the CUDA
    context, and of a rank of several what its process group takes. at_peak: (name, bytes) of what is alive when
    requested is largest, the largest first. strategy: of such a rank, the one that was taken. wrong: what is known to
    compute wrongly at such a size, None where nothing is.
    """

    card: str
    backend: str
    inputs_bytes: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    milliseconds: float | None
    events: list[Event] = field(repr=False)
    strategy: str | None = None
    measured: bool = False
    wrong: str | None = None

    @functools.cached_property
    def at_peak(self) -> list[tuple[str, int]]:
        return largest(self.events)


def trace(
    case: Case, card: str | cards.Card = "h100", *, world: int = 1, rank: int = 0, strategy: str = "auto"
) -> Estimate:
    """The estimate of a case on a card, a name of `cards.CARDS` or a Card; on "cuda", whatever the case says.

    world, rank, strategy: of `distributed.attention` over so many cards, this rank's share: the case's n is that of all
        together, in shards as even as can be. What NCCL takes is not the allocator's: device_bytes has the card's
        `communicator_bytes` for it, the other numbers have not. Time is then not modelled: it is the exchange's too.
    CannotTrace where the program looks at data; ValueError or NotImplementedError where this cannot be run on that
    card, or so shared out, with the reason.
    """
    if not isinstance(case, Case):
        raise ValueError(f"case={case!r}: want a Case")
    card = cards.find(card)
    life = _life(case, card, fake_ranks.Rank(world, rank, strategy))
    found = _estimate(card, life)
    if world > 1:
        return replace(found, device_bytes=found.device_bytes + card.communicator_bytes, strategy=life.strategy)
    return replace(found, milliseconds=milliseconds(case, card, life.backend, life.kernel))


def program(
    prepare: Callable[[Callable], tuple], card: str | cards.Card = "h100", names: tuple[str, ...] = ()
) -> Estimate:
    """The estimate of any program, a module's pass, say; its time is not modelled.

    prepare(make) takes its inputs from make(shape, dtype), tensors on the card named by `names`, makes what else it
    wants on device "cuda", and returns (call, the name of what executes it); call() is traced, its result held.
    """
    checks.callable_("prepare", prepare)
    card = cards.find(card)
    return _estimate(card, _lived(tracer.run(prepare, card, names)))


def _lived(traced: tracer.Traced, strategy: str | None = None) -> Life:
    return Life(traced.events, traced.before, traced.wrong, traced.kernel, traced.prepared[1], strategy)


def _estimate(card: cards.Card, life: Life) -> Estimate:
    used, prepared = allocator.replay(life.events), life.events[: life.before]
    lives = {x.id: x.nbytes for x in prepared if x.nbytes >= 0}
    inputs = sum(lives.values()) - sum(lives[x.id] for x in prepared if x.nbytes < 0)
    return Estimate(
        card.key, life.backend, inputs, used.peak_requested, used.peak_allocated, used.peak_reserved,
        used.peak_reserved + card.context_bytes, None, life.events, wrong=life.wrong,
    )  # fmt: skip


def _life(case: Case, card: cards.Card, place: fake_ranks.Rank) -> Life:
    """The life of a case's tensors; cards with the same habits share a trace."""
    if case.backend == "reference":
        raise CannotTrace("reference computes all N x N scores in float64 on the host, whatever the card: not traced")
    habits = card.capability, card.workspace_bytes, card.multiprocessors, card.key == cards.VIRTUAL
    key = repr((case.fields(), habits, place)) if isinstance(case.backend, str) else None
    if key in _lives:
        return _lives[key]
    on_card = replace(case, device="cuda", pattern=copy.copy(case.pattern))  # which keeps what it finds on the card
    ranks = None
    if place.world > 1:
        on_card, ranks = place.own(on_card, card)

    def prepare(make):
        return on_card.prepare_from(lambda shape: make(shape, on_card.dtype))

    found = _lived(tracer.run(prepare, card, NAMES), ranks and ranks.strategy)
    if key is not None:
        while len(_lives) >= KEPT:
            _lives.pop(next(iter(_lives)))
        _lives[key] = found
    return found


_lives: dict[str, Life] = {}


def largest(events: list[Event]) -> list[tuple[str, int]]:
    """(name, bytes) of what is alive at the largest sum, the largest first."""
    sizes, now, most, at = {}, 0, 0, 0
    for x, (id, nbytes, _) in enumerate(events, 1):
        if nbytes < 0:
            now -= sizes[id]
        else:
            sizes[id] = nbytes
            now += nbytes
            if now > most:
                most, at = now, x
    alive = {}
    for event in events[:at]:
        if event.nbytes < 0:
            del alive[event.id]
        else:
            alive[event.id] = event
    return sorted(((x.name, x.nbytes) for x in alive.values()), key=lambda x: -x[1])


def check(case: Case, card: str | cards.Card | None = None) -> dict:
    """Predicted beside measured, on the CUDA card of this machine: a record's row.

    The call runs once to compile and to fill caches, then again from an emptied allocator with a copy of the pattern,
    which has its lists to make anew. predicted_* and measured_* are bytes at the peak, inputs included: requested,
    allocated, reserved; off is (predicted - measured) / measured of the requested.
    """
    card = cards.from_device() if card is None else card
    row = {"probe": "memory"} | case.fields() | {"measured": True, "status": "ok", "error": None}
    measured = attempt(lambda: peaks(case))
    predicted = attempt(lambda: trace(case, card))
    for outcome in (predicted, measured):
        if outcome.status != "ok":
            return row | {"status": outcome.status, "error": outcome.error}
    estimate = predicted.result
    row |= {"backend": estimate.backend, "card": estimate.card} | measured.result
    row |= {f"predicted_{x}_bytes": getattr(estimate, f"{x}_bytes") for x in ("requested", "allocated", "reserved")}
    return row | {"off": row["predicted_requested_bytes"] / row["measured_requested_bytes"] - 1}


def peaks(case: Case) -> dict[str, int]:
    """measured_requested_bytes, measured_allocated_bytes and measured_reserved_bytes on CUDA, in this process."""
    for last in (False, True):
        time.sleep(0.1)  # the thread of the backward may still hold the last of its tensors
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_stats()
        torch.cuda.reset_peak_memory_stats()
        call, _ = replace(case, device="cuda", pattern=copy.copy(case.pattern)).prepare()
        result = call()
        torch.cuda.synchronize()
        if last:
            after = torch.cuda.memory_stats()
        del call, result
    kinds = {"requested": "requested_bytes", "allocated": "allocated_bytes", "reserved": "reserved_bytes"}
    return {
        f"measured_{x}_bytes": after[f"{y}.all.peak"] - before[f"{y}.all.current"] for x, y in kinds.items()
    }  # fmt: skip


# --- time ------------------------------------------------------------------------------------------------------------


def milliseconds(case: Case, card: cards.Card, backend: str, kernel: str | None = None) -> float | None:
    """Modelled time of the call; None where this execution was not measured, for a dtype that the card has no figure
    for, and where there is nothing to compute. kernel: what torch's attention took, where that is what ran."""
    dtype = str(case.dtype).removeprefix("torch.")
    lines = efficiency().get(family(case, backend, card, kernel))
    if not lines or dtype not in card.matmul_tflops or not rows(case):
        return None
    return roofline.operations(case) / (share(lines, case.head_dim, rows(case)) * card.matmul_tflops[dtype] * 1e9)


def rows(case: Case) -> int:
    """(sequence, query, head): what a card has to share out among its multiprocessors."""
    return case.batch * case.nq * case.heads


def share(lines: list[dict], head_dim: int, rows: int) -> float:
    """The share of the card's matmul peak at a head_dim and a number of rows, from those measured.

    The time of a pair is a line in head_dim: its products grow with it, its exponential does not. Through the two
    nearest measured; where only one was, half of its time is the products' for a smaller head_dim, all for a larger.
    """
    near = sorted({x["head_dim"] for x in lines}, key=lambda d: abs(math.log(d / head_dim)))[:2]
    times = [(d, d / between(sorted((x["rows"], x["share"]) for x in lines if x["head_dim"] == d), rows)) for d in near]
    (d, time), (other, its) = times[0], times[-1]
    slope = (its - time) / (other - d) if other != d else time / d / (2 if head_dim < d else 1)
    return head_dim / max(time + slope * (head_dim - d), time * min(1, head_dim / d))


def family(case: Case, backend: str, card: cards.Card, kernel: str | None = None) -> str:
    """What is taken to run at one rate: "Dilated triton causal fwd", say; dense attention by torch's kernel for it."""
    name, mask = type(case.pattern).__name__, "causal" if case.pattern.causal else "full"
    if isinstance(case.pattern, Neighborhood):
        name += f" {len(case.pattern.shape)}-D"
    if isinstance(case.pattern, Dense) and backend in ("torch", "sdpa"):
        backend = kernel or torch_rules.kernels(card.capability, case.dtype, case.head_dim)[0]
    return f"{name} {backend} {mask} {case.mode}" + (" float32" if case.dtype == torch.float32 else "")


def between(points: list[tuple[int, float]], rows: int) -> float:
    """The share at so many rows, on straight lines over log rows between the points, and level beyond the last."""
    if rows >= points[-1][0]:
        return points[-1][1]
    if rows <= points[0][0]:
        return points[0][1] * rows / points[0][0]  # launches take over: the time stays
    x = next(i for i, (m, _) in enumerate(points) if m >= rows)
    (a, low), (b, high) = points[x - 1 : x + 1]
    return low + (high - low) * math.log(rows / a) / math.log(b / a)


@functools.cache
def efficiency() -> dict[str, list[dict]]:
    """{family: [{head_dim, rows, share of the card's matmul peak}]}, from an H100's records (tests/efficiency.py)."""
    return json.loads(EFFICIENCY.read_text())["families"] if EFFICIENCY.exists() else {}


__all__ = ["CannotTrace", "Estimate", "Event", "check", "program", "trace"]
