"""Sequences of different lengths in one call: each document attends within itself, and costs what its tokens cost.

The tokens of a batch lie on one line, B * N of them, which is split where documents begin and end; documents of one
length go through one call together, all others through calls of their own. Where those of one length are no neighbours,
all tokens are sorted by the length of their document once, and the results once back. The backward of a split is one
concatenation, where that of as many slices would add as many full tensors.

Dimensions: B batch, N positions, H query heads, G key heads, D head_dim. A line is (starts, sizes, kinds) of the pieces
that it is cut into: the kind of a document is (batch entry whose pattern it has, length), that of padding None.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from workbench.engines.merge import lse_dtype
from workbench.patterns import Pattern
from workbench.patterns.base import ranges
from workbench.patterns.checks import describe, on_host

IDS = "ids (B, N), or for a batch of 1 the cumulative lengths (documents + 1,) from 0 to N"
Line = tuple[list[int], list[int], list[tuple[int, int] | None]]


@torch._disable_dynamo
def starts_of(b: int, n: int, lengths, documents) -> list[int]:
    """Where on the line each document or padding begins. ValueError for lengths and documents that are none."""
    padded = lengths is not None
    name, value = ("lengths", lengths) if padded else ("documents", documents)
    if padded and documents is not None:
        raise ValueError("lengths and documents: want one of them; padding may have an id of its own in documents")
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}={describe(value)}: want an int32 or int64 tensor, e.g. torch.tensor([300, 120])")
    return (_padded if padded else _starts)(value, b, n)


@torch._disable_dynamo
def cut(q: Tensor, k: Tensor, pattern: Pattern, lengths, documents) -> Line:
    """ValueError for lengths and documents that `attention` does not take, and documents that the pattern does not."""
    (b, n), padded = k.shape[:2], lengths is not None
    starts = starts_of(b, n, lengths, documents) or [0]  # no tokens are one document
    if q.shape[1] != n:
        name = "lengths" if padded else "documents"
        raise ValueError(f"{name} with {q.shape[1]} queries on {n} keys: want all the queries, Nq == N")
    sizes = [end - start for start, end in pairwise([*starts, b * n])]
    entries = [start // max(1, n) if pattern.batch else 0 for start in starts]
    kinds: list = list(zip(entries, sizes, strict=True))
    if padded:
        kinds[1::2] = [None] * b
    return _line(starts, sizes, kinds, pattern, q.shape[2])


def _line(starts, sizes, kinds, pattern: Pattern, heads: int) -> Line:
    """Without what is empty, which needs no call. ValueError for a document that its pattern does not take."""
    line = [x for x in zip(starts, sizes, kinds, strict=True) if x[1]]
    patterns, documents = pattern.each(), {kind for *_, kind in line if kind}
    for entry, size in documents:
        patterns[entry].check(size, heads)
    if not documents:
        line.insert(0, (0, 0, kinds[0]))  # so that gradients have a way, on which they are none
    return tuple(map(list, zip(*line, strict=True)))


def _padded(lengths: Tensor, b: int, n: int) -> list[int]:
    """Where on the line each sequence, and the padding behind it, begins."""
    values = lengths.tolist()
    if lengths.shape != (b,) or not all(0 <= x <= n for x in values):
        raise ValueError(f"lengths={values}: want {b} of them, from 0 to {n}, padding on the right")
    return [start for x, size in enumerate(values) for start in (x * n, x * n + size)]


def _starts(documents: Tensor, b: int, n: int) -> list[int]:
    """Where on the line each document begins."""
    if documents.ndim == b == 1:
        ends = documents.tolist()
        if [*ends[:1], *ends[-1:]] == [0, n] and ends == sorted(ends):
            return ends[:-1]
    if documents.shape != (b, n):
        raise ValueError(f"documents={describe(documents)} in a batch of {b} with N={n}: want {IDS}")
    with on_host():
        documents = documents.cpu().long()
        row, column = torch.cat([torch.ones(b, min(1, n)), documents.diff()], 1).nonzero(as_tuple=True)
        found, many = torch.stack([row, documents[row, column]], 1).unique(dim=0, return_counts=True)
    if len(found) < len(row):
        row, name = found[many > 1][0].tolist()
        raise ValueError(f"documents[{row}]: id {name} is in several places: want a document in one")
    return (row * n + column).tolist()


@torch._disable_dynamo
def attend(one: Callable, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, line: Line):
    """(out (B, N, H, D), lse (B, H, N) or None) from one(q, k, v, pattern) -> (out, lse or None) of each length."""
    kinds, many, (to, back) = _calls(*line, q.device)
    sources, ends = [_moved(x.flatten(0, 1), to) for x in (q, k, v)], list(accumulate(many))
    grads = torch.is_grad_enabled() and any(x.requires_grad for x in sources)
    grads = grads or torch._C._are_functorch_transforms_active()  # which write to no buffer
    parts = list(zip(*(x.split(many) for x in sources), strict=True)) if grads else None
    whole = None if grads else q.new_empty(sources[0].shape)  # results are written where they belong
    patterns, found = pattern.each(), [None] * len(many)
    for x in sorted(range(len(many)), key=lambda x: -many[x]):  # a card computes the longest while the rest is asked
        *part, into = (*parts[x], None) if grads else (y[ends[x] - many[x] : ends[x]] for y in (*sources, whole))
        found[x] = _piece(one, part, patterns, kinds[x], into)
    outs, lses = zip(*found, strict=True)
    out = _moved(torch.cat(outs) if grads else whole, back).unflatten(0, q.shape[:2])
    if any(x is None for x in lses):
        return out, None
    return out, _moved(torch.cat(lses), back).unflatten(0, q.shape[:2]).transpose(1, 2)


def _calls(starts, sizes, kinds, device):
    """(the kind of each call, its tokens, (where on the line the tokens of all of them are, the way back) or None for
    both where they follow each other)."""
    groups: dict = {}  # of pieces that are one call; a piece of padding is none
    for x, kind in enumerate(kinds):
        groups.setdefault(kind or x, []).append(x)
    order = [x for members in groups.values() for x in members]
    many = [sum(sizes[x] for x in members) for members in groups.values()]
    if order == sorted(order):
        return list(groups), many, (None, None)
    with on_host():
        to = ranges(*torch.tensor([starts, sizes])[:, order])
    return list(groups), many, (to.to(device), to.argsort().to(device))


def _piece(one: Callable, part: list[Tensor], patterns: list[Pattern], kind, into: Tensor | None):
    """(out (tokens, H, D), lse (tokens, H) or None) of documents of one kind, or padding. into: to be written, too."""
    tokens, heads = part[0].shape[:2]
    if not isinstance(kind, tuple):
        out = part[0].new_zeros(tokens, heads, part[2].shape[-1]) if into is None else into.zero_()
        return out, out.new_full((tokens, heads), -torch.inf, dtype=lse_dtype(out))
    entry, size = kind
    many = tokens // max(1, size) or 1  # of documents that have no tokens there is one
    q, k, v, *to = (x.view(many, size, *x.shape[1:]) for x in (*part, *([] if into is None else [into])))
    out, lse = one(q, k, v, patterns[entry], **({"into": to[0]} if to else {}))
    if to and out is not to[0]:
        to[0].copy_(out)
    return out.flatten(0, 1), lse if lse is None else lse.transpose(1, 2).flatten(0, 1)


def _moved(line: Tensor, index: Tensor | None) -> Tensor:
    """Row index[i] at place i."""
    return line if index is None else line.index_select(0, index)
