"""Attention over contiguous shards, from one rank's side: exchange, single-device attention, merge; and the backward.

A run is the same on every device, in this order:

    start     attend to some of the rank's own rows (`partials.own_partials`: as much as lasts while the ranks agree)
    pack      beside that, copy the rows that others need first into a buffer
    finish    the ranks have agreed: exchange queries, cast the rows of the first stage, attend to the other own rows
              meanwhile; then for each stage wait for its rows, cast those of a later one, attend to what has arrived

On a card all that moves rows is queued on a stream beside the attention's (`group.TwoStreams`); on a CPU it is done at
once. A card starts a transfer only when the attention before it leaves room, which is near its end, so that the rows of
the next stage have to be there already. The backward casts keys and values again, which saves the memory of keeping
them, and returns their gradients in float32 (float64 for float64).

Dimensions: B batch, L rows of this rank, Q queries that it computes, H query heads, G key heads, D head_dim, M keys of
a partial.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.distributed import fills, partials
from workbench.distributed.buffers import Placed
from workbench.distributed.exchange import Exchange, QueryExchange
from workbench.distributed.group import Ranks
from workbench.distributed.partials import Partial, head_group
from workbench.distributed.plans import Plan, Stage
from workbench.engines import partial


class Buffers(NamedTuple):
    """What a forward or a backward allocates before anything is sent, while an out-of-memory can still be agreed on.

    sent, received: keys and values, a buffer for each stage that travels or is attended to at once
    results: (out, lse) or (dq, dk, dv); None where the first partial's own tensor becomes the result
    returned, arrived: gradients of received rows, on their way back, and of the rank's own rows, from other ranks
    """

    sent: list[Tensor]
    received: list[Tensor]
    results: list[Tensor | None]
    returned: list[Tensor]
    arrived: list[Tensor]

    def release(self) -> None:
        """Free the buffers, for what comes after."""
        for each in self:
            each.clear()


class Executor:
    """A plan made ready to run on one rank: the partials in their order, where their rows lie, and what is exchanged.

    It holds no tensor of a call, and is kept with the pattern for later calls of the same shapes.
    first: partials that run before the ranks have agreed; second: while the first rows travel; stages: (stage, partials
        that run when its rows have arrived)
    rows: how many queries the rank computes
    all_queries: whether the first partial gives every row of out (B, Q, H, D) and dq, so that its result becomes them
    all_keys: the same of dk and dv (B, L, G, D)
    only_one: whether there is one partial and nothing to add to its gradients
    few_sources: whether gradients of own keys come from few enough ranks to be added in 16 bits (`plans.Layout`)
    """

    def __init__(self, plan: Plan, ranks: Ranks, batch: int, head_dim: int):
        self.plan, self.ranks, self.layout = plan, ranks, plan.layout
        self.exchange = Exchange(plan, ranks, batch, head_dim)
        self.queries, self.back = QueryExchange.both(plan, ranks) if plan.zigzag else (None, None)
        work, rank = plan.work(ranks.rank), ranks.rank

        def placed(stage: Stage | None, found: list[Partial]) -> list[Placed]:
            slots = [] if stage is None else self.exchange.slots[stage][1]
            return [Placed(x, fills.fills(plan, rank, stage, x, slots), stage, self.exchange, work) for x in found]

        own = partials.own_partials(plan, rank)
        self.first, self.second = placed(None, own.first), placed(None, own.second)
        self.stages = [
            (x, [*placed(None, own.before.get(x, [])), *placed(x, partials.stage_partials(plan, rank, x))])
            for x in plan.stages
        ]
        every, self.rows = self.every, sum(map(len, work))
        trailing = max((x.trailing * x.key_heads for x in every), default=0)
        self.room = self.exchange.room[1] + trailing * math.prod(self.exchange.shape)  # of what a stage receives
        self.only_one = len(every) == 1 and not self.exchange.moves
        self.few_sources = self.layout.few and int((plan.units[rank] > 0).sum()) <= self.layout.sources
        whole = head_group(plan, range(plan.kv_heads), work[0], plan.shards[rank])
        first = every[0].partial if every and every[0].partial.batch is None else None
        self.all_queries = bool(first) and len(work) == 1
        self.all_queries = self.all_queries and [(x.queries, x.heads) for x in first.groups] == [whole[:2]]
        self.all_keys = bool(first) and [x[2:] for x in first.groups] == [whole[2:]]

    @property
    def every(self) -> list[Placed]:
        """All partials in the order in which they run."""
        return [*self.first, *self.second, *itertools.chain(*(found for _, found in self.stages))]

    def to(self, device) -> None:
        """Move the indices that copies need to the device."""
        for each in (self.exchange, *self.every):
            each.to(device)

    def allocate(self, q: Tensor, k: Tensor, backward: bool) -> Buffers:
        """The buffers of a forward or a backward. q (B, queries held or computed, H, D), k (B, L, G, D)."""
        b, _, h, d = q.shape
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        rows, stages, layout = self.rows, len(self.stages), self.layout
        sent = [k.new_empty(self.exchange.room[0]) for _ in range(min(layout.ahead, stages))]
        received = [k.new_empty(self.room) for _ in range(min(layout.ahead + 1, stages))]
        if not backward:
            if self.all_queries:
                return Buffers(sent, received, [None, None], [], [])
            out = q.new_zeros(b, rows, h, d, dtype=wide if layout.merged and not partial.narrow(q) else q.dtype)
            return Buffers(sent, received, [out, q.new_full((b, h, rows), -torch.inf, dtype=wide)], [], [])
        dq = None
        if not self.all_queries:
            dq = q.new_zeros(b, rows, h, d, dtype=wide if layout.merged else q.dtype)
        gradients = [dq, *(None if self.all_keys else k.new_zeros(k.shape, dtype=wide) for _ in "kv")]
        # one is filled while the other travels
        returned = [k.new_empty(self.exchange.room[1], dtype=wide) for _ in range(min(2, stages))]
        arrived = [k.new_empty(self.exchange.room[0], dtype=wide)]
        return Buffers(sent, received, gradients, returned, arrived)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call, needs_gradients: bool) -> Forward:
        """A forward of this rank's q (B, Lq, H, D), k and v (B, L, G, D), started. call: a `call.Call`."""
        return Forward(self, q, k, v, call).start()

    def backward(self, grad: Tensor | None, grad_lse: Tensor | None, saved, call) -> Backward:
        """A backward, started, of what a forward has saved, from the gradients of out and lse, like these, or None."""
        return Backward(self, grad, grad_lse, saved, call).start()

    def held_here(self, x: Tensor) -> Tensor:
        """x (B, Q, ...), of queries that the rank computes -> (B, Lq, ...), of those that it holds."""
        if self.back is None:
            return x
        rows = self.back.keep(x)
        self.back.exchange(x, rows)
        return rows


