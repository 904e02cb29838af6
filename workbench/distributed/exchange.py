"""Moving rows between ranks: packed into one buffer and sent by one all-to-all, with splits of 0 where nothing moves.

`Exchange` moves keys and values together (a group cast: each row to the ranks that need it) and their gradients back
the same way (a group reduce: summed where the row is held). A parcel is what one rank sends another of some key heads
(`halo.HeadRows`). Parcels of equally many rows lie side by side in a block (rows, 2, B, key heads, D), 2 for keys and
values. Rows come first, so that what each rank sends is contiguous where it arrives.

`QueryExchange` moves queries, results and their gradients, where a rank computes queries that another one holds.

Dimensions: B batch, L rows of a rank, G key heads, D head_dim.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.distributed.copies import Block, Copy, StridedView, evenly, joined, length
from workbench.distributed.group import OneStream, Ranks
from workbench.distributed.halo import HeadRows
from workbench.distributed.plans import Plan, Stage
from workbench.distributed.shards import as_index, clip


class Slot(NamedTuple):
    """A parcel's place in a buffer.

    block: that it is in; at: its first head there; heads: the key heads that the parcel is for
    own: its rows among this rank's own, if the rank sends it
    """

    block: Block
    at: int
    heads: tuple[int, ...]
    own: slice | Tensor | None


class Exchange:
    """The exchanges of a plan from one rank's side: what it sends and receives in each stage, and where in buffers.

    Of each stage: slots: where parcels lie, by rank, in (what is sent, what is received); splits: how many elements go
    to, and come from, each rank; copies: of blocks that are sent (`source`) and the own rows that fill them (`target`)
    room: the most elements that a stage sends, and that it receives; moves: whether any row moves at all
    """

    def __init__(self, plan: Plan, ranks: Ranks, batch: int, head_dim: int):
        self.plan, self.ranks, rank = plan, ranks, ranks.rank
        self.shape = (2, batch, head_dim)
        self.moves = bool(plan.units.any())
        self.slots: dict[Stage, tuple[list[list[Slot]], list[list[Slot]]]] = {}
        self.splits: dict[Stage, tuple[list[int], list[int]]] = {}
        self.copies: dict[Stage, list[Copy]] = {}
        for stage in plan.stages:
            sent = self._slots([plan.parcels(rank, x, stage) for x in range(plan.world)], mine=True)
            received = self._slots([plan.parcels(x, rank, stage) for x in range(plan.world)], mine=False)
            self.slots[stage], self.splits[stage] = zip(sent, received, strict=True)
            self.copies[stage] = joined(copy for line in sent[0] for slot in line for copy in _copies(slot))
        self.room = [max((sum(x[side]) for x in self.splits.values()), default=0) for side in (0, 1)]

    def _slots(self, parcels: list[list[HeadRows]], mine: bool) -> tuple[list[list[Slot]], list[int]]:
        """(the slots of one side, its splits) for the parcels to or from each rank. mine: whether this rank sends."""
        start, slots, splits = 0, [], []
        for of_rank in parcels:
            begin, line = start, []
            for rows, alike in [(x, list(y)) for x, y in itertools.groupby(of_rank, lambda parcel: len(parcel.rows))]:
                at = 0
                block = Block(start, rows, sum(len(heads) for heads, _ in alike))
                for heads, its_rows in alike:
                    pieces = its_rows.pieces if len(its_rows.pieces) == 1 else (its_rows.positions,)
                    own = as_index(pieces[0], self.plan.shards[self.ranks.rank].start) if mine else None
                    line.append(Slot(block, at, heads, own))
                    at += len(heads)
                start += rows * self.row(block)
            slots.append(line)
            splits.append(start - begin)
        return slots, splits

    def to(self, device) -> None:
        """Move the indices that copies need to the device."""
        self.copies = {stage: [x.to(device) for x in copies] for stage, copies in self.copies.items()}

    def row(self, block: Block) -> int:
        """How many elements a row of the block has."""
        return block.width * math.prod(self.shape)

    def rows(self, buffer: Tensor, block: Block, batch: slice = slice(None)) -> Tensor:
        """A block as a view (2 B, its rows, its heads, D), first the keys of these batch entries, then the values."""
        (two, b, d), first = self.shape, batch.start or 0
        size = two * len(range(b)[batch]), block.rows, block.width, d
        strides = block.width * d * (1 if size[0] == two * b else b), self.row(block), d, 1
        with self.ranks.unfollowed():
            return buffer.as_strided(size, strides, buffer.storage_offset() + block.start + first * block.width * d)

    def pack(self, stage: Stage, k: Tensor, v: Tensor, sent: Tensor) -> None:
        """Copy what this rank sends in a stage, from k and v (B, L, G, D), into `sent`."""
        for copy in self.copies[stage]:
            # only rows that are gathered first take memory
            with contextlib.nullcontext() if isinstance(copy.target.rows, Tensor) else self.ranks.unfollowed():
                for to, own in zip(self.rows(sent, copy.block).chunk(2), (k, v), strict=True):
                    copy.source.put(to, copy.target.of(own))

    def group_cast(self, stage: Stage, sent: Tensor, received: Tensor):
        """Start to send what ranks have packed into `sent`; it arrives in `received`. Returns a handle to wait on."""
        return self._start(sent, received, *self.splits[stage])

    def group_reduce(self, stage: Stage, returned: Tensor, arrived: Tensor):
        """Start to return gradients, laid out as `received`, to the ranks that hold the rows; `add` then sums them."""
        return self._start(returned, arrived, *self.splits[stage][::-1])

    def add(self, stage: Stage, arrived: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add what `group_reduce` brought, laid out as `sent`, to dk and dv (B, L, G, D) of this rank's rows."""
        for copy in self.copies[stage]:
            for total, part in zip((dk, dv), self.rows(arrived, copy.block).chunk(2), strict=True):
                copy.target.add(total, copy.source.of(part))

    def _start(self, source: Tensor, target: Tensor, out: list[int], into: list[int]):
        if not self.moves:
            return OneStream()
        return self.ranks.all_to_all(target[: sum(into)], source[: sum(out)], into, out, wait=False)


