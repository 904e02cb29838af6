"""The plan of one attention call over shards: which rank sends which rows of which key heads to which other rank.

Every rank computes the same plan from the pattern and the lengths of all shards, without communication or a process
group. So one process can make, print and draw a plan for any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.distributed import halo
from workbench.distributed.halo import HeadRows, queries_of
from workbench.distributed.shards import Rows, Shards, as_tensor
from workbench.patterns import BlockSparse, Dense, Dilated, Neighborhood, Pattern, Window
from workbench.patterns.checks import choice

# How finely the exchange is cut into stages (`Plan.stages`).
SHARE = 16  # a stage brings a rank about a 16th of the bytes of its own keys and values, unless that is too little:
LEAST = 3 << 14  # a stage brings at least so many (row, key head): 12 MB at head_dim 64 in 16 bits
DENSE = 3 << 16  # of dense attention so many: queries for eight waves of a card's tiles, whose last is nearly full
PIECES = 4  # a key head's rows come in at most so many stages, since what is computed from each has to be merged
FEW = 4  # neighborhoods: a rank's own rows are at least so many times those that it needs, if they are a call apart
CALLS = 3  # at least, in a causal stage: early and late queries, whole blocks and triangles
AHEAD = 2  # stages that travel at once if a stage may be a single call, which leaves the card only as it ends


class Stage(NamedTuple):
    """One exchange: for these key heads, part `piece` of the `pieces` even parts of each other rank's rows."""

    heads: range
    piece: int = 0
    pieces: int = 1

    def of(self, shard: range) -> range:
        """The positions of a shard that this stage moves."""
        part = Shards.even(len(shard), self.pieces)[self.piece]
        return range(shard.start + part.start, shard.start + part.stop)


class Layout(NamedTuple):
    """How ranks carry out a plan; its pattern decides.

    apart: a rank attends to its own rows in a call of their own; else they are copied beside what arrives
    merged: a row of out may be merged from several calls' results, in float32 unless a kernel does it in 16 bits
    ahead: how many stages travel at once
    few: a row of dq is a sum of few parts, so that it may be rounded to 16 bits after each: of two parts that is one
        rounding, and a single device rounds each branch of a dilated pattern
    sources: from how many ranks at most gradients of a rank's keys may return for the same to hold for dk and dv
    """

    apart: bool
    merged: bool
    ahead: int
    few: bool
    sources: int


def plan(pattern: Pattern, shards: Shards, heads: int, kv_heads: int | None = None, nq: int | None = None) -> Plan:
    """The plan, by sequence, for keys in `shards`; the queries are the last nq positions, each where its key is.

    heads, kv_heads (default: heads): of queries and of keys; nq: default all positions. ValueError for a pattern, or
    sizes, that cannot be sharded.
    """
    return Plan(pattern, shards, heads, heads if kv_heads is None else kv_heads, shards.n if nq is None else nq)


