"""What a stream will take, before it runs: passes, bytes, and by rehearsing it without data, memory; and modelled time.

Dimensions: N positions, H query heads, G key heads, D head_dim.
"""

import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from workbench.fit import allocator, cards, estimate, tracer
from workbench.patterns import Dense, Dilated, Neighborhood
from workbench.probes.case import Case
from workbench.streaming import host
from workbench.streaming.calls import Calls
from workbench.streaming.run import Forward, Stream

CHUNK = 1 << 20  # queries: a card is busy long enough with them to hide the copies of the next, and of the last
LEAST = 64
HOST_GBS = 48.0  # each way, both ways at once, between pinned memory and an H200, as measured


@dataclass(frozen=True)
class Plan:
    """A stream over `chunks` chunks of `chunk` positions. Bytes, but for milliseconds: modelled, or None.

    kept: rows (of a head) of the long branches of a dilated pattern, which are gathered before the first chunk
    bytes_in, bytes_out: to the card and from it. peak: on the card, of all tensors, its weights too; reserved: of its
    allocator. host: pinned memory beside the tensors of source and sink.
    floors: (of host traffic, of products) in milliseconds, the longer of which no run can beat
    """

    calls: Calls
    card: str
    kept: int
    bytes_in: int
    bytes_out: int
    peak: int
    reserved: int
    host: int
    floors: tuple[float, float | None]

    @property
    def milliseconds(self) -> float | None:
        return None if self.floors[1] is None else max(self.floors)

    def __str__(self):
        chunks, time = len(self.calls.chunks), self.milliseconds
        said = [f"{chunks:,} chunks of at most {self.calls.chunk:,} positions"]
        if self.kept:
            said.append(f"{self.kept:,} rows of long branches are gathered first and stay on the card")
        said.append(f"{self.bytes_in / 1e9:.3g} GB to the card, {self.bytes_out / 1e9:.3g} GB back")
        said.append(f"at most {self.peak:,} bytes on the card, {self.host:,} pinned on the host")
        said.append("time is not modelled" if time is None else f"{time / 1000:.3g} s on {self.card}, modelled")
        return "; ".join(said)


def plan(job, pattern, sizes, dtype, options, card: cards.Card, budget: int | None, chunk: int | None) -> Plan:
    """The first plan that the budget holds. ValueError where none is. sizes: n, heads, kv_heads and head_dim."""
    n, heads, kv_heads, head_dim = sizes
    tried, least = set(), None
    for size in [chunk] if chunk else _sizes(n):
        calls = Calls.of(pattern, n, heads, kv_heads, size)
        if calls.chunk in tried:
            continue
        tried.add(calls.chunk)
        resident = 4 * sum(len(x) * len(range(heads)[x.heads]) for x in calls.kept) * head_dim * dtype.itemsize
        if budget is not None and resident > budget:  # q, k, v and out of rows that are kept
            least = min(resident, least or resident)
            continue
        found = _rehearsed(job, calls, dtype, head_dim, options, card)
        if budget is None or found.reserved <= budget:
            return found
        least = min(found.reserved, least or found.reserved)
    raise ValueError(f"budget_bytes={budget:,}: want at least {least:,} for this pattern at {n:,} positions")


def _sizes(n: int):
    """Chunks to try: the usual one; longer ones, which leave fewer rows to be kept; shorter ones."""
    size = CHUNK
    while size < 2 * n and size <= 64 * CHUNK:
        yield size
        size *= 2
    size = max(min(CHUNK, n), LEAST)
    while size >= max(LEAST, n >> 16):
        yield size
        size //= 2


def _rehearsed(job, calls: Calls, dtype, head_dim: int, options, card: cards.Card) -> Plan:
    # Patterns keep what they find on the card, which is not there: a copy rehearses.
    n = calls.n if not isinstance(calls.pattern, Dense) else min(calls.n, 2 * calls.chunk + calls.n % calls.chunk)
    copied = Calls.of(copy.copy(calls.pattern), n, calls.heads, calls.kv_heads, calls.chunk)
    stream = Stream(copied, job, dtype, head_dim, "rehearsal", options, _telling(copied))
    used = allocator.replay(tracer.run(_Rehearsal(stream), card).events)
    sink = [x for x in job.sink if x is not None]
    each = {name: _row_bytes(x) for name, x in job.tensors.items()}
    kept = sum(len(x) for x in calls.kept)
    bytes_in = kept * sum(each.values()) + sum(
        len(where) * each[which] for chunk in calls.chunks for call in calls.of_chunk(chunk)
        for which, where in job.wanted(call).values()
    )  # fmt: skip
    bytes_out = calls.n * sum(map(_row_bytes, sink))
    staged = [x for x in job.tensors.values() if kept or not _pinned(x)]
    pinned = 2 * sum(max(calls.most) * _row_bytes(x) for x in staged)
    pinned += 2 * sum(min(calls.n, calls.chunk) * _row_bytes(x) for x in sink if not _pinned(x))
    return Plan(
        calls, card.key, kept, bytes_in, bytes_out, used.peak_requested, used.peak_reserved, pinned,
        (max(bytes_in, bytes_out) / HOST_GBS / 1e6, _products(calls, head_dim, dtype, card, isinstance(job, Forward))),
    )  # fmt: skip


def _row_bytes(x) -> int:
    return x.nbytes // x.shape[0]


def _pinned(x) -> bool:
    return x.device.type == "cpu" and torch.cuda.is_available() and x.is_pinned()


def _telling(calls: Calls) -> list[range]:
    """The chunks after which memory holds nothing new: all where they differ, else a few."""
    alike = isinstance(calls.pattern, (Dense, Dilated, Neighborhood))
    middle, every = len(calls.chunks) // 2, range(len(calls.chunks))
    few = sorted({*every[:3], *every[middle : middle + 2], *every[-2:]} if alike else every)
    return [calls.chunks[x] for x in few]


class _Rehearsal(SimpleNamespace):
    """A stream as `tracer.run` takes a case: run on tensors without data."""

    def __init__(self, stream: Stream):
        self.stream = stream

    def prepare_from(self, make):
        job = copy.copy(self.stream.job)
        if isinstance(job.source, host.Projected):
            job.source = job.source._replace(**{x: _on_meta(getattr(job.source, x)) for x in ("q", "k", "v")})
            job.finish = _on_meta(job.finish)
        return replace(self.stream, job=job).run, "streaming"


def _on_meta(function):
    return copy.deepcopy(function).to("cuda") if isinstance(function, torch.nn.Module) else function


def _products(calls: Calls, head_dim: int, dtype, card: cards.Card, forward: bool) -> float | None:
    """Modelled milliseconds of all products, as of the whole pattern in memory; None where nothing like it is known."""
    mode = "fwd" if forward else "fwdbwd"
    case = Case(calls.pattern, calls.n, calls.heads, head_dim, dtype, "auto", mode, "cuda", 1, calls.kv_heads)
    try:
        backend = "triton" if not isinstance(calls.pattern, Dense) else "cudnn"
        return estimate.milliseconds(case, card, backend)
    except (ValueError, NotImplementedError):
        return None
