"""Where the rows of a partial lie: among the rank's own, in buffers of received rows, in those of returned gradients.

A partial (`partials.Partial`) says which positions attend to which; `Placed` finds, once, which rows of which tensors
these are. A run then only copies: `take` and `gather` bring a partial's queries and keys together, as views where they
lie together already; `each` and `scatter` put its results where they belong.

Dimensions: B batch, L rows of this rank, Q queries that it computes, H query heads, G key heads, D head_dim, M keys of
the partial; of a strided view, C steps of R rows and h heads each.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from workbench.distributed.exchange import Exchange, Slot, StridedView, length, strided_views
from workbench.distributed.fills import Fill
from workbench.distributed.partials import Partial
from workbench.distributed.plans import Stage


class Part(NamedTuple):
    """Rows of a partial's keys that one copy fills, and whose gradients one addition returns.

    to, heads: where among the keys and key heads of the partial, `count` runs of heads side by side
    slot: the first of as many parcels (None: the rank's own rows); rows, its_heads: which of each parcel's
    own: which of the rank's own rows and heads
    first: whether it is the first to write gradients there (see `FirstWrites`)
    """

    to: slice | Tensor
    heads: slice
    count: int
    slot: Slot | None
    rows: slice | Tensor
    its_heads: slice
    own: StridedView
    first: bool = False


class Placed:
    """A partial, and the stage of the exchange that it waits for (None: it needs no row of another rank).

    work: the queries that the rank computes, in one range or two, which lie one after the other in its q
    keys, key_heads: how many the partial has
    own: its keys as rows of the rank's own k and v, if one indexing gives them
    in_buffer: its keys as rows of the stage's receive buffer, if they lie there one after the other, but for the
        `trailing` ones at the end: the rank's own rows, which are copied there, or padding that no query sees
    full: whether `parts` fill all keys
    border_rows: the partial's queries, int64, as rows of q, if they are no range; its results overwrite what is there
    overwritten: the queries, int64, as rows of q, whose results another partial overwrites; or None
    first: whether the partial is the first to write where its results go (see `FirstWrites`)
    """

    def __init__(self, partial: Partial, fills: list[Fill], stage: Stage | None, exchange: Exchange, work: list[range]):
        self.partial, self.fills, self.exchange, self.stage = partial, fills, exchange, stage
        self.batch = slice(None) if partial.batch is None else slice(partial.batch, partial.batch + 1)
        self.border_rows, self.overwritten = (
            x - work[0].start if isinstance(x, Tensor) else None
            for x in (partial.groups[0].queries, partial.overwritten)
        )
        ranges = partial.groups if self.border_rows is None else ()
        self.queries = strided_views([(_rows(s.queries, work), s.heads) for s in ranges])
        self.heads = list(itertools.accumulate((x.count * length(x.heads) for x in self.queries), initial=0))
        self.first = False  # until `FirstWrites` says so
        self.keys = len(partial.groups[0].keys)
        self.key_heads = sum(len(range(exchange.plan.kv_heads)[s.key_heads]) for s in partial.groups)
        self.slots = [None if x.parcel is None else exchange.slots[stage][1][x.source][x.parcel] for x in self.fills]
        self.parts = self._parts()
        own = [x for x in self.fills if x.parcel is None]
        self.own = own[0] if own == self.fills and len(own) == 1 and _length(own[0].to) == self.keys else None
        self.in_buffer, self.trailing = self._in_buffer(stage)
        self.full = sum(_length(x.to) * _length(x.to_heads) for x in self.fills) == self.keys * self.key_heads

    def to(self, device) -> None:
        """Move the indices that copies need to the device."""
        self.border_rows, self.overwritten = (_on(x, device) for x in (self.border_rows, self.overwritten))
        for x, part in enumerate(self.parts):
            if isinstance(part.rows, Tensor):
                rows = part.rows.to(device)
                part = part._replace(rows=rows, own=part.own._replace(rows=rows))
            self.parts[x] = part._replace(to=_on(part.to, device))
        if self.own is not None:
            self.own = self.own._replace(rows=self.parts[0].rows)

    def _in_buffer(self, stage: Stage | None) -> tuple[Slot | None, int]:
        """(where in the stage's receive buffer the partial's keys lie in order, how many at the end are not received).

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
        trailing, own = self.keys - rows, [x for x in self.parts if x.slot is None]
        if trailing and found.start + rows * self.exchange.row(found) != sum(self.exchange.splits[stage][1]):
            return no  # something else arrives there
        if own and (
            any(x.to != slice(rows, self.keys) for x in own) or sum(length(x.heads) for x in own) != self.key_heads
        ):
            return no
        return found._replace(rows=self.keys), trailing

    def _parts(self) -> list[Part]:
        """The fills as few copies: of own rows those that are one view, of received rows parcels side by side."""
        found: list[Part] = []
        together = sorted(
            zip(self.fills, self.slots, strict=True), key=lambda pair: (pair[1] is not None, pair[0].source)
        )
        for x, slot in together:
            longer = self._with(found[-1], x, slot) if found else None
            if longer:
                found[-1] = longer
            else:
                found.append(Part(x.to, x.to_heads, 1, slot, x.rows, x.heads, StridedView(x.rows, x.heads)))
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
            own = last.own.extended(x.rows, x.heads) if last.slot is None else None
            return own and longer._replace(own=own)
        if last.slot is None or (last.rows, last.its_heads) != (x.rows, x.heads):
            return None
        many = len(slot.heads)
        same = (last.slot.start, len(last.slot.heads)) == (slot.start, many)
        return longer if same and slot.at == last.slot.at + last.count * many else None

    # --- rows ---------------------------------------------------------------------------------------------------------

    def views(self, x: Tensor) -> list[Tensor]:
        """x (B, Q, H, ...) -> the partial's rows of it: views (B, R, C, h, ...), one for each view."""
        x = x[self.batch]
        return [view.of(x) for view in self.queries]

    def each(self, x: Tensor) -> list[Tensor]:
        """x (B, R + spare rows, heads of the partial, ...) -> views as those of `views`, without the spare rows."""
        x = x[:, : x.shape[1] - self.partial.spare]
        pairs = zip(self.queries, itertools.pairwise(self.heads), strict=True)
        return [x[:, :, first:last].unflatten(2, (view.count, -1)) for view, (first, last) in pairs]

    def take(self, x: Tensor, value: float = 0) -> Tensor:
        """x (B, Q, H, ...) -> (B, R + spare rows, heads of the partial, ...): a view if it can be one, else a copy.

        value: what spare rows are filled with
        """
        if self.border_rows is not None:
            return x[self.batch, :, self.partial.groups[0].heads].index_select(1, self.border_rows)
        if len(self.queries) == 1 and self.queries[0].count == 1:
            rows, spare = x[self.batch, self.queries[0].rows, self.queries[0].heads], self.partial.spare
            return pad(rows, (0, 0) * (x.dim() - 2) + (0, spare), value=value) if spare else rows
        found = self.views(x)  # only partials of one head group have spare rows
        rows = x.new_empty(found[0].shape[0], found[0].shape[1], self.heads[-1], *x.shape[3:])
        for to, some in zip(self.each(rows), found, strict=True):
            to.copy_(some)
        return rows

    def overwrite(self, x: Tensor, part: Tensor) -> None:
        """Put the results of `border_rows` into x (B, Q, H, ...), in place."""
        x[self.batch, :, self.partial.groups[0].heads].index_copy_(1, self.border_rows, part.to(x.dtype))

    # --- keys ---------------------------------------------------------------------------------------------------------

    def gather(self, k: Tensor, v: Tensor, received: Tensor) -> list[Tensor]:
        """The partial's keys and values, (B, M, its key heads, D) each: views if they can be, else copies."""
        if self.own is not None:
            return [x[self.batch, self.own.rows, self.own.heads] for x in (k, v)]
        k, v = k[self.batch], v[self.batch]
        if self.in_buffer is not None:
            gathered = self.exchange.parcels(received, self.in_buffer, 1)[:, :, self.batch, 0]
        else:
            make = k.new_empty if self.full else k.new_zeros  # keys that no query sees have to be finite
            gathered = make(self.keys, 2, k.shape[0], self.key_heads, k.shape[3])
        for part in self.parts:
            to = gathered[:, :, :, part.heads].unflatten(3, (part.count, -1))
            if part.slot is None:
                for y, mine in enumerate((k, v)):
                    to[part.to, y] = part.own.of(mine).transpose(0, 1)
            elif self.in_buffer is None:
                to[part.to] = self._parcels(received, part)[part.rows]
        return list(gathered.permute(1, 2, 0, 3, 4).unbind(0))

    def scatter(self, dk: Tensor, dv: Tensor, totals: tuple[Tensor, Tensor], returned: Tensor) -> None:
        """Add the gradients of the partial's keys and values to `totals`, those of the rank's own rows (B, L, G, D
        each), and to `returned`, those of received rows, laid out as these were received."""
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
                        (to.index_copy_ if part.first else to.index_add_)(0, part.rows, some.to(to.dtype))
                        continue
                    to = to[part.rows]
                if part.first:
                    to.copy_(some)
                else:
                    to += some

    def _parcels(self, buffer: Tensor, part: Part) -> Tensor:
        """(rows of the parcels, 2, B, C, h, D)"""
        return self.exchange.parcels(buffer, part.slot, part.count)[:, :, self.batch, :, part.its_heads]


class FirstWrites:
    """Which partials are the first to write where their results go: these copy, later ones add or merge.

    placed: in the order in which they run; sets `first` of each, and of its parts.
    rows, own: how many (row, head) of out, and of the gradients of the rank's keys, are first written by a copy
    received: by stage, how many elements of the buffer of returned gradients are
    A buffer of which more is used has to be initialized. Strided rows count as all rows between the first and the last.
    """

    def __init__(self, placed: list[Placed], batch: int):
        self.rows = self.own = 0
        self.received: dict[Stage | None, int] = defaultdict(int)
        self._boxes: dict[tuple, list[tuple[range, set[int]]]] = defaultdict(list)
        for one in placed:
            many = batch if one.partial.batch is None else 1
            boxes = [x for view in one.queries for x in view.each()]
            one.first = bool(boxes) and self._first(("rows", one.partial.batch), boxes)
            if one.first:
                self.rows += many * sum(map(_size, boxes))
            for x, part in enumerate(one.parts):
                if part.slot is None and isinstance(part.own.rows, Tensor):
                    first = False  # behind the partial on all own rows
                elif part.slot is None:
                    boxes = list(part.own.each())
                    first = self._first(("own", one.partial.batch), boxes)
                    self.own += first * many * sum(map(_size, boxes))
                else:
                    slot, row = part.slot, one.exchange.row(part.slot)
                    heads = slice(slot.at, slot.at + part.count * len(slot.heads))
                    place = slice(slot.start, slot.start + slot.rows * row)
                    first = self._first((one.stage, one.partial.batch), [(place, heads)])
                    whole = _length(part.rows) == slot.rows and length(part.its_heads) == len(slot.heads)
                    size = slot.rows * row // slot.width * length(heads)
                    self.received[one.stage] += first * (whole and one.partial.batch is None) * size
                one.parts[x] = part._replace(first=first)

    def _first(self, where: tuple, boxes: list[tuple[slice, slice]]) -> bool:
        """Whether none of these (rows, heads) has been written in `where`; from now on they have been."""
        news = [(range(rows.start, rows.stop), set(range(heads.stop)[heads])) for rows, heads in boxes]
        before = self._boxes[where]
        first = not any(
            max(x.start, y.start) < min(x.stop, y.stop) and its & others for x, its in news for y, others in before
        )
        before += news
        return first


def _size(box: tuple[slice, slice]) -> int:
    return length(box[0]) * length(box[1])


def _rows(queries: range, work: list[range]) -> slice:
    """The rows of a head group's queries among those that the rank computes."""
    start = 0
    for part in work:
        if part and part.start <= queries.start < part.stop:
            by = start - part.start
            return slice(queries[0] + by, queries[-1] + 1 + by, queries.step)
        start += len(part)
    raise AssertionError(f"{queries} is not among {work}")


def _plain(x: slice) -> slice | None:
    return slice(x.start, x.stop) if (x.step or 1) == 1 else None


def _length(x: slice | Tensor) -> int:
    return len(x) if isinstance(x, Tensor) else length(x)


def _on(index, device):
    return index.to(device) if isinstance(index, Tensor) else index
