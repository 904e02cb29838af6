"""Sequences of different lengths in one call: each document attends within itself, and costs what its tokens cost.

The tokens of a batch lie on one line, B * N of them, which is split where documents begin and end; documents of one
length go through one call together, all others through calls of their own. Where those of one length are no neighbours,
all tokens are sorted by the length of their document once, and the results once back. The backward of a split is one
concatenation, where that of as many slices would add as many full tensors.

Dimensions: B batch, N positions, H query heads, G key heads, D head_dim.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.engines.operators import lse_dtype
from workbench.patterns import Pattern
from workbench.patterns.base import ranges
from workbench.patterns.checks import describe

IDS = "ids (B, N), or for a batch of 1 the cumulative lengths (documents + 1,) from 0 to N"


class Line(NamedTuple):
    """The line cut into documents and padding: where each piece begins, how long it is, and what it is.

    kinds: (batch entry whose pattern it has, length) of a document; None of padding
    """

    starts: list[int]
    sizes: list[int]
    kinds: list[tuple[int, int] | None]


@torch._disable_dynamo
def cut(q: Tensor, k: Tensor, pattern: Pattern, lengths, documents) -> Line:
    """ValueError for lengths and documents that `attention` does not take, and documents that the pattern does not."""
    (b, n), name = k.shape[:2], "documents" if lengths is None else "lengths"
    value = documents if lengths is None else lengths
    if lengths is not None and documents is not None:
        raise ValueError("lengths and documents: want one of them; padding may have an id of its own in documents")
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}={describe(value)}: want an int32 or int64 tensor")
    if q.shape[1] != n:
        raise ValueError(f"{name} with {q.shape[1]} queries on {n} keys: want all the queries, Nq == N")
    starts = (_of_padded if name == "lengths" else _of_packed)(value.cpu().long(), b, n)
    sizes = starts.diff(append=torch.tensor([b * n])).tolist()
    entries = (starts // max(1, n) if pattern.batch else starts * 0).tolist()
    kinds: list = list(zip(entries, sizes, strict=True))
    if name == "lengths":
        kinds[1::2] = [None] * b
    patterns = pattern.each()
    for entry, size in filter(None, {*kinds}):
        patterns[entry].check(size, q.shape[2])
    return Line(starts.tolist(), sizes, kinds)


def _of_padded(lengths: Tensor, b: int, n: int) -> Tensor:
    """Where on the line each sequence begins, and its padding, in turn."""
    if lengths.shape != (b,) or bool(((lengths < 0) | (lengths > n)).any()):
        raise ValueError(f"lengths={lengths.tolist()}: want {b} of them, from 0 to {n}, padding on the right")
    return (torch.arange(b)[:, None] * n + torch.stack([lengths * 0, lengths], 1)).flatten()


def _of_packed(documents: Tensor, b: int, n: int) -> Tensor:
    """Where on the line each document begins."""
    if documents.ndim == b == 1 and [*documents[:1], *documents[-1:]] == [0, n] and not (documents.diff() < 0).any():
        return documents[:-1]
    if documents.shape != (b, n):
        raise ValueError(f"documents={describe(documents)} in a batch of {b} with N={n}: want {IDS}")
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents.diff() != 0
    row, column = begins.nonzero(as_tuple=True)
    found, many = torch.stack([row, documents[begins]], 1).unique(dim=0, return_counts=True)
    if len(found) < len(row):
        row, name = found[many > 1][0].tolist()
        raise ValueError(f"documents[{row}]: id {name} is in several places: want a document in one")
    return row * n + column


@torch._disable_dynamo
def attend(one: Callable, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, line: Line):
    """(out (B, N, H, D), lse (B, H, N) or None) from one(q, k, v, pattern) -> (out, lse or None) of each length."""
    groups: dict = {}  # of pieces that are one call; a piece of padding is none
    for x, kind in enumerate(line.kinds):
        groups.setdefault(kind or x, []).append(x)
    to, back = _places([x for members in groups.values() for x in members], line, q.device)
    many = [sum(line.sizes[x] for x in members) for members in groups.values()]
    parts = zip(*(_moved(x.flatten(0, 1), to, back).split(many) for x in (q, k, v)), strict=True)
    patterns, outs, lses = pattern.each(), [], []
    for kind, part in zip(groups, parts, strict=True):
        if isinstance(kind, tuple):
            entry, size = kind
            out, lse = one(*(x.unflatten(0, (-1, size)) if size else x[None] for x in part), patterns[entry])
        else:
            out = torch.zeros_like(part[0][None])
            lse = out.new_full((1, q.shape[2], len(part[0])), -torch.inf, dtype=lse_dtype(q))
        outs.append(out.flatten(0, 1))
        lses.append(None if lse is None else lse.transpose(1, 2).flatten(0, 1))
    out = _moved(torch.cat(outs), back, to).unflatten(0, q.shape[:2])
    if any(x is None for x in lses):
        return out, None
    return out, _moved(torch.cat(lses), back, to).unflatten(0, q.shape[:2]).transpose(1, 2)


def _places(order: list[int], line: Line, device) -> tuple[Tensor | None, Tensor | None]:
    """Where each token of the pieces in this order lies on the line, and the inverse; (None, None) if where it is."""
    if order == sorted(order):
        return None, None
    to = ranges(*torch.tensor([line.starts, line.sizes])[:, order])
    return to.to(device), to.argsort().to(device)


def _moved(line: Tensor, index: Tensor | None, inverse: Tensor | None) -> Tensor:
    """Row index[i] at place i."""
    return line if index is None else _Moved.apply(line, index, inverse)


class _Moved(torch.autograd.Function):
    """A permutation of rows, whose gradient is one too: that of torch's index_select would add up."""

    generate_vmap_rule = True

    @staticmethod
    def forward(line, index, inverse):
        return line.index_select(0, index)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx, grad):
        index, inverse = ctx.saved_tensors
        return _Moved.apply(grad, inverse, index), None, None
