"""Parts of a pattern that are patterns themselves: some branches, some heads, or the keys that one rank has gathered.

Single-device executions run them like any pattern; only rows, blocks and heads are numbered differently.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.distributed import halo
from workbench.distributed.shards import as_tensor, clip
from workbench.patterns import Blocks, BlockSparse, Dense, Dilated, Neighborhood, Pattern, Window
from workbench.patterns.base import ranges
from workbench.patterns.layouts import Layout
from workbench.patterns.orderings import Ordering


class Branches(Dilated):
    """Some branches of a dilated pattern, for the heads from `first` on, with the offsets that they have in the whole.

    which: the branches; all_heads: how many heads the whole pattern is for, on which its offsets may depend
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

    def of_branches(self, which):
        return Branches(self.whole, tuple(self.which[b] for b in which), self.first, self.all_heads)

    def any(self, heads: int) -> bool:
        """Whether any of the branches has any of these heads."""
        return any(self.head_range(branch, heads) for branch in range(len(self.which)))

    def rule(self, branch, heads):
        divide, plus = self.whole.rule(self.which[branch], self.all_heads)
        if divide < self.all_heads and self.first % divide:
            raise ValueError(f"heads from {self.first} on: offsets='blocked' gives {divide} heads in a row one offset")
        return divide, plus + (self.first // divide if divide < self.all_heads else 0)

    def divisor(self, heads):
        return self.whole.divisor(self.all_heads)


def some_heads(pattern: Pattern, first: int, heads: int, all_heads: int) -> Pattern:
    """The pattern of heads first, ..., first + heads - 1 (of all_heads), numbered from 0.

    ValueError where there is none: offsets="blocked", cut inside a run of heads with one offset.
    """
    if heads == all_heads or isinstance(pattern, Dense) or pattern.same_heads:
        return pattern  # the same object, so that its lists of blocks are made once
    if isinstance(pattern, Dilated):
        part = Branches(pattern, tuple(range(len(pattern.segment_lengths))), first, all_heads)
        for branch in range(len(part.segment_lengths)):
            part.rule(branch, heads)
        return part
    if not isinstance(pattern, BlockSparse):
        return Gathered(pattern, first, all_heads)
    visible = pattern.layout.visible
    layout = Layout("heads", {}, lambda h, i, j, grid: visible(h + first, i, j, grid), True)
    return BlockSparse(layout, pattern.block_size, pattern.causal)


class Gathered(Pattern):
    """Some heads of any pattern, on all of its tokens or on gathered ones, with the borders of blocks as there.

    whole: a pattern on n tokens and all_heads heads, of which these are those from `first` on
    position: int64 (M,), the token that each is, -1 for padding, which no query sees; None: all, and n is not asked for
    moved: how many rows of blocks further down the queries' are
    """

    def __init__(self, whole: Pattern, first: int, all_heads: int, n: int = 0, position=None, moved: int = 0):
        self.whole, self.first, self.all_heads, self.n = whole, first, all_heads, n
        self.same_heads = whole.same_heads
        self.position, self.moved = position, moved
        self.block_size = tuple(min(n or x, x) for x in whole.block_of())  # as `beside` has them

    def count(self, h, i, j, n, heads):
        if self.position is None:
            return self.whole.count(h + self.first, i, j, n, self.all_heads)
        position = self.position.to(i.device)
        i, j = position[i].clamp(min=0), position[j]
        return self.whole.count(h + self.first, i, j.clamp(min=0), self.n, self.all_heads) * (j >= 0)

    def block_of(self, block_size=None):
        return self.block_size

    def _blocks(self, n, heads, nq, block_size):
        """Those of the whole, renumbered."""
        (every,), (bq, bk) = halo.lists(self.whole, self.n or n, self.all_heads), block_size
        first, cols, apart = (n - nq) // bq, max(1, -(-n // bk)), every.layouts > 1
        start, rows, head = max(0, first - self.moved), -(-n // bq) - first if nq else 0, torch.arange(heads)[:, None]
        row = torch.arange(start, max(start, min(every.rows, first - self.moved + rows)))  # of the whole
        head = head if apart else head[:1]
        line = ((head + self.first * apart) * every.rows + row).flatten()
        many = every.starts.diff()[line]
        some = ranges(every.starts[line], many)
        column = every.columns[some].long()
        if self.position is not None:
            block = self.position[::bk].div(bk, rounding_mode="floor")
            where = torch.full((every.cols,), -1)
            where[block[block >= 0]] = (block >= 0).nonzero().flatten()
            column = where[column]
        line = (head * rows + row + self.moved - first).flatten().repeat_interleave(many)
        key, order = (line * cols + column)[column >= 0].sort()
        return Blocks.of(block_size, n, nq, heads if apart else 1, key, every.full[some][column >= 0][order])

    def spec(self):
        return self.whole.spec()


@dataclass(frozen=True)
class View:
    """A call on gathered keys: the pattern in the call's own numbering, where the queries are the last rows.

    position: of each of the call's keys, int64 (M,) or a range; -1 for padding, which no query sees
    spare: how many of the call's queries, its last ones, are padding, which the numbering needs
    """

    pattern: Pattern
    position: range | Tensor
    spare: int = 0


def neighborhood(pattern: Neighborhood, position: Tensor) -> View:
    """A neighborhood of the cells of these tokens, the last of which are the queries."""
    curve = Ordering("gathered", pattern.shape, pattern.curve[position])
    return View(Neighborhood(pattern.shape, pattern.radius, curve), position)


def window(pattern: Window, queries: range, n: int) -> View:
    """A window on the keys that these queries see: the sinks, and right behind them the window's, in their order."""
    sinks, near = halo.window(pattern, n, queries)
    position = torch.cat([as_tensor(sinks), as_tensor(near)]) if sinks else near
    return View(pattern, position, max(sinks.stop, near.stop) - queries.stop)


def _positions(columns: Tensor, bk: int) -> Tensor:
    """The positions in these key blocks, int64 (len(columns) * bk,); -1 in blocks of padding."""
    return (columns[:, None] * bk + torch.arange(bk)).masked_fill(columns[:, None] < 0, -1).flatten()


def seeing(view: View, queries: range, heads: int) -> list[range]:
    """The queries that see some key of the view: one range of whole blocks, or two if most of them lie between."""
    bq = view.pattern.block_size[0]
    seen = view.pattern.blocks(len(view.position), heads, len(queries)).row_counts()[0].any(0).nonzero().flatten()
    if not len(seen):
        return []
    ends, gaps = [int(seen[0]), int(seen[-1]) + 1], seen.diff()
    if len(gaps) and 2 * int(gaps.max()) * bq > len(queries):
        before = int(gaps.argmax())
        ends[1:1] = [int(seen[before]) + 1, int(seen[before + 1])]
    first = queries.start // bq
    pairs = zip(ends[::2], ends[1::2], strict=True)
    return [clip(queries, (first + start) * bq, (first + stop) * bq) for start, stop in pairs]


def beside(pattern: Pattern, queries: range, own: range, needed: Tensor, n: int, heads: int) -> View:
    """On the gathered key blocks followed by the rank's own rows, with the borders of blocks as in the sequence.

    Where a block is not all there, rows of zeros fill it up, which no query sees. A short last block of the sequence is
    the last one here, too. own may be empty, at the end of the queries, for block-sparse ones in shards of whole
    blocks: causality then hides all of a block of another rank or none of it, and what lies between the last multiple
    of both block sizes and the end of the queries is filled up, too.
    """
    bq, bk = (min(n, x) for x in pattern.block_of())
    both = math.lcm(bq, bk)
    low = own.start // both * both
    high = own.stop if pattern.causal else min(n, -(-own.stop // bk) * bk)
    outside = (needed // bk).unique()
    outside = outside[(outside < low // bk) | (outside >= -(-high // bk))]
    short = n % bk if high < n and n % bk and len(outside) and int(outside[-1]) == n // bk else 0
    ragged = outside[-1:] if short else outside[:0]
    outside = outside[: len(outside) - len(ragged)]
    # a multiple of both block sizes keeps the borders of what follows; the keys are at least as many as the queries
    room = -(-max(len(outside) * bk, 0 if own else len(queries)) // both) * both

    gathered = torch.full((room // bk,), -1)
    gathered[: len(outside)] = outside
    rows, blocks = torch.arange(low, high), torch.arange(low // bk, -(-high // bk))
    if not own:
        rows, blocks = (torch.full_like(x, -1) for x in (rows, blocks))
    position = torch.cat([_positions(gathered, bk), rows, torch.arange(n - short, n)])
    spare, moved = len(position) - (room + queries.stop - low), (room - low) // bq
    if not isinstance(pattern, BlockSparse):
        return View(Gathered(pattern, 0, heads, n, position, moved), position, spare)
    columns = torch.cat([gathered, blocks, ragged])
    grid, last = (-(-n // bq), -(-n // bk)), (own.stop - 1) // bq + moved

    def visible(h, i, j, _):
        column = columns.to(j.device)[j.long()]
        seen = pattern.layout.visible(h, i - moved, column.clamp(min=0).to(j.dtype), grid)
        return seen & (column >= 0) & (i <= last)

    layout = Layout("gathered", {}, visible, pattern.layout.per_head)
    view = BlockSparse(layout, (bq, bk), pattern.causal and bool(own))
    return View(view, position, spare)
