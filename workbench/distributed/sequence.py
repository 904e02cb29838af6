"""Attention over contiguous shards, from one rank's side: exchange, single-device attention, merge; and the way back.

Stages of the exchange are three deep: while one stage's rows are attended to, those of the next two travel. (A card
begins what travels when the attention before it leaves it room, which is near its end: the rows of the stage after
have to be there by then.) The backward brings the keys and values again rather than keep what others hold, and takes
their gradients back in float32 (float64).

Dimensions: B batch, L rows of this rank, Q queries that it computes, H query heads, G key heads, D head_dim, M keys of
a job.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.distributed import jobs, local
from workbench.distributed.exchange import Exchange, Regroup, Slot
from workbench.distributed.jobs import Fill, Job, Strand
from workbench.distributed.plans import Plan, Stage
from workbench.patterns import Dense, Dilated

AHEAD = 2  # stages that travel


class Buffers(NamedTuple):
    """All that a forward or a backward allocates on every rank alike, before anything is sent.

    results: (out, lse) or (dq, dk, dv), each None where the first job's own is taken
    """

    sent: list[Tensor]
    received: list[Tensor]
    results: tuple[Tensor | None, ...]
    returned: list[Tensor]
    arrived: Tensor | None


class Sequence:
    """A plan made ready for one rank and device: jobs, what they gather, and where it lies in the buffers."""

    def __init__(self, plan: Plan, rank: int, group, batch: int, head_dim: int, device):
        self.plan, self.rank, self.group = plan, rank, group
        self.exchange = Exchange(plan, rank, group, batch, head_dim, device)
        self.regroup = Regroup(plan, rank, group) if plan.zigzag else None
        work = plan.work(rank)
        ends = list(itertools.accumulate(map(len, work), initial=0))
        self.work, self.queries = list(zip(work, ends[:-1], strict=True)), ends[-1]  # (queries, where they begin)
        self.several = isinstance(plan.pattern, (Dense, Dilated))
        self.first = [(job, jobs.fills(plan, rank, None, job)) for job in jobs.local(plan, rank)]
        self.later = {
            stage: [(job, [_on(x, device) for x in jobs.fills(plan, rank, stage, job)]) for job in found]
            for stage in plan.stages
            for found in [jobs.remote(plan, rank, stage)]
        }
        heads = max((len(stage.heads) for stage in plan.stages), default=0)
        # elements behind what arrives: one's own rows, where a job has them beside those of others
        beside = not self.several and any(self._lying(x, y) for x, found in self.later.items() for _, y in found)
        self.behind = beside * len(plan.shards[rank]) * heads * 2 * batch * head_dim
        each = [*self.first, *itertools.chain(*self.later.values())]
        self.once = len(each) == 1 and not self.exchange.moves  # nothing is ever added to what the one job gives
        self.few = isinstance(plan.pattern, Dilated)  # a row of dq is a sum of few parts, whatever the number of ranks
        whole = Strand(work[0], slice(0, plan.heads), plan.shards[rank], slice(0, plan.kv_heads))
        first = each[0][0] if each else None
        # whether the first job gives every row of out and dq, and of dk and dv
        self.all_queries = bool(first) and len(work) == 1 and not first.spare and first.batch is None
        self.all_queries = self.all_queries and [(x.queries, x.heads) for x in first.strands] == [whole[:2]]
        self.all_keys = bool(first) and first.batch is None and [x[2:] for x in first.strands] == [whole[2:]]

    # --- rows of a job ------------------------------------------------------------------------------------------------

    def _rows(self, queries: range) -> slice:
        """Where a strand's queries are among those that this rank computes."""
        for part, start in self.work:
            if part and part.start <= queries.start < part.stop:
                by = start - part.start
                return slice(queries[0] + by, queries[-1] + 1 + by, queries.step)
        raise AssertionError(f"{queries} is not among {self.work}")

    def _views(self, job: Job, x: Tensor) -> list[Tensor]:
        """x (B, Q, H, ...) -> the job's rows of it, a view a strand."""
        x = x if job.batch is None else x[job.batch : job.batch + 1]
        return [x[:, self._rows(s.queries), s.heads] for s in job.strands]

    def _take(self, job: Job, x: Tensor, value: float = 0) -> Tensor:
        """x (B, Q, H, ...) -> (B, queries of the job, its heads, ...), with the job's spare rows."""
        parts = self._views(job, x)
        x = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return pad(x, (0, 0) * (x.dim() - 2) + (0, job.spare), value=value) if job.spare else x

    def _keys(self, job: Job, fills: list[Fill], stage: Stage | None, k, v, received) -> list[Tensor]:
        """The job's keys and values (B, M, its key heads, D): views of what there is, or gathered."""
        batch = slice(None) if job.batch is None else slice(job.batch, job.batch + 1)
        k, v, m = k[batch], v[batch], len(job.strands[0].keys)
        own = [x for x in fills if x.parcel is None]
        if own == fills and len(own) == 1 and _length(own[0].to) == m:
            return [x[:, own[0].rows, own[0].heads] for x in (k, v)]
        lying = self._lying(stage, fills)
        if lying is not None and lying.rows + sum(_length(x.to) for x in own) == m:
            gathered = self.exchange.parcel(received, lying._replace(rows=m))[:, :, batch]
        else:
            heads = sum(len(range(self.plan.kv_heads)[s.key_heads]) for s in job.strands)
            held = sum(_length(x.to) * _length(x.to_heads) for x in fills)
            make = k.new_empty if held == m * heads else k.new_zeros  # rows that nobody sees have to be finite
            gathered, lying = make(m, 2, k.shape[0], heads, k.shape[3]), None
        for x in fills:
            if x.parcel is None:
                for y, mine in enumerate((k, v)):
                    gathered[x.to, y, :, x.to_heads] = mine[:, x.rows, x.heads].transpose(0, 1)
            elif lying is None:
                gathered[x.to, :, :, x.to_heads] = self._parcel(stage, x, received)[x.rows, :, batch, x.heads]
        return list(gathered.permute(1, 2, 0, 3, 4).unbind(0))

    def _lying(self, stage: Stage | None, fills: list[Fill]) -> Slot | None:
        """Where in a stage's buffer the first of a job's keys lie as they arrive, if all of others do, and one's own
        rows have room behind them."""
        found, low = None, 0
        for x in sorted((x for x in fills if x.parcel is not None), key=lambda x: x.source):
            slot = self.exchange.slots[stage][1][x.source][x.parcel]
            if any(not isinstance(y, slice) or y.step not in (None, 1) for y in (x.to, x.rows)):
                return None
            if (x.to_heads, x.heads) != (slice(0, len(slot.heads)),) * 2 or x.to.start != low:
                return None
            each, many = self.exchange.elements(slot) // slot.rows, x.rows.stop - x.rows.start
            start = slot.start + x.rows.start * each
            if found is not None and (found.heads != slot.heads or found.start + low * each != start):
                return None
            found, low = Slot(start, many, slot.heads, None) if found is None else found, low + many
        own = [x for x in fills if x.parcel is None]
        if found is None or len(own) > 1 or any(x.to_heads != slice(0, len(found.heads)) for x in own):
            return None
        return found._replace(rows=low)

    def _parcel(self, stage: Stage, fill: Fill, buffer: Tensor) -> Tensor:
        return self.exchange.parcel(buffer, self.exchange.slots[stage][1][fill.source][fill.parcel])

    # --- forward ------------------------------------------------------------------------------------------------------

    def prepare(self, q: Tensor, k: Tensor, backward: bool) -> Buffers:
        """Allocate. q (B, queries held, H, D), k (B, L, G, D)."""
        b, _, h, d = q.shape
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        deep = min(AHEAD, len(self.plan.stages))
        sent = [k.new_empty(self.exchange.room(0)) for _ in range(deep)]
        room = self.exchange.room(1) + self.behind
        received = [k.new_empty(room) for _ in range(min(AHEAD + 1, len(self.plan.stages)))]
        if not backward:
            of_q = wide if self.several and not local.narrow(q) else q.dtype
            if self.all_queries:
                return Buffers(sent, received, (None, None), [], None)
            out = q.new_zeros(b, self.queries, h, d, dtype=of_q)
            lse = q.new_full((b, h, self.queries), -torch.inf, dtype=wide)
            return Buffers(sent, received, (out, lse), [], None)
        dq = None if self.all_queries else q.new_zeros(b, self.queries, h, d, dtype=wide)
        gradients = dq, *(None if self.all_keys else k.new_zeros(k.shape, dtype=wide) for _ in "kv")
        returned = [k.new_empty(self.exchange.room(1), dtype=wide) for _ in range(deep)]
        return Buffers(sent, received, gradients, returned, k.new_empty(self.exchange.room(0), dtype=wide))

    def forward(
        self, q, k, v, scale: float, backend: str, buffers: Buffers, settle: Callable | None = None
    ) -> tuple[Tensor, Tensor]:
        """out (B, Q, H, D) and lse (B, H, Q) from q (B, Q, H, D), k and v (B, L, G, D). settle: see `_stages`."""
        out, lse = buffers.results
        fresh = True
        for stage, x, found in self._stages(k, v, buffers, settle):
            for job, fills in found:
                keys = self._keys(job, fills, stage, k, v, buffers.received[x % len(buffers.received)])
                part = local.forward(self._take(job, q), *keys, job.pattern, scale, backend)
                if out is None:
                    out, lse = part[0] if local.narrow(q) or not self.several else part[0].to(part[1].dtype), part[1]
                else:
                    self._merge(job, out, lse, *part, alone=fresh or not self.several)
                fresh = False
        return out.to(q.dtype), lse

    def early(self, q: Tensor) -> bool:
        """Whether what needs no rows of others is begun before the ranks have agreed: a card computes it meanwhile."""
        return q.device.type == "cuda" and self.regroup is None

    def _stages(self, k, v, buffers: Buffers, settle: Callable | None) -> Iterator[tuple[Stage | None, int, list]]:
        """(stage, its number, its jobs), while the rows of the next stages travel; first what needs no rows.

        settle: returns once the ranks have agreed that rows may travel.
        """
        stages, pending = self.plan.stages, []

        def pack(x: int) -> None:
            if x < len(stages):
                self.exchange.pack(stages[x], k, v, buffers.sent[x % len(buffers.sent)])

        def fetch(x: int) -> None:
            if x < len(stages):
                sent, received = (side[x % len(side)] for side in (buffers.sent, buffers.received))
                pending.append(self.exchange.fetch(stages[x], sent, received))

        for x in range(AHEAD):
            pack(x)
        if settle is not None and self.early(k):
            packed = torch.cuda.Event()
            packed.record()
            yield None, 0, self.first
            settle()
            beside = torch.cuda.Stream(k.device)  # what travels waits for the packing, not for what is computed since
            beside.wait_event(packed)
            with torch.cuda.stream(beside):
                for x in range(AHEAD):
                    fetch(x)
        else:
            for x in range(AHEAD):
                fetch(x)
            yield None, 0, self.first
        for x, stage in enumerate(stages):
            pending.pop(0).wait()
            pack(x + AHEAD)
            fetch(x + AHEAD)
            yield stage, x, self.later[stage]

    def _merge(self, job: Job, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, alone: bool) -> None:
        """alone: nothing has been put yet where this job's results go."""
        rows = zip(self._views(job, out), self._views(job, lse.transpose(1, 2)), strict=True)
        each = zip(_strands(job, part), _strands(job, part_lse.transpose(1, 2)), strict=True)
        for (to, to_lse), (one, one_lse) in zip(rows, each, strict=True):
            if alone:
                to.copy_(one)
                to_lse.copy_(one_lse)
            else:
                local.merge(to, to_lse, one, one_lse)

    # --- backward -----------------------------------------------------------------------------------------------------

    def backward(
        self, grad, grad_lse, q, k, v, out, lse, scale: float, backend: str, buffers: Buffers,
        settle: Callable | None = None,
    ):  # fmt: skip
        """(dq (B, Q, H, D), dk, dv (B, L, G, D)) from the gradients of out and of lse (or None)."""
        dq, dk, dv = buffers.results
        returning = None
        for stage, x, found in self._stages(k, v, buffers, settle):
            received, returned = (side[x % len(side)] for side in (buffers.received, buffers.returned))
            if stage is not None:
                returned.zero_()
            for job, fills in found:
                keys = self._keys(job, fills, stage, k, v, received)
                of_rows = [self._take(job, t) for t in (grad, q, out)]
                its_lse, its_grad_lse = (
                    t if t is None else self._take(job, t.transpose(1, 2), value).transpose(1, 2)
                    for t, value in ((lse, torch.inf), (grad_lse, 0))  # lse inf: a row without gradients
                )
                parts = local.backward(
                    of_rows[0], its_grad_lse, of_rows[1], *keys, of_rows[2], its_lse, job.pattern, scale, backend
                )
                if dq is None:
                    dq = parts[0] if self.once or self.few and local.narrow(q) else parts[0].to(lse.dtype)
                else:
                    for to, part in zip(self._views(job, dq), _strands(job, parts[0]), strict=True):
                        to += part
                if dk is None:
                    dk, dv = (part if self.once else part.to(lse.dtype) for part in parts[1:])
                else:
                    self._scatter(job, fills, stage, parts[1:], (dk, dv), returned)
            if stage is not None:
                self._add(returning, buffers, dk, dv)
                returning = stage, self.exchange.give(stage, returned, buffers.arrived)
        self._add(returning, buffers, dk, dv)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scatter(self, job: Job, fills: list[Fill], stage: Stage | None, parts, totals, returned) -> None:
        """The gradients of a job's keys and values: to one's own rows, or to where received rows lie."""
        batch = slice(None) if job.batch is None else slice(job.batch, job.batch + 1)
        for x in fills:
            for y, (part, total) in enumerate(zip(parts, totals, strict=True)):
                part = part[:, x.to, x.to_heads]
                if x.parcel is None:
                    total[batch, x.rows, x.heads] += part
                elif isinstance(x.rows, slice):
                    self._parcel(stage, x, returned)[x.rows, y, batch, x.heads] += part.transpose(0, 1)
                else:
                    to = self._parcel(stage, x, returned)[:, y, batch, x.heads]
                    to.index_add_(0, x.rows, part.transpose(0, 1).to(to.dtype))

    def _add(self, returning, buffers: Buffers, dk: Tensor, dv: Tensor) -> None:
        if returning is not None:
            stage, pending = returning
            pending.wait()
            self.exchange.add(stage, buffers.arrived, dk, dv)


def _strands(job: Job, x: Tensor) -> Iterator[Tensor]:
    """x (B, queries of the job, its heads, ...) -> a view a strand, without the spare rows."""
    start, length = 0, x.shape[1] - job.spare
    for strand in job.strands:
        heads = len(range(strand.heads.stop)[strand.heads])
        yield x[:, :length, start : start + heads]
        start += heads


def _length(x: slice | Tensor) -> int:
    return len(x) if isinstance(x, Tensor) else len(range(x.start, x.stop, x.step or 1))


def _on(fill: Fill, device) -> Fill:
    """The fill with its indices on a device."""
    return Fill(*(x.to(device) if isinstance(x, Tensor) else x for x in fill))
