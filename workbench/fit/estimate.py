"""What a call needs on a card that need not be there: bytes from a trace of the program itself, time from ceilings.

The trace (`tracer`) gives every tensor's life in order; a replica of torch's caching allocator replays them
(`allocator`), and four numbers come out: requested, allocated (rounded), reserved (segments), and what the
device must have (and the context). Nothing is fitted but what kernels take below the dispatcher (`workspace`),
which was measured. Time is modelled, and says so: attended pairs over the rate that the same execution reached on an
H100 (FlashAttention-4: an H200) at such a length, as a share of the card's ceiling.
"""

import copy
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from workbench.engines import torch_rules
from workbench.fit import allocator, cards, fake_ranks, tracer
from workbench.fit.tracer import CannotTrace, Event
from workbench.patterns import Dense, Neighborhood, checks
from workbench.probes import roofline
from workbench.probes.case import Case

EFFICIENCY = Path(__file__).with_name("efficiency.json")
KEPT = 512  # traces


@dataclass(frozen=True)
class Estimate:
    """Bytes at the peak of a call, inputs included, and modelled time (None where no such execution was measured).

    requested: what the tensors hold; allocated: rounded by the allocator; reserved: its segments; device: and the CUDA
    context, and of a rank of several what its process group takes. at_peak: (name, bytes) of what is alive when
    requested is largest, the largest first. strategy: of such a rank, the one that was taken. wrong: what is known to
    compute wrongly at such a size, None where nothing is. kernel: what computes, torch's where backend is torch's.
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
    wrong: str | None = None
    kernel: str | None = None

    @functools.cached_property
    def at_peak(self) -> list[tuple[str, int]]:
        sizes = {x.id: x.nbytes for x in self.events if x.nbytes >= 0}
        sums = [*accumulate(x.nbytes if x.nbytes >= 0 else -sizes[x.id] for x in self.events)]
        alive = {}
        for event in self.events[: sums.index(max(sums)) + 1] if sums else ():
            if event.nbytes < 0:
                del alive[event.id]
            else:
                alive[event.id] = event.name, event.nbytes
        return sorted(alive.values(), key=lambda x: -x[1])


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
    fake_ranks.check(world, rank, strategy)
    life, strategy = _life(case, card, world, rank, strategy)
    time = milliseconds(case, card, life.backend, life.kernel) if world == 1 and case.timed else None
    return _estimate(life, card, card.communicator_bytes if world > 1 else 0, time, strategy)


def program(prepare: Callable[[], Callable], card: str | cards.Card = "h100", calls: int = 2) -> Estimate:
    """The estimate of any program: prepare() makes what it needs on "cuda" and returns the function that is called.

    calls: how often, one after the other, all results kept: an optimizer has its states from the first step on. No time
    is modelled. CannotTrace where the program looks at data or has none on "cuda"; what it raises goes through.
    """
    card, calls = cards.find(card), checks.whole("calls", calls, 1)

    def prepared():
        call = prepare()
        return (lambda: [call() for _ in range(calls)][-1]), checks.describe(prepare)

    life = tracer.run(prepared, card)
    if not life.events:
        raise CannotTrace(f"{checks.describe(prepare)}: nothing was made on 'cuda'; want the model and its data there")
    return _estimate(life, card)


def _estimate(life: tracer.Traced, card: cards.Card, communicator=0, time=None, strategy=None) -> Estimate:
    used, inputs = allocator.replay(life.events), allocator.replay(life.events[: life.before]).requested
    return Estimate(
        card.key, life.backend, inputs, used.peak_requested, used.peak_allocated, used.peak_reserved,
        used.peak_reserved + card.context_bytes + communicator, time, life.events, strategy, life.wrong,
        life.kernel or life.backend,
    )  # fmt: skip


def _life(case: Case, card: cards.Card, *place) -> tuple[tracer.Traced, str | None]:
    """(the life of a case's tensors, the strategy that a rank of several took). place: world, rank and strategy, as of
    `trace`. Cards of the same habits share a trace."""
    if case.backend == "reference":
        raise CannotTrace("reference computes all N x N scores in float64 on the host, whatever the card: not traced")
    habits = card.capability, card.workspace_bytes, card.multiprocessors, card.key == cards.VIRTUAL
    key = repr((case.fields(), habits, place)) if isinstance(case.backend, str) else None
    if key in _lives:
        return _lives[key]
    on_card = replace(case, device="cuda", pattern=copy.copy(case.pattern))  # which keeps what it finds on the card
    on_card, ranks = fake_ranks.share(on_card, card, *place) if place[0] > 1 else (on_card, None)
    found = tracer.of_case(on_card, card), ranks and ranks.strategy
    if key is not None:
        while len(_lives) >= KEPT:
            _lives.pop(next(iter(_lives)))
        _lives[key] = found
    return found


_lives: dict[str, tuple] = {}


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
    counts, shares = zip(*points, strict=True)
    least = min(1, rows / counts[0])  # of fewer rows launches take over: the time stays
    return least * float(np.interp(math.log(rows), np.log(counts), shares))


@functools.cache
def efficiency() -> dict[str, list[dict]]:
    """{family: [{head_dim, rows, share of the card's matmul peak}]}, of records (tests/efficiency.py)."""
    return json.loads(EFFICIENCY.read_text())["families"]
