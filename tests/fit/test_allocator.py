import itertools
import random
import time

import pytest

from tests import tools
from workbench.fit.allocator import Allocator, OutOfMemory, replay

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def numbers(allocator):
    return allocator.requested, allocator.allocated, allocator.reserved


def segments(allocator):
    """The segments that have a free block, by address, each a list of its blocks: (address, size, requested bytes; None
    where free)."""
    found = {}
    for block in [block for pool in allocator._pools.values() for _, _, block in pool]:
        while block.before is not None:
            block = block.before
        line = found[block.address] = []
        while block is not None:
            line.append((block.address, block.size, block.requested if block.used else None))
            block = block.after
    return [found[address] for address in sorted(found)]


@pytest.mark.parametrize("nbytes, allocated, reserved", [
    (0, 0, 0), (1, 512, 2 * MIB), (512, 512, 2 * MIB), (513, 1024, 2 * MIB),
    (MIB, MIB, 2 * MIB), (MIB + 1, MIB + 512, 20 * MIB),  # the largest of the small pool, and of the large one
    (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
    (10 * MIB - 511, 10 * MIB, 10 * MIB), (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # a segment of its own
    (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # what is left of 12 MiB, more than 1 MiB, is split off
    (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB is not
])  # fmt: skip
def test_one_allocation(nbytes, allocated, reserved):
    allocator = Allocator()
    handle = allocator.malloc(nbytes)
    assert numbers(allocator) == (nbytes, allocated, reserved)
    allocator.free(handle)
    assert numbers(allocator) == (0, 0, reserved)
    peaks = allocator.peak_requested, allocator.peak_allocated, allocator.peak_reserved
    assert peaks == (nbytes, allocated, reserved)
    allocator.empty_cache()
    assert numbers(allocator) == (0, 0, 0)


def test_segments_are_shared():
    allocator = Allocator()
    for _ in range(4):
        allocator.malloc(512 * KIB)
    assert allocator.reserved == 2 * MIB
    allocator.malloc(1)
    assert allocator.reserved == 4 * MIB
    allocator.malloc(9 * MIB)
    allocator.malloc(9 * MIB)
    assert allocator.reserved == 24 * MIB  # both in one of 20 MiB
    allocator.malloc(2 * MIB)  # exactly what is left
    assert allocator.reserved == 24 * MIB
    allocator.malloc(2 * MIB)
    assert allocator.reserved == 44 * MIB


@pytest.mark.parametrize("second, allocated", [(23 * MIB, 24 * MIB), (23 * MIB - 512, 23 * MIB - 512)])
def test_a_large_block_is_split_if_more_than_one_mib_is_left(second, allocated):
    allocator = Allocator()
    allocator.free(allocator.malloc(24 * MIB))
    allocator.malloc(second)
    assert numbers(allocator) == (second, allocated, 24 * MIB)


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


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_free_neighbours_merge_in_any_order(order):
    allocator = Allocator()
    handles = [allocator.malloc(6 * MIB) for _ in range(3)]
    for x in order:
        allocator.free(handles[x])
    assert segments(allocator) == [[(0, 20 * MIB, None)]]
    allocator.malloc(19 * MIB)
    assert allocator.reserved == 20 * MIB


def test_at_the_limit_free_segments_go_of_every_pool():
    allocator = Allocator(limit=60 * MIB)
    for handle in [allocator.malloc(nbytes) for nbytes in (20 * MIB, 30 * MIB, KIB)]:
        allocator.free(handle)
    assert allocator.reserved == 52 * MIB
    allocator.malloc(54 * MIB)
    assert numbers(allocator) == (54 * MIB, 54 * MIB, 54 * MIB)
    assert allocator.peak_reserved == 54 * MIB


def test_a_segment_in_use_does_not_go():
    allocator = Allocator(limit=40 * MIB)
    handles = [allocator.malloc(9 * MIB) for _ in range(2)]
    allocator.free(handles[0])
    allocator.malloc(20 * MIB)
    assert allocator.reserved == 40 * MIB
    with pytest.raises(OutOfMemory, match="is in software and has 41,943,040, of which 41,943,040"):
        allocator.malloc(10 * MIB)  # 11 MiB are free, in two pieces
    assert numbers(allocator) == (29 * MIB, 29 * MIB, 40 * MIB)
    allocator.malloc(9 * MIB)


def test_replay():
    events = [(7, 30 * MIB, "q"), (8, 0, "empty"), (7, -1, ""), (9, 15 * MIB, "k"), (7, 15 * MIB, "v"), (8, -1, "")]
    allocator = replay(events)
    assert numbers(allocator) == (30 * MIB, 30 * MIB, 30 * MIB)
    assert allocator.peak_requested == 30 * MIB
    assert replay(iter(events)).reserved == 30 * MIB
    with pytest.raises(OutOfMemory):
        replay(events, limit=29 * MIB)
    assert replay(events, limit=30 * MIB).peak_reserved == 30 * MIB


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
