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
    if q.numel() == 0:
        return fake_attend(q, k, v, handle, scale)
    return run("forward", (q, k, v), living(handle), k.shape[1], scale)


@attend.register_fake
def fake_attend(q, k, v, handle, scale):
    b, nq, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((b, h, nq), dtype=lse_dtype(q))


@torch.library.custom_op("workbench::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the gradient of out, the inputs, and out and lse."""
    if q.numel() == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    return run("backward", (grad, q, k, v, out, lse), living(handle), k.shape[1], scale)


@attend_backward.register_fake
def _(grad, q, k, v, out, lse, handle, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def run(direction: str, tensors: tuple[Tensor, ...], pattern, n: int, scale: float) -> tuple[Tensor, ...]:
    """`forward` or `backward` of the execution that the pattern needs, one sequence at a time where layouts differ."""
    first = tensors[0]  # q or its like
    if pattern.batch is not None:
        sequences = zip(*(t.split(1) for t in tensors), strict=True)
        each = [run(direction, x, one, n, scale) for x, one in zip(sequences, pattern.each(), strict=True)]
        return tuple(torch.cat(t) for t in zip(*each, strict=True))
    if isinstance(pattern, Dense):
        pattern = one_branch(pattern, n)
    strided = isinstance(pattern, Dilated)
    execution, blocks = (dilated, ()) if strided else (block_sparse, (blocks_of(pattern, first, n),))
    with torch.autocast(first.device.type, enabled=False):  # the inputs are cast; what is wide inside stays wide
        return getattr(execution, direction)(*map(unit_stride, tensors), pattern, *blocks, scale)


def blocks_of(pattern, q: Tensor, n: int):
    """The pattern's blocks for these sizes, kept with the pattern: a predicate's take N^2 evaluations to find."""
    sizes = n, 1 if pattern.same_heads else q.shape[2], q.shape[1]
    return pattern.kept("blocks", (*sizes, str(q.device)), lambda: pattern.blocks(*sizes).to(q.device))


def setup_context(ctx, inputs, output) -> None:
    """What the backward of an operator of (q, k, v, handle, scale) -> (out, lse) keeps."""
    q, k, v, ctx.handle, ctx.scale = inputs
    ctx.pattern = living(int(ctx.handle))  # keeps it alive until the backward
    ctx.asked = ctx.pattern.fingerprint()
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_lse):
    ctx.pattern.unchanged(ctx.asked)
    return _autograd(ctx, grad, grad_lse)


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


attend.register_autograd(_backward, setup_context=setup_context)
