"""The torch backend as two torch operators, so that compile, checkpointing and autograd see one opaque call each way.

An operator cannot take a pattern (it may hold a Python function), so it takes the pattern's `handle`, an int that finds
the living pattern again. Fake implementations give the shapes; nothing else is traced.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.execution import block_sparse, dilated
from workbench.execution.fused import unit_stride
from workbench.patterns import Dense, Dilated, living


def lse_dtype(q: Tensor) -> torch.dtype:
    """lse is float32, and float64 for float64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def one_branch(pattern: Dense, n: int) -> Dilated:
    """Dense attention as the dilated pattern with one undilated branch."""
    return Dilated([max(1, n)], [1], causal=pattern.causal)


@torch.library.custom_op("workbench::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, handle: int, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, Nq, H, D) and lse (B, H, Nq) of the pattern behind `handle`."""
    pattern = living(handle)
    q, k, v = (unit_stride(x) for x in (q, k, v))
    if q.numel() == 0:
        return fake_attend(q, k, v, handle, scale)
    if getattr(pattern, "batch", None):
        each = [_attend(*(t[x : x + 1] for t in (q, k, v)), pattern.for_batch(x), scale) for x in range(len(q))]
        return tuple(torch.cat(t) for t in zip(*each, strict=True))
    return _attend(q, k, v, pattern, scale)


@attend.register_fake
def fake_attend(q, k, v, handle, scale):
    b, nq, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((b, h, nq), dtype=lse_dtype(q))


@torch.library.custom_op("workbench::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the gradient of out, the inputs, and out and lse."""
    pattern = living(handle)
    grad, q, k, v, out = (unit_stride(x) for x in (grad, q, k, v, out))
    if q.numel() == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    if getattr(pattern, "batch", None):
        each = [
            _backward(*(t[x : x + 1] for t in (grad, q, k, v, out, lse)), pattern.for_batch(x), scale)
            for x in range(len(q))
        ]
        return tuple(torch.cat(t) for t in zip(*each, strict=True))
    return _backward(grad, q, k, v, out, lse, pattern, scale)


@attend_backward.register_fake
def _(grad, q, k, v, out, lse, handle, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _attend(q, k, v, pattern, scale):
    if isinstance(pattern, Dense):
        pattern = one_branch(pattern, k.shape[1])
    if isinstance(pattern, Dilated):
        return dilated.forward(q, k, v, pattern, scale)
    return block_sparse.forward(q, k, v, pattern, blocks_of(pattern, q, k), scale)


def _backward(grad, q, k, v, out, lse, pattern, scale):
    if isinstance(pattern, Dense):
        pattern = one_branch(pattern, k.shape[1])
    if isinstance(pattern, Dilated):
        return dilated.backward(grad, q, k, v, out, lse, pattern, scale)
    return block_sparse.backward(grad, q, k, v, out, lse, pattern, blocks_of(pattern, q, k), scale)


def blocks_of(pattern, q: Tensor, k: Tensor):
    """The pattern's blocks for these sizes, kept with the pattern: a predicate's take N^2 evaluations to find."""
    key = (k.shape[1], q.shape[2], q.shape[1], str(q.device))
    kept = pattern.__dict__.setdefault("_blocks", {})
    if key not in kept:
        kept.clear()  # the last sizes only
        kept[key] = pattern.blocks(k.shape[1], q.shape[2], q.shape[1]).to(q.device)
    return kept[key]


def _setup_context(ctx, inputs, output):
    q, k, v, ctx.handle, ctx.scale = inputs
    ctx.pattern = living(ctx.handle)  # keeps it alive until the backward
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad, grad_lse):
    q, k, v, out, lse = ctx.saved_tensors
    if grad is None and grad_lse is None:
        return (None,) * 5
    if grad is None:
        grad = torch.zeros_like(out)
    d = q.shape[-1]
    if grad_lse is not None:
        # dS = P * (dO V^T + dlse - rowsum(dO * out)): one more column, ones in V and dlse in dO, adds just that term.
        # Eight columns, because CUDA's kernels want head_dims in eights.
        column = grad_lse.masked_fill(lse == -torch.inf, 0).transpose(1, 2)[..., None].to(grad.dtype)
        grad = torch.cat((grad, pad(column, (0, 7))), -1)
        q, k, out = pad(q, (0, 8)), pad(k, (0, 8)), pad(out, (0, 8))
        v = torch.cat((v, pad(torch.ones_like(v[..., :1]), (0, 7))), -1)
    dq, dk, dv = attend_backward(grad, q, k, v, out, lse, ctx.handle, ctx.scale)
    return dq[..., :d], dk[..., :d], dv[..., :d], None, None


attend.register_autograd(_autograd, setup_context=_setup_context)
