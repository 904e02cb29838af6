"""Where the rows of a partial lie on this rank, and how they come together for its call and go back.

A partial (`partials.Partial`) names positions of the sequence. `Placed` finds, once a plan, which rows of which tensors
these are. Queries are rows of q (B, Q, H, D). Keys are rows of the rank's own k and v (B, L, G, D), or of the flat
buffer that a stage of the exchange fills (`exchange.Exchange.rows`). For each call then

    take         gives the call's q (B, R, h, D),
    gather       its k and v (B, M, g, D), of own and received rows: a view if they lie together, else a copy,
    views, each  the rows of out that its results belong to, and its results cut alike, to be merged,
    overwrite    puts its results into out where they are not merged,
    scatter      adds the gradients of its keys to those of own rows, or of rows of the buffer that returns them.

Example: of 8 positions rank 1 holds 4 to 7. For the partial of its queries on keys 0 to 3, which rank 0 sends, `take`
is q itself, and `gather` a view of the buffer, as rank 0's rows lie there in order.

Dimensions: B batch, L rows of this rank, Q queries that it computes, H query heads, G key heads, D head_dim; of the
partial: R queries, M keys, h query heads, g key heads; of a strided view: C steps of R rows and c heads each.
"""

import itertools

from torch import Tensor
from torch.nn.functional import pad

from workbench.distributed.copies import Block, Copy, StridedView, length, strided_views
from workbench.distributed.exchange import Exchange
from workbench.distributed.partials import Partial
from workbench.distributed.plans import Stage


