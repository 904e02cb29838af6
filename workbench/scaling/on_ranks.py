"""What ranks do to measure a strategy: functions for a `Pool`, called on every rank alike.

A result is this rank's; the caller (`scaling.sweeps`) combines the ranks. Time is measured by `times`, on cards in a
pool of ranks that do nothing else; all else by `facts`.

Dimensions: B batch, N positions, H heads, D head_dim.
"""

import gc
import math
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps

import torch
import torch.distributed as dist

from workbench.distributed.traffic import Traffic
from workbench.fit.trial import card_of
from workbench.patterns import tables
from workbench.probes import memory
from workbench.probes.case import Case
from workbench.probes.timing import AA
from workbench.scaling import compare, strategies
from workbench.scaling.strategies import Work

CALLS = 3  # over which the busy share is measured; on a CPU no more once they have taken ENOUGH_S
ENOUGH_S = 0.03  # seconds against which the barrier behind the calls is little
FEWEST = 3  # samples, however long they take: fewer show no spread
NO_WORK = ("nccl", "Memcpy", "Memset")  # how names of what a profile shows on a card begin that is no computation


def job(function: Callable) -> Callable:
    """A job that leaves no memory reserved on its card, which another pool's rank may use next."""

    @wraps(function)
    def run(*arguments, **named):
        try:
            return function(*arguments, **named)
        finally:
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    return run


