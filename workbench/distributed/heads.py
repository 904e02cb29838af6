"""Head parallelism: every rank attends to all positions for a part of the heads (DeepSpeed-Ulysses, arXiv 2309.14509).

One all-to-all turns a rank's rows of all heads into all rows of its heads, another one turns the results back. The
attention between is that of a single device.

Dimensions: B batch, L rows of a rank, N rows of all, H heads, D head_dim.
"""

from __future__ import annotations

import json
import math
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from workbench import dispatch
from workbench.distributed.exchange import all_to_all
from workbench.distributed.plans import Plan, describe, digest, of_mode
from workbench.distributed.shards import Shards
from workbench.distributed.views import some_heads
from workbench.patterns import Dilated, Pattern


class HeadsPlan(Plan):
    """What a `Plan` tells, for head parallelism; ValueError where heads and key heads do not divide among the ranks."""

    strategy = "heads"

    def __init__(self, pattern: Pattern, shards: Shards, heads: int, kv_heads: int, nq: int):
        super().__init__(pattern, shards, heads, kv_heads, nq)
        if heads % self.world or kv_heads % self.world:
            raise ValueError(f"strategy='heads': {heads} heads on {kv_heads} key heads, want multiples of {self.world}")
        if getattr(pattern, "batch", None) is not None:
            raise ValueError("strategy='heads': want one layout for the batch")
        if isinstance(pattern, Dilated) and self.n < heads:  # kernels take a rate beyond the sequence to be its length
            raise ValueError(f"strategy='heads': {self.n} positions, want at least as many as heads, {heads}")
        self.each = heads // self.world
        self.parts = [some_heads(pattern, rank * self.each, self.each, heads) for rank in range(self.world)]

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
        one = [part.pairs(self.n, self.each, self.nq) for part in self.parts]
        return np.array(one, dtype=object)

    @property
    def stages(self):
        return []

    @cached_property
    def digest(self) -> int:
        what = [self.strategy, self.shards.lengths, self.heads, self.kv_heads, self.nq]
        return digest(describe(self.pattern), json.dumps(what))


class _Turn(torch.autograd.Function):
    """(B, L, H, ...) of a rank's rows <-> (B, N, H / world, ...) of all rows; the gradient takes the other way."""

    @staticmethod
    def forward(ctx, x, lengths, rank, group, to_heads):
        ctx.way = lengths, rank, group, not to_heads
        return turn(x, lengths, rank, group, to_heads)

    @staticmethod
    def backward(ctx, grad):
        return turn(grad, *ctx.way), None, None, None, None


def turn(x: Tensor, lengths: list[int], rank: int, group, to_heads: bool) -> Tensor:
    world, starts = len(lengths), Shards(tuple(lengths)).starts
    rows = [slice(starts[p], starts[p + 1]) for p in range(world)]
    size = x.shape[2] // world if to_heads else x.shape[2]
    heads = [slice(p * size, (p + 1) * size) for p in range(world)]
    each = x.shape[0] * size * math.prod(x.shape[3:])
    of_all, of_mine = [lengths[p] * each * (p != rank) for p in range(world)], [lengths[rank] * each] * world
    of_mine[rank] = 0
    if to_heads:
        result = x.new_empty(x.shape[0], starts[-1], size, *x.shape[3:])
        result[:, rows[rank]] = x[:, :, heads[rank]]
        parts, out, into = [x[:, :, heads[p]] for p in range(world)], of_mine, of_all
    else:
        result = x.new_empty(x.shape[0], lengths[rank], size * world, *x.shape[3:])
        result[:, :, heads[rank]] = x[:, rows[rank]]
        parts, out, into = [x[:, rows[p]] for p in range(world)], of_all, of_mine
    sent = torch.cat([x.new_empty(0), *(part.transpose(0, 1).flatten() for p, part in enumerate(parts) if p != rank)])
    arrived = x.new_empty(sum(into))
    all_to_all(arrived, sent, into, out, group)
    for p, part in enumerate(arrived.split(into)):
        if p != rank:
            to = result[:, rows[p]] if to_heads else result[:, :, heads[p]]
            to.copy_(part.view(to.shape[1], to.shape[0], *to.shape[2:]).transpose(0, 1))
    return result


def attention(q: Tensor, k: Tensor, v: Tensor, plan: HeadsPlan, rank: int, group, scale, return_lse, backend):
    """out (B, queries held, H, D), and lse with return_lse, of this rank's rows."""
    held, rows = [len(plan.queries(p)) for p in range(plan.world)], list(plan.shards.lengths)
    q, k, v = (_Turn.apply(x, lengths, rank, group, True) for x, lengths in ((q, held), (k, rows), (v, rows)))
    found = dispatch.attention(q, k, v, plan.parts[rank], scale=scale, backend=backend, return_lse=return_lse)
    if not return_lse:
        return _Turn.apply(found, held, rank, group, False)
    lse = _Turn.apply(found[1].transpose(1, 2), held, rank, group, False).transpose(1, 2)
    return _Turn.apply(found[0], held, rank, group, False), lse
