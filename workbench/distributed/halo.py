"""The halo of a rank: which keys of other ranks its queries see. Found by arithmetic, without communication.

Example: causal dense attention, 8 positions on 2 ranks. Rank 1 holds 4 to 7 and its halo is 0 to 3; that of rank 0 is
empty. A halo is a list of `HeadRows`: positions in the whole sequence, and the key heads for which they are needed. A
key head needs a position if one of the query heads that share it has a query on this rank that sees the position.

A rank's queries are those of its positions that are among the last Nq of the sequence. Each kind of pattern has its
rule: `dense`, `DilatedHalo`, `BlockHalo`, `NeighborhoodHalo`.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.distributed.shards import Rows, Shards, as_tensor, clip
from workbench.patterns import BlockSparse, Dilated, Neighborhood
from workbench.patterns.neighborhood import box_sums


class HeadRows(NamedTuple):
    """Positions, and the key heads for which their rows are needed."""

    heads: tuple[int, ...]
    rows: Rows


def queries_of(own: range, n: int, nq: int) -> range:
    """Those of a rank's positions that are queries: among the last nq of n."""
    return range(max(own.start, n - nq), max(own.stop, n - nq)) if own.stop > n - nq else range(0)


# --- dense ------------------------------------------------------------------------------------------------------------


def dense(causal: bool, n: int, key_heads: int, own: range, work: list[range]) -> list[HeadRows]:
    """Everything or, if causal, what comes before the last query. work: the queries that the rank computes."""
    if not any(work) or not key_heads:
        return []
    stop = max(x.stop for x in work if x) if causal else n
    return _head_rows([tuple(range(key_heads))], [Rows.of([range(stop)]).without(own)])


def _head_rows(heads, rows) -> list[HeadRows]:
    return [HeadRows(h, r) for h, r in zip(heads, rows, strict=True) if len(r)]


# --- dilated ----------------------------------------------------------------------------------------------------------


PERIOD = 1 << 22  # up to which one period is tabulated; beyond it all positions are listed to be counted


