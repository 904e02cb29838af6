"""Which calls of attention a stream makes, chunk by chunk, and which rows each needs: arithmetic on positions.

A chunk is a run of queries whose results are on the card together. By pattern:

    dense          a call on each chunk of keys that it sees, merged by lse
    dilated        one call on the chunk itself, for the branches whose segments lie inside chunks; of the longer ones
                   every r-th row is kept (`Kept`): they are computed first, on these rows alone, and merged by lse
    window         one call on the chunk and what lies within the window's reach
    others         one call, on the keys within a neighborhood's radius, or the key blocks that the chunk's blocks see
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from workbench.distributed import halo, views
from workbench.distributed.plans import on_grid
from workbench.patterns import Dense, Dilated, Neighborhood, Pattern, Window

Positions = range | Tensor  # ascending but for -1, padding that no query sees
EVERY = slice(None)


class Call(NamedTuple):
    """Attention of some queries to some keys, by a pattern in the call's own numbering: the queries are the last rows.

    rows: the chunk's among the call's queries; the others are there so that these see, and are seen by, all they should
    """

    queries: Positions
    keys: Positions
    pattern: Pattern
    rows: slice = EVERY


@dataclass(frozen=True, eq=False)
class Kept:
    """The rows of n that some heads keep in long branches, which are branches of these rows.

    In each segment of `length` positions these are offset, offset + rate, ...: `each` of them, fewer in a short one.
    branches: (segment length, rate, offset), counted in these rows; the first one has all of them
    """

    n: int
    length: int
    rate: int
    offset: int
    heads: slice
    branches: tuple[tuple[int, int, int], ...]

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

    def __len__(self):
        return self.before(self.n)


@dataclass(frozen=True, eq=False)
class Calls:
    """The calls over n positions in chunks of `chunk` queries: whole segments or blocks, of as many lengths as fit."""

    pattern: Pattern
    n: int
    heads: int
    kv_heads: int
    chunk: int

    def __post_init__(self):
        unit = 1 if isinstance(self.pattern, (Dense, Dilated, Window)) or on_grid(self.pattern) else math.lcm(
            *(min(self.n, x) for x in self.pattern.block_of()))  # fmt: skip
        chunk = max(self.chunk, unit)
        for w in sorted(getattr(self.pattern, "segment_lengths", ())):
            unit = math.lcm(unit, w) if math.lcm(unit, w) <= chunk else unit
        object.__setattr__(self, "chunk", self.n if chunk >= self.n else chunk // unit * unit)

    @cached_property
    def chunks(self) -> list[range]:
        return [range(x, min(self.n, x + self.chunk)) for x in range(0, self.n, self.chunk)]

    @cached_property
    def most(self) -> tuple[int, int]:
        """The most queries and keys of a call."""
        if isinstance(self.pattern, (Dense, Dilated)):
            return self.chunk, self.chunk
        if self.window:
            return (min(self.n, self.chunk + 2 * self.reach),) * 2
        sizes = [(len(call.queries), len(call.keys)) for chunk in self.chunks for call in self.of_chunk(chunk)]
        return tuple(map(max, zip(*sizes, strict=True)))

    @cached_property
    def window(self) -> Window | None:
        return window_of(self.pattern)

    @cached_property
    def reach(self) -> int:
        """How far from its query, or from its key, the window goes."""
        back, ahead, step, _ = self.window.reach(self.n)
        return max(back, ahead) * step

    @cached_property
    def inside(self) -> list[int]:
        """The branches of a dilated pattern whose segments lie inside chunks."""
        return [b for b, w in enumerate(self.pattern.segment_lengths) if self.chunk == self.n or self.chunk % w == 0]

    @cached_property
    def local(self) -> Pattern | None:
        """The pattern of a dilated chunk; None where all segments are longer."""
        if len(self.inside) == len(self.pattern.segment_lengths):
            return self.pattern
        branches, heads = tuple(self.inside), self.heads
        local = branches and self.pattern.kept(
            "local", (branches, heads), lambda: views.Branches(self.pattern, branches, 0, heads)
        )  # whose lists of blocks another run finds again
        return local if local and local.any(self.heads) else None

    @cached_property
    def kept(self) -> list[Kept]:
        """Of a dilated pattern's long branches, together where one keeps some of the rows that another keeps."""
        alike: dict[tuple, list[int]] = {}
        every = range(len(getattr(self.pattern, "segment_lengths", ())))
        long = [b for b in every if b not in self.inside]
        for h in range(self.heads if long else 0):
            offsets = ((b, self.pattern.offset(b, h, self.heads)) for b in long)
            alike.setdefault(tuple((b, o) for b, o in offsets if o is not None), []).append(h)
        return [kept for branches, heads in alike.items() for kept in self._kept(branches, heads)]

    def _kept(self, branches, heads: list[int]) -> Iterator[Kept]:
        """Of heads with the same offsets: branches is a list of (branch, offset)."""
        chains: list[list[tuple[int, int, int]]] = []  # (length, rate, offset), that of the most rows first
        for b, offset in sorted(branches, key=lambda x: self.pattern.dilation_rates[x[0]]):
            w, r = self.pattern.segment_lengths[b], self.pattern.dilation_rates[b]
            w = -(-self.n // r) * r if w >= self.n else w  # one segment, of whole rates
            if offset < min(w, self.n):
                chain = next((x for x in chains if _nested((w, r, offset), x[0])), None)
                chain.append((w, r, offset)) if chain else chains.append([(w, r, offset)])
        step = heads[1] - heads[0] if len(heads) > 1 else 1
        for (length, rate, first), *others in chains:
            base = -(-(length - first) // rate), 1, 0
            branches = base, *((w // rate, r // rate, (offset - first) // rate) for w, r, offset in others)
            yield Kept(self.n, length, rate, first, slice(heads[0], heads[-1] + 1, step), branches)

    def of_chunk(self, chunk: range) -> Iterator[Call]:
        """The calls whose results, merged, are the chunk's but for those of rows that are kept."""
        pattern = self.pattern
        if isinstance(pattern, Dilated):
            yield from [Call(chunk, chunk, self.local)] if self.local else ()
        elif isinstance(pattern, Dense):
            own, other = Dense(pattern.causal), Dense()
            for keys in self.chunks[: chunk.start // self.chunk + 1 if pattern.causal else None]:
                yield Call(chunk, keys, own if keys == chunk else other)
        elif self.window:
            around = range(max(0, chunk.start - self.reach), min(self.n, chunk.stop + self.reach))
            yield Call(around, around, self.window, slice(chunk.start - around.start, chunk.stop - around.start))
        else:
            view = self._view(chunk)
            padded = torch.cat([torch.arange(chunk.start, chunk.stop), torch.full((view.spare,), -1)])
            yield Call(padded if view.spare else chunk, view.position, view.pattern, slice(0, len(chunk)))

    def _view(self, chunk: range) -> views.View:
        pattern = self.pattern.for_batch(0)
        if isinstance(pattern, Window):
            return views.window(pattern, chunk, self.n)
        if on_grid(pattern):
            own = torch.arange(chunk.start, chunk.stop)
            seen = pattern.near(own)
            others = seen[(seen < chunk.start) | (seen >= chunk.stop)]
            return views.neighborhood(pattern, torch.cat([others, own]))
        rows = halo.listed(pattern, self.n, self.heads, self.kv_heads, chunk, chunk)
        needed = torch.cat([x.positions for x in rows]).unique()
        return views.beside(pattern, chunk, chunk, needed, self.n, self.heads)


def window_of(pattern: Pattern) -> Window | None:
    """The pattern as a window on any run of positions; None where it is none, or has sinks."""
    if isinstance(pattern, Window):
        return None if pattern.sinks else pattern
    return pattern.line if isinstance(pattern, Neighborhood) else None


def _nested(branch: tuple[int, int, int], base: tuple[int, int, int]) -> bool:
    """Whether a branch (length, rate, offset) keeps some of the rows of `base`, whose segments are whole rates."""
    (w, r, offset), (length, rate, first) = branch, base
    return (length % rate, w % rate, r % rate, offset % rate) == (0, 0, 0, first)
