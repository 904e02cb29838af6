"""A layout of visible blocks, refined by causality."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.patterns import layouts
from workbench.patterns.base import Blocks
from workbench.patterns.checks import axes, describe, flag
from workbench.patterns.listed import Listed

CHUNK = 1 << 20  # cells of the block grid held at once: a few MB


@dataclass
class Part:
    """Visible blocks of one layout in the query blocks [start, end): row, column int64 (absolute), full bool."""

    head: int
    start: int
    end: int
    row: Tensor
    column: Tensor
    full: Tensor

    def only(self, chosen: Tensor, full: Tensor | None = None) -> Part:
        full = self.full if full is None else full
        return Part(self.head, self.start, self.end, self.row[chosen], self.column[chosen], full[chosen])


class BlockSparse(Listed):
    """visible(h, i, j) = layout(h, i // bq, j // bk), and j <= i if causal.

    layout: from workbench.layouts. block_size: an int or (query, key). `BlockSparse(...) & Predicate(fn)` hides pairs
    inside the blocks, and asks fn about no others.
    """

    def __init__(self, layout, block_size=128, causal=False):
        if not isinstance(layout, layouts.Layout):
            raise ValueError(f"layout={describe(layout)}: want a layout, e.g. layouts.local(4)")
        self.layout = layout
        self.block_size = axes("block_size", block_size, 2, 1)
        self.causal = flag("causal", causal)

    @property
    def same_heads(self) -> bool:
        return not self.layout.per_head

    @property
    def batch(self) -> int | None:
        """The batch size where the layout differs by batch entry, else None."""
        return self.layout.batch

    def for_batch(self, b: int) -> BlockSparse:
        """The pattern of one batch entry: itself where all have the same."""
        if self.batch is None:
            return self
        return BlockSparse(self.layout.for_batch(b), self.block_size, self.causal)

    def check(self, n, heads, nq=None):
        n, heads, nq = super().check(n, heads, nq)
        self.layout.check(heads, self._grid(n))
        return n, heads, nq

    def count(self, h, i, j, n, heads):
        seen = self._layout(h, i // self.block_size[0], j // self.block_size[1], n)
        return seen & (j <= i) if self.causal else seen.expand(torch.broadcast_shapes(seen.shape, i.shape, j.shape))

    def _layout(self, h, a, b, n):
        if self.batch is not None and self.batch != 1:
            raise ValueError(f"layout of batch {self.batch}: index the batch, pattern.for_batch(b), first")
        layout = self.layout if self.batch is None else self.layout.for_batch(0)
        return layout.visible(h, a, b, self._grid(n))

    def _grid(self, n):
        return -(-n // self.block_size[0]), -(-n // self.block_size[1])

    def block_of(self, block_size=None):
        """The pattern's own, or multiples of it; another one is refused."""
        asked = self.block_size if block_size is None else axes("block_size", block_size, 2, 1)
        if any(x % own for x, own in zip(asked, self.block_size, strict=True)):
            raise ValueError(f"block_size={block_size!r}: want {self.block_size}, the pattern's own, or multiples")
        return asked

    def _blocks(self, n, heads, nq, block_size):
        rows = (
            (part.row.sub(part.start).bincount(minlength=part.end - part.start), part.column.int(), part.full)
            for part in self._parts(n, heads, nq)
        )
        layouts = heads if self.layout.per_head else 1
        return Blocks.joined(self.block_size, n, nq, layouts, rows).coarser(block_size)

    def _parts(self, n, heads, nq):
        """The visible blocks of a few whole rows at a time, row by row, layout by layout."""
        first, (rows, cols) = (n - nq) // self.block_size[0], self._grid(n)
        step = max(1, CHUNK // max(1, cols))
        for head in range(heads if self.layout.per_head else 1):
            for start in range(first, rows if nq else first, step):
                yield self._part(head, start, min(rows, start + step), n, nq)

    def _part(self, head, start, end, n, nq) -> Part:
        """Rows [start, end) of one layout."""
        bq, bk = self.block_size
        cols = self._grid(n)[1]
        a = torch.arange(start, end, dtype=torch.int32).view(1, -1, 1)
        start_of = torch.arange(start, end)[:, None] * bq
        first, last = start_of.clamp(min=n - nq), (start_of + bq).clamp(max=n) - 1  # the queries of each row
        if self.causal:
            cols = int(last[-1]) // bk + 1  # nothing further right is visible to these rows
        b = torch.arange(cols, dtype=torch.int32).view(1, 1, -1)
        visible = self._layout(torch.full((1, 1, 1), head, dtype=torch.int32), a, b, n).expand(1, end - start, cols)[0]
        if self.causal:
            visible = visible & (b[0].long() * bk <= last)
        row, column = visible.nonzero(as_tuple=True)
        full = torch.ones_like(row, dtype=torch.bool)
        if self.causal:
            full = (column * bk + bk).clamp(max=n) - 1 <= first[row, 0]
        return Part(head, start, end, row + start, column, full)

    def _pairs(self, n, heads, nq):
        total = [0] * (heads if self.layout.per_head else 1)
        for part in self._parts(n, heads, nq):
            total[part.head] += self._pairs_of(part, n, nq)
        return total if self.layout.per_head else total * heads

    _distinct = _pairs

    def _pairs_of(self, part: Part, n, nq) -> int:
        (q0, q1), (k0, k1) = self._spans(part, n, nq)
        total = _inner((q1 - q0)[part.full], (k1 - k0)[part.full])
        rest = part.only(~part.full)
        # Query i sees i + 1 - k0 keys of the block, clamped to [0, k1 - k0]: the sum is of triangular numbers.
        (q0, q1), (k0, k1) = self._spans(rest, n, nq)
        return total + sum(
            sign * _triangles(x - y) for sign, x, y in ((1, q1, k0), (-1, q1, k1), (-1, q0, k0), (1, q0, k1))
        )

    def _spans(self, part: Part, n, nq):
        """The queries [q0, q1) and keys [k0, k1) of each block."""
        bq, bk = self.block_size
        queries = (part.row * bq).clamp(min=n - nq), (part.row * bq + bq).clamp(max=n)
        return queries, (part.column * bk, (part.column * bk + bk).clamp(max=n))

    def spec(self):
        spec = {"pattern": "BlockSparse", "layout": self.layout.spec(), "block_size": list(self.block_size)}
        return spec | {"causal": self.causal}

    @classmethod
    def from_spec(cls, layout, **rest):
        return cls(layouts.from_spec(layout), **rest)

    @property
    def short_name(self):
        """The layout's, and what else is not the usual: blocks of 64, say."""
        (bq, bk), name = self.block_size, self.layout.name
        return name if bq == bk == 128 else f"{name}-blocks-{bq}" + f"x{bk}" * (bq != bk)

    def __repr__(self):
        return f"BlockSparse({self.layout!r}, block_size={self.block_size}{', causal=True' * self.causal})"


def _inner(a: Tensor, b: Tensor) -> int:
    """sum(a * b), of a few small numbers or, where that could overflow, in Python ints."""
    if not len(a) or int(a.max()) * int(b.max()) * len(a) < 1 << 62:
        return int((a * b).sum())
    return sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))


def _triangles(sides: Tensor) -> int:
    sides = sides.clamp(min=0)
    return _inner(sides, sides + 1) // 2