class Residues:
    """The positions t with t mod r = o for at least one (o, r) of `classes`, 0 <= o < r; counted in closed form.

    An example: {(0, 4), (1, 2)} are the positions 0, 1, 3, 4, 5, 7, 8, ...
    """

    def __init__(self, classes: frozenset[tuple[int, int]]):
        # a class inside another adds nothing, as (o, 2r) inside (o, r)
        held = {(o, r) for o, r in classes for a, s in classes if (a, s) != (o, r) and r % s == 0 and o % s == a}
        self.classes = sorted(classes - held)

    @cached_property
    def table(self) -> np.ndarray:
        """int64 (period + 1,): [x] is how many of the positions 0 ... x - 1 are kept."""
        period = math.lcm(*(r for _, r in self.classes))
        kept = np.zeros(period + 1, dtype=np.int64)
        for o, r in self.classes:
            kept[1 + o :: r] = 1
        return kept.cumsum()

    def below(self, x: np.ndarray) -> np.ndarray:
        """How many positions in [0, x) are kept, for each x."""
        x = np.asarray(x, dtype=np.int64)
        if len(self.classes) == 1:
            o, r = self.classes[0]
            return np.maximum(0, (x - o + r - 1) // r)
        if math.lcm(*(r for _, r in self.classes)) > PERIOD:
            return np.searchsorted(self.rows(0, int(x.max(initial=0)))[0].numpy(), x)
        whole, rest = np.divmod(x, len(self.table) - 1)
        return whole * self.table[-1] + self.table[rest]

    def rows(self, start: int, stop: int) -> list[range | torch.Tensor]:
        """The kept positions in [start, stop), ascending, as one piece of `Rows`."""
        pieces = [clip(range(o, stop, r), start, stop) for o, r in self.classes]
        if len(pieces) == 1:
            return pieces
        return [torch.cat([*map(as_tensor, pieces)]).unique()]


class Interval(NamedTuple):
    """Positions [start, stop) of other ranks, and for each key head which of them it needs (None: none)."""

    start: int
    stop: int
    residues: tuple[Residues | None, ...]


class DilatedHalo:
    """The kept keys of each segment that crosses a border of the shard and has a kept query in it.

    offsets: for each key head and branch, the offsets of its query heads in the branch
    """

    def __init__(self, pattern: Dilated, n: int, nq: int, heads: int, key_heads: int):
        self.pattern, self.n, self.nq, self.key_heads = pattern, n, nq, key_heads
        self.branches = list(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True))
        group = heads // max(1, key_heads)
        table = pattern._offsets(heads).view(key_heads, group, len(self.branches)) if heads else None
        self.offsets = [
            tuple(tuple(sorted({o for o in table[g, :, b].tolist() if o >= 0})) for b in range(len(self.branches)))
            for g in range(key_heads)
        ]
        self._unions: dict[frozenset, Residues] = {}
        self._needed: dict[tuple, tuple[Residues | None, ...]] = {}

    def intervals(self, own: range) -> list[Interval]:
        """Ascending and disjoint: left of the shard and, unless causal, right of it."""
        queries = queries_of(own, self.n, self.nq)
        if not queries:
            return []
        left, right = [], []  # (the segment's far end, branch, start of the segment, the rank's queries in it)
        for b, (w, _) in enumerate(self.branches):
            start = queries.start // w * w
            if start < own.start:
                left.append((start, b, start, range(queries.start, min(queries.stop, start + w))))
            start = (own.stop - 1) // w * w
            stop = min(self.n, start + w)
            if stop > own.stop and not self.pattern.causal:
                right.append((stop, b, start, range(max(queries.start, start), queries.stop)))
        found = []
        edges = sorted({x for x, *_ in left})
        for start, stop in zip(edges, edges[1:] + [own.start], strict=True) if edges else ():
            found.append(Interval(start, stop, self._needs([x[1:] for x in left if x[0] <= start])))
        edges = sorted({x for x, *_ in right})
        for start, stop in zip([own.stop] + edges[:-1], edges, strict=True) if edges else ():
            found.append(Interval(start, stop, self._needs([x[1:] for x in right if x[0] >= stop])))
        return found

    def _needs(self, active) -> tuple[Residues | None, ...]:
        """For each key head what it needs of a position that is in all active segments.

        active: (branch, start of its segment, the rank's queries in it). Only residues of these count, so that many
        ranks share the result.
        """
        key = []
        for b, start, queries in active:
            r = self.branches[b][1]
            here = (0, r) if len(queries) >= r else ((queries.start - start) % r, len(queries))
            key.append((b, start % r, *here))
        key = tuple(key)
        if key not in self._needed:
            by_offsets = {offsets: self._union(key, offsets) for offsets in set(self.offsets)}
            self._needed[key] = tuple(by_offsets[offsets] for offsets in self.offsets)
        return self._needed[key]

    def _union(self, active, offsets) -> Residues | None:
        """The positions kept by a branch for one of these offsets, where also a query is kept for it.

        active: (branch, its segment's start mod r, the first query's place in the segment mod r, how many queries). r
        queries in a row have every offset.
        """
        classes = set()
        for b, start, first, count in active:
            r = self.branches[b][1]
            classes |= {((start + o) % r, r) for o in offsets[b] if (o - first) % r < count}
        if not classes:
            return None
        classes = frozenset(classes)
        if classes not in self._unions:
            self._unions[classes] = Residues(classes)
        return self._unions[classes]

    def halo(self, own: range) -> list[HeadRows]:
        intervals = self.intervals(own)
        alike: dict[tuple, list[int]] = {}  # key heads that need the same
        for g in range(self.key_heads):
            alike.setdefault(tuple(id(z.residues[g]) for z in intervals), []).append(g)
        rows = [
            Rows.of(piece for z in intervals if z.residues[x[0]] for piece in z.residues[x[0]].rows(z.start, z.stop))
            for x in alike.values()
        ]
        return _head_rows(map(tuple, alike.values()), rows)

    def units(self, shards: Shards) -> Tensor:
        """int64 (world, world): how many (row, key head) rank [p, .] needs of rank [., s], in closed form.

        Intervals with the same residues share one count of every rank's rows; what lies outside an interval at its two
        ends is then subtracted.
        """
        total, bounds = np.zeros((shards.world, shards.world), dtype=np.int64), shards.bounds.numpy()
        alike: dict[tuple, list[tuple[int, int, int]]] = {}
        for p in range(shards.world):
            for z in self.intervals(shards[p]):
                alike.setdefault(z.residues, []).append((p, z.start, z.stop))
        for residues, intervals in alike.items():
            residues = Counter(one for one in residues if one)
            if not residues:
                continue
            p, start, stop = np.array(intervals).T
            below, before, upto = (
                sum(times * one.below(x) for one, times in residues.items()) for x in (bounds, start, stop)
            )
            first, last = np.searchsorted(bounds, start, "right") - 1, np.searchsorted(bounds, stop)
            each = np.diff(below)
            for row, a, b in zip(p.tolist(), first.tolist(), last.tolist(), strict=True):
                total[row, a:b] += each[a:b]
            np.subtract.at(total, (p, first), before - below[first])
            np.subtract.at(total, (p, last - 1), below[last] - upto)
        return torch.from_numpy(total)


# --- block-sparse -----------------------------------------------------------------------------------------------------


