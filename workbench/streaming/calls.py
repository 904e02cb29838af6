"""Which calls of attention a stream makes, chunk by chunk, and which rows each needs: arithmetic on positions.

A chunk is a run of queries whose results are on the card together. By pattern:

    dense          a call on each chunk of keys that it sees, merged by lse
    dilated        one call on the chunk itself, for the branches whose segments lie inside chunks; of the longer ones
                   every r-th row is kept (`Kept`): they are computed first, on these rows alone, and merged by lse
    neighborhood   one call, on the keys within the radius
    block-sparse   one call, on the key blocks that the chunk's blocks see

Dimensions: N positions, L of a chunk, M of the keys of a call, H query heads, G key heads (G divides H).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from workbench.distributed import halo, views
from workbench.patterns import BlockSparse, Dense, Dilated, Neighborhood, Pattern

Positions = range | Tensor  # ascending but for -1, padding that no query sees


class Call(NamedTuple):
    """Attention of some queries to some keys, by a pattern in the call's own numbering: the queries are the last rows.

    rows: which of the call's queries are the chunk's; the others are there so that these see all that they should
    """

    queries: Positions
    keys: Positions
    pattern: Pattern
    rows: slice


class Branches(Dilated):
    """Branches in which all heads keep the same positions, those with t mod r equal to the branch's entry of `same`."""

    def __init__(self, segment_lengths, dilation_rates, causal, same):
        super().__init__(segment_lengths, dilation_rates, causal)
        self.same = tuple(same)

    def rule(self, branch, heads):
        return heads, self.same[branch]

    def of_branches(self, which):
        lengths, rates, same = ([x[b] for b in which] for x in (self.segment_lengths, self.dilation_rates, self.same))
        return Branches(lengths, rates, self.causal, same)


