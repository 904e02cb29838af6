"""Which rank holds which positions: contiguous shards of a sequence, and sets of positions in ascending order."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from workbench.patterns.checks import whole, wholes


@dataclass(frozen=True)
class Shards:
    """Rank p holds the positions [starts[p], starts[p + 1]); shards may be unequal, and empty.

    lengths: ints >= 0, one a rank; ValueError otherwise
    """

    lengths: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "lengths", wholes("lengths", self.lengths, 0))

    @classmethod
    def even(cls, n: int, world: int) -> Shards:
        """n positions on `world` ranks, lengths differing by at most one, the larger first."""
        n, world = whole("n", n, 0), whole("world", world, 1)
        size, larger = divmod(n, world)
        return cls(tuple(size + (p < larger) for p in range(world)))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each shard begins, and where the last one ends."""
        return (0, *itertools.accumulate(self.lengths))

    @cached_property
    def bounds(self) -> Tensor:
        """`starts` as int64 (world + 1,)."""
        return torch.tensor(self.starts)

    @property
    def world(self) -> int:
        return len(self.lengths)

    @property
    def n(self) -> int:
        return self.starts[-1]

    def __getitem__(self, rank: int) -> range:
        """The positions of a rank."""
        return range(self.starts[rank], self.starts[rank + 1])


@dataclass(frozen=True, eq=False)
class Rows:
    """Positions in ascending order, as pieces: ranges, which take no memory however long, or int64 tensors."""

    pieces: tuple[range | Tensor, ...] = ()

    @classmethod
    def of(cls, pieces: Iterable[range | Tensor]) -> Rows:
        return cls(tuple(x for x in pieces if len(x)))

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def within(self, start: int, stop: int) -> Rows:
        """The positions in [start, stop)."""
        return Rows.of(_clip(x, start, stop) for x in self.pieces)

    def without(self, hole: range) -> Rows:
        """The positions outside a range of step 1."""
        return Rows(self.within(0, hole.start).pieces + self.within(hole.stop, sys.maxsize).pieces)

    @cached_property
    def positions(self) -> Tensor:
        """All positions, int64 (len(self),)."""
        return torch.cat([torch.zeros(0, dtype=torch.int64), *map(as_tensor, self.pieces)])

    def counts(self, shards: Shards) -> Tensor:
        """int64 (world,): how many of the positions each rank holds."""
        bounds = shards.bounds
        total = torch.zeros_like(bounds)
        for x in self.pieces:
            if isinstance(x, range):
                total += ((bounds - x.start + x.step - 1) // x.step).clamp(0, len(x))
            else:
                total += torch.searchsorted(x, bounds)
        return total.diff()

    def find(self, wanted: range) -> slice | Tensor:
        """The indices of `wanted` among these positions, all of which have to be there."""
        if len(self.pieces) == 1 and isinstance(x := self.pieces[0], range):
            if not wanted:
                return slice(0, 0)
            first, last = ((position - x.start) // x.step for position in (wanted[0], wanted[-1]))
            return slice(first, last + 1, wanted.step // x.step or 1)
        return torch.searchsorted(self.positions, as_tensor(wanted))


def as_index(x: range | Tensor, start: int = 0) -> slice | Tensor:
    """Positions as indices of a tensor whose first row is position `start`: a slice, which indexes without a copy, of a
    range and of consecutive positions."""
    if isinstance(x, range):
        return slice(x[0] - start, x[-1] - start + 1, x.step)
    if len(x) and int(x[-1]) - int(x[0]) == len(x) - 1 and bool((x.diff() == 1).all()):
        return slice(int(x[0]) - start, int(x[-1]) - start + 1)
    return x - start


def as_tensor(x: range | Tensor) -> Tensor:
    return torch.arange(x.start, x.stop, x.step) if isinstance(x, range) else x


def clip(x: range, start: int, stop: int) -> range:
    """The members of an ascending range in [start, stop)."""
    first = x.start + max(0, -(-(start - x.start) // x.step)) * x.step
    return range(first, max(first, min(stop, x.stop)), x.step)


def _clip(x: range | Tensor, start: int, stop: int) -> range | Tensor:
    if isinstance(x, range):
        return clip(x, start, stop)
    low, high = torch.searchsorted(x, torch.tensor([start, max(start, stop)])).tolist()
    return x[low:high]
