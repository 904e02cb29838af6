"""The door to attention over several ranks: agree, plan, exchange, attend.

Dimensions: B batch, L rows of this rank, N rows of all ranks together, H query heads, G key heads, D head_dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workbench import dispatch
from workbench.distributed import heads as by_heads
from workbench.distributed import local
from workbench.distributed.agree import agree, same
from workbench.distributed.heads import HeadsPlan
from workbench.distributed.plans import Plan, describe, digest
from workbench.distributed.sequence import Buffers, Sequence
from workbench.distributed.shards import Shards
from workbench.execution.fused import unit_stride
from workbench.patterns import Dense, Pattern

STRATEGIES = ("auto", "sequence", "heads")
SAME = ("pattern", "shape", "dtype", "strategy", "scale", "backend", "return_lse", "requires_grad")  # on all ranks


@torch.compiler.disable
def attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, group=None, strategy: str = "auto", scale: float | None = None,
    return_lse: bool = False, backend: str = "auto",
):  # fmt: skip
    """Attention of this rank's queries to the keys of all ranks: what `workbench.attention` gives for these rows.

    q (B, Lq, H, D), k and v (B, L, G, D): this rank's contiguous shard, in the order of ranks; lengths may differ and
    be 0. Where there are fewer queries than keys, they are the last positions of all, each on the rank that has its
    key. Returns out like q, or (out, lse (B, H, Lq)) with return_lse.
    group: a process group (None: the default one). A world of 1 needs none, and is `workbench.attention` itself.
    strategy: "sequence" (each rank attends for its own rows, and gets the key rows that these touch), "heads" (each
    rank attends to everything for a part of the heads), or "auto", the one that moves fewer bytes (see `explain`).
    backend: "auto", "torch" or "triton", for what a rank computes.

    All ranks of the group call this, and its backward, together. ValueError on every rank, before data moves, where one
    rank's input is wrong or ranks differ in what they want; so for an out-of-memory while buffers are made, on forward
    and backward. What moves: keys and values once forward and once backward, and their gradients in float32 (float64),
    as `Plan.bytes` says.
    """
    q, k, v, call = _agreed(q, k, v, pattern, group, strategy, scale, return_lse, backend)
    if call is None:
        return dispatch.attention(q, k, v, pattern, scale=scale, backend=backend, return_lse=return_lse)
    if isinstance(call.plan, HeadsPlan):
        return by_heads.attention(q, k, v, call.plan, call.rank, call.group, call.scale, return_lse, backend)
    found = _Attend.apply(q, k, v, call)
    return (dispatch._divided(found[0], pattern), found[1]) if return_lse else dispatch._divided(found, pattern)


def explain(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, group=None, strategy: str = "auto") -> str:
    """Which strategy this call takes, and the bytes that it moves, in a sentence. All ranks call it together."""
    q, k, v, call = _agreed(q, k, v, pattern, group, strategy, None, False, "auto")
    if call is None:
        return f"one rank: {dispatch.explain(q, k, v, pattern)}"
    sizes = (q.element_size(), q.shape[3], q.shape[0])
    forward, backward = (call.plan.bytes(*sizes, mode=mode) for mode in ("fwd", "bwd"))
    return (
        f"{call.plan.strategy}: {call.why}; forward moves {int(forward.sum()):,} bytes, at most "
        f"{int(forward.sum(0).max()):,} to one rank, and backward {int(backward.sum()):,}"
    )


class Call(NamedTuple):
    """One agreed call. ready: the plan on this rank's device (sequence only); buffers: what the forward needs."""

    plan: Plan
    why: str
    rank: int
    group: object
    device: torch.device
    scale: float
    backend: str
    return_lse: bool
    ready: Sequence | None
    buffers: Buffers | None


class Made(NamedTuple):
    """A plan as it was made for the last call, kept with the pattern."""

    key: tuple
    plan: Plan
    why: str
    group: object
    ready: Sequence | None


def _agreed(
    q, k, v, pattern, group, strategy, scale, return_lse, backend
) -> tuple[Tensor, Tensor, Tensor, Call | None]:
    """(q, k, v as they are computed with, the call or None for a single rank); raises on all ranks or on none."""
    group, world, rank, device = _place(group)
    if world == 1:
        _check_names(strategy)
        return q, k, v, None
    error, made, buffers, numbers = None, None, None, [0] * (3 + len(SAME))
    try:
        _check_names(strategy)
        _check(q, k, v, pattern, scale, strategy, backend)
        q, k, v = dispatch.autocast(q, k, v)
        key = (q.shape, k.shape, q.device, q.dtype, strategy)
        made = _kept(pattern).get("made")
        if made is not None and made.key == key and made.group is group:
            buffers = _buffers(made, q, k)
        else:
            made = None
        numbers = [q.shape[1], k.shape[1], made.plan.digest if made else 0]
        numbers += _numbers(q, k, v, pattern, strategy, scale, backend, return_lse)
    except Exception as found:
        error = found
    told = agree(group, device, error, numbers)
    same(told[:, 3:], SAME)
    if made is None or bool((told[:, 2] != made.plan.digest).any()):
        made = buffers = None
        try:
            made = _make(q, k, pattern, told, rank, group, strategy)
            _kept(pattern)["made"] = made
            buffers = _buffers(made, q, k)
        except Exception as found:
            error = found
        told = agree(group, device, error, [made.plan.digest if made else 0])
        same(told, ("plan",))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    call = Call(made.plan, made.why, rank, group, device, scale, backend, return_lse, made.ready, buffers)
    return q, k, v, call


