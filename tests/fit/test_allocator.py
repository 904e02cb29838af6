import itertools
import random
import time

import pytest

from tests import tools
from workbench.fit.allocator import Allocator, OutOfMemory, replay

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def numbers(allocator):
    return allocator.requested, allocator.allocated, allocator.reserved


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


HOLES = [2, 3, 2, 6, 2, 3, 2]  # 20 MiB
PROGRAMS = {  # the limit; steps: the MiB that it takes or the place, from 1 on, of what it frees, and what is reserved
    "segments are shared": (None, [(0.5, 2), (0.5, 2), (0.5, 2), (0.5, 2), (1e-6, 4), (9, 24), (9, 24), (2, 24),
                                   (2, 44)]),  # both of 9 in one of 20, and exactly what is left
    "a large block is not split where 1 MiB is left": (None, [(24, 24), (-1, 24), (23, 24), (0.9, 26), (1.1, 46)]),
    "and is where more is": (None, [(24, 24), (-1, 24), (22.9, 24), (1.05, 24)]),
    "a small block is split where 512 bytes are left": (None, [(1, 2), (1, 2), (-1, 2), (1 - 2**-11, 2), (2**-11, 2)]),
    "best fit": (None, [*((x, 20) for x in HOLES), (-4, 20), (-2, 20), (3, 20), (6, 20)]),
    "and then the lowest address": (None, [*((x, 20) for x in HOLES), (-2, 20), (-6, 20), (3, 20), (-1, 20), (-3, 20),
                                           (7, 40)]),  # not whole: what was freed between the two is taken
    "at the limit free segments go of every pool": (60, [(20, 20), (30, 50), (1e-3, 52), (-1, 52), (-2, 52), (-3, 52),
                                                         (54, 54)]),
    "and none in use": (40, [(9, 20), (9, 20), (-1, 20), (20, 40), (10, None), (9, 40)]),  # 11 MiB free, in two pieces
} | {f"free neighbours merge, {x}": (None, [(6, 20)] * 3 + [(-1 - y, 20) for y in x] + [(19, 20)])
     for x in itertools.permutations(range(3))}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_reserves_what_it_does_on_a_card(name):
    limit, steps = PROGRAMS[name]
    allocator, handles = Allocator(limit and limit * MIB), []
    for step, reserved in steps:
        if reserved is None:
            with pytest.raises(OutOfMemory, match="is in software and has 41,943,040, of which 41,943,040"):
                allocator.malloc(step * MIB)
        elif step < 0:
            allocator.free(handles[-step - 1])
        else:
            handles.append(allocator.malloc(int(step * MIB)))
        assert allocator.reserved == (reserved or limit) * MIB, step


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
