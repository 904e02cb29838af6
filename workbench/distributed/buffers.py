"""A job made ready for one rank: where its rows lie among the rank's own, in received buffers, and in returned ones.

All that does not depend on the tensors is found once, when the task is made.

Dimensions: B batch, L rows of this rank, Q queries that it computes, H query heads, G key heads, D head_dim, M keys of
the job, R rows and h heads of each of the C steps of a skew.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from workbench.distributed.exchange import Exchange, Skew, Slot, length, skews
from workbench.distributed.partials import Fill, Job
from workbench.distributed.plans import Stage


class Part(NamedTuple):
    """Rows of a job's keys that one copy fills, and whose gradients one addition returns.

    to, heads: where among the keys and key heads of the job, `count` runs of heads side by side
    slot: the first of as many parcels (None: the rank's own rows); rows, its_heads: which of each parcel's
    own: which of the rank's own rows and heads
    alone: whether it is the first to write gradients there (see `Written`)
    """

    to: slice | Tensor
    heads: slice
    count: int
    slot: Slot | None
    rows: slice | Tensor
    its_heads: slice
    own: Skew
    alone: bool = False


class Task:
    """A job, and the stage of the exchange that it waits for (None: it needs no row of another rank).

    work: the parts of the queries that the rank computes, each with the row at which it begins
    keys, key_heads: how many the job has; own: its keys as a view of the rank's own rows, if they are one
    lying: its keys as a view of the stage's receive buffer, if they are one; behind: how many of them are not received:
        the rank's own rows, which have to be copied there, or padding that no query sees
    full: whether `parts` fill all keys
    picked: the rank's queries that the job has, int64, if they are a tensor; it replaces their results
    replaced: the rank's queries whose results another job replaces, int64, or None
    alone: whether the job is the first to write where its results go (see `Written`)
    """

    def __init__(self, job: Job, fills: list[Fill], stage: Stage | None, exchange: Exchange, work, key_heads: int):
        self.job, self.fills, self.exchange = job, [_on(x, exchange.device) for x in fills], exchange
        self.stage = stage
        self.batch = slice(None) if job.batch is None else slice(job.batch, job.batch + 1)
        first = work[0][0].start
        self.picked, self.replaced = (
            x.sub(first).to(exchange.device) if isinstance(x, Tensor) else None
            for x in (job.strands[0].queries, job.replaced)
        )
        ranges = job.strands if self.picked is None else ()
        self.queries = skews([(_rows(s.queries, work), s.heads) for s in ranges])
        self.heads = list(itertools.accumulate((x.count * length(x.heads) for x in self.queries), initial=0))
        self.alone = False  # until `Written` says so
        self.keys = len(job.strands[0].keys)
        self.key_heads = sum(len(range(key_heads)[s.key_heads]) for s in job.strands)
        self.slots = [None if x.parcel is None else exchange.slots[stage][1][x.source][x.parcel] for x in self.fills]
        self.parts = self._parts()
        own = [x for x in self.fills if x.parcel is None]
        self.own = own[0] if own == self.fills and len(own) == 1 and _length(own[0].to) == self.keys else None
        self.lying, self.behind = self._lying(stage)
        self.full = sum(_length(x.to) * _length(x.to_heads) for x in self.fills) == self.keys * self.key_heads

    def _lying(self, stage: Stage | None) -> tuple[Slot | None, int]:
        """(where in the stage's receive buffer the job's keys lie in order, how many at the end are not received).

        (None, 0) if they do not lie there.
        """
        found, rows, no = None, 0, (None, 0)
        received = [x for x in self.parts if x.slot is not None]
        for _, of_source in itertools.groupby(received, lambda part: part.slot.start):
            for x in (parts := list(of_source)):
                if isinstance(x.rows, Tensor) or isinstance(x.to, Tensor) or (x.rows.step or 1) != 1:
                    return no
                its_heads = slice(x.slot.at, x.slot.at + x.count * len(x.slot.heads))
                if _plain(x.heads) != its_heads or x.its_heads.indices(len(x.slot.heads)) != (0, len(x.slot.heads), 1):
                    return no
            first = parts[0]
            if any((x.to, x.rows) != (first.to, first.rows) for x in parts) or first.to.start != rows:
                return no
            if first.slot.width != self.key_heads or sum(length(x.heads) for x in parts) != self.key_heads:
                return no
            start = first.slot.start + first.rows.start * self.exchange.row(first.slot)
            if found is not None and found.start + rows * self.exchange.row(found) != start:
                return no
            found = found or first.slot._replace(start=start, at=0, heads=tuple(range(self.key_heads)))
            rows += length(first.rows)
        if found is None:
            return no
        behind, own = self.keys - rows, [x for x in self.parts if x.slot is None]
        if behind and found.start + rows * self.exchange.row(found) != sum(self.exchange.splits[stage][1]):
            return no  # something else arrives there
        if own and (
            any(x.to != slice(rows, self.keys) for x in own) or sum(length(x.heads) for x in own) != self.key_heads
        ):
            return no
        return found._replace(rows=self.keys), behind

    def _parts(self) -> list[Part]:
        """The fills as few copies: of own rows those that are one skew, of received rows parcels side by side."""
        found: list[Part] = []
        together = sorted(
            zip(self.fills, self.slots, strict=True), key=lambda pair: (pair[1] is not None, pair[0].source)
        )
        for x, slot in together:
            longer = self._with(found[-1], x, slot) if found else None
            if longer:
                found[-1] = longer
            else:
                found.append(Part(x.to, x.to_heads, 1, slot, x.rows, x.heads, Skew(x.rows, x.heads)))
        return found

    def _with(self, last: Part, x: Fill, slot: Slot | None) -> Part | None:
        """The part extended by a fill, if the two are one copy, else None."""
        many = length(x.to_heads)
        if any(isinstance(y, Tensor) for y in (last.to, last.rows, x.to, x.rows)) or last.to != x.to:
            return None
        if (
            (x.to_heads.step or 1) != 1
            or many * last.count != length(last.heads)
            or x.to_heads.start != last.heads.stop
        ):
            return None
        longer = last._replace(heads=slice(last.heads.start, x.to_heads.stop), count=last.count + 1)
        if slot is None:
            own = last.own.and_then(x.rows, x.heads) if last.slot is None else None
            return own and longer._replace(own=own)
        if last.slot is None or (last.rows, last.its_heads) != (x.rows, x.heads):
            return None
        many = len(slot.heads)
        same = (last.slot.start, len(last.slot.heads)) == (slot.start, many)
        return longer if same and slot.at == last.slot.at + last.count * many else None

    # --- rows ---------------------------------------------------------------------------------------------------------

    def views(self, x: Tensor) -> list[Tensor]:
        """x (B, Q, H, ...) -> the job's rows of it: views (B, R, C, h, ...), one for each skew."""
        x = x[self.batch]
        return [skew.of(x) for skew in self.queries]

    def each(self, x: Tensor) -> list[Tensor]:
        """x (B, R + spare rows, heads of the job, ...) -> views as those of `views`, without the spare rows."""
        x = x[:, : x.shape[1] - self.job.spare]
        pairs = zip(self.queries, itertools.pairwise(self.heads), strict=True)
        return [x[:, :, first:last].unflatten(2, (skew.count, -1)) for skew, (first, last) in pairs]

    def take(self, x: Tensor, value: float = 0) -> Tensor:
        """x (B, Q, H, ...) -> (B, R + spare rows, heads of the job, ...): a view if it can be one, else a copy.

        value: what spare rows are filled with
        """
        if self.picked is not None:
            return x[self.batch, :, self.job.strands[0].heads].index_select(1, self.picked)
        if len(self.queries) == 1 and self.queries[0].count == 1:
            rows, spare = x[self.batch, self.queries[0].rows, self.queries[0].heads], self.job.spare
            return pad(rows, (0, 0) * (x.dim() - 2) + (0, spare), value=value) if spare else rows
        found = self.views(x)  # only jobs of one strand have spare rows
        rows = x.new_empty(found[0].shape[0], found[0].shape[1], self.heads[-1], *x.shape[3:])
        for to, some in zip(self.each(rows), found, strict=True):
            to.copy_(some)
        return rows

    def replace(self, x: Tensor, part: Tensor) -> None:
        """Put results of `picked` into x (B, Q, H, ...), in place."""
        x[self.batch, :, self.job.strands[0].heads].index_copy_(1, self.picked, part.to(x.dtype))

    # --- keys ---------------------------------------------------------------------------------------------------------

    def gather(self, k: Tensor, v: Tensor, received: Tensor) -> list[Tensor]:
        """The job's keys and values, (B, M, key heads of the job, D) each: views if they can be, else copies."""
        if self.own is not None:
            return [x[self.batch, self.own.rows, self.own.heads] for x in (k, v)]
        k, v = k[self.batch], v[self.batch]
        if self.lying is not None:
            gathered = self.exchange.parcels(received, self.lying, 1)[:, :, self.batch, 0]
        else:
            make = k.new_empty if self.full else k.new_zeros  # keys that no query sees have to be finite
            gathered = make(self.keys, 2, k.shape[0], self.key_heads, k.shape[3])
        for part in self.parts:
            to = gathered[:, :, :, part.heads].unflatten(3, (part.count, -1))
            if part.slot is None:
                for y, mine in enumerate((k, v)):
                    to[part.to, y] = part.own.of(mine).transpose(0, 1)
            elif self.lying is None:
                to[part.to] = self._parcels(received, part)[part.rows]
        return list(gathered.permute(1, 2, 0, 3, 4).unbind(0))

    def scatter(self, dk: Tensor, dv: Tensor, totals: tuple[Tensor, Tensor], returned: Tensor) -> None:
        """Add the gradients of the job's keys and values to `totals`, of the rank's own rows (B, L, G, D each), and to
        `returned`, of received rows, laid out as these were received."""
        for part in self.parts:
            for y, (some, total) in enumerate(zip((dk, dv), totals, strict=True)):
                some = some[:, part.to, part.heads].unflatten(2, (part.count, -1))
                if part.slot is None and isinstance(part.own.rows, Tensor):
                    total[self.batch, :, part.own.heads].index_add_(1, part.own.rows, some.squeeze(2).to(total.dtype))
                    continue
                if part.slot is None:
                    to = part.own.of(total[self.batch])
                else:
                    to, some = self._parcels(returned, part)[:, y], some.transpose(0, 1)
                    if isinstance(part.rows, Tensor):
                        (to.index_copy_ if part.alone else to.index_add_)(0, part.rows, some.to(to.dtype))
                        continue
                    to = to[part.rows]
                if part.alone:
                    to.copy_(some)
                else:
                    to += some

    def _parcels(self, buffer: Tensor, part: Part) -> Tensor:
        """(rows of the parcels, 2, B, C, h, D)"""
        return self.exchange.parcels(buffer, part.slot, part.count)[:, :, self.batch, :, part.its_heads]


class Written:
    """Which tasks are the first to write where their results go: these overwrite, later ones add or merge.

    Sets `alone` of the tasks, given in the order in which they run, and of their parts.
    rows, own: how many (row, head) of out, and of the gradients of the rank's keys, are overwritten
    received: by stage, how many elements of the buffer of returned gradients are overwritten
    What is not overwritten has to be initialized. Strided rows count as all rows between the first and the last.
    """

    def __init__(self, tasks: list[Task], batch: int):
        self.rows = self.own = 0
        self.received: dict[Stage | None, int] = defaultdict(int)
        self._boxes: dict[tuple, list[tuple[range, set[int]]]] = defaultdict(list)
        for task in tasks:
            many = batch if task.job.batch is None else 1
            boxes = [x for skew in task.queries for x in skew.each()]
            task.alone = bool(boxes) and self._first(("rows", task.job.batch), boxes)
            if task.alone:
                self.rows += many * sum(map(_size, boxes))
            for x, part in enumerate(task.parts):
                if part.slot is None and isinstance(part.own.rows, Tensor):
                    alone = False  # behind the task of all own rows
                elif part.slot is None:
                    boxes = list(part.own.each())
                    alone = self._first(("own", task.job.batch), boxes)
                    self.own += alone * many * sum(map(_size, boxes))
                else:
                    slot, row = part.slot, task.exchange.row(part.slot)
                    heads = slice(slot.at, slot.at + part.count * len(slot.heads))
                    place = slice(slot.start, slot.start + slot.rows * row)
                    alone = self._first((task.stage, task.job.batch), [(place, heads)])
                    whole = _length(part.rows) == slot.rows and length(part.its_heads) == len(slot.heads)
                    size = slot.rows * row // slot.width * length(heads)
                    self.received[task.stage] += alone * (whole and task.job.batch is None) * size
                task.parts[x] = part._replace(alone=alone)

    def _first(self, where: tuple, boxes: list[tuple[slice, slice]]) -> bool:
        """Whether none of these (rows, heads) has been written in `where`; from now on they have been."""
        news = [(range(rows.start, rows.stop), set(range(heads.stop)[heads])) for rows, heads in boxes]
        before = self._boxes[where]
        alone = not any(
            max(x.start, y.start) < min(x.stop, y.stop) and its & others for x, its in news for y, others in before
        )
        before += news
        return alone


def _size(box: tuple[slice, slice]) -> int:
    return length(box[0]) * length(box[1])


def _rows(queries: range, work) -> slice:
    """The rows of a strand's queries among those that the rank computes."""
    for part, start in work:
        if part and part.start <= queries.start < part.stop:
            by = start - part.start
            return slice(queries[0] + by, queries[-1] + 1 + by, queries.step)
    raise AssertionError(f"{queries} is not among {work}")


def _plain(x: slice) -> slice | None:
    return slice(x.start, x.stop) if (x.step or 1) == 1 else None


def _length(x: slice | Tensor) -> int:
    return len(x) if isinstance(x, Tensor) else length(x)


def _on(fill: Fill, device) -> Fill:
    """The fill with its index tensors on a device."""
    return Fill(*(x.to(device) if isinstance(x, Tensor) else x for x in fill))
