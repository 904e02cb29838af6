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

from workbench.distributed.copies import Block, Copy, StridedView, evenly, joined
from workbench.distributed.group import OneStream, Ranks
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
            sides = [self._slots([plan.parcels(rank, x, stage) for x in range(plan.world)], mine=True),
                     self._slots([plan.parcels(x, rank, stage) for x in range(plan.world)], mine=False)]  # fmt: skip
            self.slots[stage] = tuple(slots for slots, _ in sides)
            self.splits[stage] = tuple(splits for _, splits in sides)
            self.copies[stage] = joined(
                copy for line in self.slots[stage][0] for slot in line for copy in _copies(slot)
            )
        self.room = [max((sum(x[side]) for x in self.splits.values()), default=0) for side in (0, 1)]

    def _slots(self, parcels, mine: bool):
        start, slots, splits = 0, [], []
        each = 2 * self.shape[1] * self.shape[2]
        for of_rank in parcels:
            begin, line = start, []
            for rows, block in itertools.groupby(of_rank, lambda parcel: len(parcel.rows)):
                block = list(block)
                width, at = sum(len(heads) for heads, _ in block), 0
                for heads, its_rows in block:
                    pieces = its_rows.pieces if len(its_rows.pieces) == 1 else (its_rows.positions,)
                    own = as_index(pieces[0], self.plan.shards[self.ranks.rank].start) if mine else None
                    line.append(Slot(Block(start, rows, width), at, heads, own))
                    at += len(heads)
                start += rows * width * each
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
        two, b, d = self.shape
        with self.ranks.unfollowed():
            flat = buffer[block.start : block.start + block.rows * self.row(block)]
            return flat.view(block.rows, two, b, block.width, d)[:, :, batch].permute(1, 2, 0, 3, 4).flatten(0, 1)

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
    """Moves rows of queries from the ranks that hold them to those that compute them, and back (`Plan.work`).

    `keep` then `exchange`: (B, queries held, ...) -> (B, queries computed, ...), first the rows that stay on this rank,
    then those that come from others. `back` is the inverse, in one call.
    """

    def __init__(self, plan: Plan, ranks: Ranks):
        self.ranks, rank, every = ranks, ranks.rank, range(plan.world)
        held, computed = plan.queries(rank), plan.work(rank)
        # by rank: slices of the rows held here that the rank computes, and of the rows computed here that it holds
        self.held = [[_moved(clip(w, held.start, held.stop), -held.start) for w in plan.work(x)] for x in every]
        starts = [0, len(computed[0])]
        self.taken = [
            [
                _moved(clip(w, plan.queries(x).start, plan.queries(x).stop), at - w.start)
                for w, at in zip(computed, starts, strict=True)
            ]
            for x in every
        ]
        self.sizes = len(held), sum(map(len, computed))

    def back(self, x: Tensor) -> Tensor:
        rows = self._keep(x, self.taken, self.held, self.sizes[0])
        self._exchange(x, rows, self.taken, self.held)
        return rows

    def keep(self, x: Tensor) -> Tensor:
        return self._keep(x, self.held, self.taken, self.sizes[1])

    def exchange(self, x: Tensor, rows: Tensor) -> None:
        self._exchange(x, rows, self.held, self.taken)

    def _keep(self, x: Tensor, source, target, size: int) -> Tensor:
        rows = x.new_empty(x.shape[0], size, *x.shape[2:])
        for here, there in zip(source[self.ranks.rank], target[self.ranks.rank], strict=True):
            rows[:, there] = x[:, here]
        return rows

    def _exchange(self, x: Tensor, rows: Tensor, source, target) -> None:
        rank, each = self.ranks.rank, x.shape[0] * math.prod(x.shape[2:])
        out, into = ([_size(s) * each * (y != rank) for y, s in enumerate(side)] for side in (source, target))
        sent, wanted = (
            [rows_of[:, s] for y, side in enumerate(sides) if y != rank for s in side if s.stop > s.start]
            for rows_of, sides in ((x, source), (rows, target))
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


def _size(slices: list[slice]) -> int:
    return sum(s.stop - s.start for s in slices)
