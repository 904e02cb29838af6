"""What ranks do to measure a strategy: functions for a `Pool`, called on every rank alike; a case comes as JSON.

A result is this rank's; the caller (`probes.scaling`) combines the ranks. Time is measured by `times`, in a pool of
ranks that do nothing else; all else by `facts`, in another one.

Dimensions: B batch, N positions, H heads, D head_dim.
"""

from __future__ import annotations

import gc
import random
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial, wraps

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.distributed import strategies
from workbench.distributed.shards import Rows, Shards
from workbench.distributed.strategies import ONE, Work
from workbench.distributed.traffic import Traffic
from workbench.patterns import from_spec
from workbench.probes import memory
from workbench.probes.case import Case
from workbench.probes.error import RELATIVE
from workbench.probes.frontier import card_of
from workbench.probes.outcome import attempt
from workbench.probes.timing import AA
from workbench.probes.validity import Exact, edges, sample

SMALL = 1 << 20  # elements of a result up to which all of its rows are compared
DRAWN = 32  # random rows that are compared in a larger result, beside those at edges
CALLS = 3  # over which the busy share is measured
FEWEST = 3  # samples, however long they take: fewer show no spread
NO_WORK = ("nccl", "Memcpy", "Memset")  # how names of what a profile shows on a card begin that is no computation


def described(case: Case) -> dict:
    """A case as JSON, for `read`."""
    names = ("n", "heads", "head_dim", "backend", "mode", "device", "batch", "kv_heads", "nq", "seed")
    fields = {name: getattr(case, name) for name in names}
    return fields | {"pattern": case.pattern.spec(), "dtype": str(case.dtype).removeprefix("torch.")}


def read(case: dict) -> Case:
    return Case(**case | {"pattern": from_spec(case["pattern"])})


def _place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def _job(function: Callable) -> Callable:
    """A job that leaves no memory reserved on its card, which another pool's rank may use next."""

    @wraps(function)
    def job(*arguments, **named):
        try:
            return function(*arguments, **named)
        finally:
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    return job


