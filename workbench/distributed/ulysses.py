"""Head parallelism: every rank attends to all positions for a part of the heads (DeepSpeed-Ulysses, arXiv 2309.14509).

One all-to-all turns a rank's rows of all heads into all rows of its heads, another turns the results back. They run in
stages of a few heads, which bounds the memory of their buffers. Within a stage, attention is that of a single device.
Stages do not overlap: on two H200s overlap was slower (131,072 x 12 x 64: 65 ms against 60), since NCCL's kernel, while
it waits for its peer, occupies multiprocessors that the attention could use.

Dimensions: B batch, L rows of a rank, N rows of all, H heads, h heads of a rank in a stage, D head_dim.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.distributed import plans
from workbench.distributed.group import Ranks
from workbench.distributed.plans import Plan
from workbench.distributed.shards import Shards
from workbench.distributed.views import some_heads
from workbench.engines import partial
from workbench.patterns import Dilated, Pattern, PerHead

STAGES = 4  # at most so many


class HeadsPlan(Plan):
    """A `Plan` for head parallelism. ValueError unless heads and key heads are multiples of the number of ranks.

    units, moved, bytes, pairs, balance and text are those of head parallelism; `halo`, `work` and `parcels`, which
    are about the sequence, do not apply. stages: the key heads of a rank's share that travel together.
    """

    strategy = "heads"

    def __init__(self, pattern: Pattern, shards: Shards, heads: int, kv_heads: int, nq: int):
        super().__init__(pattern, shards, heads, kv_heads, nq)
        if heads % self.world or kv_heads % self.world:
            raise ValueError(f"strategy='heads': {heads} heads on {kv_heads} key heads, want multiples of {self.world}")
        if pattern.batch is not None:
            raise ValueError("strategy='heads': want one layout for the batch")
        if isinstance(pattern, Dilated) and self.n < heads:  # kernels cap a dilation rate at the length of the sequence
            raise ValueError(f"strategy='heads': {self.n} positions, want at least as many as heads, {heads}")
        self.each, self.key_each = heads // self.world, kv_heads // self.world
        self.group = heads // max(1, kv_heads)  # query heads to a key head
        self.stages, self.parts = self._cut()

    def _cut(self) -> tuple[list[range], list[list[Pattern]]]:
        """(stages, for each rank the pattern of each stage): the most that are worth it and that the pattern allows."""
        most = int(self.units.sum(0).max())
        for many in range(min(STAGES, self.key_each, most // plans.LEAST), 1, -1):
            with contextlib.suppress(ValueError):
                return self._stages(many)
        return self._stages(1)

    def _stages(self, many: int) -> tuple[list[range], list[list[Pattern]]]:
        stages = list(Shards.even(self.key_each, many))
        return stages, [[self._part(rank, stage) for stage in stages] for rank in range(self.world)]

    def _part(self, rank: int, stage: range) -> Pattern:
        some, pattern = self.of_queries(stage), self.pattern
        first, heads = rank * self.each + some.start, some.stop - some.start
        if isinstance(pattern, PerHead) and len({x.key for x in pattern.of[first : first + heads]}) == 1:
            pattern = pattern.of[first]
        return some_heads(pattern, first, heads, self.heads)

    def of_queries(self, stage: range) -> slice:
        """The query heads, of a rank's share, that go with the key heads of a stage."""
        return slice(stage.start * self.group, stage.stop * self.group)

    @functools.cached_property
    def units(self) -> Tensor:
        """int64 (world, world): how many (row, key head) rank [s, .] sends to rank [., t]."""
        rows = torch.tensor(self.shards.lengths)[:, None].expand(-1, self.world).clone()
        return rows.fill_diagonal_(0) * (self.kv_heads // self.world)

    @functools.cached_property
    def moved(self) -> Tensor:
        """int64 (world, world): query rows that rank [s, .] sends to rank [., t], each for the heads of [., t]."""
        held = torch.tensor([len(self.queries(rank)) for rank in range(self.world)])
        return held[:, None].expand(-1, self.world).clone().fill_diagonal_(0)

    def _bytes(self, itemsize, wide, head_dim, batch, lse):
        there = self.moved * (batch * self.each)
        keys = self.units * (2 * batch * head_dim * itemsize)
        queries = (there + there.T) * head_dim * itemsize
        return keys + queries + there.T * (wide * lse), keys.T + queries + there * (wide * lse)

    @functools.cached_property
    def pairs(self):
        sizes = [len(stage) * self.group for stage in self.stages]
        each = [[part.pairs(self.n, h, self.nq) for part, h in zip(x, sizes, strict=True)] for x in self.parts]
        return np.array([sum(x) for x in each], dtype=object)


class HeadAllToAll(NamedTuple):
    """Exchanges a rank's rows of all heads, (B, L, H, ...), for all rows of some heads, (B, N, h, ...), and back.

    lengths: how many rows each rank has. A rank's own part goes through the all-to-all too, without leaving the rank,
    so that what arrives is complete.
    """

    lengths: list[int]
    ranks: Ranks

    def to_heads(self, x: Tensor, some: slice) -> Tensor:
        """x (B, L, H, ...) -> (B, N, h, ...). some: which heads of every rank's share."""
        world, own = len(self.lengths), self.lengths[self.ranks.rank]
        shares = x.unflatten(2, (world, x.shape[2] // world))[:, :, :, some]
        sent = shares.permute(2, 1, 0, *range(3, shares.dim())).contiguous()  # (world, L, B, h, ...)
        arrived = x.new_empty(sum(self.lengths), *sent.shape[2:])
        each = math.prod(sent.shape[2:])
        into, out = [rows * each for rows in self.lengths], [own * each] * world
        self.ranks.all_to_all(arrived.flatten(), sent.flatten(), into, out)
        return arrived.transpose(0, 1)

    def to_rows(self, x: Tensor, whole: Tensor, some: slice) -> None:
        """x (B, N, h, ...) into `whole` (B, L, H, ...), at the heads `some` of every rank's share."""
        world, own = len(self.lengths), self.lengths[self.ranks.rank]
        sent = x.transpose(0, 1).contiguous()  # (N, B, h, ...)
        arrived = x.new_empty(world, own, *sent.shape[1:])
        each = math.prod(sent.shape[1:])
        into, out = [own * each] * world, [rows * each for rows in self.lengths]
        self.ranks.all_to_all(arrived.flatten(), sent.flatten(), into, out)
        shares = whole.unflatten(2, (world, whole.shape[2] // world))[:, :, :, some]
        shares.copy_(arrived.permute(2, 1, 0, *range(3, arrived.dim())))


class Executor:
    """A plan by heads made ready for one rank. Its runs do nothing before the ranks have agreed but `rehearse`."""

    def __init__(self, plan: HeadsPlan, ranks: Ranks):
        self.plan, self.ranks = plan, ranks
        self.of_queries = HeadAllToAll([len(plan.queries(p)) for p in range(plan.world)], ranks)
        self.of_keys = HeadAllToAll(list(plan.shards.lengths), ranks)

    def to(self, device) -> None:
        """It has nothing on the device."""

    def rehearse(self, q: Tensor, backward: bool) -> None:
        """Allocate what a run will, and free it, so that an out-of-memory comes while ranks can still agree on it;
        torch's allocator caches the memory for the run. q: of the call's batch, head_dim, dtype and device."""
        b, d, plan = q.shape[0], q.shape[3], self.plan
        held, own = len(plan.queries(self.ranks.rank)), plan.shards.lengths[self.ranks.rank]
        most = max((len(stage) for stage in plan.stages), default=0)
        whole = b * d * (held * plan.heads + 2 * own * plan.kv_heads * backward)  # out, or dq, dk and dv
        sent = b * d * most * plan.world * max(held * plan.group, own)  # of one tensor at a time
        arrived = b * d * most * (plan.nq * plan.group + 2 * plan.n * (not backward))  # q, k and v, or out's gradient
        _ = [q.new_empty(size) for size in (whole, sent, arrived)]

    def stages(self) -> Iterator[tuple[Pattern, slice, slice]]:
        """(pattern, query heads, key heads) of each stage; heads are slices of any rank's share."""
        for part, keys in zip(self.plan.parts[self.ranks.rank], self.plan.stages, strict=True):
            yield part, self.plan.of_queries(keys), slice(keys.start, keys.stop)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call, needs_gradients: bool) -> Later:
        """A forward of this rank's q (B, Lq, H, D), k and v (B, L, G, D). call: a `call.Call`. `finish()` gives (out
        like q, lse (B, H, Lq), not computed unless the call returns it; of each stage all rows of q, k, v, out and lse,
        for a backward)."""
        self.rehearse(q, backward=False)
        return Later(functools.partial(self._forward, q, k, v, call, needs_gradients))

    def _forward(self, q, k, v, call, needs_gradients: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out, lse, saved = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=wide), []
        for pattern, heads, keys in self.stages():
            brought = self.of_queries.to_heads(q, heads), *(self.of_keys.to_heads(x, keys) for x in (k, v))
            results = partial.forward(*brought, pattern, call)
            saved += [*brought, *results] if needs_gradients else []
            self.of_queries.to_rows(results[0], out, heads)
            if call.return_lse:
                self.of_queries.to_rows(results[1].transpose(1, 2), lse, heads)
        return out, lse.transpose(1, 2), saved

    def backward(self, grad: Tensor | None, grad_lse: Tensor | None, saved, call) -> Later:
        """A backward of what a forward has saved, from the gradients of out and lse, like these, or None.
        `finish(any_grad_lse)` gives (dq, dk, dv); any_grad_lse: whether lse has a gradient on some rank, whose rows
        then travel from all."""
        self.rehearse(saved[0], backward=True)
        return Later(functools.partial(self._backward, grad, grad_lse, saved, call))

    def _backward(self, grad, grad_lse, saved, call, any_grad_lse: bool) -> tuple[Tensor, Tensor, Tensor]:
        plan, own, like = self.plan, self.of_keys.lengths[self.ranks.rank], saved[0]
        shape = like.shape[0], self.of_queries.lengths[self.ranks.rank], plan.heads, like.shape[3]
        grad = like.new_zeros(shape) if grad is None else grad
        if any_grad_lse and grad_lse is None:
            grad_lse = saved[4].new_zeros(shape[0], shape[2], shape[1])
        dq = grad.new_empty(shape)
        dk, dv = (grad.new_empty(shape[0], own, plan.kv_heads, shape[3]) for _ in "kv")
        for x, (pattern, heads, keys) in enumerate(self.stages()):
            its_grad, its_grad_lse = self.of_queries.to_heads(grad, heads), None
            if grad_lse is not None:
                its_grad_lse = self.of_queries.to_heads(grad_lse.transpose(1, 2), heads).transpose(1, 2)
            kept = saved[5 * x : 5 * x + 5]  # q, k, v, out, lse
            found = partial.backward(its_grad, its_grad_lse, *kept, pattern, call)
            self.of_queries.to_rows(found[0].to(dq.dtype), dq, heads)
            for result, rows in zip(found[1:], (dk, dv), strict=True):
                self.of_keys.to_rows(result.to(rows.dtype), rows, keys)
        return dq, dk, dv

    def held_here(self, x: Tensor) -> Tensor:
        return x


class Later(NamedTuple):
    """A run all of which comes once the ranks have agreed: `finish`."""

    finish: Callable

    def pack(self) -> None:
        """Nothing travels before the ranks have agreed."""
