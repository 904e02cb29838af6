"""Patterns that are known by their blocks: what else is asked of them is evaluated in the blocks that are visible in
part, a few at a time."""

import operator
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.patterns.base import TILE, Blocks, Pattern, watched

PART, ALL, OPEN = 1, 2, 3  # of a block: some pairs are visible, not all; all are; evaluation has to tell


class States(NamedTuple):
    """Blocks by their keys (see `Blocks.of`), int64, ascending, and PART, ALL or OPEN of each.

    share: at most how much of its pairs each shows, where that is known.
    """

    key: Tensor
    state: Tensor
    share: Tensor | None = None


NOTHING = States(*[torch.zeros(0, dtype=torch.int64, device="cpu")] * 2)


def merged(kind: str, parts: list[States]) -> States:
    """What one sees of several: "|", what any shows; "&", what all show; "-", what the first shows and no other does;
    "+", how often all together show it, where ALL means once and all others are PART."""
    key, place = torch.cat([x.key for x in parts]).unique(return_inverse=True)
    state = torch.zeros(len(parts), len(key), dtype=torch.int8)
    share = torch.zeros(len(key))
    for line, at, x in zip(state, place.split([len(x.key) for x in parts]), parts, strict=True):
        line[at] = x.state.to(torch.int8)
        share[at] += 1 if x.share is None else x.share
    if kind == "-":  # what is hidden from the others is shown by their complements
        state[1:] = torch.tensor([ALL, PART, 0, OPEN], dtype=torch.int8)[state[1:].long()]
    if kind in "|+":
        sure, shown = (state == ALL).any(0), (state > 0).sum(0)
        seen = shown > 0
        alone = (shown == 1) & ~(state == OPEN).any(0) | (share < 0.999)  # all of a block, but for rounding, is more
        sure = sure & (shown == 1) if kind == "+" else sure
        alone = alone | (kind == "+")
    else:
        seen, left = (state > 0).all(0), (state != ALL).sum(0)
        sure, alone = left == 0, (left == 1) & (state != OPEN).all(0)
    found = torch.where(sure, ALL, torch.where(alone, PART, OPEN))
    return States(key[seen], found[seen])


def repeats(pattern: Pattern, n: int, heads: int) -> bool:
    """Whether a query may see a key more than once: then `count` is not bool."""
    zero = torch.zeros(1, 1, 1, dtype=torch.int64)
    return bool(n and heads) and pattern.for_batch(0).count(zero, zero, zero, n, heads).dtype != torch.bool


def evaluated(pattern: Pattern, blocks: Blocks, heads: int, key: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (slice of these blocks, how often each pair is seen, which exist), (blocks, bq, bk), some at a time."""
    n, nq, (bq, bk), cols, rows = blocks.n, blocks.nq, blocks.block_size, max(1, blocks.cols), max(1, blocks.rows)
    below, beside = torch.arange(min(bq, n)).view(1, -1, 1), torch.arange(min(bk, n)).view(1, 1, -1)
    step = max(1, TILE // 4 // max(1, below.numel() * beside.numel()))
    starts = range(0, len(key), step)
    for some in watched((slice(x, min(len(key), x + step)) for x in starts), pattern.name, len(starts)):
        line, column = (x.view(-1, 1, 1) for x in (key[some] // cols, key[some] % cols))
        i, j = (line % rows + blocks.first) * bq + below, column * bk + beside
        exists = (i >= n - nq) & (i < n) & (j < n)
        # A function may look up tensors of n entries: it is only asked about positions that exist.
        i, j = i.clamp(n - nq, n - 1), j.clamp(max=n - 1)
        yield some, pattern.count(line // rows, i, j, n, heads) * exists, exists


def refined(pattern: Pattern, grid: Blocks, heads: int, found: States) -> Blocks:
    """The blocks with a visible pair: what is OPEN is evaluated."""
    seen, full = torch.ones_like(found.key, dtype=torch.bool), found.state == ALL
    asked = (found.state == OPEN).nonzero()[:, 0]
    for some, shown, exists in evaluated(pattern, grid, heads, found.key[asked]):
        seen[asked[some]] = shown.flatten(1).any(1)
        full[asked[some]] = ((shown == 1) == exists).flatten(1).all(1)
    return Blocks.of(grid.block_size, grid.n, grid.nq, grid.layouts, found.key[seen], full[seen])


def by_head(pattern: Pattern, n: int, heads: int) -> bool:
    """Whether what a pattern counts depends on the head."""
    last = torch.full((1, 1, 1), n - 1)
    return len(pattern.count(torch.arange(heads).view(-1, 1, 1), last, last, n, heads)) > 1


class Looked(Pattern):
    """A pattern whose blocks come from looking at all pairs."""

    everywhere = True

    def _blocks(self, n, heads, nq, block_size):
        layouts = heads if n and heads and nq and by_head(self, n, heads) else min(1, heads)
        grid = Blocks.joined(block_size, n, nq, layouts, [])
        key = torch.arange(layouts * grid.rows * grid.cols)
        return refined(self, grid, heads, States(key, torch.full_like(key, OPEN)))


class Listed(Pattern):
    """A pattern that shows a pair once at most and has lists of blocks that do not come from looking at all pairs."""

    def _distinct(self, n, heads, nq):
        blocks = self._blocks(n, heads, nq, self.block_of())
        (bq, bk), line, start = blocks.block_size, blocks.line, blocks.columns.long() * blocks.block_size[1]
        wide = ((start + bk).clamp(max=n) - start) * blocks.full
        wide = torch.zeros(blocks.layouts * blocks.rows, dtype=torch.int64).index_add_(0, line, wide)
        row = (torch.arange(blocks.rows) + blocks.first) * bq
        high = ((row + bq).clamp(max=n) - row.clamp(min=n - nq)).tolist()
        part, found = (~blocks.full).nonzero()[:, 0], torch.zeros(blocks.layouts, dtype=torch.int64)
        for some, pairs in self._inside(blocks, heads, part):
            found.index_add_(0, line[part[some]] // blocks.rows, pairs)
        # The products may not fit in 64 bits.
        each = wide.view(blocks.layouts, blocks.rows).tolist()
        each = [x + sum(map(operator.mul, high, y)) for x, y in zip(found.tolist(), each, strict=True)]
        return each if blocks.layouts == heads else each * heads

    def _inside(self, blocks: Blocks, heads: int, part: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice of the partial blocks `part`, how many pairs each of these shows)."""
        for some, seen, _ in evaluated(self, blocks, heads, blocks.key[part]):
            yield some, seen.sum((1, 2))

    def _uncovered(self, n, heads, nq):
        blocks = self._blocks(n, heads, nq, self.block_of())
        bq, line, rows = blocks.block_size[0], blocks.line, max(1, blocks.rows)
        seen = torch.zeros(blocks.layouts * blocks.rows, min(bq, n), dtype=torch.int32)  # how many blocks show a query
        seen[line[blocks.full]] = 1
        part = (seen[line] == 0).any(1).nonzero()[:, 0]
        for some, shown, _ in evaluated(self, blocks, heads, blocks.key[part]):
            seen.index_add_(0, line[part[some]], shown.any(2).int())
        position = (torch.arange(len(seen))[:, None] % rows + blocks.first) * bq + torch.arange(min(bq, n))
        dark = (seen == 0) & (position >= n - nq) & (position < n)
        each = dark.view(blocks.layouts, blocks.rows * min(bq, n)).sum(1)
        return each if blocks.layouts == heads else each.repeat(heads)
