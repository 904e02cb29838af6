"""A layout of visible blocks, refined by causality."""

from __future__ import annotations

import torch

from workbench.patterns import layouts
from workbench.patterns.base import Blocks
from workbench.patterns.checks import axes, describe, flag
from workbench.patterns.listed import Listed

CHUNK = 1 << 20  # cells of the block grid held at once: a few MB


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
    def by_spec(self) -> bool:
        return type(self) is BlockSparse and self.layout.by_spec

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
        seen = self.layout.visible(h, i // self.block_size[0], j // self.block_size[1], self._grid(n))
        return seen & (j <= i) if self.causal else seen.expand(torch.broadcast_shapes(seen.shape, i.shape, j.shape))

    def _grid(self, n):
        return -(-n // self.block_size[0]), -(-n // self.block_size[1])

    def _blocks(self, n, heads, nq, block_size):
        layouts = heads if self.layout.per_head else 1
        first, (rows, cols) = (n - nq) // self.block_size[0], self._grid(n)
        step = max(1, CHUNK // max(1, cols))
        some = (
            self._rows(head, start, min(rows, start + step), n, nq)
            for head in range(layouts) for start in range(first, rows if nq else first, step)
        )  # fmt: skip
        return Blocks.joined(self.block_size, n, nq, layouts, some).coarser(block_size)

    def _rows(self, head, start, end, n, nq):
        """(how many blocks each row of [start, end) has, their columns, full) of one layout."""
        bq, bk = self.block_size
        grid = self._grid(n)
        cols = grid[1]
        a = torch.arange(start, end, dtype=torch.int32).view(1, -1, 1)
        start_of = torch.arange(start, end)[:, None] * bq
        first, last = start_of.clamp(min=n - nq), (start_of + bq).clamp(max=n) - 1  # the queries of each row
        if self.causal:
            cols = int(last[-1]) // bk + 1  # nothing further right is visible to these rows
        b = torch.arange(cols, dtype=torch.int32).view(1, 1, -1)
        h = torch.full((1, 1, 1), head, dtype=torch.int32)
        visible = self.layout.visible(h, a, b, grid).expand(1, end - start, cols)[0]
        if self.causal:
            visible = visible & (b[0].long() * bk <= last)
        row, column = visible.nonzero(as_tuple=True)
        full = (column * bk + bk).clamp(max=n) - 1 <= first[row, 0] if self.causal else torch.ones_like(row).bool()
        return visible.sum(1), column.int(), full

    def _pairs(self, n, heads, nq):
        return self._distinct(n, heads, nq)

    def _inside(self, blocks, heads, part):
        """Query i sees i + 1 - k0 keys of a block, from 0 to all k1 - k0: the sum is of triangular numbers."""
        (bq, bk), n = self.block_size, blocks.n
        row, k0 = blocks.line[part] % max(1, blocks.rows), blocks.columns[part].long() * bk
        q0 = (row + blocks.first) * bq
        q1, k1, q0 = (q0 + bq).clamp(max=n), (k0 + bk).clamp(max=n), q0.clamp(min=n - blocks.nq)
        many = sum(sign * (x - y).clamp(min=0) * ((x - y).clamp(min=0) + 1) // 2
                   for sign, x, y in ((1, q1, k0), (-1, q1, k1), (-1, q0, k0), (1, q0, k1)))  # fmt: skip
        yield slice(None), many

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
