"""The torch backend: which execution a pattern needs, and the operators of both.

Dimensions: B batch, N keys, Nq queries (the last Nq of the N positions), H query heads, G key heads, D head_dim.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.engines import operators
from workbench.engines.torch import block_sparse, dilated
from workbench.patterns import Dense, Dilated
from workbench.patterns.tables import place


def one_branch(pattern: Dense, n: int) -> Dilated:
    """Dense attention as the dilated pattern with one undilated branch."""
    return Dilated([max(1, n)], [1], causal=pattern.causal)


def execution_of(pattern, q: Tensor, k: Tensor):
    """(the module that runs the pattern, what its functions take for it)."""
    if isinstance(pattern, Dense):
        pattern = one_branch(pattern, k.shape[1])
    if isinstance(pattern, Dilated):
        return dilated, pattern
    return block_sparse, block_sparse.Grid(pattern, blocks_of(pattern, q, k.shape[1]), q.shape[2], k.shape[2])


def of_each(run: Callable, pattern, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """run(pattern, *tensors), one sequence at a time where layouts differ."""
    with torch.autocast(tensors[0].device.type, enabled=False):  # the inputs are cast; what is wide inside stays wide
        if pattern.batch is None:
            return run(pattern, *tensors)
        found = [run(*x) for x in zip(pattern.each(), *(x.split(1) for x in tensors), strict=True)]
        return tuple(map(torch.cat, zip(*found, strict=True)))


def blocks_of(pattern, q: Tensor, n: int):
    """The pattern's blocks for these sizes, kept with the pattern: a predicate's take N^2 evaluations to find."""
    sizes = n, 1 if pattern.same_heads else q.shape[2], q.shape[1]

    def make():
        found = pattern.blocks(*sizes)  # in blocks no longer than the sequence: what is gathered is whole blocks
        used = found.columns.long().unique() if q.shape[1] < n else None
        size = tuple(min(x, max(1, n)) for x in found.block_size)
        return replace(found, block_size=size, used=used).to(q.device)

    return pattern.kept("blocks", (*sizes, place(q)), make)


def forward(q: Tensor, k: Tensor, v: Tensor, pattern, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, Nq, H, D) and lse (B, H, Nq)."""

    def run(one, q, k, v):
        execution, given = execution_of(one, q, k)
        return execution.forward(q, k, v, given, scale)

    return of_each(run, pattern, (q, k, v))


def backward(grad, grad_lse, q, k, v, out, lse, pattern, scale):
    """(dq, dk, dv) from the gradients of out and lse, the inputs, and out and lse."""

    def run(one, grad, q, k, *rest):
        execution, given = execution_of(one, q, k)
        return execution.backward(grad, q, k, *rest, given, scale)

    return through_lse(grad, grad_lse, q, k, v, out, lse, lambda *x: of_each(run, pattern, x))


def through_lse(grad, grad_lse, q, k, v, out, lse, run) -> tuple[Tensor, ...]:
    """run(grad, q, k, v, out, lse), a backward that knows no gradient of lse, with that gradient too."""
    if grad_lse is None:
        return run(grad, q, k, v, out, lse)
    # dS = P * (dO V^T + dlse - rowsum(dO * out)): one more column, ones in V and dlse in dO, adds just that term.
    # Eight columns, because CUDA's kernels want head_dims in eights.
    column = grad_lse.masked_fill(lse == -torch.inf, 0).transpose(1, 2)[..., None].to(grad.dtype)
    grad = torch.cat((grad, pad(column, (0, 7))), -1)
    q, k, out = pad(q, (0, 8)), pad(k, (0, 8)), pad(out, (0, 8))
    v = torch.cat((v, pad(torch.ones_like(v[..., :1]), (0, 7))), -1)
    return tuple(x[..., : q.shape[-1] - 8].contiguous() for x in run(grad, q, k, v, out, lse))


attend, attend_backward = operators.define("attend", forward, backward)