class Run:
    """What forward and backward share: the order of the attention and of the exchange beside it.

    `attend`, of each, computes a partial, whose rows have arrived in the buffers of stage number x, and merges it.
    """

    def __init__(self, executor: Executor, k: Tensor, v: Tensor, buffers: Buffers, call):
        self.executor, self.k, self.v, self.buffers = executor, k, v, buffers
        self.call = call
        self.streams = executor.ranks.streams(k.device)
        self.moves: list[tuple[Tensor, Tensor]] = []  # (rows of queries held, of queries computed) to be exchanged
        self.arriving = []  # a handle for each stage that has been cast

    def start(self):
        self.ready = self.streams.mark()  # the inputs are there, and whatever used the buffers' memory before is over
        for placed in self.executor.first:
            self.attend(placed, 0)
        return self

    def pack(self) -> None:
        with self.streams.beside():
            self.ready.wait()
            for x in range(self.executor.layout.ahead):
                self._pack(x)

    def run(self) -> None:
        """All that comes once the ranks have agreed."""
        streams, ahead = self.streams, self.executor.layout.ahead
        with streams.beside():
            for held, computed in self.moves:
                self.executor.queries.exchange(held, computed)
            exchanged = streams.mark()
            self._cast(0)
        for placed in self.executor.second:
            self.attend(placed, 0)
        with streams.beside():
            for x in range(1, ahead):
                self._cast(x)
        exchanged.wait()
        for x, (stage, found) in enumerate(self.executor.stages):
            self.arriving[x].wait()
            with streams.beside():
                self.arriving[x].wait()
                if x:
                    done.wait()  # noqa: F821 (the stage before has read the buffers that are filled now)
                self._pack(x + ahead)
                self._cast(x + ahead)
            self.attend_stage(stage, found, x)
            done = streams.mark()  # noqa: F841

    def computed(self, x: Tensor) -> Tensor:
        """x (B, queries held, ...) -> (B, queries computed, ...), in which those of other ranks are still to come."""
        if self.executor.queries is None:
            return x
        self.moves.append((x, rows := self.executor.queries.keep(x)))
        return rows

    def attend_stage(self, stage: Stage, found: list[Placed], x: int) -> None:
        for placed in found:
            self.attend(placed, x)

    def _pack(self, x: int) -> None:
        if x < len(self.executor.stages):
            sent = self.buffers.sent
            self.executor.exchange.pack(self.executor.stages[x][0], self.k, self.v, sent[x % len(sent)])

    def _cast(self, x: int) -> None:
        if x < len(self.executor.stages):
            sent, received = (side[x % len(side)] for side in (self.buffers.sent, self.buffers.received))
            self.arriving.append(self.executor.exchange.group_cast(self.executor.stages[x][0], sent, received))


