"""Need: which key rows of other ranks a rank's queries touch. One function a kind of pattern; nothing is communicated.

A position is needed for a key head where a query of the rank sees it under one of the heads that share the key head.
The rows of a rank are [a, b), its queries those of them that are among the last Nq positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.distributed.combs import Comb
from workbench.distributed.shards import Rows, Shards, clip
from workbench.patterns import BlockSparse, Dilated, Neighborhood


class Need(NamedTuple):
    """Rows that other ranks hold, and the key heads for which they are needed."""

    heads: tuple[int, ...]
    rows: Rows


def queries_of(own: range, n: int, nq: int) -> range:
    return range(max(own.start, n - nq), max(own.stop, n - nq)) if own.stop > n - nq else range(0)


# --- dense ------------------------------------------------------------------------------------------------------------


def dense(causal: bool, n: int, key_heads: int, own: range, work: list[range]) -> list[Need]:
    """What comes before the last query, or everything. work: the queries that the rank computes."""
    if not any(work) or not key_heads:
        return []
    stop = max(x.stop for x in work if x) if causal else n
    return _need([tuple(range(key_heads))], [Rows.of([range(stop)]).without(own)])


def _need(heads, rows) -> list[Need]:
    return [Need(h, r) for h, r in zip(heads, rows, strict=True) if len(r)]


# --- dilated ----------------------------------------------------------------------------------------------------------


class Zone(NamedTuple):
    """Positions [start, stop) of other ranks, and which of them each key head needs: a comb, or None."""

    start: int
    stop: int
    combs: tuple[Comb | None, ...]


class DilatedNeeds:
    """A segment that reaches beyond the shard is needed where one of its kept queries is the rank's."""

    def __init__(self, pattern: Dilated, n: int, nq: int, heads: int, key_heads: int):
        self.pattern, self.n, self.nq, self.key_heads = pattern, n, nq, key_heads
        self.branches = list(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True))
        group = heads // max(1, key_heads)
        table = pattern._offsets(heads).view(key_heads, group, len(self.branches)) if heads else None
        self.offsets = [
            [sorted({o for o in table[g, :, b].tolist() if o >= 0}) for b in range(len(self.branches))]
            for g in range(key_heads)
        ]
        self._combs: dict[frozenset, Comb] = {}
        self._below: dict[tuple, np.ndarray] = {}

    def zones(self, own: range) -> list[Zone]:
        """Ascending and disjoint; beside the shard on the left, and where it is not causal on the right."""
        queries = queries_of(own, self.n, self.nq)
        if not queries:
            return []
        left, right = [], []  # (how far, branch, start of the segment, its queries here)
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
            found.append(Zone(start, stop, self._kept([x[1:] for x in left if x[0] <= start])))
        edges = sorted({x for x, *_ in right})
        for start, stop in zip([own.stop] + edges[:-1], edges, strict=True) if edges else ():
            found.append(Zone(start, stop, self._kept([x[1:] for x in right if x[0] >= stop])))
        return found

    def _kept(self, active) -> tuple[Comb | None, ...]:
        combs = []
        for offsets in self.offsets:
            teeth = set()
            for b, start, queries in active:
                r = self.branches[b][1]
                kept = (range(start + o, queries.stop, r) for o in offsets[b])
                teeth |= {(x.start % r, r) for x in kept if clip(x, queries.start, queries.stop)}
            key = frozenset(teeth)
            combs.append(self._combs.setdefault(key, Comb(key)) if key else None)
        return tuple(combs)

    def needs(self, own: range) -> list[Need]:
        zones = self.zones(own)
        classes: dict[tuple, list[int]] = {}
        for g in range(self.key_heads):
            classes.setdefault(tuple(id(z.combs[g]) for z in zones), []).append(g)
        rows = [
            Rows.of(piece for z in zones if z.combs[x[0]] for piece in z.combs[x[0]].rows(z.start, z.stop))
            for x in classes.values()
        ]
        return _need(map(tuple, classes.values()), rows)

    def units(self, shards: Shards) -> Tensor:
        """int64 (world, world): (row, key head) pairs that rank [p, .] needs of rank [., s], in closed form."""
        total, bounds = np.zeros((shards.world, shards.world), dtype=np.int64), np.array(shards.starts)
        for p in range(shards.world):
            for z in self.zones(shards[p]):
                if not any(z.combs):
                    continue
                ranks = shards.owners(z.start, z.stop)
                if z.combs not in self._below:
                    self._below[z.combs] = sum(comb.below(bounds) for comb in z.combs if comb)
                below = self._below[z.combs][ranks.start : ranks.stop + 1].copy()
                ends = np.array([z.start, z.stop])
                below[0], below[-1] = sum(comb.below(ends) for comb in z.combs if comb)
                total[p, ranks.start : ranks.stop] += np.diff(below)
        return torch.from_numpy(total)


