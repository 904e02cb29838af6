"""Attention over contiguous shards, from one rank's side: exchange, single-device attention, merge; and the backward.

While the rows of one stage of the exchange are attended to, those of the next one or two travel. A card starts a
transfer only when the attention before it leaves room, which is near its end, so that the rows of the next stage
have to be there already. The backward fetches keys and values again, which saves the memory of keeping them, and
returns their gradients in float32 (float64 for float64).

Dimensions: B batch, L rows of this rank, Q queries that it computes, H query heads, G key heads, D head_dim, M keys of
a job.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.distributed import partials, streams
from workbench.distributed.buffers import Task, Written
from workbench.distributed.exchange import Exchange, Regroup
from workbench.distributed.partials import Job, Strand
from workbench.distributed.plans import Plan, Stage
from workbench.execution import partial
from workbench.patterns import Dense, Dilated, Neighborhood

AHEAD = 2  # stages that travel at once if a stage may be a single call, which leaves the card only as it ends


class Buffers(NamedTuple):
    """What a forward or a backward allocates before anything is sent, while an out-of-memory can still be agreed on.

    sent, received: keys and values, a buffer for each stage that travels or is attended to at once
    results: (out, lse) or (dq, dk, dv); None where the first job's own tensor becomes the result
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


class Sequence:
    """A plan made ready for one rank and device: its tasks, and where their rows lie in the buffers."""

    def __init__(self, plan: Plan, rank: int, group, batch: int, head_dim: int, device):
        self.plan = plan
        self.exchange = Exchange(plan, rank, group, batch, head_dim, device)
        self.regroup = Regroup(plan, rank, group) if plan.zigzag else None
        work = plan.work(rank)
        ends = list(itertools.accumulate(map(len, work), initial=0))
        self.work, self.queries = list(zip(work, ends[:-1], strict=True)), ends[-1]  # (queries, where they begin)
        cells = isinstance(plan.pattern, Neighborhood)
        self.blocks = plan.apart and not cells  # a job of a stage is then one strand
        # whether a row is merged of several jobs' results
        self.several = self.blocks or isinstance(plan.pattern, (Dense, Dilated))
        self.ahead = AHEAD if self.several and not plan.zigzag and not plan.apart else 1

        def tasks(stage: Stage | None, found: list[Job]) -> list[Task]:
            more = stage, self.exchange, self.work, plan.kv_heads
            return [Task(job, partials.fills(plan, rank, stage, job), *more) for job in found]

        own = partials.local(plan, rank)
        self.first, self.second = tasks(None, own.first), tasks(None, own.second)
        self.later = {
            stage: [*tasks(None, own.before.get(stage, [])), *tasks(stage, partials.remote(plan, rank, stage))]
            for stage in plan.stages
        }
        each = [*self.first, *self.second, *itertools.chain(*self.later.values())]
        self.behind = max((x.behind * x.key_heads for x in each), default=0) * math.prod(self.exchange.shape)
        self.once = len(each) == 1 and not self.exchange.moves  # the one job's gradients are the result
        # A row's gradient is then a sum of few parts, for dk and dv if few ranks return theirs. Such a sum may be
        # rounded to 16 bits each time: of two parts that is one rounding, and a single device rounds each branch of a
        # dilated pattern.
        dilated = isinstance(plan.pattern, Dilated)
        self.few = plan.apart or dilated
        returning = int((plan.units[rank] > 0).sum())
        most = len(plan.pattern.segment_lengths) if dilated else int(self.blocks)
        self.few_keys = self.few and returning <= most
        whole = Strand(work[0], slice(0, plan.heads), plan.shards[rank], slice(0, plan.kv_heads))
        first = each[0].job if each else None
        # whether the first job gives every row of out and dq; and of dk and dv
        self.all_queries = bool(first) and len(work) == 1 and not first.spare and first.batch is None
        self.all_queries = self.all_queries and [(x.queries, x.heads) for x in first.strands] == [whole[:2]]
        self.all_keys = bool(first) and first.batch is None and [x[2:] for x in first.strands] == [whole[2:]]
        self.written = Written(each, batch)

    def prepare(self, q: Tensor, k: Tensor, backward: bool) -> Buffers:
        """The buffers of a forward or a backward. q (B, queries held or computed, H, D), k (B, L, G, D)."""
        b, _, h, d = q.shape
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        deep = min(self.ahead, len(self.plan.stages))
        sent = [k.new_empty(self.exchange.room[0]) for _ in range(deep)]
        room = self.exchange.room[1] + self.behind
        received = [k.new_empty(room) for _ in range(min(self.ahead + 1, len(self.plan.stages)))]
        if not backward:
            of_q = wide if self.several and not partial.narrow(q) else q.dtype
            if self.all_queries:
                return Buffers(sent, received, [None, None], [], [])
            out = q.new_empty(b, self.queries, h, d, dtype=of_q)
            lse = q.new_empty(b, h, self.queries, dtype=wide)
            if self.written.rows < out[..., 0].numel():
                out.zero_()
                lse.fill_(-torch.inf)
            return Buffers(sent, received, [out, lse], [], [])
        of_q = wide if self.several else q.dtype  # each of its rows is one job's
        dq = None if self.all_queries else q.new_empty(b, self.queries, h, d, dtype=of_q)
        if dq is not None and self.written.rows < dq[..., 0].numel():
            dq.zero_()
        make = k.new_zeros if self.written.own < k[..., 0].numel() else k.new_empty
        gradients = [dq, *(None if self.all_keys else make(k.shape, dtype=wide) for _ in "kv")]
        two = range(min(2, len(self.plan.stages)))  # one is filled while the other travels
        returned = [k.new_empty(self.exchange.room[1], dtype=wide) for _ in two]
        arrived = [k.new_empty(self.exchange.room[0], dtype=wide)]
        return Buffers(sent, received, gradients, returned, arrived)

    # --- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self, q, k, v, scale: float, backend: str, buffers: Buffers,
        begin: Callable[[], Callable[[], None]], bring: Callable[[], None],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """out (B, Q, H, D) and lse (B, H, Q) from q (B, Q, H, D), k and v (B, L, G, D).

        begin, bring: see `_stages`
        """
        out, lse = buffers.results
        for stage, x, found in self._stages(k, v, buffers, begin, bring):
            for task in found:
                keys = task.gather(k, v, buffers.received[x % len(buffers.received)])
                call = task.take(q), *keys, task.job.pattern, scale, backend
                if stage is not None and self.blocks:
                    to = task.take(out), task.take(lse.transpose(1, 2)).transpose(1, 2)  # views
                    if partial.merge_into(*to, *call):
                        continue
                part = partial.forward(*call)
                if out is None:
                    out, lse = part[0] if partial.narrow(q) or not self.several else part[0].to(part[1].dtype), part[1]
                else:
                    self._merge(task, out, lse, *part)
                del call, keys, part  # before the next ones are made
        buffers.release()
        return out.to(q.dtype), lse

    def early(self) -> bool:
        """Whether the attention that needs no rows of other ranks begins before the ranks have agreed: on a card it
        runs meanwhile."""
        return self.exchange.device.type == "cuda"

    def _stages(
        self, k, v, buffers: Buffers, begin: Callable[[], Callable[[], None]], bring: Callable[[], None]
    ) -> Iterator[tuple[Stage | None, int, list]]:
        """(stage, its number, its tasks), while the rows of later stages travel; first (None, 0, tasks that need none).

        begin: starts the agreement of ranks before rows travel, and returns what waits for it
        bring: then moves the queries that ranks compute for each other
        """
        stages, pending = self.plan.stages, []

        def pack(x: int) -> None:
            if x < len(stages):
                self.exchange.pack(stages[x], k, v, buffers.sent[x % len(buffers.sent)])

        def fetch(x: int) -> None:
            if x < len(stages):
                sent, received = (side[x % len(side)] for side in (buffers.sent, buffers.received))
                pending.append(self.exchange.fetch(stages[x], sent, received))

        if not self.early():
            for x in range(self.ahead):
                pack(x)
            begin()()
            bring()
            for x in range(self.ahead):
                fetch(x)
            yield None, 0, [*self.first, *self.second]
            for x, stage in enumerate(stages):
                pending[x].wait()
                pack(x + self.ahead)
                fetch(x + self.ahead)
                yield stage, x, self.later[stage]
            return

        # On a card rows are packed and sent on a stream of their own, beside the attention that is queued meanwhile:
        # they wait for the inputs, which are there now, and for buffers that the attention has done with.
        beside, free, brought = streams.beside(k.device), torch.cuda.Event(), torch.cuda.Event()
        free.record()
        yield None, 0, self.first
        settle = begin()
        with torch.cuda.stream(beside):
            beside.wait_event(free)
            for x in range(self.ahead):
                pack(x)
        settle()  # on the caller's stream, which uses the memory that this may allocate
        with torch.cuda.stream(beside):
            bring()
            brought.record()
            fetch(0)
        yield None, 0, self.second
        with torch.cuda.stream(beside):
            for x in range(1, self.ahead):
                fetch(x)
        brought.wait()
        for x, stage in enumerate(stages):
            pending[x].wait()
            with torch.cuda.stream(beside):
                pending[x].wait()
                if x:
                    beside.wait_event(free)
                pack(x + self.ahead)
                fetch(x + self.ahead)
            yield stage, x, self.later[stage]
            free.record()

    def _merge(self, task: Task, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        if task.picked is not None:
            task.replace(out, part)
            task.replace(lse.transpose(1, 2), part_lse.transpose(1, 2))
            return
        rows = zip(task.views(out), task.views(lse.transpose(1, 2)), strict=True)
        each = zip(task.each(part), task.each(part_lse.transpose(1, 2)), strict=True)
        for (to, to_lse), (one, one_lse) in zip(rows, each, strict=True):
            if task.alone:
                to.copy_(one)
                to_lse.copy_(one_lse)
            else:
                partial.merge(to, to_lse, one, one_lse)

    # --- backward -----------------------------------------------------------------------------------------------------

    def backward(
        self, grad, grad_lse, q, k, v, out, lse, scale: float, backend: str, buffers: Buffers,
        begin: Callable[[], Callable[[], None]], bring: Callable[[], None],
    ):  # fmt: skip
        """(dq (B, Q, H, D), dk, dv (B, L, G, D)) from the gradients of out and of lse (or None); else as `forward`."""
        dq, dk, dv = buffers.results
        returning = None
        for stage, x, found in self._stages(k, v, buffers, begin, bring):
            received, returned = (side[x % len(side)] for side in (buffers.received, buffers.returned))
            if stage is not None and self.written.received[stage] < sum(self.exchange.splits[stage][1]):
                returned.zero_()
            for task in found:
                keys = task.gather(k, v, received)
                of_rows = [task.take(t) for t in (grad, q, out)]
                its_lse, its_grad_lse = (
                    t if t is None else task.take(t.transpose(1, 2), value).transpose(1, 2)
                    for t, value in ((lse, torch.inf), (grad_lse, 0))  # lse inf: a row without gradients
                )
                if task.replaced is not None:
                    its_lse = its_lse.index_fill(2, task.replaced, torch.inf)
                parts = partial.backward(
                    of_rows[0], its_grad_lse, of_rows[1], *keys, of_rows[2], its_lse, task.job.pattern, scale, backend
                )
                if task.picked is not None:
                    task.replace(dq, parts[0])
                elif dq is None:
                    dq = parts[0] if self.once or self.few and partial.narrow(q) else parts[0].to(lse.dtype)
                else:
                    for to, part in zip(task.views(dq), task.each(parts[0]), strict=True):
                        to.copy_(part) if task.alone else to.add_(part)
                if dk is None:
                    as_is = self.once or self.few_keys and partial.narrow(q)
                    dk, dv = (part if as_is else part.to(lse.dtype) for part in parts[1:])
                else:
                    task.scatter(*parts[1:], (dk, dv), returned)
                del keys, of_rows, parts  # before the next ones are made
            if stage is not None:
                self._add(returning, buffers, dk, dv)
                returning = stage, self.exchange.give(stage, returned, buffers.arrived[0])
        self._add(returning, buffers, dk, dv)
        buffers.release()
        gradients = [dq, dk, dv]
        del dq, dk, dv
        for x in range(3):  # one at a time, so that at most one is in memory twice
            gradients[x] = gradients[x].to(q.dtype)
        return tuple(gradients)

    def _add(self, returning, buffers: Buffers, dk: Tensor, dv: Tensor) -> None:
        if returning is not None:
            stage, pending = returning
            pending.wait()
            self.exchange.add(stage, buffers.arrived[0], dk, dv)
