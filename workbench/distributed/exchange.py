"""Moving rows between ranks: packed into one buffer, sent by one all-to-all, with zero splits where nothing is needed.

Keys and values travel together, their gradients the same way back. A parcel in a buffer is (rows, 2, B, key heads, D):
rows first, so that what comes from several ranks is a run of memory each.

Dimensions: B batch, N rows of a rank, G key heads, D head_dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.distributed.plans import Plan, Stage
from workbench.distributed.shards import Rows, as_index, clip


class Slot(NamedTuple):
    """A parcel's place in a buffer, and among a rank's own rows and heads (for parcels that the rank sends)."""

    start: int
    rows: int
    heads: tuple[int, ...]
    own: slice | Tensor | None


class Exchange:
    """The exchanges of a plan, from one rank's side: what it sends and receives in a stage, and where it lies."""

    def __init__(self, plan: Plan, rank: int, group, batch: int, head_dim: int, device):
        self.plan, self.rank, self.group, self.device = plan, rank, group, device
        self.shape = (2, batch, head_dim)
        self.moves = bool(plan.units.any())
        self.slots: dict[Stage, tuple[list[list[Slot]], list[list[Slot]]]] = {}
        self.splits: dict[Stage, tuple[list[int], list[int]]] = {}
        for stage in plan.stages:
            sides = [self._slots([plan.parcels(rank, x, stage) for x in range(plan.world)], mine=True),
                     self._slots([plan.parcels(x, rank, stage) for x in range(plan.world)], mine=False)]  # fmt: skip
            self.slots[stage] = tuple(slots for slots, _ in sides)
            self.splits[stage] = tuple(splits for _, splits in sides)

    def _slots(self, parcels, mine: bool):
        start, slots, splits = 0, [], []
        each = 2 * self.shape[1] * self.shape[2]
        for of_rank in parcels:
            begin, line = start, []
            for heads, rows in of_rank:
                own = select(rows, self.plan.shards[self.rank].start, self.device) if mine else None
                line.append(Slot(start, len(rows), heads, own))
                start += len(rows) * len(heads) * each
            slots.append(line)
            splits.append(start - begin)
        return slots, splits

    def room(self, side: int) -> int:
        """Elements of the largest stage that this rank sends (0) or receives (1)."""
        return max((sum(splits[side]) for splits in self.splits.values()), default=0)

    def elements(self, slot: Slot) -> int:
        return slot.rows * len(slot.heads) * math.prod(self.shape)

    def parcel(self, buffer: Tensor, slot: Slot) -> Tensor:
        """(rows, 2, B, heads, D), a view of the buffer."""
        two, batch, d = self.shape
        part = buffer[slot.start : slot.start + self.elements(slot)]
        return part.view(slot.rows, two, batch, len(slot.heads), d)

    def pack(self, stage: Stage, k: Tensor, v: Tensor, sent: Tensor) -> None:
        """Put what this rank sends in a stage, of k and v (B, N, G, D), into `sent`."""
        for slot in (slot for line in self.slots[stage][0] for slot in line):
            parcel = self.parcel(sent, slot)
            for x, source in enumerate((k, v)):
                rows = source[:, slot.own] if isinstance(slot.own, slice) else source.index_select(1, slot.own)
                for to, heads in _heads(slot.heads):
                    parcel[:, x, :, to] = rows[:, :, heads].transpose(0, 1)

    def fetch(self, stage: Stage, sent: Tensor, received: Tensor):
        """Start to bring what this rank needs, once all have packed: `received` comes."""
        return self._start(sent, received, *self.splits[stage])

    def give(self, stage: Stage, returned: Tensor, arrived: Tensor):
        """Start taking the gradients of received rows (laid out as `received`) back to the ranks that hold the rows."""
        return self._start(returned, arrived, *self.splits[stage][::-1])

    def add(self, stage: Stage, arrived: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add what `give` brought, laid out as `sent`, to the gradients of this rank's rows (B, N, G, D)."""
        for slot in (slot for line in self.slots[stage][0] for slot in line):
            parcel = self.parcel(arrived, slot)
            for x, total in enumerate((dk, dv)):
                for of, heads in _heads(slot.heads):
                    part = parcel[:, x, :, of].transpose(0, 1)
                    if isinstance(slot.own, slice):
                        total[:, slot.own, heads] += part
                    else:
                        total[:, :, heads].index_add_(1, slot.own, part)

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

    there(x): (B, own queries, ...) -> (B, queries to be computed, ...); back(x) is its inverse.
    """

    def __init__(self, plan: Plan, rank: int, group):
        self.plan, self.rank, self.group = plan, rank, group
        every = range(plan.world)
        held, self.computed = plan.queries(rank), plan.work(rank)
        first = held.start
        # by rank: slices of the rows held, and of the rows computed, that are that rank's other half
        self.held = [[_moved(clip(w, held.start, held.stop), -first) for w in plan.work(x)] for x in every]
        starts = [0, len(self.computed[0])]
        self.taken = [
            [
                _moved(clip(w, plan.queries(x).start, plan.queries(x).stop), at - w.start)
                for w, at in zip(self.computed, starts, strict=False)
            ]
            for x in every
        ]
        self.sizes = len(held), sum(map(len, self.computed))

    def there(self, x: Tensor) -> Tensor:
        return self._move(x, self.held, self.taken, self.sizes[1])

    def back(self, x: Tensor) -> Tensor:
        return self._move(x, self.taken, self.held, self.sizes[0])

    def _move(self, x: Tensor, source, target, size: int) -> Tensor:
        result = x.new_empty(x.shape[0], size, *x.shape[2:])
        each = x.shape[0] * math.prod(x.shape[2:])
        for here, there in zip(source[self.rank], target[self.rank], strict=True):
            result[:, there] = x[:, here]
        out, into = ([_size(s) * each * (y != self.rank) for y, s in enumerate(side)] for side in (source, target))
        parts = [x[:, s].transpose(0, 1).flatten() for y, side in enumerate(source) if y != self.rank for s in side]
        sent = torch.cat(parts) if parts else x.new_empty(0)
        arrived = x.new_empty(sum(into))
        all_to_all(arrived, sent, into, out, self.group)
        start = 0
        for s in (s for y, side in enumerate(target) if y != self.rank for s in side):
            rows = s.stop - s.start
            part = arrived[start : start + rows * each].view(rows, x.shape[0], *x.shape[2:])
            result[:, s] = part.transpose(0, 1)
            start += rows * each
        return result


def _moved(x: range, by: int) -> slice:
    return slice(x.start + by, x.stop + by) if x else slice(0, 0)


def _size(slices: list[slice]) -> int:
    return sum(s.stop - s.start for s in slices)