class Forward(Run):
    """out (B, Q, H, D) and lse (B, H, Q)."""

    def __init__(self, executor: Executor, q: Tensor, k: Tensor, v: Tensor, call):
        super().__init__(executor, k, v, executor.allocate(q, k, backward=False), call)
        self.out, self.lse = self.buffers.results
        self.q = self.computed(q)

    def attend(self, placed: Placed, x: int) -> None:
        keys = placed.gather(self.k, self.v, self.buffers.received[x % len(self.buffers.received)])
        out, lse = partial.forward(placed.take(self.q), *keys, placed.partial.pattern, self.call)
        if self.out is None:
            as_is, rows = partial.narrow(self.q) or not self.executor.layout.merged, self.executor.rows
            self.out, self.lse = (out if as_is else out.to(lse.dtype))[:, :rows], lse[..., :rows]
        elif placed.border_rows is not None:
            placed.overwrite(self.out, out)
            placed.overwrite(self.lse.transpose(1, 2), lse.transpose(1, 2))
        else:
            self._merge(placed, out, lse)

    def _merge(self, placed: Placed, out: Tensor, lse: Tensor) -> None:
        rows = zip(placed.views(self.out), placed.views(self.lse.transpose(1, 2)), strict=True)
        each = zip(placed.each(out), placed.each(lse.transpose(1, 2)), strict=True)
        for (to, to_lse), (one, one_lse) in zip(rows, each, strict=True):
            partial.merge(to, to_lse, one, one_lse)

    def finish(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(out, lse, what a backward needs)."""
        self.run()
        self.buffers.release()
        out = self.out.to(self.q.dtype)
        return out, self.lse, [self.q, self.k, self.v, out, self.lse]


class Backward(Run):
    """dq (B, Q, H, D), dk and dv (B, L, G, D)."""

    def __init__(self, executor: Executor, grad: Tensor | None, grad_lse: Tensor | None, saved, call):
        self.q, k, v, self.out, self.lse = saved
        super().__init__(executor, k, v, executor.allocate(self.q, k, backward=True), call)
        self.dq, self.dk, self.dv = self.buffers.results
        self.returning = None  # the stage whose gradients are on their way back, and the handle to wait on
        self.held = len(executor.plan.queries(executor.ranks.rank))
        if grad is None:
            grad = self.out.new_zeros(self.out.shape[0], self.held, *self.out.shape[2:])
        self.grad = self.computed(grad)
        self.grad_lse = grad_lse if grad_lse is None else self.computed(grad_lse.transpose(1, 2)).transpose(1, 2)

    def attend(self, placed: Placed, x: int) -> None:
        received, returned = (side[x % len(side)] for side in (self.buffers.received, self.buffers.returned))
        keys = placed.gather(self.k, self.v, received)
        grad, q, out = (placed.take(t) for t in (self.grad, self.q, self.out))
        lse, grad_lse = (
            t if t is None else placed.take(t.transpose(1, 2), value).transpose(1, 2)
            for t, value in ((self.lse, torch.inf), (self.grad_lse, 0))  # lse inf: a row without gradients
        )
        if placed.overwritten is not None:
            lse = lse.index_fill(2, placed.overwritten, torch.inf)
        dq, *both = partial.backward(grad, grad_lse, q, *keys, out, lse, placed.partial.pattern, self.call)
        self._add_to_queries(placed, dq)
        if self.dk is None:
            as_is = self.executor.only_one or self.executor.few_sources and partial.narrow(self.q)
            self.dk, self.dv = (t if as_is else t.to(self.lse.dtype) for t in both)
        else:
            placed.scatter(*both, (self.dk, self.dv), returned)

    def _add_to_queries(self, placed: Placed, dq: Tensor) -> None:
        if placed.border_rows is not None:
            placed.overwrite(self.dq, dq)
        elif self.dq is None:
            as_is = self.executor.only_one or self.executor.layout.few and partial.narrow(self.q)
            self.dq = (dq if as_is else dq.to(self.lse.dtype))[:, : self.executor.rows]
        else:
            for to, some in zip(placed.views(self.dq), placed.each(dq), strict=True):
                to.add_(some)

    def attend_stage(self, stage: Stage, found: list[Placed], x: int) -> None:
        returned, exchange = self.buffers.returned[x % len(self.buffers.returned)], self.executor.exchange
        returned[: sum(exchange.splits[stage][1])].zero_()
        super().attend_stage(stage, found, x)
        self._add_returned()
        self.returning = stage, exchange.group_reduce(stage, returned, self.buffers.arrived[0])

    def _add_returned(self) -> None:
        if self.returning is not None:
            stage, handle = self.returning
            handle.wait()
            self.executor.exchange.add(stage, self.buffers.arrived[0], self.dk, self.dv)

    def finish(self, any_grad_lse: bool) -> list[Tensor]:
        """[dq, dk, dv]. any_grad_lse: whether lse has a gradient on some rank; where queries move, it moves too."""
        if any_grad_lse and self.grad_lse is None and self.executor.queries:
            none = self.lse.new_zeros(self.lse.shape[0], self.held, self.lse.shape[1])
            self.grad_lse = self.computed(none).transpose(1, 2)
        self.run()
        self._add_returned()
        self.buffers.release()
        gradients = [self.dq, self.dk, self.dv]
        self.dq = self.dk = self.dv = None
        for x in range(3):  # one at a time, so that at most one is in memory twice
            gradients[x] = gradients[x].to(self.q.dtype)
        return gradients
