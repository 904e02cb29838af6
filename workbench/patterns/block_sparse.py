"""A layout of visible blocks, refined by causality and by a predicate inside the blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.patterns import layouts
from workbench.patterns.base import TILE, Blocks, Pattern
from workbench.patterns.checks import axes, describe, flag
from workbench.patterns.predicate import evaluate, named, source_of

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


class BlockSparse(Pattern):
    """visible(h, i, j) = layout(h, i // bq, j // bk), and j <= i if causal, and predicate(h, i, j).

    layout: from workbench.layouts. block_size: an int or (query, key).
    predicate: fn(h, i, j) on broadcastable int64 tensors -> bool, pickled and printed as that of `Predicate`.
    """

    def __init__(self, layout, block_size=128, causal=False, predicate=None):
        if not isinstance(layout, layouts.Layout):
            raise ValueError(f"layout={describe(layout)}: want a layout, e.g. layouts.local(4)")
        self.layout = layout
        self.block_size = axes("block_size", block_size, 2, 1)
        self.causal = flag("causal", causal)
        if predicate is not None and not callable(predicate):
            raise ValueError(f"predicate={predicate!r}: want a function of (h, i, j), or None")
        self.predicate = predicate

    @property
    def function(self):
        return self.predicate

    @property
    def same_heads(self) -> bool:
        return not self.layout.per_head and self.predicate is None

    @property
    def batch(self) -> int | None:
        """The batch size where the layout differs by batch entry, else None."""
        return self.layout.batch

    def for_batch(self, b: int) -> BlockSparse:
        """The pattern of one batch entry: itself where all have the same."""
        if self.batch is None:
            return self
        return BlockSparse(self.layout.for_batch(b), self.block_size, self.causal, self.predicate)

    def check(self, n, heads, nq=None):
        n, heads, nq = super().check(n, heads, nq)
        self.layout.check(heads, self._grid(n))
        return n, heads, nq

    def count(self, h, i, j, n, heads):
        return self._layout(h, i // self.block_size[0], j // self.block_size[1], n) & self._inside(h, i, j)

    def _layout(self, h, a, b, n):
        if self.batch is not None and self.batch != 1:
            raise ValueError(f"layout of batch {self.batch}: index the batch, pattern.for_batch(b), first")
        layout = self.layout if self.batch is None else self.layout.for_batch(0)
        return layout.visible(h, a, b, self._grid(n))

    def _inside(self, h, i, j):
        """Which pairs of visible blocks are visible: bool, broadcastable."""
        seen = j <= i if self.causal else torch.ones_like(i + j, dtype=torch.bool)
        return seen if self.predicate is None else seen & evaluate(self.predicate, h, i, j)

    def _grid(self, n):
        return -(-n // self.block_size[0]), -(-n // self.block_size[1])

    def block_of(self, block_size=None):
        """The pattern's own; another one is refused."""
        if block_size is not None and axes("block_size", block_size, 2, 1) != self.block_size:
            raise ValueError(f"block_size={block_size!r}: want {self.block_size}, the pattern's own, or None")
        return self.block_size

    def _blocks(self, n, heads, nq, block_size):
        layouts = heads if self._by_head(n, heads) else 1
        rows = (
            (part.row.sub(part.start).bincount(minlength=part.end - part.start), part.column.int(), part.full)
            for part in self._parts(n, heads, nq)
        )
        return Blocks.joined(self.block_size, n, nq, layouts, rows)

    def _by_head(self, n, heads) -> bool:
        if self.layout.per_head or self.predicate is None or not n or heads < 2:
            return self.layout.per_head
        last = torch.full((1, 1, 1), n - 1)
        return len(evaluate(self.predicate, torch.arange(heads).view(-1, 1, 1), last, last)) > 1

    def _parts(self, n, heads, nq):
        """The visible blocks of a few whole rows at a time, row by row, layout by layout."""
        first, (rows, cols) = (n - nq) // self.block_size[0], self._grid(n)
        step = max(1, CHUNK // max(1, cols))
        for head in range(heads if self._by_head(n, heads) else 1):
            for start in range(first, rows if nq else first, step):
                part = self._part(head, start, min(rows, start + step), n, nq)
                yield part if self.predicate is None else self._refine(part, n, nq)

    def _part(self, head, start, end, n, nq) -> Part:
        """Rows [start, end) of one layout, predicate aside."""
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

    def _evaluated(self, part: Part, n, nq):
        """Yield (slice of the part's blocks, seen, exists), bool (blocks, bq, bk) both, a few blocks at a time."""
        (bq, bk), size = self.block_size, len(part.row)
        step = max(1, TILE // 4 // (bq * bk))
        for some in (slice(start, min(size, start + step)) for start in range(0, size, step)):
            h = torch.full((1, 1, 1), part.head)
            i = part.row[some].view(-1, 1, 1) * bq + torch.arange(bq).view(1, -1, 1)
            j = part.column[some].view(-1, 1, 1) * bk + torch.arange(bk)
            exists = (i >= n - nq) & (i < n) & (j < n)
            # A predicate may look up tensors of n entries: it is only asked about positions that exist.
            i, j = i.clamp(n - nq, n - 1), j.clamp(max=n - 1)
            yield some, self._inside(h, i, j).expand(exists.shape) & exists, exists

    def _refine(self, part: Part, n, nq) -> Part:
        """The blocks in which the predicate shows a pair; full where it shows all."""
        left, full = torch.zeros_like(part.full), torch.zeros_like(part.full)
        for some, seen, exists in self._evaluated(part, n, nq):
            left[some] = seen.any(2).any(1)
            full[some] = (seen == exists).all(2).all(1)
        return part.only(left, full)

    def _pairs(self, n, heads, nq):
        total = sum(self._pairs_of(part, n, nq) for part in self._parts(n, heads, nq))
        return total if self._by_head(n, heads) else heads * total

    _distinct = _pairs

    def _pairs_of(self, part: Part, n, nq) -> int:
        (q0, q1), (k0, k1) = self._spans(part, n, nq)
        total = _inner((q1 - q0)[part.full], (k1 - k0)[part.full])
        rest = part.only(~part.full)
        if self.predicate is not None:
            return total + sum(int(seen.sum()) for _, seen, _ in self._evaluated(rest, n, nq))
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
        spec["causal"] = self.causal
        if self.predicate is not None:
            spec["predicate"] = source_of(self.predicate)
        return spec

    @classmethod
    def from_spec(cls, layout, predicate=None, **rest):
        if predicate is not None:
            raise ValueError("a BlockSparse with a predicate cannot be made from its spec: a predicate is Python code")
        return cls(layouts.from_spec(layout), **rest)

    @property
    def short_name(self):
        """The layout's, and what else is not the usual: blocks of 64, say, or a predicate."""
        (bq, bk), words = self.block_size, [self.layout.name]
        words += [f"blocks-{bq}" if bq == bk else f"blocks-{bq}x{bk}"] if (bq, bk) != (128, 128) else []
        return "-".join(words if self.predicate is None else [*words, "where", named(self.predicate).strip("<>")])

    def __repr__(self):
        causal = ", causal=True" * self.causal
        predicate = "" if self.predicate is None else f", predicate={named(self.predicate)}"
        return f"BlockSparse({self.layout!r}, block_size={self.block_size}{causal}{predicate})"


def _inner(a: Tensor, b: Tensor) -> int:
    """sum(a * b), of a few small numbers or, where that could overflow, in Python ints."""
    if not len(a) or int(a.max()) * int(b.max()) * len(a) < 1 << 62:
        return int((a * b).sum())
    return sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))


def _triangles(sides: Tensor) -> int:
    sides = sides.clamp(min=0)
    return _inner(sides, sides + 1) // 2
