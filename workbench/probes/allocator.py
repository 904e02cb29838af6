"""torch's CUDA caching allocator, replayed: what a program's tensors take from a card, without the card.

The rules are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.11 with its default settings, and of
expandable_segments:True. They are about sizes and the order of calls only, so a few lines of arithmetic give the
numbers of `torch.cuda.memory_stats` to the byte.

A tensor's bytes are rounded up to 512 and found a block: the smallest free one that fits, of its stream and its pool
(small: up to 1 MiB, or large); the lowest address among equals. What is left of a block is split off where it is worth
it, and a freed block merges with free neighbours. Where no block fits, a segment is taken from the driver: 2 MiB in the
small pool; in the large pool 20 MiB for less than 10 MiB, else the size rounded up to 2 MiB. Segments stay until the
limit is hit: then those that are wholly free are given back, and the allocation is tried once more.

An expandable segment is a range of addresses, one a stream and pool, that is given memory in pages of 2 MiB (small
pool) or 20 MiB (large pool) where it is needed, mostly at its end; at the limit it gives its wholly free pages back.

Not replayed: blocks used on a second stream (record_stream), CUDA graphs' private pools, and where the driver puts a
segment. Addresses only decide between free blocks of one size; here each segment lies above those before it.
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
ADDRESSES = 1 << 47  # of an expandable segment: more than there is memory (torch: 9/8 of the card's)


class OutOfMemory(torch.OutOfMemoryError):
    """The allocation does not fit the limit, free segments given back."""


class _Pool:
    """The free blocks of a stream, small or large: (size, address, block) in order; and unmapped ones, by address."""

    __slots__ = ("small", "page", "free", "unmapped")

    def __init__(self, small: bool):
        self.small = small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.free: list[tuple[int, int, _Block]] = []
        self.unmapped: list[tuple[int, _Block]] = []

    def add(self, block: _Block) -> None:
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def add_unmapped(self, block: _Block) -> None:
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: _Block) -> None:
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class _Block:
    """A run of addresses in a segment, between its neighbours `before` and `after`."""

    __slots__ = ("address", "size", "pool", "base", "before", "after", "used", "mapped", "requested")

    def __init__(self, address: int, size: int, pool: _Pool, base: int | None):
        self.address, self.size, self.pool = address, size, pool
        self.base = base  # where its segment begins, if that is expandable
        self.before: _Block | None = None
        self.after: _Block | None = None
        self.used, self.mapped, self.requested = False, True, 0

    def split_off(self, size: int) -> _Block:
        """A new block of the first `size` bytes; this one keeps the rest."""
        first = _Block(self.address, size, self.pool, self.base)
        first.mapped = self.mapped
        first.before, first.after = self.before, self
        if self.before is not None:
            self.before.after = first
        self.before = first
        self.address += size
        self.size -= size
        return first

    def merge(self, other: _Block | None) -> None:
        """Absorb a neighbour if there is one that is free, and mapped or unmapped as this block is."""
        if other is None or other.used or other.mapped != self.mapped:
            return
        (self.pool.remove if other.mapped else self.pool.remove_unmapped)(other)
        self.size += other.size
        if other is self.before:
            self.address, self.before = other.address, other.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = other.after
            if self.after is not None:
                self.after.before = self

    def room(self) -> int:
        """The size that it can grow to in place."""
        after = self.after
        return self.size + (after.size if after is not None and not after.mapped else 0)


class Allocator:
    """The allocator of one card.

    limit: bytes that it may reserve, or None for no end; what torch.cuda.set_per_process_memory_fraction sets, or a
        card's memory less its CUDA context. torch compares it before it rounds to pages, and so does this: expandable
        segments may reserve up to 20 MiB above it.
    expandable: as with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

    In bytes, as torch.cuda.memory_stats counts them: requested (asked for and not freed), allocated (their blocks),
    reserved (segments and mapped pages), and the peak of each.
    """

    def __init__(self, limit: int | None = None, expandable: bool = False):
        if limit is not None and limit < 0:
            raise ValueError(f"limit={limit!r}: want a number of bytes, or None")
        self.limit, self.expandable = limit, expandable
        self.requested = self.allocated = self.reserved = 0
        self.peak_requested = self.peak_allocated = self.peak_reserved = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._used: dict[int, _Block | None] = {}
        self._next_handle = 0
        self._top = 0

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """Allocate; returns the handle to free it by. No bytes take no memory. OutOfMemory changes no used block."""
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes!r}: want at least 0")
        self._next_handle += 1
        if nbytes == 0:
            self._used[self._next_handle] = None
            return self._next_handle
        size = -(-nbytes // ROUND) * ROUND
        small = size <= SMALL
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = _Pool(small)
        block = self._cached(pool, size)
        if block is None:
            block = self._new(pool, size, nbytes)
        left = block.size - size
        if left >= ROUND if small or self.expandable else left > SMALL:
            rest, block = block, block.split_off(size)
            pool.add(rest)
        block.used, block.requested = True, nbytes
        self._used[self._next_handle] = block
        self.requested += nbytes
        self.allocated += block.size
        if self.requested > self.peak_requested:
            self.peak_requested = self.requested
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return self._next_handle

    def free(self, handle: int) -> None:
        """Free what `malloc` returned the handle of, once. ValueError for any other handle."""
        if handle not in self._used:
            raise ValueError(f"handle={handle!r}: nothing that is allocated has it")
        block = self._used.pop(handle)
        if block is None:
            return
        self.requested -= block.requested
        self.allocated -= block.size
        block.used = False
        if block.before is not None:
            block.merge(block.before)
        if block.after is not None:
            block.merge(block.after)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give back every segment (or page of an expandable one) that no tensor lies in."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(pool, block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def segments(self) -> list[list[tuple[int, int, int | None]]]:
        """The segments by address, each a list of its blocks: (address, size, requested bytes; None where free).

        Of an expandable segment, each run of pages with memory is one.
        """
        blocks = [b for b in self._used.values() if b is not None]
        blocks += [b for pool in self._pools.values() for _, _, b in pool.free]
        found = []
        for head in sorted(blocks, key=lambda b: b.address):
            if head.before is not None and head.before.mapped:
                continue
            found.append([])
            while head is not None and head.mapped:
                found[-1].append((head.address, head.size, head.requested if head.used else None))
                head = head.after
        return found

    # --- where a block comes from ------------------------------------------------------------------------------------

    def _cached(self, pool: _Pool, size: int) -> _Block | None:
        """The free block that fits best, taken from its pool."""
        free = pool.free
        i = bisect_left(free, (size,))
        if i == len(free):
            return None
        if self.expandable:  # a block that can grow counts with what it can grow to
            while i + 1 < len(free) and free[i + 1][2].room() < free[i][2].room():
                i += 1
        return free.pop(i)[2]

    def _new(self, pool: _Pool, size: int, nbytes: int) -> _Block:
        """A block of new memory of at least `size` bytes, not in its pool."""
        if pool.small:
            segment = SMALL_SEGMENT
        else:
            segment = LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        if self.limit is not None and self.reserved + segment > self.limit:
            self.empty_cache()
            if self.reserved + segment > self.limit:
                raise OutOfMemory(self._message(segment, nbytes))
        if self.expandable:
            return self._grow(pool, size)
        self._reserve(segment)
        return _Block(self._place(segment), segment, pool, None)

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _place(self, nbytes: int) -> int:
        """The address of a new segment."""
        self._top += nbytes
        return self._top - nbytes

    def _message(self, segment: int, nbytes: int) -> str:
        return (
            f"CUDA out of memory. Tried to allocate {_amount(segment)}, for a tensor of {_amount(nbytes)}. The card, "
            f"which is in software, has a total capacity of {_amount(self.limit)} of which "
            f"{_amount(max(0, self.limit - self.reserved))} is free. Of the allocated memory {_amount(self.allocated)} "
            f"is allocated by PyTorch, and {_amount(self.reserved - self.allocated)} is reserved by PyTorch but "
            "unallocated."
        )

    # --- expandable segments -----------------------------------------------------------------------------------------

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """Give memory to the lowest addresses at which, free blocks included, there is room for size."""
        block = self._lowest(pool, size)
        if not block.mapped:
            self._map(block, min(block.size, size))
        while block.size < size:  # what follows a free block is unmapped; mapped, it takes the free block in
            following = block.after
            self._map(following, min(following.size, size - block.size))
            block = following
        pool.remove(block)
        return block

    def _lowest(self, pool: _Pool, size: int) -> _Block:
        for _, block in pool.unmapped:
            if block.before is not None and not block.before.used:
                block = block.before
            room, following = 0, block
            while room < size and following is not None and not following.used:
                room += following.size
                following = following.after
            if room >= size:
                return block
        nbytes = ADDRESSES // pool.page * pool.page
        base = self._place(nbytes)
        block = _Block(base, nbytes, pool, base)
        block.mapped = False
        pool.add_unmapped(block)
        return block

    def _map(self, block: _Block, nbytes: int) -> None:
        """Give memory to the first pages of a block that has none, as many as nbytes need."""
        pool = block.pool
        nbytes = -(-nbytes // pool.page) * pool.page
        pool.remove_unmapped(block)
        if nbytes < block.size:
            rest = _Block(block.address + nbytes, block.size - nbytes, pool, block.base)
            rest.mapped, rest.before, rest.after = False, block, block.after
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, nbytes
            pool.add_unmapped(rest)
        block.mapped = True
        block.merge(block.before)
        block.merge(block.after)
        pool.add(block)
        self._reserve(nbytes)

    def _unmap(self, pool: _Pool, block: _Block) -> None:
        """Give back the pages that lie wholly in a free block."""
        first = -(-(block.address - block.base) // pool.page) * pool.page + block.base
        end = (block.address + block.size - block.base) // pool.page * pool.page + block.base
        if first >= end:
            return
        pool.remove(block)
        self.reserved -= end - first
        if block.address < first:
            pool.add(block.split_off(first - block.address))
        if block.size > end - first:
            whole = block.split_off(end - first)
            pool.add(block)
            block = whole
        block.mapped = False
        block.merge(block.before)
        block.merge(block.after)
        if block.before is not None or block.after is not None:  # else nothing of the segment is left
            pool.add_unmapped(block)


def replay(events: Iterable[Sequence], limit: int | None = None, expandable: bool = False) -> Allocator:
    """The allocator after the events (id, nbytes, ...): births of nbytes, and deaths, which have nbytes -1.

    OutOfMemory where they do not fit the limit; ValueError for a death of what is not alive, or a second birth.
    """
    allocator = Allocator(limit, expandable)
    alive: dict[int, int] = {}
    malloc, free = allocator.malloc, allocator.free
    for event in events:
        key, nbytes = event[0], event[1]
        if nbytes == -1:
            if key not in alive:
                raise ValueError(f"event {tuple(event)}: {key!r} is not alive")
            free(alive.pop(key))
        elif key in alive:
            raise ValueError(f"event {tuple(event)}: {key!r} is already alive")
        else:
            alive[key] = malloc(nbytes)
    return allocator


def _amount(nbytes: int) -> str:
    """Bytes as torch's message has them: 12 bytes, 3.50 KiB, 20.00 MiB, 1.25 GiB."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    for unit in ("KiB", "MiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.2f} {unit}"
    return f"{nbytes / 1024:.2f} GiB"