# --- block-sparse -----------------------------------------------------------------------------------------------------


class BlockNeeds:
    """The rows of a key block that a query block of the rank sees, up to the time of the last query that sees it."""

    CELLS = 1 << 22  # of the block grid, looked at at once

    def __init__(self, pattern: BlockSparse, n: int, nq: int, heads: int, key_heads: int):
        self.n, self.nq, self.key_heads, self.heads = n, nq, key_heads, heads
        self.pattern, self.block_size = pattern, pattern.block_size
        batch = pattern.batch
        self.layouts = [pattern.layout] if batch is None else [pattern.layout.for_batch(b) for b in range(batch)]
        self.per_head = pattern.layout.per_head
        rank = pattern.causal_rank
        self.time = None if not pattern.causal else torch.arange(n) if rank is None else rank.cpu()

    def visible(self, own: range) -> tuple[Tensor, Tensor]:
        """Of each layout (key head, or all): int64 (layouts, key blocks), the time of the last of the rank's queries
        that sees a block, -1 where none does; and how many pairs of rows its visible blocks hold, all heads together.
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
            latest, reach = self._latest(low, high, block), cols
            if self.time is not None and self.pattern.causal_rank is None:
                reach = int(latest[-1]) // bk + 1
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
            time = torch.where(seen, latest.view(1, -1, 1), -1).amax(1)
            last[:, :reach] = torch.maximum(last[:, :reach], time)
        return last, pairs

    def _latest(self, low: Tensor, high: Tensor, block: Tensor) -> Tensor:
        """int64 (blocks,): the time of the last query of each block of the rank's; 0 where time does not count."""
        if self.time is None:
            return torch.zeros_like(low)
        if self.pattern.causal_rank is None:
            return high - 1
        which = torch.repeat_interleave(torch.arange(len(block)), high - low)
        time = self.order[int(low[0]) : int(high[-1])]
        return torch.full_like(low, -1).scatter_reduce_(0, which, time, "amax")

    @property
    def order(self) -> Tensor:
        """Times as 0, 1, 2, ...: equal where the times are."""
        if not hasattr(self, "_order"):
            self._order = self.time.unique(return_inverse=True)[1]
        return self._order

    def needs(self, own: range) -> list[Need]:
        last, _ = self.visible(own)
        bk = self.block_size[1]
        found = []
        for one in last:
            block = (one >= 0).nonzero().flatten()
            position = (block[:, None] * bk + torch.arange(bk)).flatten()
            until = one[block].repeat_interleave(bk)
            keep = position < self.n
            if self.time is not None:
                time = position if self.pattern.causal_rank is None else self.order[position.clamp(max=self.n - 1)]
                keep &= time <= until
            found.append(Rows.of([position[keep]]).without(own))
        if not self.per_head:
            return _need([tuple(range(self.key_heads))], found) if self.key_heads else []
        return _need([(g,) for g in range(self.key_heads)], found)


# --- neighborhood -----------------------------------------------------------------------------------------------------


class NeighborhoodNeeds:
    """The cells within the radius of a cell of the rank's: a box grown around each, one axis after another."""

    def __init__(self, pattern: Neighborhood, n: int, nq: int, heads: int, key_heads: int):
        self.pattern, self.n, self.nq, self.key_heads = pattern, n, nq, key_heads

    def needs(self, own: range) -> list[Need]:
        queries = queries_of(own, self.n, self.nq)
        if not queries or not self.key_heads:
            return []
        shape, radius = self.pattern.shape, self.pattern.radius
        cells = self.pattern.coordinates(torch.arange(queries.start, queries.stop))
        low = [max(0, int(x.min()) - r) for x, r in zip(cells, radius, strict=True)]
        high = [min(side, int(x.max()) + r + 1) for x, r, side in zip(cells, radius, shape, strict=True)]
        near = torch.zeros([h - x for x, h in zip(low, high, strict=True)], dtype=torch.int32)
        near[tuple(x - o for x, o in zip(cells, low, strict=True))] = 1
        for axis, r in enumerate(radius):
            side = near.shape[axis]
            below = torch.cat([torch.zeros_like(near.narrow(axis, 0, 1)), near.cumsum(axis, dtype=torch.int32)], axis)
            x = torch.arange(side)
            upto, since = (x + min(r, side) + 1).clamp(max=side), (x - min(r, side)).clamp(min=0)
            near = (below.index_select(axis, upto) > below.index_select(axis, since)).int()
        spot = near.nonzero(as_tuple=True)
        cell = torch.zeros_like(spot[0])
        for x, o, side in zip(spot, low, shape, strict=True):
            cell = cell * side + x + o
        token = self.pattern.rank[cell]
        token = token[token >= 0].sort().values
        return _need([tuple(range(self.key_heads))], [Rows.of([token]).without(own)])