def _sync(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _barrier(device: str) -> None:
    """All ranks leave it together, with nothing running on their cards.

    They first meet on the host: NCCL's barrier runs a kernel on the card of a rank that waits in it, and another rank
    may still compute on that card, as DataParallel's rank 0 does.
    """
    _sync(device)
    dist.all_reduce(torch.zeros(1))
    dist.barrier(**({"device_ids": [torch.cuda.current_device()]} if device.startswith("cuda") else {}))
    _sync(device)


def _timed(device: str, work: Callable) -> float:
    """Milliseconds that this rank takes, from a common barrier on."""
    _barrier(device)
    begin = time.perf_counter()
    work()
    _sync(device)
    return 1000 * (time.perf_counter() - begin)


# --- memory, bytes, exactness, busy share -----------------------------------------------------------------------------


@_job
def facts(case: dict, strategy: str, checked: bool = True) -> dict:
    """What a strategy takes in memory and communication, and whether its results are right.

    peak_bytes, extra_bytes: at the peak of the first call, with and without the inputs; a list by card: one, or all for
        rank 0 of "data parallel"
    sent_bytes: floating-point data that this rank sent, None if torch.distributed did not move it; control_bytes: other
        data that it sent
    busy: a list by card, see `busy`
    errors: by result [largest absolute error, largest error over what is allowed], against rank 0's one-device call or,
        for a forward that one device cannot do, against float64; compared_with: which of the two
    compared: how many rows of out or dq; unchecked: why nothing was compared, or None
    """
    case, (rank, world) = read(case), _place()
    expected, why = _reference(case, rank, world) if checked else (None, None)
    work = strategies.prepare(strategy, case, rank, world)
    by_rank_0 = strategy == "data parallel"
    cards = world if by_rank_0 and not work.idle else 1
    with work.context():
        _barrier(case.device)
        extra = _extra(work, cards)
        with Traffic() as traffic:
            results = work(out=True)
        _sync(case.device)
        found = {"extra_bytes": extra, "peak_bytes": [extra[0] + work.inputs_bytes, *extra[1:]], "unchecked": why}
        found |= {"sent_bytes": None if by_rank_0 else traffic.rows, "control_bytes": traffic.control}
        found |= {"errors": {}, "compared": 0, "compared_with": None}
        if expected is not None:
            found |= _compare(work, results, expected, world)
        elif checked and case.mode == "fwd":
            found |= _compare_drawn(work, results) | {"unchecked": None}
        del results
        found["busy"] = busy(work, cards)
    return found


def _extra(work: Work, cards: int) -> list[int]:
    """Peak bytes of a call above what was allocated before, on each of so many cards."""
    if cards == 1:
        device = torch.cuda.current_device() if work.case.device.startswith("cuda") else None
        return [memory.measure(work, "cpu" if device is None else f"cuda:{device}").extra_bytes]
    before = []
    for card in range(cards):
        torch.cuda.reset_peak_memory_stats(card)
        before.append(torch.cuda.memory_allocated(card))
    work()
    torch.cuda.synchronize()
    return [torch.cuda.max_memory_allocated(card) - x for card, x in enumerate(before)]


def busy(work: Work, cards: int = 1) -> list[float | None]:
    """The share of the wall time of CALLS calls in which each card computes; all ranks begin and end them together.

    CUDA: the union of the intervals of all kernels but NCCL's, from torch's profiler; None if it shows none although
    the rank has work. CPU: this process's CPU time over the wall time of its threads, which includes gloo's copies.
    """
    if not work.case.device.startswith("cuda"):
        _barrier(work.case.device)
        begin, before = time.perf_counter(), time.process_time()
        for _ in range(CALLS):
            work()
        computed = time.process_time() - before
        _barrier(work.case.device)
        return [computed / (time.perf_counter() - begin) / torch.get_num_threads()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _barrier(work.case.device)
        begin = time.perf_counter()
        for _ in range(CALLS):
            work()
        _barrier(work.case.device)
        wall = time.perf_counter() - begin
    first = 0 if cards > 1 else torch.cuda.current_device()
    spans: dict[int, list[tuple[int, int]]] = {first + x: [] for x in range(cards)}
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.name().startswith(NO_WORK):
            start = event.start_ns()
            spans.setdefault(event.device_index(), []).append((start, start + event.duration_ns()))
    return [
        None if cards == 1 and not spans[card] and not work.idle else covered(spans[card]) / 1e9 / wall
        for card in range(first, first + cards)
    ]


def covered(spans: list[tuple[int, int]]) -> int:
    """The length of the union of intervals."""
    total, end = 0, None
    for start, stop in sorted(spans):
        if end is None or start > end:
            total, end = total + stop - start, stop
        elif stop > end:
            total, end = total + stop - end, stop
    return total


def _places(case: Case, name: str, world: int) -> Tensor:
    """int64, ascending: the rows of a result to compare, all of a small one, else those at edges of shards and of the
    pattern, the first and the last, and DRAWN random ones."""
    of_keys = name in ("dk", "dv")
    length, heads, shift = (case.n, case.kv_heads, 0) if of_keys else (case.nq, case.heads, case.n - case.nq)
    if case.batch * length * heads * case.head_dim <= SMALL:
        return torch.arange(length)
    borders = {x for parts in (world, 2 * world) for x in Shards.even(case.n, parts).starts}
    found = {y for x in borders for y in (x - 1, x)} | {*edges(case.pattern, case.n)} | {shift, case.n - 1}
    drawn = torch.randint(shift, case.n, (DRAWN,), generator=torch.Generator().manual_seed(case.seed))
    found |= set(drawn.tolist())
    return torch.tensor(sorted(x - shift for x in found if shift <= x < case.n))


def _reference(case: Case, rank: int, world: int) -> tuple[dict[str, Tensor] | None, str | None]:
    """({result: float64 (B, rows compared, heads, D)} of the one-device call, None) on all ranks, or (None, why) if
    rank 0 could not do it."""
    names = ("dq", "dk", "dv", "out") if case.mode == "fwdbwd" else ("out",)
    at = {name: _places(case, name, world) for name in names}

    def work():
        results = strategies.prepare(ONE, case, 0, world)(out=True)
        return {x: results[x][:, at[x].to(results[x].device)].double().cpu().contiguous() for x in names}

    outcome = attempt(work) if rank == 0 else None
    why = [outcome and outcome.error]
    dist.broadcast_object_list(why, src=0, device=torch.device("cpu"))
    if why[0] is not None:
        return None, f"no one-device result to compare with: {why[0]}"
    found = outcome.result if rank == 0 else {}
    for name in names:
        heads = case.kv_heads if name in ("dk", "dv") else case.heads
        shape = case.batch, len(at[name]), heads, case.head_dim
        found.setdefault(name, torch.empty(shape, dtype=torch.float64))
        dist.broadcast(found[name], 0)
    return found, None


def _compare(work: Work, results: dict[str, Tensor], expected: dict[str, Tensor], world: int) -> dict:
    """errors, compared and compared_with of `facts`, against the one-device call.

    A row's error is ||got - want|| over its size, ||want||. In the dq of a query that sees few keys, or the dk of a key
    that few see, nearly everything cancels; so ||out||, or ||dv||, which for inputs N(0, 1) are of the same scale, is
    added to the size. Allowed is four times the error that one float32 (float64) result may have, or four roundings of
    a 16-bit one: on both sides weights and results are rounded.
    """
    case, errors, compared = work.case, {}, 0
    allowed = 4 * RELATIVE.get(case.dtype, torch.finfo(case.dtype).eps)
    batch = slice(work.share.batch.start, work.share.batch.stop)
    for name, got in results.items():
        at = _places(case, name, world)
        rows = Rows.of(work.share.rows(name, case)).positions
        here = torch.isin(rows, at).nonzero().flatten()
        index = torch.searchsorted(at, rows[here])
        want = expected[name][batch, index]
        off = got[:, here.to(got.device)].double().cpu() - want
        size = want.norm(dim=-1)
        if beside := {"dq": "out", "dk": "dv"}.get(name):
            size = size + expected[beside][batch, index].norm(dim=-1)
        relative = off.norm(dim=-1) / size.clamp(min=torch.finfo(case.dtype).tiny)
        errors[name] = [_largest(off.abs()), _largest(relative) / allowed]
        compared = max(compared, len(here)) if name in ("out", "dq") else compared
    return {"errors": errors, "compared": compared, "compared_with": "one device"}


class _Drawn(Exact):
    """The definition in float64, for inputs that no device can hold: their rows are drawn again as needed."""

    def __init__(self, case: Case):
        sizes = {"q": (case.nq, case.heads), "k": (case.n, case.kv_heads), "v": (case.n, case.kv_heads)}
        shapes = [(case.batch, *sizes[name], case.head_dim) for name in "qkv"]
        super().__init__(case.pattern, *(torch.empty(shape, device="meta") for shape in shapes))
        self.case, self.device = case, torch.device(case.device)

    def take(self, x: Tensor, b: int, at: range | Tensor, h: int) -> Tensor:
        name = next(name for name in "qkv" if x is getattr(self, name))
        rows = torch.arange(at.start, at.stop, at.step) if isinstance(at, range) else at.cpu()
        return strategies.remake(self.case, name, rows)[b, :, h].double()


def _compare_drawn(work: Work, results: dict[str, Tensor]) -> dict:
    """errors, compared and compared_with of `facts`, against float64, of some of this rank's rows of out.

    In each run of rows that the rank has, these are the ones of `validity.sample` (at both sides of edges and of where
    offsets no longer fit into 32 bits, and random ones) and, for each dilated branch and head, the last row it keeps.
    """
    case, exact, at = work.case, _Drawn(work.case), defaultdict(list)
    shift, place = case.n - case.nq, 0
    for rows in work.share.rows("out", case) if results else ():
        shape = (len(work.share.batch), len(rows), case.heads, case.head_dim)
        first = rows.start + shift
        for b, i, h in sample(shape, case.pattern, first, case.seed):
            at[work.share.batch.start + b, h].append((place + i, first + i))
        last = rows.stop - 1 + shift
        for branch, (w, r) in enumerate(zip(*_branches(case.pattern), strict=True)):
            for h in range(case.heads):
                o = case.pattern.offset(branch, h, case.heads)
                kept = None if o is None else last // w * w + (last % w - o) // r * r + o
                if kept is not None and kept >= first:
                    at[work.share.batch.start, h].append((place + kept - first, kept))
        place += len(rows)
    absolute, relative, compared = 0.0, 0.0, 0
    allowed = RELATIVE.get(case.dtype, 2 * torch.finfo(case.dtype).eps)
    for (b, h), rows in at.items():
        here, positions = (torch.tensor(x) for x in zip(*sorted(set(rows)), strict=True))
        want, size = exact.rows(b, h, positions)["out"]
        off = results["out"][b - work.share.batch.start, here.to(want.device), h].double() - want
        absolute, compared = max(absolute, _largest(off.abs())), compared + len(here)
        relative = max(relative, _largest(off.norm(dim=1) / size.clamp(min=torch.finfo(case.dtype).tiny)))
    errors = {"out": [absolute, relative / allowed]} if compared else {}
    return {"errors": errors, "compared": compared, "compared_with": "float64, keys drawn again"}


def _branches(pattern) -> tuple:
    return getattr(pattern, "segment_lengths", ()), getattr(pattern, "dilation_rates", ())


def _largest(x: Tensor) -> float:
    """The maximum, inf if there is a NaN, 0 if x is empty."""
    return float(x.nan_to_num(nan=torch.inf).max()) if x.numel() else 0.0


# --- time -------------------------------------------------------------------------------------------------------------


@_job
def times(case: dict, names: list[str], samples: int, seconds: float) -> dict:
    """{strategy: milliseconds of each round on this rank}; "A/A" is the first strategy again.

    In each round all are timed, in a random order that is the same on all ranks. A sample begins at a barrier and ends
    when this rank is done. seconds: after about so long no second warm-up call is made, and no round is begun once
    there are FEWEST.
    """
    case, (rank, world) = read(case), _place()
    made: dict = {}
    works = {name: strategies.prepare(name, case, rank, world, made) for name in names}
    begin = time.perf_counter()
    for work in works.values():
        for _ in range(2):
            _sample(work)
            if _over(begin, seconds):
                break
    works[AA] = works[names[0]]
    shuffled, taken = random.Random(0), {name: [] for name in works}  # the same seed on all ranks
    begin = time.perf_counter()
    for done in range(samples):
        if done >= FEWEST and _over(begin, seconds):
            break
        for name in shuffled.sample(list(works), len(works)):
            taken[name].append(_sample(works[name]))
    return taken


def _sample(work: Work) -> float:
    with work.context():
        return _timed(work.case.device, work)


def _over(begin: float, seconds: float) -> bool:
    """Whether the time is over by rank 0's clock: the same answer on all ranks."""
    answer = torch.tensor([int(time.perf_counter() - begin > seconds)])
    dist.broadcast(answer, 0)
    return bool(answer)


@_job
def link(sizes: list[int], samples: int, device: str) -> list[list[float]]:
    """By size, the milliseconds of all-to-alls in which this rank sends so many bytes, equally to each other rank."""
    rank, world = _place()
    found = []
    for size in sizes:
        splits = [0 if x == rank else size // (world - 1) for x in range(world)]
        source, target = (torch.zeros(sum(splits), dtype=torch.uint8, device=device) for _ in range(2))
        work = partial(dist.all_to_all_single, target, source, splits, splits)
        found.append([_timed(device, work) for _ in range(2 + samples)][2:])  # the first two warm up
    return found


# --- length -----------------------------------------------------------------------------------------------------------


@_job
def fits(case: dict, strategy: str, budget_bytes: int | None) -> dict:
    """Peak bytes, and the milliseconds of a second call, on a card limited to budget_bytes, with the inputs made there.

    What the call raises, such as out of memory, is raised.
    """
    case, (rank, world) = read(case), _place()
    if case.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    with card_of(budget_bytes, case.device.startswith("cuda")) as used:
        work = strategies.prepare(strategy, case, rank, world)
        taken = [_sample(work) for _ in range(2)]
        card = torch.cuda.mem_get_info()[1] if case.device.startswith("cuda") else budget_bytes
        return used() | {"milliseconds": taken[1], "card_bytes": card}
