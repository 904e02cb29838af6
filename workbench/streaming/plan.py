"""What a stream will take, before it runs: bytes, memory, by rehearsing it without data, and modelled time."""

import copy
from dataclasses import dataclass, replace

from torch import Tensor, nn

from workbench.fit import allocator, cards, estimate, tracer
from workbench.patterns import Dense, Dilated
from workbench.probes.case import Case
from workbench.streaming import host
from workbench.streaming.calls import Calls
from workbench.streaming.run import Forward, Stream

CHUNK = 1 << 20  # queries: work enough for a card to hide the copies of the next chunk, and of the last
LEAST = 64
HOST_GBS = 48.0  # each way, both ways at once, between pinned memory and an H200, as measured


@dataclass(frozen=True)
class Plan:
    """A stream, by its calls. Sizes in bytes, times in milliseconds.

    kept: rows of the long branches of a dilated pattern, gathered before the first chunk; their results stay there
    bytes_in, bytes_out: to the card and from it. peak: of all tensors on the card, weights too; reserved: of its
        allocator; None where the program looks at data. pinned: on the host, beside source and sink
    traffic_ms, products_ms: modelled, the copies and the kernels (at the rate that they reached on record): a
        long run takes about the longer one. products_ms is None where no such kernel was measured
    """

    calls: Calls
    card: str
    kept: int
    bytes_in: int
    bytes_out: int
    peak: int | None
    reserved: int | None
    pinned: int
    traffic_ms: float
    products_ms: float | None

    @property
    def milliseconds(self) -> float | None:
        return None if self.products_ms is None else max(self.traffic_ms, self.products_ms)

    def __str__(self):
        peak = "an unknown number of" if self.peak is None else f"at most {self.peak:,}"
        time = "time is not modelled"
        if self.milliseconds is not None:
            time = f"{self.milliseconds / 1000:.3g} s on {self.card}, modelled"
        return (
            f"{len(self.calls.chunks):,} chunks of at most {self.calls.chunk:,} positions; {self.kept:,} rows of long "
            f"branches are gathered first; {self.bytes_in / 1e9:.3g} GB to the card, {self.bytes_out / 1e9:.3g} GB "
            f"back; {peak} bytes on the card, {self.pinned:,} more pinned on the host; {time}"
        )


def plan(job, calls: Calls, options, card: cards.Card, budget: int | None) -> Plan:
    """The first chunk length that the budget holds, of calls.n positions. ValueError where none is."""
    tried, least = set(), []
    for chunk in [options.chunk] if options.chunk else _lengths(calls.n):
        calls = replace(calls, chunk=chunk)
        if calls.chunk in tried:
            continue
        tried.add(calls.chunk)
        rows = sum(len(x) * len(range(calls.heads)[x.heads]) for x in calls.kept)
        least.append(4 * rows * options.head_dim * options.dtype.itemsize)  # q, k, v and out of what is kept
        if budget is None or least[-1] <= budget:
            found = _rehearsed(job, calls, options, card)
            least[-1] = found.reserved
            if budget is None or found.reserved is None or found.reserved <= budget:
                return found
    raise ValueError(f"budget_bytes={budget:,}: want at least {min(least):,} for this pattern at {calls.n:,} positions")


def _lengths(n: int):
    """Of chunks: the usual one; longer ones, which leave fewer rows to be kept; shorter ones."""
    longer = [CHUNK << x for x in range(7) if CHUNK << x < 2 * n]
    usual = max(LEAST, min(n, CHUNK))
    return longer + [usual >> x for x in range(usual.bit_length()) if usual >> x >= max(LEAST, n >> 16)]


def _rehearsed(job, calls: Calls, options, card: cards.Card) -> Plan:
    # Patterns keep what they find on the card, which is not there: a copy rehearses. Dense chunks are all alike.
    n = min(calls.n, 2 * calls.chunk + calls.n % calls.chunk) if isinstance(calls.pattern, Dense) else calls.n
    copied = replace(calls, pattern=copy.copy(calls.pattern), n=n)
    stream = Stream(copied, job, "rehearsal", options, _telling(copied))
    peak = reserved = None
    try:
        life = tracer.run(lambda: (replace(stream, job=_on_card(job)).run, "streaming"), card)
        used = allocator.replay(life.events)
        peak, reserved = used.peak_requested, used.peak_reserved
    except tracer.CannotTrace:
        if options.budget_bytes is not None:
            raise
    kept = sum(map(len, calls.kept))
    bytes_in, bytes_out, pinned = _traffic(job, calls, kept)
    mode = "fwd" if isinstance(job, Forward) else "fwdbwd"
    case = Case(calls.pattern, calls.n, calls.heads, options.head_dim, options.dtype, mode=mode, device="cuda")
    products = estimate.milliseconds(case, card, "cudnn" if isinstance(calls.pattern, Dense) else "triton")
    traffic = max(bytes_in, bytes_out) / HOST_GBS / 1e6
    return Plan(calls, card.key, kept, bytes_in, bytes_out, peak, reserved, pinned, traffic, products)


def _traffic(job, calls: Calls, kept: int) -> tuple[int, int, int]:
    """(bytes to the card, bytes back, bytes pinned on the host)."""
    each, keys = {name: _row_bytes(x) for name, x in job.tensors.items()}, 0
    bytes_in, bytes_out = kept * sum(each.values()), 0
    for call in (call for chunk in calls.chunks for call in calls.of_chunk(chunk)):
        bytes_in += sum(len(where) * each[which] for which, where in job.wanted(call).values())
        keys += len(call.keys)
    pinned = sum(calls.most[1] * each[name] for name, x in job.tensors.items() if kept or not host.pinned(x))
    for place, x in enumerate(job.sink):
        if job.adds and place:  # dk and dv, of each call
            row = _row_bytes(job.source[place])
            bytes_out, pinned = bytes_out + keys * row, pinned + calls.most[1] * row
        elif x is not None:
            bytes_out += calls.n * _row_bytes(x)
            pinned += 0 if host.pinned(x) else calls.chunk * _row_bytes(x)
    return bytes_in, bytes_out, 2 * pinned


def _row_bytes(x: Tensor) -> int:
    return x.nbytes // x.shape[0]


def _telling(calls: Calls) -> list[range]:
    """The chunks after which memory holds nothing new: a few, of first, middle and last ones, unless all differ."""
    middle, every = len(calls.chunks) // 2, range(len(calls.chunks))
    alike = calls.window or isinstance(calls.pattern, (Dense, Dilated))
    few = {*every[:3], *every[middle : middle + 2], *every[-2:]}
    return [calls.chunks[x] for x in (sorted(few) if alike else every)]


def _on_card(job):
    """The job with weights of its own, on the card."""
    job = copy.copy(job)
    if isinstance(job.source, host.Projected):
        moved = [copy.deepcopy(x).to("cuda") if isinstance(x, nn.Module) else x for x in (*job.source[1:4], job.finish)]
        job.source, job.finish = job.source._replace(**dict(zip("qkv", moved[:3], strict=True))), moved[3]
    return job
