"""A pattern says which (head, query, key) pairs attend; everything else is derived from that one function.

Dimensions: B batch, N keys, Nq queries (the last Nq of the N positions), H heads; i and j are absolute positions of a
query and a key, h is a query head.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
TILE = 1 << 22  # pairs in a tile of a generic count: 32 MB of int64


@dataclass(frozen=True)
class Blocks:
    """The blocks of the (query, key) grid that hold a visible pair, row by row (CSR).

    Block boundaries are absolute positions: query block a covers [a * bq, (a + 1) * bq), and `first` is the first block
    that holds a query. `layouts` is 1 where all heads share one layout, else the number of heads.

    starts: int64 (layouts * rows + 1), row x of layout g spans columns[starts[g * rows + x] : starts[g * rows + x + 1]]
    columns: int32, key blocks, ascending within a row
    full: bool, True only where every pair of the block that exists is visible exactly once (else ask `Pattern.count`)
    """

    block_size: tuple[int, int]
    n: int
    nq: int
    layouts: int
    starts: Tensor
    columns: Tensor
    full: Tensor

    @property
    def first(self) -> int:
        return (self.n - self.nq) // self.block_size[0]

    @property
    def rows(self) -> int:
        return -(-self.n // self.block_size[0]) - self.first if self.nq else 0

    @property
    def cols(self) -> int:
        return -(-self.n // self.block_size[1])

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.starts, self.columns, self.full))

    def to(self, device) -> Blocks:
        moved = (t.to(device) for t in (self.starts, self.columns, self.full))
        return Blocks(self.block_size, self.n, self.nq, self.layouts, *moved)

    def row_counts(self) -> Tensor:
        """int64 (2, layouts, rows): how many blocks each row has, and how many of them are full.

        A last key block that is shorter than the others counts as not full.
        """
        full, lines = self.full, len(self.starts) - 1
        if self.n % self.block_size[1]:
            full = full & (self.columns < self.cols - 1)
        line = torch.arange(lines).repeat_interleave(self.starts.diff())
        counts = torch.stack([self.starts.diff(), torch.bincount(line[full], minlength=lines)])
        return counts.view(2, self.layouts, self.rows)

    @classmethod
    def from_dense(cls, block_size, n, nq, visible: Tensor, full: Tensor) -> Blocks:
        """From bool tensors (layouts, rows, cols): small grids, and the chunks of larger ones."""
        layouts, rows, _ = visible.shape
        starts = torch.zeros(layouts * rows + 1, dtype=torch.int64)
        torch.cumsum(visible.sum(-1).flatten(), 0, out=starts[1:])
        columns = visible.nonzero()[:, -1].to(torch.int32)
        return cls(block_size, n, nq, layouts, starts, columns, full[visible])


class Pattern:
    """What attends to what. Subclasses define `count`, and override what they have a closed form for.

    Every method takes `n` (keys), `heads` (query heads) and `nq` (queries: the last nq of the n positions; default n).
    """

    causal = False
    same_heads = False  # whether all heads see the same, however many there are
    batch: int | None = None  # the batch size where the pattern differs by batch entry

    def __getstate__(self):  # a copy is a pattern of its own, and keeps tables of its own
        return {k: v for k, v in self.__dict__.items() if k not in ("_handle", "_kept", "_shared")}

    def kept(self, what: str, key: tuple, make: Callable[[], T]) -> T:
        """make(), kept with the pattern as `what` until it is asked for under another key: the last sizes only."""
        kept = self.__dict__.setdefault("_kept", {})
        found = kept.get(what)
        if found is None or found[0] != key:
            kept[what] = found = None  # the last one goes before the next is made
            kept[what] = found = key, make()
        return found[1]

    def for_batch(self, b: int) -> Pattern:
        """The pattern of one batch entry: itself where all have the same."""
        return self

    def each(self) -> list[Pattern]:
        """The patterns of the batch entries, or the one that all have."""
        return [self] if self.batch is None else [self.for_batch(b) for b in range(self.batch)]

    def divisor(self, heads: int) -> int:
        """What the output of the softmax is divided by."""
        return 1

    def count(self, h: Tensor, i: Tensor, j: Tensor, n: int, heads: int) -> Tensor:
        """How often query i of head h sees key j, causality included: broadcastable int64 tensors -> bool or int."""
        raise NotImplementedError

    def check(self, n: int, heads: int, nq: int | None = None) -> int:
        """Raise ValueError where the pattern does not apply to these sizes; return nq."""
        nq = n if nq is None else nq
        if any(isinstance(x, (float, str)) or x is None for x in (n, heads, nq)):
            raise ValueError(f"n={n!r}, heads={heads!r}, nq={nq!r}: want ints")
        if n < 0 or heads < 0:
            raise ValueError(f"n={n}, heads={heads}: neither can be negative")
        if not 0 <= nq <= n:
            raise ValueError(f"nq={nq} queries on n={n} keys: queries are the last nq positions, so 0 <= nq <= n")
        return nq

    # --- generic answers, tile by tile: exact, bounded memory, N^2 work ---------------------------------------------

    def tiles(self, n: int, heads: int, nq: int):
        """Yield (first row, count of these rows) with the count broadcastable to (heads, rows, n)."""
        h = torch.arange(heads).view(-1, 1, 1)
        j = torch.arange(n).view(1, 1, -1)
        step = max(1, TILE // max(1, n * heads))
        for start in range(n - nq, n, step):
            i = torch.arange(start, min(n, start + step)).view(1, -1, 1)
            yield start, self.count(h, i, j, n, heads)

    def multiplicity(self, n: int, heads: int, nq: int | None = None) -> Tensor:
        """int32 (heads, nq, n): how often each query sees each key. For small n: the picture, and the oracle's mask."""
        nq = self.check(n, heads, nq)
        out = torch.zeros(heads, nq, n, dtype=torch.int32)
        for start, count in self.tiles(n, heads, nq):
            row = start - (n - nq)
            out[:, row : row + count.shape[1]] = count.to(torch.int32)
        return out

    def pairs(self, n: int, heads: int, nq: int | None = None) -> int:
        """Attended (head, query, key) pairs, with multiplicity: what has to be computed."""
        return self._sum(n, heads, nq, lambda count: count.to(torch.int64).sum((1, 2)))

    def distinct(self, n: int, heads: int, nq: int | None = None) -> int:
        """Visible (head, query, key) triples, each counted once."""
        return self._sum(n, heads, nq, lambda count: (count > 0).sum((1, 2)))

    def uncovered(self, n: int, heads: int, nq: int | None = None) -> int:
        """How many (head, query) rows no key reaches."""
        return int(self._uncovered(n, heads, self.check(n, heads, nq)).sum())

    def coverage(self, n: int, heads: int, nq: int | None = None) -> Tensor:
        """float64 (heads,): the fraction of rows with a visible key."""
        nq = self.check(n, heads, nq)
        return 1 - self._uncovered(n, heads, nq).double() / max(1, nq)

    def density(self, n: int, heads: int, nq: int | None = None) -> float:
        """Distinct visible pairs over all heads * nq * n, causal or not."""
        nq = self.check(n, heads, nq)
        return self.distinct(n, heads, nq) / max(1, heads * nq * n)

    def block_density(self, n: int, heads: int, nq: int | None = None, block_size=None) -> float:
        """Blocks that hold a visible pair, over all blocks and heads. block_size: by default that of `blocks`."""
        blocks = self.blocks(n, heads, nq, *(() if block_size is None else (block_size,)))
        return len(blocks.columns) / max(1, blocks.layouts * blocks.rows * blocks.cols)

    def blocks(self, n: int, heads: int, nq: int | None = None, block_size=128) -> Blocks:
        """The blocks that hold a visible pair; one layout where `count` does not depend on the head."""
        raise NotImplementedError(f"{self} has no block form")

    def row_counts(self, n: int, heads: int, nq: int | None = None, block_size=None) -> Tensor:
        """`Blocks.row_counts` of `blocks`, without making the list where there is a rule for its length."""
        return self.blocks(n, heads, nq, *(() if block_size is None else (block_size,))).row_counts()

    def _uncovered(self, n: int, heads: int, nq: int) -> Tensor:
        """int64 (heads,): rows that no key reaches."""
        out = torch.zeros(heads, dtype=torch.int64)
        for _, count in self.tiles(n, heads, nq):
            out += (~(count > 0).any(-1)).sum(-1)
        return out

    def _sum(self, n, heads, nq, per_head) -> int:
        nq = self.check(n, heads, nq)
        total = torch.zeros(heads, dtype=torch.int64)
        for _, count in self.tiles(n, heads, nq):
            total += per_head(count.expand(-1, -1, n))
        return int(total.sum())

    # --- identity ----------------------------------------------------------------------------------------------------

    def spec(self) -> dict:
        """The constructor call as JSON-able data: {"pattern": class name, ...arguments}; `from_spec` is its inverse."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """A short name for tables and records, e.g. dense, longnet-paper, random-0.90, neighborhood-16."""
        return type(self).__name__.lower()

    def __repr__(self) -> str:
        args = ", ".join(f"{k}={json.dumps(v)}" for k, v in self.spec().items() if k != "pattern")
        return f"{type(self).__name__}({args})"


def repeated(counts: Callable[[int], Tensor], n: int, block: int, period: int, reach: int) -> Tensor:
    """counts(n), (..., rows of `block` tokens), of a periodic pattern, extrapolated from two short lengths.

    For patterns in which a block's visibility depends on its row and column modulo `period` and, within `reach` blocks,
    on their distance from each other and from the ends. Each further period of columns on one side of a row, beyond the
    reach, then adds the same number of blocks.
    """
    reach, step = reach + 1, period * block
    turns = (n - (2 * reach + period + 1) * block) // step  # periods that can be left out
    if turns < 1:
        return counts(n)
    short, longer = counts(n - turns * step), counts(n - (turns - 1) * step)
    row = torch.arange(-(-n // block))
    before = ((row - reach) // period).clamp(0, turns)  # how many of them lie before the row
    row = row - before * period
    here = short[..., row]
    return here + before * (longer[..., row + period] - here) + (turns - before) * (longer[..., row] - here)


def pair_of(block_size) -> tuple[int, int]:
    """A block size as (query, key): an int means both."""
    pair = tuple(block_size) if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(pair) != 2 or not all(type(b) is int and b > 0 for b in pair):
        raise ValueError(f"block_size={block_size!r}: want a positive int, or (query, key) of two")
    return pair
