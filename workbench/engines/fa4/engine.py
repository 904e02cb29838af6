"""Attention by FlashAttention-4's kernels on Hopper.

Dilated patterns run in tile order (`patterns.tile_order`). Tokens may lie in that order or in natural order, which the
kernels read in place where every segment is whole; a shorter last segment is padded, in copies. Branches that have no
tile order together with the others run by the Triton kernels and are merged.

The backward adds up dq in any order, so gradients differ in their last bits from run to run.

Dimensions: B batch, N keys, Nq queries (the last Nq positions), H query heads, G key heads, D head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workbench.engines import fa4
from workbench.engines.fa4 import places, plans
from workbench.engines.fa4.plans import Plan, Variant
from workbench.engines.triton import dilated
from workbench.patterns import Dense
from workbench.patterns.tile_order import TILE, TileOrder

ROWS = 640  # what the backward knows of rows is padded to whole tiles, of 64, 80 or 128 of them
ROOM = 1 << 28  # bytes that the float32 sums of dq may take, beside what one group of heads needs


def kernels():
    """The compiled kernels: a module that can be imported where the package is."""
    if fa4.STAND_IN is not None:
        return fa4.STAND_IN
    from workbench.engines.fa4 import compiled

    return compiled


def aligned(x: Tensor) -> Tensor:
    """x as the kernels read it: rows of 16 bytes at addresses that are multiples of 16, else a copy."""
    fit = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(step % 8 == 0 for step in x.stride()[:3])
    return x if fit else x.contiguous()


class Frame(NamedTuple):
    """How tokens of one kind (queries or keys) meet the kernels, which take sequences as (B, places, heads, D).

    order: the tile order, or the natural one (one residue). joined: whether the sequences follow each other as one.
    moved: whether tokens are copied into their order first, and results back; else they are read where they lie.
    in_place: whether the kernels read natural order as tile order.
    """

    order: TileOrder
    joined: bool
    moved: bool
    in_place: bool

    def enter(self, x: Tensor) -> Tensor:
        """x (B, N, heads, D) as a kernel takes it."""
        return self.view(places.into(x, self.order) if self.moved else aligned(x))

    def view(self, x: Tensor) -> Tensor:
        if not self.joined or x.shape[0] == 1:
            return x
        if x.stride(0) != x.shape[1] * x.stride(1):
            x = x.contiguous()
        return x.as_strided((1, x.shape[0] * x.shape[1], *x.shape[2:]), (x.stride(1), *x.stride()[1:]))

    def result(self, x: Tensor, summed: bool = False) -> Tensor:
        """Where a kernel writes the result x (B, N, heads, D); summed: by way of sums, which are in tile order."""
        apart = self.moved or summed and self.in_place
        return x.new_empty((x.shape[0], self.order.padded, *x.shape[2:])) if apart else x

    def rows(self, x: Tensor) -> Tensor:
        """What is known of rows (heads, B, places) as a kernel takes it."""
        return x.view(1, len(x), -1) if self.joined else x.transpose(0, 1)

    def sums(self, heads: int, b: int, rows: int, d: int, device) -> Tensor:
        """Float32 zeros for what a kernel adds up."""
        b, rows = (1, b * rows) if self.joined else (b, rows)
        return torch.zeros((b, heads, rows * wide(d)), dtype=torch.float32, device=device)

    def leave(self, result: Tensor, x: Tensor) -> None:
        """Move the `result` to x, where it is not x."""
        if result is not x:
            places.out_of(result, x, self.order)


def frames(plan: Plan, n: int, nq: int, natural: bool) -> tuple[Frame, Frame]:
    """Of queries and of keys."""
    if plan.order is None:
        one = Frame(TileOrder(nq, -(-nq // ROWS) * ROWS, 1), False, False, False)
        return one, one._replace(order=TileOrder(n, n, 1))
    moved = natural and n % plan.order.segment > 0
    keys = Frame(plan.order, True, moved, natural and not moved)
    return keys._replace(order=plan.order._replace(n=nq)), keys


def forward(
    q: Tensor, k: Tensor, v: Tensor, pattern, scale: float, natural: bool = True, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out (B, Nq, H, D) and lse (B, H, Nq) from q (B, Nq, H, D), k and v (B, N, G, D).

    natural: whether tokens lie in natural order, else in the pattern's tile order. out: contiguous, to be written
    """
    (b, nq, h, _), n = q.shape, k.shape[1]
    plan = plans.plan_of(pattern, q, n)
    queries, keys = frames(plan, n, nq, natural)
    kind = variant(q, k, plan, pattern, queries, False)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    to = queries.result(out)
    lse = torch.empty((h, b, to.shape[1]), dtype=torch.float32, device=q.device)
    kernels().forward(
        kind, queries.enter(q), keys.enter(k), keys.enter(v), queries.view(to), queries.rows(lse), scale, plan.scalar,
        plan.both.by_queries.of(1 if queries.joined else b, range(h)) if kind.listed else None,
    )  # fmt: skip
    queries.leave(to, out)
    if queries.moved:
        lse = lse.index_select(2, queries.order.place(torch.arange(nq, device=q.device)))
    lse = lse.transpose(0, 1).contiguous()
    if plan.rest is not None:
        dilated.forward(q, k, v, plan.rest, scale, (out, lse))
    return out, lse


