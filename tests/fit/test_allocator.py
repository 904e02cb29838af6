import itertools
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tools
from workbench.fit.allocator import Allocator, OutOfMemory, replay

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def numbers(allocator):
    return allocator.requested, allocator.allocated, allocator.reserved


def segments(allocator):
    """The segments by address, each a list of its blocks: (address, size, requested bytes; None where free)."""
    blocks = [block for block in allocator._used.values() if block is not None]
    blocks += [block for pool in allocator._pools.values() for _, _, block in pool.free]
    found = []
    for block in sorted(blocks, key=lambda block: block.address):
        if block.before is None:
            found.append([])
        found[-1].append((block.address, block.size, block.requested if block.used else None))
    return found


# --- the rules, one by one -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nbytes, allocated, reserved",
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest of the small pool
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),  # rounded, it is 10 MiB: a segment of its own
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # what is left of 12 MiB, more than 1 MiB, is split off
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB is not
    ],
)
def test_one_allocation(nbytes, allocated, reserved):
    allocator = Allocator()
    handle = allocator.malloc(nbytes)
    assert numbers(allocator) == (nbytes, allocated, reserved)
    allocator.free(handle)
    assert numbers(allocator) == (0, 0, reserved)
    assert (allocator.peak_requested, allocator.peak_allocated, allocator.peak_reserved) == (
        nbytes, allocated, reserved
    )  # fmt: skip
    allocator.empty_cache()
    assert numbers(allocator) == (0, 0, 0)


def test_a_small_block_is_split_always():
    allocator = Allocator()
    first, _ = allocator.malloc(1024), allocator.malloc(512)
    allocator.free(first)
    allocator.malloc(512)
    assert segments(allocator) == [[(0, 512, 512), (512, 512, None), (1024, 512, 512), (1536, 2 * MIB - 1536, None)]]


def test_best_fit_and_then_the_lowest_address():
    allocator = Allocator()
    sizes = [2 * MIB, 3 * MIB, 2 * MIB, 6 * MIB, 2 * MIB, 3 * MIB, 2 * MIB]  # 20 MiB
    handles = [allocator.malloc(size) for size in sizes]
    for hole in (1, 3, 5):
        allocator.free(handles[hole])
    allocator.malloc(3 * MIB)  # fits both of 3 MiB, and the one of 6 MiB
    taken = {address: used for address, _, used in segments(allocator)[0]}
    assert (taken[2 * MIB], taken[7 * MIB], taken[15 * MIB]) == (3 * MIB, None, None)
    assert allocator.reserved == 20 * MIB


def test_at_the_limit_free_segments_go_of_every_pool():
    allocator = Allocator(limit=60 * MIB)
    for handle in [allocator.malloc(nbytes) for nbytes in (20 * MIB, 30 * MIB, KIB)]:
        allocator.free(handle)
    assert allocator.reserved == 52 * MIB
    allocator.malloc(54 * MIB)
    assert numbers(allocator) == (54 * MIB, 54 * MIB, 54 * MIB)
    assert allocator.peak_reserved == 54 * MIB


def test_out_of_memory_says_what_there_was():
    allocator = Allocator(limit=GIB)
    allocator.malloc(600 * MIB - 5)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        allocator.malloc(500 * MIB - 1)
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 500.00 MiB, for a tensor of 500.00 MiB. The card, which is in software, "
        "has a total capacity of 1.00 GiB of which 424.00 MiB is free. Of the allocated memory 600.00 MiB is allocated "
        "by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
    )
    allocator.malloc(424 * MIB)


# --- bad calls -------------------------------------------------------------------------------------------------------


def test_bad_calls_are_refused():
    with pytest.raises(ValueError, match="limit=-1"):
        Allocator(-1)
    allocator = Allocator()
    with pytest.raises(ValueError, match="nbytes=-1"):
        allocator.malloc(-1)
    handle, nothing = allocator.malloc(1), allocator.malloc(0)
    for x in (handle, nothing):
        allocator.free(x)
        with pytest.raises(ValueError, match=f"handle={x}"):
            allocator.free(x)


def test_replay():
    events = [(7, 30 * MIB, "q"), (8, 0, "empty"), (7, -1, ""), (9, 15 * MIB, "k"), (7, 15 * MIB, "v"), (8, -1, "")]
    allocator = replay(events)
    assert numbers(allocator) == (30 * MIB, 30 * MIB, 30 * MIB)
    assert allocator.peak_requested == 30 * MIB
    assert replay(iter(events)).reserved == 30 * MIB
    with pytest.raises(OutOfMemory):
        replay(events, limit=29 * MIB)
    assert replay(events, limit=30 * MIB).peak_reserved == 30 * MIB
    with pytest.raises(ValueError, match="3 is not alive"):
        replay([(3, -1, "")])
    with pytest.raises(ValueError, match="3 is already alive"):
        replay([(3, 1, ""), (3, 1, "")])


