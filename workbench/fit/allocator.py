"""torch's CUDA caching allocator, replayed: what a program's tensors take from a card, without the card.

The rules are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.11 with its default settings. They are about sizes
and the order of calls only, so a few lines of arithmetic give the numbers of `torch.cuda.memory_stats` to the byte.

A tensor's bytes are rounded up to 512 and found a block: the smallest free one that fits, of its pool (small: up to
1 MiB, or large); the lowest address among equals. What is left of a block is split off where it is worth
it, and a freed block merges with free neighbours. Where no block fits, a segment is taken from the driver: 2 MiB in the
small pool; in the large pool 20 MiB for less than 10 MiB, else the size rounded up to 2 MiB. Segments stay until the
limit is hit: then those that are wholly free are given back, and the allocation is tried once more.

Not replayed: a second stream, expandable segments, CUDA graphs' private pools, and where the driver puts a segment.
Addresses only decide between free blocks of one size; here each segment lies above those before it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import torch

MIB = 1 << 20
ROUND = 512  # kMinBlockSize
SMALL = MIB  # kSmallSize: the most that the small pool takes
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT = 20 * MIB  # large_segment_size_mb
OWN_SEGMENT = 10 * MIB  # kMinLargeAlloc: from here on, a segment of an allocation's own size
ROUND_SEGMENT = 2 * MIB  # kRoundLarge


class OutOfMemory(torch.OutOfMemoryError):
    """The allocation does not fit the limit, free segments given back."""


class _Block:
    """A run of addresses in a segment, between its neighbours `before` and `after`."""

    __slots__ = ("address", "size", "pool", "before", "after", "used", "requested")

    def __init__(self, address: int, size: int, pool: list[tuple[int, int, _Block]]):
        self.address, self.size, self.pool = address, size, pool
        self.before: _Block | None = None
        self.after: _Block | None = None
        self.used, self.requested = False, 0

    def split_off(self, size: int) -> _Block:
        """A new block of the first `size` bytes; this one keeps the rest."""
        first = _Block(self.address, size, self.pool)
        first.before, first.after = self.before, self
        if self.before is not None:
            self.before.after = first
        self.before = first
        self.address += size
        self.size -= size
        return first

    def offer(self) -> None:
        """It is free: it stands in its pool, a list of (size, address, block) in order."""
        insort(self.pool, (self.size, self.address, self))

    def withdraw(self) -> None:
        del self.pool[bisect_left(self.pool, (self.size, self.address))]

    def merge(self, other: _Block | None) -> None:
        """Absorb a neighbour if there is one that is free."""
        if other is None or other.used:
            return
        other.withdraw()
        self.size += other.size
        if other is self.before:
            self.address, self.before = other.address, other.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = other.after
            if self.after is not None:
                self.after.before = self


class Allocator:
    """The allocator of one card.

    limit: bytes that it may reserve, or None for no end; what torch.cuda.set_per_process_memory_fraction sets, or a
        card's memory less its CUDA context.

    In bytes, as torch.cuda.memory_stats counts them: requested (asked for and not freed), allocated (their blocks),
    reserved (segments), and the peak of each.
    """

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self.requested = self.allocated = self.reserved = 0
        self.peak_requested = self.peak_allocated = self.peak_reserved = 0
        self._pools: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}  # small, large
        self.top = 0  # the address of the next segment

    def malloc(self, nbytes: int) -> _Block | None:
        """Allocate; returns the block to free, None for no bytes. OutOfMemory changes no used block."""
        if nbytes == 0:
            return None
        size = -(-nbytes // ROUND) * ROUND
        pool = self._pools[size <= SMALL]
        at = bisect_left(pool, (size,))  # the free block that fits best, if any does
        block = pool.pop(at)[2] if at < len(pool) else self._new(pool, size, nbytes)
        left = block.size - size
        if left >= ROUND if size <= SMALL else left > SMALL:
            rest, block = block, block.split_off(size)
            rest.offer()
        block.used, block.requested = True, nbytes
        self.requested += nbytes
        self.allocated += block.size
        self.peak_requested = max(self.peak_requested, self.requested)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: _Block | None) -> None:
        """Free what `malloc` returned, once."""
        if block is None:
            return
        self.requested -= block.requested
        self.allocated -= block.size
        block.used = False
        block.merge(block.before)
        block.merge(block.after)
        block.offer()

    def empty_cache(self) -> None:
        """Give back every segment that no tensor lies in."""
        for pool in self._pools.values():
            for _, _, block in list(pool):
                if block.before is None and block.after is None:
                    block.withdraw()
                    self.reserved -= block.size

    def _new(self, pool: list, size: int, nbytes: int) -> _Block:
        """A block of new memory of at least `size` bytes, not in its pool."""
        large = LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        segment = SMALL_SEGMENT if size <= SMALL else large
        if self.limit is not None and self.reserved + segment > self.limit:
            self.empty_cache()
            if self.reserved + segment > self.limit:
                raise OutOfMemory(
                    f"CUDA out of memory: a tensor of {nbytes:,} bytes wants {segment:,} from the card, which is in "
                    f"software and has {self.limit:,}, of which {self.reserved:,} are reserved"
                )
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.top += segment
        return _Block(self.top - segment, segment, pool)


def replay(events: Iterable[Sequence], limit: int | None = None) -> Allocator:
    """The allocator after the events (id, nbytes, ...): births of nbytes, and deaths, which have nbytes -1.

    OutOfMemory where they do not fit the limit; KeyError for a death of what is not alive.
    """
    allocator = Allocator(limit)
    alive: dict[int, _Block | None] = {}
    for key, nbytes, *_ in events:
        if nbytes == -1:
            allocator.free(alive.pop(key))
        else:
            alive[key] = allocator.malloc(nbytes)
    return allocator