def _copies(slot: Slot) -> list[Copy]:
    """Of a parcel that is sent: one, or one for each head if its heads are not evenly spaced."""
    every, pairs = slice(0, slot.block.rows), [(slot.at + x, h) for x, h in enumerate(slot.heads)]
    return [Copy(slot.block, StridedView(every, to), StridedView(slot.own, heads)) for to, heads in evenly(pairs)]


class QueryExchange:
    """Moves rows of queries from the ranks that hold them to those that compute them (`Plan.work`), or back.

    x (B, rows here, ...) -> (B, rows wanted here, ...): `keep` makes the result with the rows that stay on this rank,
    `exchange` then brings those of other ranks.
    source, target: by rank, slices of the rows here that it wants, and of the rows wanted here that it has; size: how
    many are wanted here
    """

    def __init__(self, ranks: Ranks, source: list[list[slice]], target: list[list[slice]], size: int):
        self.ranks, self.source, self.target, self.size = ranks, source, target, size

    @classmethod
    def both(cls, plan: Plan, ranks: Ranks) -> tuple[QueryExchange, QueryExchange]:
        """(from holders to those that compute, back)."""
        held, computed = plan.queries(ranks.rank), plan.work(ranks.rank)
        places = list(zip(computed, (0, len(computed[0])), strict=True))
        here, there = [], []
        for x in range(plan.world):
            its = plan.queries(x)
            here.append([_moved(clip(w, held.start, held.stop), -held.start) for w in plan.work(x)])
            there.append([_moved(clip(w, its.start, its.stop), at - w.start) for w, at in places])
        return cls(ranks, here, there, sum(map(len, computed))), cls(ranks, there, here, len(held))

    def keep(self, x: Tensor) -> Tensor:
        rows = x.new_empty(x.shape[0], self.size, *x.shape[2:])
        for here, there in zip(self.source[self.ranks.rank], self.target[self.ranks.rank], strict=True):
            rows[:, there] = x[:, here]
        return rows

    def exchange(self, x: Tensor, rows: Tensor) -> None:
        rank, each = self.ranks.rank, x.shape[0] * math.prod(x.shape[2:])
        sides = self.source, self.target
        out, into = ([(y != rank) * each * sum(map(length, s)) for y, s in enumerate(side)] for side in sides)
        sent, wanted = (
            [rows_of[:, s] for y, some in enumerate(side) if y != rank for s in some if length(s)]
            for rows_of, side in zip((x, rows), sides, strict=True)
        )
        # a single part of a single sequence is sent and received in place
        flat = [part.transpose(0, 1).flatten().contiguous() for part in sent]
        packed = flat[0] if len(flat) == 1 else torch.cat(flat) if flat else x.new_empty(0)
        straight = len(wanted) == 1 and x.shape[0] == 1 and wanted[0].is_contiguous()
        arrived = wanted[0].view(-1) if straight else x.new_empty(sum(into))
        self.ranks.all_to_all(arrived, packed, into, out)
        start = 0
        for part in [] if straight else wanted:
            size = part.shape[1] * each
            some = arrived[start : start + size].view(part.shape[1], part.shape[0], *part.shape[2:])
            part.copy_(some.transpose(0, 1))
            start += size


def _moved(x: range, by: int) -> slice:
    return slice(x.start + by, x.stop + by) if x else slice(0, 0)
