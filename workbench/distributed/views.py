"""Parts of a pattern that are patterns themselves: some branches, some heads, or the keys that one rank has gathered.

The single-device executions run these as they run any pattern; only the numbering of rows, blocks and heads is another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.orderings import Ordering
from workbench.patterns import BlockSparse, Dense, Dilated, Neighborhood, Pattern
from workbench.patterns.layouts import Layout


class Branches(Dilated):
    """Some branches of a dilated pattern, for `heads` heads from head `first` on, with the offsets they have there.

    all_heads: how many heads the whole pattern has, on which its offsets may depend
    """

    def __init__(self, whole: Dilated, which: tuple[int, ...], first: int, all_heads: int):
        super().__init__(
            [whole.segment_lengths[b] for b in which], [whole.dilation_rates[b] for b in which], whole.causal,
            whole.heads, whole.offsets,
        )  # fmt: skip
        self.whole, self.which, self.first, self.all_heads = whole, which, first, all_heads

    def head_range(self, branch, heads):
        members = self.whole.head_range(self.which[branch], self.all_heads)
        return range(max(members.start - self.first, 0), max(0, min(members.stop - self.first, heads)))

    def any(self, heads: int) -> bool:
        """Whether some of the branches has one of these heads."""
        return any(self.head_range(branch, heads) for branch in range(len(self.which)))

    def rule(self, branch, heads):
        divide, plus = self.whole.rule(self.which[branch], self.all_heads)
        if divide < self.all_heads and self.first % divide:
            raise ValueError(f"heads from {self.first} on: offsets='blocked' gives {divide} heads in a row one offset")
        return divide, plus + (self.first // divide if divide < self.all_heads else 0)

    def divisor(self, heads):
        return self.whole.divisor(self.all_heads)


def some_heads(pattern: Pattern, first: int, heads: int, all_heads: int) -> Pattern:
    """The pattern that heads first, first + 1, ... (`heads` of all_heads) have, as heads 0, 1, ...

    ValueError where these heads have no such pattern (offsets="blocked", cut inside a run of one offset).
    """
    if heads == all_heads or isinstance(pattern, (Dense, Neighborhood)):
        return pattern
    if isinstance(pattern, BlockSparse) and not pattern.layout.per_head and pattern.predicate is None:
        return pattern  # whose lists of blocks are then made once
    if isinstance(pattern, Dilated):
        part = Branches(pattern, tuple(range(len(pattern.segment_lengths))), first, all_heads)
        for branch in range(len(part.segment_lengths)):
            part.rule(branch, heads)
        return part
    layout, predicate = pattern.layout, pattern.predicate
    if layout.per_head:
        layout = Layout("heads", {}, _moved(layout, first), True)
    if predicate is not None:
        predicate = _shifted(predicate, first)
    return BlockSparse(layout, pattern.block_size, pattern.causal, predicate, pattern.causal_rank)


def _moved(layout: Layout, first: int) -> Callable:
    return lambda h, i, j, grid: layout.visible(h + first, i, j, grid)


def _shifted(predicate: Callable, first: int) -> Callable:
    return lambda h, i, j: predicate(h + first, i, j)


@dataclass(frozen=True)
class Gathered:
    """A call on gathered keys: the pattern in the call's own numbering, where the queries are the last rows.

    position: int64 (M,), which position each key row of the call is; -1 for rows that no query sees
    queries: how many, of which those beyond the rank's own (`spare`, at the end) are there for the numbering only
    """

    pattern: Pattern
    position: Tensor
    queries: int
    spare: int = 0


def neighborhood(pattern: Neighborhood, queries: range, own: range, needed: Tensor) -> Gathered:
    """The gathered rows, then the rank's own: a neighborhood among the cells of these tokens."""
    position = torch.cat([needed, torch.arange(own.start, own.stop)])
    curve = Ordering("gathered", pattern.shape, pattern.curve[position])
    return Gathered(Neighborhood(pattern.shape, pattern.radius, curve), position, len(queries))