class BlockHalo:
    """The rows of each key block that one of the rank's query blocks sees; if causal, up to the last query."""

    CELLS = 1 << 22  # of the block grid, evaluated at once

    def __init__(self, pattern: BlockSparse, n: int, nq: int, heads: int, key_heads: int):
        self.n, self.nq, self.key_heads, self.heads = n, nq, key_heads, heads
        self.pattern, self.block_size = pattern, pattern.block_size
        batch = pattern.batch
        self.layouts = [pattern.layout] if batch is None else [pattern.layout.for_batch(b) for b in range(batch)]
        self.per_head = pattern.layout.per_head

    def visible(self, own: range) -> tuple[Tensor, Tensor]:
        """(last, pairs) of the rank's queries. last: int64 (key heads, or 1 if all heads share the layout; key blocks),
        the last query that sees a block, 0 if not causal, -1 if none sees it. pairs: int64 scalar,
        the (head, query, key) of all visible blocks.
        """
        (bq, bk), n = self.block_size, self.n
        rows, cols = -(-n // bq), -(-n // bk)
        queries = queries_of(own, n, self.nq)
        sets = self.key_heads if self.per_head else 1
        last, pairs = torch.full((sets, cols), -1), torch.zeros((), dtype=torch.int64)
        if not queries or not self.heads:
            return last, pairs
        step = max(1, self.CELLS // max(1, cols * sets))
        widths = torch.full((cols,), bk)
        widths[-1] = n - (cols - 1) * bk
        for start in range(queries.start // bq, (queries.stop - 1) // bq + 1, step):
            block = torch.arange(start, min(start + step, (queries.stop - 1) // bq + 1), dtype=torch.int32)
            low = (block.long() * bq).clamp(min=queries.start)
            high = ((block.long() + 1) * bq).clamp(max=queries.stop)
            latest = high - 1 if self.pattern.causal else torch.zeros_like(low)
            reach = int(latest[-1]) // bk + 1 if self.pattern.causal else cols
            seen = torch.zeros(sets, len(block), reach, dtype=torch.bool)
            j = torch.arange(reach, dtype=torch.int32)
            for h in range(self.heads if self.per_head else 1):
                head = torch.full((1, 1, 1), h, dtype=torch.int32)
                for layout in self.layouts:
                    one = layout.visible(head, block.view(1, -1, 1), j.view(1, 1, -1), (rows, cols))
                    one = one.expand(1, len(block), reach)[0]
                    seen[h * sets // self.heads] |= one
                    each = (one * widths[:reach]).sum(1) * (high - low)
                    pairs = pairs + each.sum() * (1 if self.per_head else self.heads)
            found = torch.where(seen, latest.view(1, -1, 1), -1).amax(1)
            last[:, :reach] = torch.maximum(last[:, :reach], found)
        return last, pairs

    def halo(self, own: range) -> list[HeadRows]:
        last, _ = self.visible(own)
        bk = self.block_size[1]
        found = []
        for one in last:
            block = (one >= 0).nonzero().flatten()
            position = (block[:, None] * bk + torch.arange(bk)).flatten()
            until = one[block].repeat_interleave(bk)
            keep = position < self.n
            if self.pattern.causal:
                keep &= position <= until
            found.append(Rows.of([position[keep]]).without(own))
        if not self.per_head:
            return _head_rows([tuple(range(self.key_heads))], found) if self.key_heads else []
        return _head_rows([(g,) for g in range(self.key_heads)], found)


# --- neighborhood -----------------------------------------------------------------------------------------------------


class NeighborhoodHalo:
    """The tokens that some of the rank's queries see."""

    def __init__(self, pattern: Neighborhood, n: int, nq: int, heads: int, key_heads: int):
        self.pattern, self.n, self.nq, self.key_heads = pattern, n, nq, key_heads

    def halo(self, own: range) -> list[HeadRows]:
        queries = queries_of(own, self.n, self.nq)
        if not queries or not self.key_heads:
            return []
        token = self.near(torch.arange(queries.start, queries.stop))
        return _head_rows([tuple(range(self.key_heads))], [Rows.of([token]).without(own)])

    def near(self, tokens: Tensor) -> Tensor:
        """The tokens that these see, and that see these, int64, ascending: within the radius of one of their cells."""
        if not len(tokens):
            return tokens
        shape, radius = self.pattern.shape, self.pattern.radius
        cells = self.pattern.coordinates(tokens)
        low = [max(0, int(x.min()) - r) for x, r in zip(cells, radius, strict=True)]
        high = [min(side, int(x.max()) + r + 1) for x, r, side in zip(cells, radius, shape, strict=True)]
        near = torch.zeros([h - x for x, h in zip(low, high, strict=True)], dtype=torch.int32)
        near[tuple(x - o for x, o in zip(cells, low, strict=True))] = 1
        spot = box_sums(near, radius).nonzero(as_tuple=True)
        cell = torch.zeros_like(spot[0])
        for x, o, side in zip(spot, low, shape, strict=True):
            cell = cell * side + x + o
        found = self.pattern.rank[cell]
        return found[found >= 0].sort().values
