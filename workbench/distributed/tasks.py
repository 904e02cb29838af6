"""A job made ready for one rank: where its rows lie among the rank's own, in what arrives, and in what goes back.

Dimensions: B batch, L rows of this rank, Q queries that it computes, H query heads, G key heads, D head_dim, M keys of
the job. Everything that can be known before there are tensors is found once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.distributed.exchange import Exchange, Slot
from workbench.distributed.jobs import Fill, Job
from workbench.distributed.plans import Stage


class Task:
    """A job of a stage (None: before all stages). work: the queries of the rank, each with where they begin.

    keys: how many; behind: how many rows of the rank itself lie behind what arrives, once they are put there
    """

    def __init__(self, job: Job, fills: list[Fill], stage: Stage | None, exchange: Exchange, work, key_heads: int):
        self.job, self.fills, self.exchange = job, [_on(x, exchange.device) for x in fills], exchange
        self.batch = slice(None) if job.batch is None else slice(job.batch, job.batch + 1)
        self.rows = [_rows(s.queries, work) for s in job.strands]
        self.strands, start = [], 0  # where the heads of each are, side by side
        for s in job.strands:
            heads = len(range(s.heads.stop)[s.heads])
            self.strands.append(slice(start, start + heads))
            start += heads
        self.keys = len(job.strands[0].keys)
        self.key_heads = sum(len(range(key_heads)[s.key_heads]) for s in job.strands)
        self.slots = [None if x.parcel is None else exchange.slots[stage][1][x.source][x.parcel] for x in self.fills]
        own = [x for x in self.fills if x.parcel is None]
        # keys that are the rank's own rows, and nothing else, are a view of them
        self.own = own[0] if own == self.fills and len(own) == 1 and _length(own[0].to) == self.keys else None
        self.lying = self._lying(stage)
        self.behind = _length(own[0].to) if self.lying and own else 0
        self.full = sum(_length(x.to) * _length(x.to_heads) for x in self.fills) == self.keys * self.key_heads

    def _lying(self, stage: Stage | None) -> Slot | None:
        """Where in a stage's buffer the job's keys lie as they arrive, with the rank's own rows behind them, if so."""
        found, rows, own = None, 0, []
        for x, slot in sorted(zip(self.fills, self.slots, strict=True), key=lambda pair: pair[0].source):
            if slot is None:
                own.append(x)
                continue
            if not all(isinstance(y, slice) and y.step in (None, 1) for y in (x.to, x.rows)) or x.to.start != rows:
                return None
            many, heads = x.rows.stop - x.rows.start, len(slot.heads)
            each = self.exchange.elements(slot) // slot.rows
            start = slot.start + x.rows.start * each
            if x.to_heads.indices(self.key_heads) != (0, heads, 1) or x.heads.indices(heads) != (0, heads, 1):
                return None
            if found is not None and (found.heads != slot.heads or found.start + rows * each != start):
                return None
            found, rows = found or Slot(start, many, slot.heads, None), rows + many
        if found is None or len(found.heads) != self.key_heads or len(own) > 1:
            return None
        if own and (
            own[0].to_heads.indices(self.key_heads) != (0, self.key_heads, 1)
            or found.start + self.exchange.elements(found._replace(rows=rows)) != sum(self.exchange.splits[stage][1])
        ):
            return None  # behind them something else arrives
        return found._replace(rows=self.keys) if rows + sum(_length(x.to) for x in own) == self.keys else None

    # --- rows ---------------------------------------------------------------------------------------------------------

    def views(self, x: Tensor) -> list[Tensor]:
        """x (B, Q, H, ...) -> the job's rows of it, a view a strand."""
        x = x[self.batch]
        return [x[:, rows, s.heads] for rows, s in zip(self.rows, self.job.strands, strict=True)]

    def take(self, x: Tensor, value: float = 0) -> Tensor:
        """x (B, Q, H, ...) -> (B, queries of the job, its heads, ...), with the job's spare rows."""
        parts, spare = self.views(x), self.job.spare
        x = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return pad(x, (0, 0) * (x.dim() - 2) + (0, spare), value=value) if spare else x

    def each(self, x: Tensor) -> list[Tensor]:
        """x (B, queries of the job, its heads, ...) -> a view a strand, without the spare rows."""
        return [x[:, : x.shape[1] - self.job.spare, heads] for heads in self.strands]

    # --- keys ---------------------------------------------------------------------------------------------------------

    def gather(self, k: Tensor, v: Tensor, received: Tensor) -> list[Tensor]:
        """The job's keys and values (B, M, its key heads, D): views of what there is, or copies side by side."""
        k, v = k[self.batch], v[self.batch]
        if self.own is not None:
            return [x[:, self.own.rows, self.own.heads] for x in (k, v)]
        if self.lying is not None:
            gathered = self.exchange.parcel(received, self.lying)[:, :, self.batch]
        else:
            make = k.new_empty if self.full else k.new_zeros  # rows that nobody sees have to be finite
            gathered = make(self.keys, 2, k.shape[0], self.key_heads, k.shape[3])
        for x, slot in zip(self.fills, self.slots, strict=True):
            if slot is None:
                for y, mine in enumerate((k, v)):
                    gathered[x.to, y, :, x.to_heads] = mine[:, x.rows, x.heads].transpose(0, 1)
            elif self.lying is None:
                parcel = self.exchange.parcel(received, slot)
                gathered[x.to, :, :, x.to_heads] = parcel[x.rows, :, self.batch, x.heads]
        return list(gathered.permute(1, 2, 0, 3, 4).unbind(0))

    def scatter(self, dk: Tensor, dv: Tensor, totals: tuple[Tensor, Tensor], returned: Tensor) -> None:
        """The gradients of the job's keys and values: to one's own rows (B, L, G, D), or to where received rows lie."""
        for x, slot in zip(self.fills, self.slots, strict=True):
            for y, (part, total) in enumerate(zip((dk, dv), totals, strict=True)):
                part = part[:, x.to, x.to_heads]
                if slot is None:
                    total[self.batch, x.rows, x.heads] += part
                elif isinstance(x.rows, slice):
                    self.exchange.parcel(returned, slot)[x.rows, y, self.batch, x.heads] += part.transpose(0, 1)
                else:
                    to = self.exchange.parcel(returned, slot)[:, y, self.batch, x.heads]
                    to.index_add_(0, x.rows, part.transpose(0, 1).to(to.dtype))


def _rows(queries: range, work) -> slice:
    """Where a strand's queries are among those that the rank computes."""
    for part, start in work:
        if part and part.start <= queries.start < part.stop:
            by = start - part.start
            return slice(queries[0] + by, queries[-1] + 1 + by, queries.step)
    raise AssertionError(f"{queries} is not among {work}")


def _length(x: slice | Tensor) -> int:
    return len(x) if isinstance(x, Tensor) else len(range(x.start, x.stop, x.step or 1))


def _on(fill: Fill, device) -> Fill:
    """The fill with its indices on a device."""
    return Fill(*(x.to(device) if isinstance(x, Tensor) else x for x in fill))