@dataclass(frozen=True, eq=False)
class Kept:
    """The rows of n that some heads keep in long branches, and the attention between them, as a pattern on these rows.

    In each segment of `length` positions these are offset, offset + rate, ...: `each` of them, fewer in a short one.
    """

    n: int
    length: int
    rate: int
    offset: int
    heads: slice
    pattern: Pattern

    @property
    def each(self) -> int:
        return -(-(self.length - self.offset) // self.rate)

    def before(self, position: int) -> int:
        """How many of the rows lie before a position."""
        segment, inside = divmod(position, self.length)
        return segment * self.each + max(0, min(self.each, -(-(inside - self.offset) // self.rate)))

    def at(self, start: int, stop: int, origin: int = 0) -> Positions:
        """The positions of rows start ... stop - 1, counted from `origin`."""
        if self.length % self.rate == 0 or stop <= self.each:
            first = self.offset - origin
            return range(first + start * self.rate, first + stop * self.rate, self.rate)
        with _disable_current_modes():  # a card in software has no part in this
            row = torch.arange(start, stop)
            return row // self.each * self.length + row % self.each * self.rate + (self.offset - origin)

    def inside(self, chunk: range) -> tuple[slice, Positions]:
        """Of the rows in a chunk: which ones they are, and their places in the chunk."""
        start, stop = self.before(chunk.start), self.before(chunk.stop)
        return slice(start, stop), self.at(start, stop, chunk.start)

    def __len__(self):
        return self.before(self.n)


@dataclass(frozen=True, eq=False)
class Calls:
    """The calls of attention over n positions, in chunks of at most `chunk` queries. ValueError for no such pattern."""

    pattern: Pattern
    n: int
    heads: int
    kv_heads: int
    chunk: int
    _windows: dict[int, Neighborhood] = field(default_factory=dict)

    @classmethod
    def of(cls, pattern: Pattern, n: int, heads: int, kv_heads: int, chunk: int) -> "Calls":
        """Chunks are made of whole segments, or blocks, of as many lengths as fit `chunk`."""
        unit = math.lcm(*pattern.block_size) if isinstance(pattern, BlockSparse) else 1
        if isinstance(pattern, BlockSparse):
            chunk = max(chunk, unit)
        for w in sorted(getattr(pattern, "segment_lengths", ())):
            unit = math.lcm(unit, w) if math.lcm(unit, w) <= chunk else unit
        return cls(pattern, n, heads, kv_heads, n if chunk >= n else chunk // unit * unit)

    @cached_property
    def chunks(self) -> list[range]:
        return [range(x, min(self.n, x + self.chunk)) for x in range(0, self.n, max(1, self.chunk))]

    @cached_property
    def most(self) -> tuple[int, int]:
        """The most queries and keys of a call."""
        if isinstance(self.pattern, (Dense, Dilated)):
            return (min(self.n, self.chunk),) * 2
        if isinstance(self.pattern, Neighborhood) and _line(self.pattern):
            return (min(self.n, self.chunk + 2 * self.pattern.radius[0]),) * 2
        sizes = [(len(call.queries), len(call.keys)) for chunk in self.chunks for call in self.of_chunk(chunk)]
        return tuple(map(max, zip(*sizes, strict=True))) if sizes else (0, 0)

    @cached_property
    def inside(self) -> list[int]:
        """The branches of a dilated pattern whose segments lie inside chunks."""
        return [b for b, w in enumerate(self.pattern.segment_lengths) if self.chunk >= self.n or self.chunk % w == 0]

    @cached_property
    def local(self) -> Pattern | None:
        """The pattern of a dilated chunk; None where all segments are longer."""
        if len(self.inside) == len(self.pattern.segment_lengths):
            return self.pattern
        local = views.Branches(self.pattern, tuple(self.inside), 0, self.heads) if self.inside else None
        return local if local and local.any(self.heads) else None

    @cached_property
    def kept(self) -> list[Kept]:
        """Of a dilated pattern's long branches, together where one keeps some of the rows that another keeps."""
        if not isinstance(self.pattern, Dilated):
            return []
        alike: dict[tuple, list[int]] = {}
        long = [b for b in range(len(self.pattern.segment_lengths)) if b not in self.inside]
        for h in range(self.heads):
            offsets = tuple((b, self.pattern.offset(b, h, self.heads)) for b in long)
            alike.setdefault(tuple((b, o) for b, o in offsets if o is not None), []).append(h)
        return [kept for branches, heads in alike.items() for kept in self._chains(branches, heads)]

    def _chains(self, branches, heads: list[int]) -> Iterator[Kept]:
        chains: list[list[tuple[int, int, int]]] = []
        step = heads[1] - heads[0] if len(heads) > 1 else 1
        for b, offset in sorted(branches, key=lambda x: self.pattern.dilation_rates[x[0]]):
            w, r = self.pattern.segment_lengths[b], self.pattern.dilation_rates[b]
            w = -(-self.n // r) * r if w >= self.n else w  # one segment, of whole rates
            if offset < min(w, self.n):
                chain = next((x for x in chains if _nested(w, r, offset, self.n, *x[0])), None)
                chain.append((w, r, offset)) if chain else chains.append([(w, r, offset)])
        for chain in chains:
            length, rate, first = chain[0]
            rows = -(-(length - first) // rate)
            same = [(offset - first) // rate for *_, offset in chain]
            lengths = [rows, *(-(-w // rate) for w, *_ in chain[1:])]
            pattern = Branches(lengths, [r // rate for _, r, _ in chain], self.pattern.causal, same)
            yield Kept(self.n, length, rate, first, slice(heads[0], heads[-1] + 1, step), pattern)

    def of_chunk(self, chunk: range) -> Iterator[Call]:
        """The calls whose results, merged, are the chunk's, the rows that are kept aside."""
        pattern, every = self.pattern, slice(None)
        if isinstance(pattern, Dilated):
            yield from [Call(chunk, chunk, self.local, every)] if self.local else ()
        elif isinstance(pattern, Dense):
            for keys in self.chunks[: chunk.start // self.chunk + 1 if pattern.causal else None]:
                yield Call(chunk, keys, Dense(pattern.causal and keys == chunk), every)
        elif not isinstance(pattern, Neighborhood):
            rows = halo.block_sparse(pattern, self.n, self.heads, self.kv_heads, chunk, chunk)
            needed = torch.cat([x.positions for x in rows]).unique()
            view = views.block_sparse(pattern.for_batch(0), chunk, chunk, needed, self.n)
            padding = torch.full((view.spare,), -1)
            queries = torch.cat([torch.arange(chunk.start, chunk.stop), padding]) if view.spare else chunk
            yield Call(queries, view.position, view.pattern, slice(0, len(chunk)))
        elif _line(pattern):
            start, stop = max(0, chunk.start - pattern.radius[0]), min(self.n, chunk.stop + pattern.radius[0])
            rows = slice(chunk.start - start, chunk.stop - start)
            if stop - start not in self._windows:  # one object for all chunks: lists of blocks are kept with it
                self._windows[stop - start] = Neighborhood(stop - start, pattern.radius[0])
            yield Call(range(start, stop), range(start, stop), self._windows[stop - start], rows)
        else:
            others = halo.neighborhood(pattern, chunk, chunk).positions
            view = views.neighborhood(pattern, torch.cat([others, torch.arange(chunk.start, chunk.stop)]), len(chunk))
            yield Call(chunk, view.position, view.pattern, every)


def _line(pattern: Neighborhood) -> bool:
    return len(pattern.shape) == 1 and pattern.ordering is None


def _nested(w: int, r: int, offset: int, n: int, length: int, rate: int, first: int) -> bool:
    """Whether the branch (w, r, offset) keeps some of the rows that (length, rate, first) keeps, segment by segment."""
    return (length % rate, w % rate, r % rate, offset % rate) == (0, 0, 0, first)