def _check_names(strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: want one of {', '.join(map(repr, STRATEGIES))}")


def _check(q, k, v, pattern, scale, strategy, backend) -> None:
    """What a rank can tell from its own shard."""
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern={pattern!r}: want a pattern, e.g. Dense() or Dilated([2048, 4096], [1, 2])")
    dispatch.check(q, k, v, Dense(), scale)
    if getattr(pattern, "batch", None) not in (None, q.shape[0]):
        raise ValueError(f"the layout is for a batch of {pattern.batch}, but q is {tuple(q.shape)}")
    reason = local.why_not(backend, q, k, pattern)
    if reason:
        raise ValueError(reason)


def _place(group) -> tuple[object, int, int, torch.device]:
    """(the group, how many ranks it has, which of them this is, where what it gathers has to be)."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return group, 1, 0, torch.device("cpu")
    group, nccl = dist.group.WORLD if group is None else group, dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    return group, dist.get_world_size(group), dist.get_rank(group), device


def _kept(pattern: Pattern) -> dict:
    return pattern.__dict__.setdefault("_shared", {})


def _numbers(q, k, v, pattern, strategy, scale, backend, return_lse) -> list[int]:
    """One number for each of SAME."""
    kept = _kept(pattern)
    if "digest" not in kept:
        kept["digest"] = digest(describe(pattern))
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)]
    shape = [q.shape[0], *q.shape[2:], k.shape[2]]
    words = (shape, q.dtype, strategy, scale, backend, return_lse, wanted)
    return [kept["digest"], *(digest(repr(x)) for x in words)]


def _make(q, k, pattern, told: Tensor, rank: int, group, strategy: str) -> Made:
    """The plan for the lengths that all ranks told, made ready for this rank."""
    held, lengths = told[:, 0].tolist(), told[:, 1].tolist()
    shards, nq, (b, _, h, d) = Shards(tuple(lengths)), sum(held), q.shape
    for p, count in enumerate(held):
        first = max(shards[p].start, shards.n - nq)
        if count != max(0, shards[p].stop - first):
            raise ValueError(
                f"rank {p} has {count} queries on {lengths[p]} keys: the last {nq} of {shards.n} positions are "
                f"queries, so want {max(0, shards[p].stop - first)}, those that are among its keys"
            )
    plan, why = choose(strategy, (pattern, shards, h, k.shape[2], nq), q.element_size(), d)
    ready = None if isinstance(plan, HeadsPlan) else Sequence(plan, rank, group, b, d, q.device)
    return Made((q.shape, k.shape, q.device, q.dtype, strategy), plan, why, group, ready)


def choose(strategy: str, sizes: tuple, itemsize: int, head_dim: int) -> tuple[Plan, str]:
    """(the plan, why): sizes are `Plan`'s arguments. ValueError where the strategy asked for is not possible."""
    if strategy == "heads":
        return HeadsPlan(*sizes), "asked for by name"
    plan = Plan(*sizes)
    if strategy == "sequence":
        return plan, "asked for by name"
    try:
        other = HeadsPlan(*sizes)
    except ValueError as error:
        return plan, f"not possible by heads ({error})"
    most = [int(x.bytes(itemsize, head_dim).sum(0).max()) for x in (plan, other)]
    if most[1] < most[0]:
        return other, f"it brings one rank at most {most[1]:,} bytes, the rows that queries touch are {most[0]:,}"
    return plan, f"the rows that queries touch are at most {most[0]:,} bytes for one rank, by heads it is {most[1]:,}"


def _buffers(made: Made, q: Tensor, k: Tensor) -> Buffers | None:
    return None if made.ready is None else made.ready.prepare(q, k, backward=False)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call: Call):
        ready, ctx.call = call.ready, call._replace(buffers=None)
        q, k, v = map(unit_stride, (q, k, v))
        rows = ready.regroup.there(q) if ready.regroup else q
        out, lse = ready.forward(rows, k, v, call.scale, call.backend, call.buffers)
        ctx.save_for_backward(rows, k, v, out, lse)
        ctx.set_materialize_grads(False)
        if ready.regroup:
            out = ready.regroup.back(out)
            lse = ready.regroup.back(lse.transpose(1, 2)).transpose(1, 2) if call.return_lse else None
        return (out, lse) if call.return_lse else out

    @staticmethod
    def backward(ctx, grad, grad_lse=None):
        call, (rows, k, v, out, lse) = ctx.call, ctx.saved_tensors
        ready, error, buffers = call.ready, None, None
        try:
            buffers = ready.prepare(rows, k, backward=True)
        except Exception as found:
            error = found
        told = agree(call.group, call.device, error, [int(grad_lse is not None)])
        held = len(ready.plan.queries(call.rank))
        grad = out.new_zeros(out.shape[0], held, *out.shape[2:]) if grad is None else grad
        if bool(told.any()):
            grad_lse = lse.new_zeros(*lse.shape[:2], held) if grad_lse is None else grad_lse
        if ready.regroup:
            grad = ready.regroup.there(grad)
            if grad_lse is not None:
                grad_lse = ready.regroup.there(grad_lse.transpose(1, 2)).transpose(1, 2)
        dq, dk, dv = ready.backward(grad, grad_lse, rows, k, v, out, lse, call.scale, call.backend, buffers)
        return ready.regroup.back(dq) if ready.regroup else dq, dk, dv, None