def _sync(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def barrier(device: str) -> None:
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
    barrier(device)
    begin = time.perf_counter()
    work()
    _sync(device)
    return 1000 * (time.perf_counter() - begin)


@job
def facts(case: Case, strategy: str, checked: bool = True) -> dict:
    """What a strategy takes in memory and communication, and whether its results are right.

    peak_bytes, extra_bytes: at the peak of the first call, with and without the inputs; a list by card: one, or all for
        rank 0 of "data parallel"
    sent_bytes: floating-point data that this rank sent, None if torch.distributed did not move it; control_bytes: other
        data that it sent
    busy: a list by card; kernel: the name of the one that took most of a card's time; see `busy`
    errors: by result [largest absolute error, largest error over what is allowed], against rank 0's one-device call
    compared: how many rows of out or dq; unchecked: why nothing was compared, or None
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    expected, why = compare.one_device(case, rank, world) if checked else (None, None)
    work = strategies.prepare(strategy, case, rank, world)
    by_rank_0 = strategy == "data parallel"
    cards = world if by_rank_0 and not work.idle else 1
    with work.context():
        barrier(case.device)
        extra = _extra(work, cards)
        with Traffic() as traffic:
            results = work(out=True)
        _sync(case.device)
        given = sum(x.numel() * x.element_size() for x in work.inputs)
        found = {"extra_bytes": extra, "peak_bytes": [extra[0] + given, *extra[1:]], "unchecked": why}
        found |= {"sent_bytes": None if by_rank_0 else traffic.rows, "control_bytes": traffic.control}
        found |= {"errors": {}, "compared": 0}
        if expected is not None:
            found |= compare.with_one_device(work, results, expected, world)
        del results
        found["busy"], found["kernel"] = busy(work, cards)
    return found


def _extra(work: Work, cards: int) -> list[int]:
    """Peak bytes of a call above what was allocated before, on each of so many cards."""
    if cards == 1:
        cuda = work.case.device.startswith("cuda")
        return [memory.measure(work, f"cuda:{torch.cuda.current_device()}" if cuda else "cpu")]
    before = []
    for card in range(cards):
        torch.cuda.reset_peak_memory_stats(card)
        before.append(torch.cuda.memory_allocated(card))
    work()
    torch.cuda.synchronize()
    return [torch.cuda.max_memory_allocated(card) - x for card, x in enumerate(before)]


def busy(work: Work, cards: int = 1) -> tuple[list[float | None], str | None]:
    """(the share of the wall time of up to CALLS calls in which each card computes, the kernel that took most of it);
    all ranks begin and end the calls together.

    CUDA: the union of the intervals of all kernels but NCCL's, from torch's profiler; None if it shows none although
    the rank has work. CPU: this process's CPU time over the wall time of its threads, which includes gloo's copies.
    """
    cuda = work.case.device.startswith("cuda")
    seen = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) if cuda else nullcontext()
    with seen as profile:
        barrier(work.case.device)
        begin, before = time.perf_counter(), time.process_time()
        for _ in range(CALLS):
            work()
            if not cuda and _over(begin, ENOUGH_S):
                break
        computed = time.process_time() - before
        barrier(work.case.device)
        wall = time.perf_counter() - begin
    if not cuda:
        return [computed / wall / torch.get_num_threads()], None
    first = 0 if cards > 1 else torch.cuda.current_device()
    spans: dict[int, list[tuple[int, int]]] = {first + x: [] for x in range(cards)}
    longest: dict[str, int] = {}
    for name, card, _, start, took in kernels(profile):
        if not name.startswith(NO_WORK):
            spans.setdefault(card, []).append((start, start + took))
            longest[name] = longest.get(name, 0) + took
    mine = [spans[first + x] for x in range(cards)]
    shares = [None if cards == 1 and not x and not work.idle else covered(x) / 1e9 / wall for x in mine]
    return shares, max(longest, key=longest.get, default=None)


def kernels(profile) -> list[tuple[str, int, int, int, int]]:
    """(name, card, stream, start, duration) of what a profile shows on cards, in nanoseconds, in order."""
    found = [
        (x.name(), x.device_index(), x.device_resource_id(), x.start_ns(), x.duration_ns())
        for x in profile.profiler.kineto_results.events()
        if x.device_type() == torch.autograd.DeviceType.CUDA
    ]
    return sorted(found, key=lambda x: x[3])


def covered(spans: list[tuple[int, int]]) -> int:
    """The length of the union of intervals."""
    total, end = 0, -math.inf
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


@job
def times(case: Case, names: list[str], samples: int, seconds: float, at_once: bool = True) -> dict:
    """{strategy: milliseconds of each round on this rank}; "A/A" is the first strategy again.

    In each round all are timed, in a random order that is the same on all ranks. A sample begins at a barrier and ends
    when this rank is done. seconds: after about so long no round is begun once there are FEWEST, and after a tenth of
    warming up each is called once only. at_once: whether all inputs are there at once, or a sample makes its own.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    made: dict = {}
    works = {name: strategies.prepare(name, case, rank, world, made) for name in names} if at_once else {}
    begin = time.perf_counter()
    for work in works.values():
        for _ in range(2):
            _sample(work)
            if _over(begin, seconds / 10):
                break
    order = [*names, AA]
    shuffled, taken = random.Random(0), {name: [] for name in order}  # the same seed on all ranks
    begin = time.perf_counter()
    for done in range(samples):
        if done >= FEWEST and _over(begin, seconds):
            break
        for name in shuffled.sample(order, len(order)):
            which = names[0] if name == AA else name
            taken[name].append(_sample(works[which]) if at_once else _alone(which, case, rank, world))
    return taken


def _sample(work: Work) -> float:
    with work.context():
        return _timed(work.case.device, work)


def _alone(name: str, case: Case, rank: int, world: int) -> float:
    """A sample of a strategy when no other one's inputs are there, behind a call that warms up."""
    work = strategies.prepare(name, case, rank, world)
    taken = [_sample(work) for _ in range(2)][1]
    del work
    if case.device.startswith("cuda"):
        torch.cuda.empty_cache()  # the next inputs may be of another size
    return taken


def _over(begin: float, seconds: float) -> bool:
    """Whether the time is over by rank 0's clock: the same answer on all ranks."""
    answer = torch.tensor(time.perf_counter() - begin > seconds)
    dist.broadcast(answer, 0)
    return bool(answer)


@job
def link(sizes: list[int], samples: int, device: str) -> list[list[float]]:
    """By size, the milliseconds of all-to-alls in which this rank sends so many bytes, equally to each other rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for size in sizes:
        splits = [0 if x == rank else size // (world - 1) for x in range(world)]
        source, target = (torch.zeros(sum(splits), dtype=torch.uint8, device=device) for _ in range(2))
        work = partial(dist.all_to_all_single, target, source, splits, splits)
        found.append([_timed(device, work) for _ in range(2 + samples)][2:])  # the first two warm up
    return found


@job
def fits(case: Case, strategy: str, budget_bytes: int | None) -> dict:
    """Peak bytes, and the milliseconds of a second call, on a card limited to budget_bytes, with the inputs made there.

    What the call raises, such as out of memory, is raised.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if case.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    with card_of(budget_bytes, case.device.startswith("cuda")) as used:
        work = strategies.prepare(strategy, case, rank, world)
        taken = [_sample(work) for _ in range(2)]
        card = torch.cuda.mem_get_info()[1] if case.device.startswith("cuda") else budget_bytes
        tables.EQUAL.clear()  # the rest of what this length has left goes with its pattern
        return used() | {"milliseconds": taken[1], "card_bytes": card}