class Plan:
    """What ranks need from each other (`halo`, `units`, `bytes`), and what they compute (`work`, `pairs`, `balance`).

    zigzag: whether ranks compute queries that other ranks hold (see `work`), which have to travel
    strategy: "sequence" or "heads"
    """

    strategy = "sequence"

    def __init__(self, pattern: Pattern, shards: Shards, heads: int, kv_heads: int, nq: int):
        if heads and (not kv_heads or heads % kv_heads):
            raise ValueError(f"kv_heads={kv_heads} on heads={heads}: want a divisor")
        _, heads, self.nq = pattern.for_batch(0).check(shards.n, heads, nq)
        if isinstance(pattern, Neighborhood) and pattern.line:
            pattern = pattern.line  # whose calls take contiguous keys
        self.pattern, self.shards, self.heads, self.kv_heads = pattern, shards, heads, kv_heads
        self.zigzag = isinstance(pattern, Dense) and pattern.causal
        self._halos: dict[int, list[HeadRows]] = {}
        self._parcels: dict[tuple[int, int, Stage], list[HeadRows]] = {}
        self.views: dict[tuple, object] = {}  # the patterns on gathered keys, which `partials` keeps here

    @cached_property
    def layout(self) -> Layout:
        """How ranks carry this plan out."""
        apart, dilated = self._apart(), isinstance(self.pattern, Dilated)
        blocks = apart and isinstance(self.pattern, BlockSparse)
        merged = blocks or dilated or isinstance(self.pattern, Dense)
        ahead = AHEAD if merged and not self.zigzag else 1
        sources = len(self.pattern.segment_lengths) if dilated else int(blocks)
        return Layout(apart, merged, ahead, apart or dilated, sources)

    def _apart(self) -> bool:
        """Blocks: for shards of whole ones. Windows and grids: where few queries see rows of other ranks."""
        pattern, longest = self.pattern, max(self.shards.lengths, default=0)
        if isinstance(pattern, BlockSparse):
            return all(x % math.lcm(*pattern.block_size) == 0 for x in self.shards.starts)
        near = isinstance(pattern, Window) and not pattern.sinks or on_grid(pattern)
        return near and int(self.units.sum(0).max()) * FEW <= longest * self.kv_heads

    @property
    def n(self) -> int:
        return self.shards.n

    @property
    def world(self) -> int:
        return self.shards.world

    def queries(self, rank: int) -> range:
        """The queries that a rank holds."""
        return queries_of(self.shards[rank], self.n, self.nq)

    def work(self, rank: int) -> list[range]:
        """The queries that a rank computes: its own or, for causal dense attention, an early and a late part of all.

        A late query sees more keys than an early one; such pairs ("zigzag") give every rank as much to compute.
        """
        if not self.zigzag:
            return [self.queries(rank)]
        parts, first = Shards.even(self.nq, 2 * self.world), self.n - self.nq
        pair = (parts[rank], parts[2 * self.world - 1 - rank])
        return [range(x.start + first, x.stop + first) for x in pair]

    @cached_property
    def dilated(self) -> halo.DilatedHalo:
        """What finds halos of a dilated pattern, and keeps what ranks share of them."""
        return halo.DilatedHalo(self.pattern, self.n, self.nq, self.heads, self.kv_heads)

    def halo(self, rank: int) -> list[HeadRows]:
        """The rows of other ranks that a rank needs; key heads that need the same rows share an entry."""
        if rank not in self._halos:
            self._halos[rank] = self._find(rank)
        return self._halos[rank]

    def parcels(self, source: int, target: int, stage: Stage) -> list[HeadRows]:
        """What `source` sends to `target` in a stage, in the order of packing."""
        if source == target:
            return []
        key = (source, target, stage)
        if key not in self._parcels:
            own, parcels = stage.of(self.shards[source]), []
            for heads, rows in self.halo(target):
                heads, rows = tuple(h for h in heads if h in stage.heads), rows.within(own.start, own.stop)
                if heads and len(rows):
                    parcels.append(HeadRows(heads, rows))
            self._parcels[key] = parcels
        return self._parcels[key]

    @cached_property
    def units(self) -> Tensor:
        """int64 (world, world): how many (row, key head) rank [s, .] sends to rank [., t]."""
        if isinstance(self.pattern, Dilated):
            return self.dilated.units(self.shards).T.contiguous()
        total = torch.zeros(self.world, self.world, dtype=torch.int64)
        for rank in range(self.world):
            for heads, rows in self._find(rank):
                total[:, rank] += len(heads) * rows.counts(self.shards)
        return total

    def _find(self, rank: int) -> list[HeadRows]:
        pattern, own, work, heads = self.pattern, self.shards[rank], self.work(rank), range(self.kv_heads)
        if not any(work) or not heads:
            return []
        if isinstance(pattern, Dilated):
            return self.dilated.halo(own)
        if isinstance(pattern, Dense):
            found = [halo.dense(pattern.causal, self.n, own, work)]
        elif isinstance(pattern, Window):
            found = [Rows.of(halo.window(pattern, self.n, work[0])).without(own)]
        elif on_grid(pattern):
            found = [Rows.of([pattern.near(as_tensor(work[0]))]).without(own)]
        else:
            found = halo.listed(pattern, self.n, self.heads, self.kv_heads, own, work[0])
        of = [(head,) for head in heads] if len(found) > 1 else [tuple(heads)]
        return [HeadRows(*one) for one in zip(of, found, strict=True) if len(one[1])]

    @cached_property
    def moved(self) -> Tensor:
        """int64 (world, world): query rows that rank [s, .] holds and rank [., t] computes; 0 on the diagonal."""
        total = torch.zeros(self.world, self.world, dtype=torch.int64)
        if self.zigzag:
            for target in range(self.world):
                for part in self.work(target):
                    total[:, target] += self.shards.bounds.clamp(part.start, part.stop).diff()
            total.fill_diagonal_(0)
        return total

    @cached_property
    def stages(self) -> list[Stage]:
        """The exchanges, in order, the same on all ranks. There is at least one, even if nothing moves in it."""
        own, most, share = max(1, self.n * self.kv_heads // self.world), int(self.units.sum(0).max()), SHARE
        if isinstance(self.pattern, Dense):
            worth = most // (DENSE * (CALLS if self.zigzag else 1))
        elif isinstance(self.pattern, Dilated):
            worth, share = most // (2 * LEAST), 8 * SHARE  # few rows arrive, but a stage takes several copies of them
        else:
            most += own if most and not self.layout.apart else 0  # a rank's own rows are copied beside what arrives
            worth = most // LEAST
        many = max(1, min(-(-most * share // own), worth))
        heads = max(1, self.kv_heads // many)  # of a stage
        parts = Shards.even(self.kv_heads, -(-self.kv_heads // heads))
        pieces = min(PIECES, -(-many // parts.world)) if isinstance(self.pattern, Dense) else 1
        return [Stage(part, y, pieces) for part in parts for y in range(pieces)]

    def bytes(self, itemsize: int, head_dim: int, batch: int = 1, mode: str = "fwd", lse: bool = False) -> Tensor:
        """int64 (world, world): bytes that rank [s, .] sends to rank [., t].

        mode: "fwd"; "bwd", in which keys and values are sent again and their gradients return in float32 (float64 for
            float64); or "fwdbwd". For causal dense attention, queries, outputs and their gradients travel too.
        lse: whether lse is returned, and has a gradient.
        """
        choice("mode", mode, "fwd", "bwd", "fwdbwd")
        forward, backward = self._bytes(itemsize, max(4, itemsize), head_dim, batch, lse)
        return forward * ("fwd" in mode) + backward * ("bwd" in mode)

    def _bytes(self, itemsize: int, wide: int, head_dim: int, batch: int, lse: bool) -> tuple[Tensor, Tensor]:
        """`bytes` of a forward and of a backward. wide: bytes of a number of the gradients that return, and of lse."""
        rows = batch * head_dim * 2  # numbers of a row of keys and values
        there, back = self.moved * batch * self.heads, self.moved.T * batch * self.heads  # all 0 but for zigzag
        both = self.units * (rows * itemsize) + (there + back) * (head_dim * itemsize)
        return both + back * (wide * lse), both + self.units.T * (rows * wide) + there * (wide * lse)

    @cached_property
    def pairs(self) -> np.ndarray:
        """(world,) Python ints: (head, query, key) that each rank computes; by lists of blocks, all of visible ones."""
        pattern, ranks = self.pattern, range(self.world)
        if isinstance(pattern, Dense):  # the queries see what the last ones of a sequence that ends with them do
            each = [[(x.stop if pattern.causal else self.n, len(x)) for x in self.work(rank)] for rank in ranks]
            return np.array([sum(pattern.pairs(n, self.heads, nq) for n, nq in x) for x in each], dtype=object)
        every = [self.queries(rank) if self.heads else range(0) for rank in ranks]
        if isinstance(pattern, (Dilated, Window)) or on_grid(pattern):
            each = [[pattern.pairs(self.n, self.heads, self.n - y) for y in (x.start, x.stop)] for x in every]
            return np.array([x - y for x, y in each], dtype=object)
        sizes = pattern, self.n, self.heads, self.kv_heads
        return np.array([int(halo.visible_blocks(*sizes, x)[1]) if x else 0 for x in every], dtype=object)

    @property
    def balance(self) -> float:
        """The largest number of pairs of a rank over the mean: 1 is even."""
        return float(self.pairs.max() / max(1, self.pairs.mean()))

    @cached_property
    def digest(self) -> int:
        """62 bits that are equal where plans are."""
        what = [self.strategy, self.shards.lengths, self.heads, self.kv_heads, self.nq, [str(x) for x in self.stages]]
        return digest(describe(self.pattern), json.dumps(what), self.units.numpy().tobytes())


def on_grid(pattern: Pattern) -> bool:
    """Whether it is a neighborhood of which each query sees just what is within the radius."""
    return isinstance(pattern, Neighborhood) and pattern.plain


def digest(*parts: str | bytes) -> int:
    """A hash of 62 bits, which an int64 holds."""
    joined = hashlib.sha256()
    for part in parts:
        joined.update(part.encode() if isinstance(part, str) else part)
    return int.from_bytes(joined.digest()[:8], "little") >> 2


def describe(pattern: Pattern) -> str:
    """Text that tells patterns apart: the constructor's arguments, and the whole curves of neighborhoods."""
    try:
        spec = json.dumps(pattern.spec(), default=str)
    except ValueError:  # it has a function whose source cannot be found
        spec = repr(type(pattern))
    if isinstance(pattern, Neighborhood):
        spec += hashlib.sha256(pattern.curve.numpy().tobytes()).hexdigest()
    return spec + "".join(map(describe, getattr(pattern, "of", ())))