def own_blocks(pattern: BlockSparse, own: range, n: int) -> BlockSparse:
    """The pattern among the rows of one rank, where these are whole blocks."""
    (bq, bk), layout = pattern.block_size, pattern.layout
    grid = (n // bq, n // bk)

    def visible(h, i, j, _):
        return layout.visible(h, i + own.start // bq, j + own.start // bk, grid)

    return BlockSparse(Layout("own", {}, visible, layout.per_head), pattern.block_size, pattern.causal)


def other_blocks(
    pattern: BlockSparse, queries: range, columns: Tensor, n: int, first: int, heads: int, all_heads: int
) -> Gathered:
    """Key blocks of other ranks, int64 (columns,), all of them behind no query that sees them; ranks have whole blocks.

    Behind these blocks is padding, so that there are as many keys as queries.
    """
    pattern = some_heads(pattern, first, heads, all_heads)
    (bq, bk), both, layout = pattern.block_size, math.lcm(*pattern.block_size), pattern.layout
    rows = -(-max(len(columns) * bk, len(queries)) // both) * both
    columns = torch.cat([columns, torch.full((rows // bk - len(columns),), -1)])
    moved, grid = (rows - queries.stop) // bq, (n // bq, n // bk)

    def visible(h, i, j, _):
        column = columns.to(j.device)[j.long()]
        return layout.visible(h, i - moved, column.clamp(min=0).to(j.dtype), grid) & (column >= 0)

    view = BlockSparse(Layout("others", {}, visible, layout.per_head), pattern.block_size)
    position = (columns[:, None] * bk + torch.arange(bk)).masked_fill(columns[:, None] < 0, -1).flatten()
    return Gathered(view, position, len(queries))


def block_sparse(
    pattern: BlockSparse, queries: range, own: range, needed: Tensor, n: int, first: int, heads: int, all_heads: int
) -> Gathered:
    """The gathered key blocks, then the rank's own rows, with all blocks cut where they are cut in the sequence.

    In between and at the ends are rows of zeros where a block of the rank's is not all there: nothing sees them, or
    causality hides them. A short last block of the sequence is the last one here too.
    """
    pattern = some_heads(pattern, first, heads, all_heads)
    (bq, bk), both = pattern.block_size, math.lcm(*pattern.block_size)
    cols = -(-n // bk)
    low = own.start // both * both
    high = own.stop if pattern.causal and pattern.causal_rank is None else min(n, -(-own.stop // bk) * bk)
    outside = (needed // bk).unique()
    outside = outside[(outside < low // bk) | (outside >= -(-high // bk))]
    short = n % bk if high < n and n % bk and len(outside) and int(outside[-1]) == cols - 1 else 0
    ragged = outside[-1:] if short else outside[:0]
    outside = outside[: len(outside) - len(ragged)]
    room = -(-len(outside) * bk // both) * both  # a multiple of both block sizes: what follows is cut as it was

    gathered = torch.full((room // bk,), -1)
    gathered[: len(outside)] = outside
    columns = torch.cat([gathered, torch.arange(low // bk, -(-high // bk)), ragged])  # -1: a block of padding
    rows = (gathered[:, None] * bk + torch.arange(bk)).masked_fill(gathered[:, None] < 0, -1).flatten()
    position = torch.cat([rows, torch.arange(low, high), torch.arange(n - short, n)])
    moved = room // bq - low // bq
    last_row = (own.stop - 1) // bq + moved
    layout, grid = pattern.layout, (-(-n // bq), cols)

    def visible(h, i, j, _):
        column = columns.to(j.device)[j.long()]
        seen = layout.visible(h, i - moved, column.clamp(min=0).to(j.dtype), grid)
        return seen & (column >= 0) & (i <= last_row)

    rank, predicate = pattern.causal_rank, None
    if rank is not None:
        rank = torch.where(position < 0, torch.iinfo(torch.int64).max, rank.cpu()[position.clamp(min=0)])
    if pattern.predicate is not None:

        def predicate(h, i, j):
            there = position.clamp(min=0).to(i.device)
            return pattern.predicate(h, there[i], there[j])

    view = BlockSparse(
        Layout("gathered", {}, visible, layout.per_head), pattern.block_size, pattern.causal, predicate, rank
    )
    here = len(position) - (room + queries.start - low)
    return Gathered(view, position, here, here - len(queries))