def test_it_is_fast_however_many_are_alive():
    random_ = random.Random(0)
    sizes = [int(2 ** random_.uniform(0, 24)) for _ in range(20_000)]
    order = list(range(20_000))
    random_.shuffle(order)
    events = [(i, n, "") for i, n in enumerate(sizes)] + [(i, -1, "") for i in order]
    begin = time.process_time()
    replay(events)
    spent = time.process_time() - begin
    assert spent < 2 * tools.slowness(time.process_time)  # a scan over what is alive would take minutes


# --- against a model that knows no blocks ----------------------------------------------------------------------------


class Naive:
    """The same rules, where what is free is what no allocation covers: no blocks are split and none are merged.

    Memory is pieces [begin, end) with a pool; taken: handle -> (begin, end, requested bytes, pool).
    """

    def __init__(self, limit):
        self.limit = limit
        self.memory, self.taken, self.counter, self.top = [], {}, 0, 0

    @property
    def numbers(self):
        return (
            sum(x[2] for x in self.taken.values()),
            sum(x[1] - x[0] for x in self.taken.values()),
            sum(end - begin for begin, end, _ in self.memory),
        )

    def holes(self, pool):
        found = []
        for begin, end, owner in sorted(self.memory):
            if owner != pool:
                continue
            inside = sorted(x for x in self.taken.values() if x[0] < end and begin < x[1])
            edges = [begin, *itertools.chain.from_iterable((x[0], x[1]) for x in inside), end]
            for a, b in zip(edges[::2], edges[1::2], strict=True):
                if a < b:
                    found.append((a, b))
        return found

    def malloc(self, nbytes):
        self.counter += 1
        size = max(1, -(-nbytes // 512)) * 512
        pool = size <= MIB
        fits = sorted((b - a, a) for a, b in self.holes(pool) if b - a >= size)
        if not fits:
            wanted = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            if self.limit is not None and self.numbers[2] + wanted > self.limit:
                self.give_back()
                if self.numbers[2] + wanted > self.limit:
                    return None
            fits = [self.segment(pool, wanted)]
        length, begin = fits[0]
        threshold = 512 if pool else MIB + 512
        end = begin + (size if length - size >= threshold else length)
        self.taken[self.counter] = (begin, end, nbytes, pool)
        return self.counter

    def segment(self, pool, nbytes):
        self.memory.append((self.top, self.top + nbytes, pool))
        self.top += nbytes
        return nbytes, self.memory[-1][0]

    def give_back(self):
        self.memory = [m for m in self.memory if any(x[0] < m[1] and m[0] < x[1] for x in self.taken.values())]


SIZES = st.one_of(
    st.integers(1, 5000),
    st.integers(1, 3 * MIB),
    st.integers(1, 64 * MIB),
    st.sampled_from([512, MIB - 512, MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB, 20 * MIB, 20 * MIB + 512]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES),
        st.tuples(st.just("free"), st.integers(0, 10**6)),
        st.tuples(st.just("empty"), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from([None, 64 * MIB, 130 * MIB]))
def test_any_program(steps, limit):
    real, naive, alive = Allocator(limit), Naive(limit), []
    peaks = [0, 0, 0]
    for what, x in steps:
        if what == "malloc":
            wanted = naive.malloc(x)
            if wanted is None:
                with pytest.raises(OutOfMemory):
                    real.malloc(x)
            else:
                alive.append((real.malloc(x), wanted))
        elif what == "free" and alive:
            handle, wanted = alive.pop(x % len(alive))
            real.free(handle)
            del naive.taken[wanted]
        elif what == "empty":
            real.empty_cache()
            naive.give_back()
        assert numbers(real) == naive.numbers
        peaks = [max(pair) for pair in zip(peaks, numbers(real), strict=True)]
        check(real, limit, peaks)


def check(real, limit, peaks):
    requested, allocated, reserved = numbers(real)
    assert requested <= allocated <= reserved
    assert limit is None or reserved <= limit
    assert [real.peak_requested, real.peak_allocated, real.peak_reserved] == peaks
    found = segments(real)
    for blocks in found:
        for (a, size, used), (b, _, after) in itertools.pairwise(blocks):
            assert a + size == b and (used is not None or after is not None)  # no gap; free neighbours are one
        assert all(size > 0 and size % 512 == 0 and a % 512 == 0 and (used or 0) <= size for a, size, used in blocks)
    for one, other in itertools.pairwise(found):
        assert one[-1][0] + one[-1][1] <= other[0][0]
    every = [block for blocks in found for block in blocks]
    assert reserved == sum(size for _, size, _ in every)
    assert allocated == sum(size for _, size, used in every if used is not None)
    assert requested == sum(used or 0 for _, _, used in every)