class Placed:
    """A partial, and where its rows lie on this rank.

    stage: the stage of the exchange that brings some of its keys; None if all are the rank's own
    batch: the entries of the batch that it is for
    work (when it is made): the ranges of queries that the rank computes, one or two, which lie one after the other in q

    Queries:
    queries: strided views of q; side by side along the heads they are the call's q
    heads: where the heads of each view begin in the call, and h at the end
    border_rows: instead of them rows of q, int64, if the queries are no range: its results overwrite what is there
    overwritten: rows of q, int64, of the queries whose results another partial overwrites; or None

    Keys:
    keys, key_heads: M and g
    copies: from own rows (`block` None) or from blocks of the buffer (`source`) to the call's keys (`target`);
        gradients go back the same way
    full: whether they fill all keys, so that none is padding
    all_own: whether one indexing of the rank's own k and v gives the keys
    in_buffer: the part of the buffer that is the keys in their order, but for the `trailing` last ones: the rank's own
        rows, which are copied there, or padding that no query sees. None if there is no such part
    """

    def __init__(
        self, partial: Partial, copies: list[Copy], stage: Stage | None, exchange: Exchange, work: list[range]
    ):
        self.partial, self.copies, self.exchange, self.stage = partial, copies, exchange, stage
        self.batch = slice(None) if partial.batch is None else slice(partial.batch, partial.batch + 1)
        rows = partial.groups[0].queries, partial.overwritten
        self.border_rows, self.overwritten = (x - work[0].start if isinstance(x, Tensor) else None for x in rows)
        ranges = partial.groups if self.border_rows is None else ()
        self.queries = strided_views(StridedView(_rows(s.queries, work), s.heads) for s in ranges)
        self.heads = list(itertools.accumulate((x.count * length(x.heads) for x in self.queries), initial=0))
        self.keys = len(partial.groups[0].keys)
        self.key_heads = sum(len(range(exchange.plan.kv_heads)[s.key_heads]) for s in partial.groups)
        self.full = sum(x.target.size for x in copies) == self.keys * self.key_heads
        self.all_own = len(copies) == 1 and self.full and copies[0].block is None and copies[0].source.count == 1
        self.in_buffer, self.trailing = self._in_buffer()

    def to(self, device) -> None:
        """Move the indices that copies need to the device."""
        self.copies = [x.to(device) for x in self.copies]
        rows = self.border_rows, self.overwritten
        self.border_rows, self.overwritten = (x if x is None else x.to(device) for x in rows)

    def _in_buffer(self) -> tuple[Block | None, int]:
        """(`in_buffer`, `trailing`).

        The keys lie in order if each copy, from its own place, puts the first of all keys at the same element.
        """
        received = [x for x in self.copies if x.block is not None]
        steps = [(x.block, *step) for x in received for step in zip(x.source.each(), x.target.each(), strict=True)]
        starts = {self._start(*step) for step in steps}
        if len(starts) != 1 or None in starts:
            return None, 0
        block = Block(starts.pop(), self.keys, self.key_heads)
        keys, more = divmod(sum(x.target.size for x in received), self.key_heads)
        last = max(to.stop for *_, (to, _) in steps)
        trailing, behind = self.keys - keys, block.start + keys * self.exchange.row(block)
        if more or last != keys or trailing and behind != sum(self.exchange.splits[self.stage][1]):
            return None, 0  # there are gaps, or something else arrives behind
        return (block, trailing) if self.full or len(received) == len(self.copies) else (None, 0)

    def _start(self, block: Block, source: tuple, target: tuple) -> int | None:
        """At which element the first key would lie if all keys lay as those of one step of a copy do; None if these are
        not consecutive, or not of all key heads. source, target: (rows, heads)."""
        (rows, heads), (to, to_heads) = source, target
        if any(isinstance(x, Tensor) or (x.step or 1) > 1 for x in (rows, heads, to, to_heads)):
            return None
        there = heads == to_heads and block.width == self.key_heads
        return block.start + (rows.start - to.start) * self.exchange.row(block) if there else None

    def views(self, x: Tensor) -> list[Tensor]:
        """x (B, Q, H, ...) -> the partial's rows of it: a view (B, R, C, c, ...) for each of `queries`."""
        x = x[self.batch]
        return [view.of(x) for view in self.queries]

    def each(self, x: Tensor) -> list[Tensor]:
        """x (B, R + spare, h, ...), of the call -> views of it that belong to those of `views`, one each."""
        x = x[:, : x.shape[1] - self.partial.spare]
        pairs = zip(self.queries, itertools.pairwise(self.heads), strict=True)
        return [x[:, :, first:last].unflatten(2, (view.count, -1)) for view, (first, last) in pairs]

    def take(self, x: Tensor, value: float = 0) -> Tensor:
        """x (B, Q, H, ...) -> (B, R + spare, h, ...), for the call: a view if it can be one, else a copy.

        value: what spare rows are filled with
        """
        rows, spare = None, self.partial.spare
        if self.border_rows is not None:
            rows = x[self.batch, :, self.partial.groups[0].heads].index_select(1, self.border_rows)
        elif len(self.queries) == 1 and self.queries[0].count == 1:
            rows = x[self.batch, self.queries[0].rows, self.queries[0].heads]
        if rows is not None:
            return pad(rows, (0, 0) * (x.dim() - 2) + (0, spare), value=value) if spare else rows
        found = self.views(x)  # only partials of one head group have spare rows
        rows = x.new_empty(found[0].shape[0], found[0].shape[1], self.heads[-1], *x.shape[3:])
        for to, some in zip(self.each(rows), found, strict=True):
            to.copy_(some)
        return rows

    def overwrite(self, x: Tensor, part: Tensor) -> None:
        """Put part (B, R + spare, h, ...), the call's results for `border_rows`, into x (B, Q, H, ...), in place."""
        part = part[:, : len(self.border_rows)].to(x.dtype)
        x[self.batch, :, self.partial.groups[0].heads].index_copy_(1, self.border_rows, part)

    def gather(self, k: Tensor, v: Tensor, received: Tensor) -> list[Tensor]:
        """[keys, values] of the call, (B, M, g, D) each: views if they can be, else copies.

        k, v: of the rank (B, L, G, D); received: the flat buffer that the stage has filled
        """
        if self.all_own:  # by one indexing each, since the first kernel waits for it
            source = self.copies[0].source
            return [x[self.batch, source.rows, source.heads] for x in (k, v)]
        k, v = k[self.batch], v[self.batch]
        if self.in_buffer is not None:
            gathered = self.exchange.rows(received, self.in_buffer, self.batch)
        else:
            make = k.new_empty if self.full else k.new_zeros  # keys that no query sees have to be finite
            gathered = make(self.keys, 2, k.shape[0], self.key_heads, k.shape[3]).permute(1, 2, 0, 3, 4).flatten(0, 1)
        for copy in self.copies:
            if copy.block is None:
                for to, own in zip(gathered.chunk(2), (k, v), strict=True):
                    copy.target.put(to, copy.source.of(own))
            elif self.in_buffer is None:
                copy.target.put(gathered, copy.source.of(self.exchange.rows(received, copy.block, self.batch)))
        return list(gathered.chunk(2))

    def scatter(self, dk: Tensor, dv: Tensor, totals: tuple[Tensor, Tensor], returned: Tensor) -> None:
        """Add dk and dv of the call (B, M, g, D) to those of own rows, `totals` (B, L, G, D each), and to those of
        received rows, `returned`, a flat buffer that is laid out as the one in which these have arrived."""
        for block, source, target in self.copies:
            if block is None:
                to = [x[self.batch] for x in totals]
            else:
                to = self.exchange.rows(returned, block, self.batch).chunk(2)
            for total, part in zip(to, (dk, dv), strict=True):
                source.add(total, target.of(part))


def _rows(queries: range, work: list[range]) -> slice:
    """A head group's queries, positions, as rows of q, which has the queries of `work`."""
    start = 0
    for part in work:
        if part and part.start <= queries.start < part.stop:
            by = start - part.start
            return slice(queries[0] + by, queries[-1] + 1 + by, queries.step)
        start += len(part)
    raise AssertionError(f"{queries} is not among {work}")
