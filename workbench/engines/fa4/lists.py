"""The lists of blocks that FlashAttention-4 walks: for each block of 128 queries the blocks of 128 keys that it sees,
and for the backward the other way round.

An entry is the number of a block and, in tile order, in the bits from `SHIFT` on how often its pairs count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workbench.engines.triton import block_lists
from workbench.patterns.base import Blocks
from workbench.patterns.tile_order import TILE, Pairs, turn

SHIFT = 22  # 2^22 blocks are 2^29 tokens; the backward, whose tiles are halves of blocks, doubles an entry
NUMBER = (1 << SHIFT) - 1
TIMES = 1 << 7  # an entry counts less often than this: the backward compares twice an entry with `hopper.LAST`


class Lists(NamedTuple):
    """int32: counts (B or 1, H or 1, lines), entries (B or 1, H or 1, lines, longest list).

    The blocks of `partial` have hidden pairs, which a mask finds; those of `full` have none.
    """

    partial_counts: Tensor
    partial: Tensor
    full_counts: Tensor
    full: Tensor

    def of(self, batch: int, heads: range) -> Lists:
        """Those of some heads, repeated (without a copy) for all sequences and heads where they have the same."""
        if self.full.shape[:2] == (batch, len(heads)):
            return self
        some = (x if x.shape[1] == 1 else x[:, heads.start : heads.stop] for x in self)
        return Lists(*(x.expand(batch, len(heads), *x.shape[2:]) for x in some))


class Both(NamedTuple):
    """The lists of blocks of queries, which the forward walks, and of blocks of keys, which the backward walks.

    masked: whether there are partial blocks. The two may be one.
    """

    by_queries: Lists
    by_keys: Lists
    masked: bool

    def to(self, device) -> Both:
        by_queries = Lists(*(x.to(device) for x in self.by_queries))
        if self.by_keys is self.by_queries:
            return Both(by_queries, by_queries, self.masked)
        return Both(by_queries, Lists(*(x.to(device) for x in self.by_keys)), self.masked)


def of_pairs(found: Pairs, batch: int) -> Both:
    """The lists of pairs of tiles, of `batch` sequences that follow each other as one."""
    bases, (rows, cols) = max((base for base, _ in found.sets), default=0) + 1, found.tiles
    both = _both(found.base, found.row, found.col, found.times, found.partial, (1, bases, rows, cols))
    by_queries = _of_heads(both.by_queries, found, batch, cols)
    # Where nothing is hidden inside blocks nothing is causal, and a tile sees those that see it.
    same = rows == cols and not both.masked
    return Both(by_queries, by_queries if same else _of_heads(both.by_keys, found, batch, rows), both.masked)


def _of_heads(part: Lists, found: Pairs, batch: int, tiles: int) -> Lists:
    """The lists of all heads from those of the bases, for `batch` sequences, each of which has so many tiles more."""
    line = torch.arange(part.full.shape[2])

    def spread(x: Tensor) -> Tensor:
        entries = x.dim() > 3
        every = x.new_empty(1, len(found.which), batch, *x.shape[2:])
        for head, (base, by) in enumerate(found.sets[one] for one in found.which.tolist()):
            own = x[0, base, turn(line, -by, found.segment)] if by else x[0, base]
            if entries and by:
                number = own & NUMBER
                own = own - number + turn(number, by, found.segment)
            for b in range(batch):
                every[0, head, b] = own + b * tiles * entries
        return every.flatten(2, 3)

    return Lists(*map(spread, part))


def of_blocks(each: list[Blocks]) -> Both:
    """The lists of the blocks of each sequence, or of all: of multiples of 128 queries and keys, each counted once."""
    one, (layout, row, col, full) = each[0], block_lists.every(each)
    (high, wide), rows, cols = (x // TILE for x in one.block_size), -(-one.nq // TILE), -(-one.n // TILE)
    if high * wide > 1:  # each block as blocks of 128; of partial ones some are full or empty, which the mask finds too
        row = (row[:, None, None] * high + torch.arange(high)[:, None]).expand(-1, high, wide).flatten()
        col = (col[:, None, None] * wide + torch.arange(wide)).expand(-1, high, wide).flatten()
        layout, full = (x.repeat_interleave(high * wide) for x in (layout, full))
        there = (row < rows) & (col < cols)
        row, col, layout, full = row[there], col[there], layout[there], full[there]
    return _both(layout, row, col, torch.zeros_like(row), ~full, (len(each), one.layouts, rows, cols))


def _both(layout, row, col, times, partial, shape) -> Both:
    """layout: of each pair, counted through sequences and layouts; shape: how many of these, rows and columns."""
    (b, sets, rows, cols), found = shape, []
    for line, lines, entry in ((layout * rows + row, rows, col), (layout * cols + col, cols, row)):
        of = block_lists.lists(line, (times << SHIFT) + entry, ~partial, b * sets * lines)
        found.append(Lists(*_padded(of.part, of.part_blocks, (b, sets, lines)),
                           *_padded(of.full, of.full_blocks, (b, sets, lines))))  # fmt: skip
    return Both(*found, bool(partial.any()))


def _padded(starts: Tensor, entries: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(counts, entries as a table) of CSR lists."""
    counts = starts.diff()
    table = torch.zeros(len(counts), max([1, *counts.tolist()]), dtype=torch.int32)
    table[torch.arange(table.shape[1]) < counts[:, None]] = entries
    return counts.view(shape), table.view(*shape, -1)
