"""Moving rows between ranks: packed into one buffer and sent by one all-to-all, with splits of 0 where nothing moves.

Keys and values travel together, and their gradients return the same way. A parcel is what one rank sends another of
some key heads (`Need`); parcels of as many rows make up a block (rows, 2, B, key heads, D). Rows come first, so that
what each rank sends is contiguous where it arrives.

Dimensions: B batch, N rows of a rank, G key heads, D head_dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.distributed.plans import Plan, Stage
from workbench.distributed.shards import Rows, as_index, clip


class Skew(NamedTuple):
    """`count` steps, each of as many rows and heads as the first, `row_turn` rows and `head_turn` heads further on."""

    rows: slice
    heads: slice
    count: int = 1
    row_turn: int = 0
    head_turn: int = 0

    def of(self, x: Tensor) -> Tensor:
        """A view (B, R, C, h, ...) of x (B, L, H, ...)."""
        first = x[:, self.rows, self.heads]
        if self.count == 1:
            return first.unsqueeze(2)
        (b, r, h, *rest), (of_b, of_r, of_h, *strides) = first.shape, first.stride()
        turn = self.row_turn * x.stride(1) + self.head_turn * x.stride(2)
        return first.as_strided((b, r, self.count, h, *rest), (of_b, of_r, turn, of_h, *strides))

    def each(self) -> Iterator[tuple[slice, slice]]:
        """The rows and heads of each step."""
        for x in range(self.count):
            turns = x * self.row_turn, x * self.head_turn
            yield tuple(
                slice(y.start + by, y.stop + by, y.step) for y, by in zip((self.rows, self.heads), turns, strict=True)
            )

    def and_then(self, rows: slice, heads: slice) -> Skew | None:
        """This skew with these rows and heads as its next step, or None if they are not one."""
        if not (_alike(self.rows, rows) and _alike(self.heads, heads)):
            return None
        ahead = rows.start - self.rows.start, heads.start - self.heads.start
        turns = ahead if self.count == 1 else (self.row_turn, self.head_turn)
        if min(turns) < 0 or ahead != (self.count * turns[0], self.count * turns[1]):
            return None  # a stride cannot be negative
        return Skew(self.rows, self.heads, self.count + 1, *turns)


def skews(pairs: Iterable[tuple[slice, slice]]) -> list[Skew]:
    """(rows, heads) pairs, in their order, as few skews. The slices have to have starts and stops."""
    found: list[Skew] = []
    for rows, heads in pairs:
        longer = found[-1].and_then(rows, heads) if found else None
        if longer:
            found[-1] = longer
        else:
            found.append(Skew(rows, heads))
    return found


def _alike(x: slice, y: slice) -> bool:
    many = length(x)
    return many == length(y) and (many < 2 or (x.step or 1) == (y.step or 1))


def length(x: slice) -> int:
    return len(range(x.start, x.stop, x.step or 1))


class Slot(NamedTuple):
    """A parcel's place in a buffer.

    start, rows, width: of its block, where the block begins and how many rows and heads it has
    at: the parcel's first head in the block; heads: the key heads that the parcel is for
    own: the parcel's rows among this rank's own, if the rank sends it
    """

    start: int
    rows: int
    width: int
    at: int
    heads: tuple[int, ...]
    own: slice | Tensor | None


class Put(NamedTuple):
    """One copy, into `count` parcels side by side of which `slot` is the first, or into some heads of one parcel.

    to: which heads of each parcel; own: the rank's rows and heads that go there; index: rows instead of those of `own`,
    int64, where they are not evenly spaced
    """

    slot: Slot
    count: int
    to: slice
    index: Tensor | None
    own: Skew


class Exchange:
    """The exchanges of a plan from one rank's side: what it sends and receives in each stage, and where in buffers."""

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
        # the most elements that a stage sends, and that it receives
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
        """How many elements a row of the slot's block has."""
        return slot.width * math.prod(self.shape)

    def parcels(self, buffer: Tensor, slot: Slot, count: int) -> Tensor:
        """`count` parcels of equal shape side by side, the first in `slot`: a view (rows, 2, B, count, heads, D)."""
        two, batch, d = self.shape
        block = buffer[slot.start : slot.start + slot.rows * self.row(slot)].view(slot.rows, two, batch, slot.width, d)
        return block[:, :, :, slot.at : slot.at + count * len(slot.heads)].unflatten(3, (count, -1))

    def pack(self, stage: Stage, k: Tensor, v: Tensor, sent: Tensor) -> None:
        """Copy what this rank sends in a stage, from k and v (B, N, G, D), into `sent`."""
        for put in self.puts[stage]:
            parcels = self.parcels(sent, put.slot, put.count)[..., put.to, :]
            for x, source in enumerate((k, v)):
                if put.index is None:
                    rows = put.own.of(source)
                else:
                    rows = source[:, :, put.own.heads].index_select(1, put.index).unsqueeze(2)
                parcels[:, x] = rows.transpose(0, 1)

    def fetch(self, stage: Stage, sent: Tensor, received: Tensor):
        """Start the all-to-all from what ranks have packed into `sent` to `received`; returns a handle to wait on."""
        return self._start(sent, received, *self.splits[stage])

    def give(self, stage: Stage, returned: Tensor, arrived: Tensor):
        """Start the all-to-all that returns gradients, laid out as `received`, to the ranks that hold the rows."""
        return self._start(returned, arrived, *self.splits[stage][::-1])

    def add(self, stage: Stage, arrived: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add what `give` brought, laid out as `sent`, to the gradients dk and dv (B, N, G, D) of this rank's rows."""
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
    """The handle of an exchange in which nothing moves."""

    wait = staticmethod(lambda: None)


def all_to_all(target: Tensor, source: Tensor, into: list[int], out: list[int], group, wait: bool = True):
    """torch's all-to-all; all rows move through here. into, out: how many elements come from and go to each rank."""
    return dist.all_to_all_single(target, source, into, out, group=group, async_op=not wait)


def _puts(line: list[Slot]) -> list[Put]:
    """The copies that fill the parcels for one rank, as few as possible."""
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
    """(place in the parcel, heads): one pair of slices if the heads are evenly spaced, else a pair for each head."""
    steps = {b - a for a, b in zip(heads, heads[1:], strict=False)} or {1}
    if len(steps) == 1:
        return [(slice(0, len(heads)), slice(heads[0], heads[-1] + 1, min(steps)))]
    return [(slice(x, x + 1), slice(h, h + 1)) for x, h in enumerate(heads)]


def select(rows: Rows, start: int, device) -> slice | Tensor:
    """Positions as an index into the rows of a shard that begins at `start`."""
    if len(rows.pieces) == 1 and isinstance(x := rows.pieces[0], range):
        return slice(x[0] - start, x[-1] - start + 1, x.step)
    index = as_index(rows.positions - start)
    return index if isinstance(index, slice) else index.to(device)


class Regroup:
    """Moves rows of queries from the ranks that hold them to those that compute them, and back (`Plan.work`).

    `kept` then `bring`: (B, queries held, ...) -> (B, queries computed, ...), first the rows that stay on this rank,
    then those that come from others. `back` is the inverse, in one call.
    """

    def __init__(self, plan: Plan, rank: int, group):
        self.rank, self.group, every = rank, group, range(plan.world)
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
