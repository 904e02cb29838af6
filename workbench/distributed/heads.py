"""Head parallelism: every rank attends to all positions for a part of the heads (DeepSpeed-Ulysses, arXiv 2309.14509).

An all-to-all turns a rank's rows of all heads into all rows of its heads, another one turns the results back. They go
by stages of a few heads: while those of one stage are attended to, the next ones travel, and the last ones go back. The
attention of a stage is that of a single device.

Dimensions: B batch, L rows of a rank, N rows of all, H heads, h heads of a rank in a stage, D head_dim.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.distributed import local, plans
from workbench.distributed.agree import agree
from workbench.distributed.exchange import all_to_all
from workbench.distributed.plans import Plan, describe, digest, of_mode
from workbench.distributed.shards import Shards
from workbench.distributed.views import some_heads
from workbench.patterns import Dilated, Pattern

AHEAD = 1  # stages that travel while one is attended to


class HeadsPlan(Plan):
    """What a `Plan` tells, for head parallelism; ValueError where heads and key heads do not divide among the ranks.

    stages: which of a rank's key heads travel together
    """

    strategy = "heads"

    def __init__(self, pattern: Pattern, shards: Shards, heads: int, kv_heads: int, nq: int):
        super().__init__(pattern, shards, heads, kv_heads, nq)
        if heads % self.world or kv_heads % self.world:
            raise ValueError(f"strategy='heads': {heads} heads on {kv_heads} key heads, want multiples of {self.world}")
        if getattr(pattern, "batch", None) is not None:
            raise ValueError("strategy='heads': want one layout for the batch")
        if isinstance(pattern, Dilated) and self.n < heads:  # kernels take a rate beyond the sequence to be its length
            raise ValueError(f"strategy='heads': {self.n} positions, want at least as many as heads, {heads}")
        self.each, self.key_each = heads // self.world, kv_heads // self.world
        self.stages, self.parts = self._cut()

    def _cut(self) -> tuple[list[range], list[list[Pattern]]]:
        """(stages, by rank the pattern of each stage): as many as are worth it and as the pattern can be cut into."""
        most = int(self.units.sum(0).max())
        for many in range(max(1, min(self.key_each, most // plans.LEAST)), 0, -1):
            parts = Shards.even(self.key_each, many)
            stages = [parts[x] for x in range(many)]
            try:
                return stages, [[self._part(rank, stage) for stage in stages] for rank in range(self.world)]
            except ValueError:
                if many == 1:
                    raise
        raise AssertionError("a stage of all heads is possible, or was refused")

    def _part(self, rank: int, stage: range) -> Pattern:
        some = self.of_queries(stage)
        return some_heads(self.pattern, rank * self.each + some.start, some.stop - some.start, self.heads)

    def of_queries(self, stage: range) -> slice:
        """Which of a rank's query heads go with the key heads of a stage."""
        group = self.heads // max(1, self.kv_heads)
        return slice(stage.start * group, stage.stop * group)

    @cached_property
    def units(self) -> Tensor:
        """int64 (world, world): key rows, counted once a key head, that rank [s, .] sends to rank [., t]."""
        rows = torch.tensor(self.shards.lengths)[:, None].expand(-1, self.world).clone()
        return rows.fill_diagonal_(0) * (self.kv_heads // self.world)

    @cached_property
    def moved(self) -> Tensor:
        """int64 (world, world): query rows that rank [s, .] sends to rank [., t], for the heads that [., t] has."""
        held = torch.tensor([len(self.queries(rank)) for rank in range(self.world)])
        return held[:, None].expand(-1, self.world).clone().fill_diagonal_(0)

    def bytes(self, itemsize, head_dim, batch=1, mode="fwd", lse=False):
        there = self.moved * (batch * self.each)
        keys = self.units * (2 * batch * head_dim * itemsize)
        queries = (there + there.T) * head_dim * itemsize
        wide = max(4, itemsize) * lse
        return of_mode(mode, keys + queries + there.T * wide, keys.T + queries + there * wide)

    @cached_property
    def pairs(self):
        group = self.heads // max(1, self.kv_heads)
        sizes = [len(stage) * group for stage in self.stages]
        each = [[part.pairs(self.n, h, self.nq) for part, h in zip(x, sizes, strict=True)] for x in self.parts]
        return np.array([sum(x) for x in each], dtype=object)

    @cached_property
    def digest(self) -> int:
        what = [self.strategy, self.shards.lengths, self.heads, self.kv_heads, self.nq, [str(x) for x in self.stages]]
        return digest(describe(self.pattern), json.dumps(what))


class Turn(NamedTuple):
    """Between a rank's rows of all heads, (B, L, H, ...), and all rows of some of its heads, (B, N, h, ...).

    lengths: of the rows of each rank. Both ways are begun, and what is returned waits for the end. One's own part goes
    the same way, so that what arrives is whole; nothing of it leaves the rank.
    """

    lengths: list[int]
    rank: int
    group: object

    def to_heads(self, x: Tensor, some: slice) -> Callable[[], Tensor]:
        """some: which of every rank's share of the heads."""
        world, own = len(self.lengths), self.lengths[self.rank]
        shares = x.unflatten(2, (world, x.shape[2] // world))[:, :, :, some]
        sent = shares.permute(2, 1, 0, *range(3, shares.dim())).contiguous()  # (world, L, B, h, ...)
        arrived = x.new_empty(sum(self.lengths), *sent.shape[2:])
        each = math.prod(sent.shape[2:])
        into, out = [rows * each for rows in self.lengths], [own * each] * world
        work = all_to_all(arrived.flatten(), sent.flatten(), into, out, self.group, wait=False)

        def turned(sent=sent) -> Tensor:  # which has to live until it is sent
            work.wait()
            return arrived.transpose(0, 1)

        return turned

    def to_rows(self, x: Tensor, whole: Tensor, some: slice) -> Callable[[], None]:
        """Into `whole` (B, L, H, ...), at those heads of every rank's share."""
        world, own = len(self.lengths), self.lengths[self.rank]
        sent = x.transpose(0, 1).contiguous()  # (N, B, h, ...)
        arrived = x.new_empty(world, own, *sent.shape[1:])
        each = math.prod(sent.shape[1:])
        into, out = [own * each] * world, [rows * each for rows in self.lengths]
        work = all_to_all(arrived.flatten(), sent.flatten(), into, out, self.group, wait=False)

        def turned(sent=sent) -> None:
            work.wait()
            shares = whole.unflatten(2, (world, whole.shape[2] // world))[:, :, :, some]
            shares.copy_(arrived.permute(2, 1, 0, *range(3, arrived.dim())))

        return turned


def ahead(start: Callable[[int], Callable], many: int) -> Iterator:
    """What the things that start(0), start(1), ... begin come to, each begun AHEAD of its turn."""
    begun = deque(start(x) for x in range(min(AHEAD, many)))
    for x in range(many):
        if x + AHEAD < many:
            begun.append(start(x + AHEAD))
        yield begun.popleft()()


def together(turns: Iterable[Callable]) -> Callable[[], list]:
    turns = list(turns)
    return lambda: [turned() for turned in turns]


class Call(NamedTuple):
    """device: where what ranks tell each other has to be."""

    plan: HeadsPlan
    rank: int
    group: object
    device: torch.device
    scale: float
    backend: str
    return_lse: bool

    def turns(self) -> tuple[Turn, Turn]:
        """Of queries, and of keys."""
        held = [len(self.plan.queries(p)) for p in range(self.plan.world)]
        return Turn(held, self.rank, self.group), Turn(list(self.plan.shards.lengths), self.rank, self.group)


class Attend(torch.autograd.Function):
    """(q (B, Lq, H, D), k and v (B, L, G, D), a `Call`) -> out, or (out, lse (B, H, Lq)), of this rank's rows."""

    @staticmethod
    def forward(ctx, q, k, v, call: Call):
        of_queries, of_keys = call.turns()
        stages = [(call.plan.of_queries(x), slice(x.start, x.stop)) for x in call.plan.stages]
        out, lse, back, kept = q.new_empty(q.shape), None, [], []

        def bring(x: int):
            some, keys = stages[x]
            return together([of_queries.to_heads(q, some), of_keys.to_heads(k, keys), of_keys.to_heads(v, keys)])

        for x, brought in enumerate(ahead(bring, len(stages))):
            part, its_lse = local.forward(*brought, call.plan.parts[call.rank][x], call.scale, call.backend)
            kept += [*brought, part, its_lse] if any(ctx.needs_input_grad) else []
            going = [of_queries.to_rows(part, out, stages[x][0])]
            if call.return_lse:
                if lse is None:
                    lse = its_lse.new_empty(*q.shape[:3])
                going.append(of_queries.to_rows(its_lse.transpose(1, 2), lse, stages[x][0]))
            back.append(together(going))
            if x:
                back.pop(0)()
        for turned in back:
            turned()
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        ctx.call = call
        return (out, lse.transpose(1, 2)) if call.return_lse else out

    @staticmethod
    def backward(ctx, grad, grad_lse=None):
        call, saved = ctx.call, ctx.saved_tensors
        kept = [saved[x : x + 5] for x in range(0, len(saved), 5)]  # of each stage: q, k, v, out, lse
        (of_queries, of_keys), plan = call.turns(), call.plan
        like, (b, held) = kept[0], (kept[0][0].shape[0], of_queries.lengths[call.rank])
        told = agree(call.group, call.device, None, [int(grad_lse is not None)])
        if grad is None:
            grad = like[0].new_zeros(b, held, plan.heads, like[0].shape[3])
        if bool(told.any()):
            grad_lse = like[4].new_zeros(b, plan.heads, held) if grad_lse is None else grad_lse
        stages = [(plan.of_queries(x), slice(x.start, x.stop)) for x in plan.stages]
        dq = grad.new_empty(grad.shape)
        dk, dv = (grad.new_empty(b, of_keys.lengths[call.rank], plan.kv_heads, grad.shape[3]) for _ in "kv")
        back = []

        def bring(x: int):
            found = [of_queries.to_heads(grad, stages[x][0])]
            if grad_lse is not None:
                found.append(of_queries.to_heads(grad_lse.transpose(1, 2), stages[x][0]))
            return together(found)

        for x, (its_grad, *its_grad_lse) in enumerate(ahead(bring, len(stages))):
            its_grad_lse = its_grad_lse[0].transpose(1, 2) if its_grad_lse else None
            of_part = its_grad, its_grad_lse, *kept[x], plan.parts[call.rank][x], call.scale, call.backend
            parts = [part.to(grad.dtype) for part in local.backward(*of_part)]
            some, keys = stages[x]
            going = [of_queries.to_rows(parts[0], dq, some), of_keys.to_rows(parts[1], dk, keys)]
            back.append(together([*going, of_keys.to_rows(parts[2], dv, keys)]))
            if x:
                back.pop(0)()
        for turned in back:
            turned()
        return dq, dk, dv, None
