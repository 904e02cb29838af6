"""Moving rows between ranks: packed into one buffer, sent by one all-to-all, with zero splits where nothing is needed.

Keys and values travel together, their gradients the same way back. A block of parcels is (rows, 2, B, key heads, D):
rows first, so that what comes from several ranks is a run of memory each.

Dimensions: B batch, N rows of a rank, G key heads, D head_dim.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.distributed.plans import Plan, Stage
from workbench.distributed.shards import Rows, as_index, clip
from workbench.distributed.skews import Skew, skews


class Slot(NamedTuple):
    """A parcel's place in a buffer, and among a rank's own rows and heads (for parcels that the rank sends).

    Parcels of as many rows lie side by side, a block: start, rows and width (in heads) are the block's; at: which of
    these heads is the parcel's first.
    """

    start: int
    rows: int
    width: int
    at: int
    heads: tuple[int, ...]
    own: slice | Tensor | None


class Put(NamedTuple):
    """What goes into `count` parcels side by side, the first in `slot`, or into some of the heads of one.

    to: the heads of each parcel; index: the rank's rows (None: those of `own`); own: rows and heads among these
    """

    slot: Slot
    count: int
    to: slice
    index: Tensor | None
    own: Skew


class Exchange:
    """The exchanges of a plan, from one rank's side: what it sends and receives in a stage, and where it lies."""

    def __init__(self, plan: Plan, rank: int, group, batch: int, head_dim: int, device):
        self.plan, self.rank, self.group, self.device = plan, rank, group, device
        self.shape = (2, batch, head_dim)
        self.moves = bool(plan.units.any())
        self.slots: dict[Stage, tuple[list[list[Slot]], list[list[Slot]]]] = {}
        self.splits: dict[Stage, tuple[list[int], list[int]]] = {}
        self.puts: dict[Stage, list[Put]] = {}
        for stage in plan.stages:
            sides = [self._slots([plan.parcels(rank, x, stage) for x in range(plan.world)], mine=True),
                     self._slots([plan.parcels(x, rank, stage) for x in range(plan.world)], mine=False)]  # fmt: skip
            self.slots[stage] = tuple(slots for slots, _ in sides)
            self.splits[stage] = tuple(splits for _, splits in sides)
            self.puts[stage] = [put for line in self.slots[stage][0] for put in _puts(line)]
        # elements of the largest stage that this rank sends, and receives
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
                    own = select(its_rows, self.plan.shards[self.rank].start, self.device) if mine else None
                    line.append(Slot(start, rows, width, at, heads, own))
                    at += len(heads)
                start += rows * width * each
            slots.append(line)
            splits.append(start - begin)
        return slots, splits

    def row(self, slot: Slot) -> int:
        """Elements of a row of the slot's block."""
        return slot.width * math.prod(self.shape)

    def parcels(self, buffer: Tensor, slot: Slot, count: int) -> Tensor:
        """(rows, 2, B, count, heads, D), a view of the buffer: alike parcels side by side, the first in `slot`."""
        two, batch, d = self.shape
        block = buffer[slot.start : slot.start + slot.rows * self.row(slot)].view(slot.rows, two, batch, slot.width, d)
        return block[:, :, :, slot.at : slot.at + count * len(slot.heads)].unflatten(3, (count, -1))

    def pack(self, stage: Stage, k: Tensor, v: Tensor, sent: Tensor) -> None:
        """Put what this rank sends in a stage, of k and v (B, N, G, D), into `sent`."""
        for put in self.puts[stage]:
            parcels = self.parcels(sent, put.slot, put.count)[..., put.to, :]
            for x, source in enumerate((k, v)):
                if put.index is None:
                    rows = put.own.of(source)
                else:
                    rows = source[:, :, put.own.heads].index_select(1, put.index).unsqueeze(2)
                parcels[:, x] = rows.transpose(0, 1)

    def fetch(self, stage: Stage, sent: Tensor, received: Tensor):
        """Start to bring what this rank needs, once all have packed: `received` comes."""
        return self._start(sent, received, *self.splits[stage])

    def give(self, stage: Stage, returned: Tensor, arrived: Tensor):
        """Start taking the gradients of received rows (laid out as `received`) back to the ranks that hold the rows."""
        return self._start(returned, arrived, *self.splits[stage][::-1])

    def add(self, stage: Stage, arrived: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add what `give` brought, laid out as `sent`, to the gradients of this rank's rows (B, N, G, D)."""
        for put in self.puts[stage]:
            parcels = self.parcels(arrived, put.slot, put.count)[..., put.to, :]
            for x, total in enumerate((dk, dv)):
                part = parcels[:, x].transpose(0, 1)
                if put.index is None:
                    put.own.of(total).add_(part)
                else:
                    total[:, :, put.own.heads].index_add_(1, put.index, part.squeeze(2).to(total.dtype))

    def _start(self, source: Tensor, target: Tensor, out: list[int], into: list[int]):
        if not self.moves:
            return _Done
        return all_to_all(target[: sum(into)], source[: sum(out)], into, out, self.group, wait=False)


class _Done:
    """What there is to wait for where nothing moves."""

    wait = staticmethod(lambda: None)


def all_to_all(target: Tensor, source: Tensor, into: list[int], out: list[int], group, wait: bool = True):
    """Every transfer of rows goes through here. into, out: elements from and to each rank."""
    return dist.all_to_all_single(target, source, into, out, group=group, async_op=not wait)


def _puts(line: list[Slot]) -> list[Put]:
    """What goes into the parcels for one rank, as few copies."""
    found = []
    for slot in line:
        for to, heads in _heads(slot.heads):
            index = None if isinstance(slot.own, slice) else slot.own
            rows = slot.own if index is None else slice(0, slot.rows)
            found.append(Put(slot, 1, to, index, Skew(rows, heads)))
    if len(found) > len(line) or any(put.index is not None for put in found):
        return found
    together, first = [], 0
    for own in skews([put.own[:2] for put in found]):
        together.append(found[first]._replace(count=own.count, own=own))
        first += own.count
    return together


def _heads(heads: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """(where in the parcel, which heads): one pair of slices if they are evenly spaced, else one each."""
    steps = {b - a for a, b in zip(heads, heads[1:], strict=False)} or {1}
    if len(steps) == 1:
        return [(slice(0, len(heads)), slice(heads[0], heads[-1] + 1, min(steps)))]
    return [(slice(x, x + 1), slice(h, h + 1)) for x, h in enumerate(heads)]


def select(rows: Rows, start: int, device) -> slice | Tensor:
    """Positions as an index of the rows of a shard that begins at `start`."""
    if len(rows.pieces) == 1 and isinstance(x := rows.pieces[0], range):
        return slice(x[0] - start, x[-1] - start + 1, x.step)
    index = as_index(rows.positions - start)
    return index if isinstance(index, slice) else index.to(device)


class Regroup:
    """Rows of queries from the ranks that hold them to those that compute them, and back.

    `kept` then `bring`: (B, queries held, ...) -> (B, queries computed, ...), first the rows that stay on this rank,
    then those that come from others. `back` is the inverse, in one call.
    """

    def __init__(self, plan: Plan, rank: int, group):
        self.rank, self.group, every = rank, group, range(plan.world)
        held, computed = plan.queries(rank), plan.work(rank)
        # for each rank: slices of the rows held here that it computes, and of the rows computed here that it holds
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
        rows = self._kept(x, self.taken, self.held, self.sizes[0])
        self._bring(x, rows, self.taken, self.held)
        return rows

    def kept(self, x: Tensor) -> Tensor:
        return self._kept(x, self.held, self.taken, self.sizes[1])

    def bring(self, x: Tensor, rows: Tensor) -> None:
        self._bring(x, rows, self.held, self.taken)

    def _kept(self, x: Tensor, source, target, size: int) -> Tensor:
        rows = x.new_empty(x.shape[0], size, *x.shape[2:])
        for here, there in zip(source[self.rank], target[self.rank], strict=True):
            rows[:, there] = x[:, here]
        return rows

    def _bring(self, x: Tensor, rows: Tensor, source, target) -> None:
        each = x.shape[0] * math.prod(x.shape[2:])
        out, into = ([_size(s) * each * (y != self.rank) for y, s in enumerate(side)] for side in (source, target))
        sent, wanted = (
            [rows_of[:, s] for y, side in enumerate(sides) if y != self.rank for s in side if s.stop > s.start]
            for rows_of, sides in ((x, source), (rows, target))
        )
        # a single part of a single sequence is sent and received in place
        flat = [part.transpose(0, 1).flatten().contiguous() for part in sent]
        packed = flat[0] if len(flat) == 1 else torch.cat(flat) if flat else x.new_empty(0)
        straight = len(wanted) == 1 and x.shape[0] == 1 and wanted[0].is_contiguous()
        arrived = wanted[0].view(-1) if straight else x.new_empty(sum(into))
        all_to_all(arrived, packed, into, out, self.group)
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