def backward(grad, grad_lse, q, k, v, out, lse, pattern, scale: float, natural: bool = True):
    """(dq, dk, dv) from the gradients of out and lse, the inputs, and out and lse."""
    (b, nq, h, d), (n, g) = q.shape, k.shape[1:3]
    plan = plans.plan_of(pattern, q, n)
    queries, keys = frames(plan, n, nq, natural)
    kind, run = variant(q, k, plan, pattern, queries, True), kernels()
    dq, dk, dv = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    rows = places.rows(grad, grad_lse, out, lse, queries.order if natural else TileOrder(nq, nq, 1))
    entered = queries.enter(q), keys.enter(k), keys.enter(v), queries.enter(grad)
    group, places_of_rows = h // g, rows[0].shape[2]
    step = max(1, ROOM // (4 * group * b * places_of_rows * wide(d)))

    def of_heads(theirs: range) -> None:
        """Their gradients; what that takes is freed before the next heads' begin."""
        ours = range(theirs.start * group, theirs.stop * group)
        some = [heads_of(x, of) for x, of in zip(entered, (ours, theirs, theirs, ours), strict=True)]
        results = [heads_of(x, of) for x, of in zip((dq, dk, dv), (ours, theirs, theirs), strict=True)]
        to = [queries.result(results[0], True), *(keys.result(x, group > 1) for x in results[1:])]
        written = [queries.view(to[0]), keys.view(to[1]), keys.view(to[2])]
        sums = [queries.sums(len(ours), b, places_of_rows, d, q.device)]
        if group > 1:
            sums += [keys.sums(len(theirs), b, -(-to[1].shape[1] // TILE) * TILE, d, q.device) for _ in "kv"]
        run.backward(
            kind, *some, *(queries.rows(x[ours.start : ours.stop]) for x in rows), *(*sums, *written[1:])[:3], scale,
            plan.scalar, plan.both.by_keys.of(1 if queries.joined else b, ours) if kind.listed else None,
        )  # fmt: skip
        run.convert(kind, True, sums[0], written[0], scale)
        for total, result, by in zip(sums[1:], written[1:], (scale, 1.0), strict=False):
            run.convert(kind, False, total, result, by)
        for frame, result, x in zip((queries, keys, keys), to, results, strict=True):
            frame.leave(result, x)

    for start in range(0, g, step):
        of_heads(range(start, min(g, start + step)))
    if plan.rest is not None:
        dilated.backward(grad, grad_lse, q, k, v, out, lse, plan.rest, scale, (dq, dk, dv))
    return dq, dk, dv


def heads_of(x: Tensor, heads: range) -> Tensor:
    return x[:, :, heads.start : heads.stop]


def wide(head_dim: int) -> int:
    """The head_dim of sums."""
    return -(-head_dim // 32) * 32


def variant(q: Tensor, k: Tensor, plan: Plan, pattern, queries: Frame, backward: bool) -> Variant:
    """What is compiled for a call."""
    order = plan.order and (plan.order.segment, plan.order.rate)
    if plan.mask not in ("later", "padding") and not queries.in_place:
        order = None  # what does not depend on it is compiled once for all
    group, band = q.shape[2] // k.shape[2], plan.mask if plan.mask in ("window", "back") and not backward else None
    return Variant(
        q.dtype, q.shape[3], group, isinstance(pattern, Dense) and pattern.causal, None if band else plan.mask, band,
        order, queries.in_place, plan.order is not None,
    )  # fmt: skip
