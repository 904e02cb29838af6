"""Dilated attention on strided views: a fused call for each (branch, residue), merged by log-sum-exp, no gathering.

A branch (w, r) keeps, in each segment of w positions, the positions o, o + r, o + 2r, ... for heads of offset o. That
selection of a (B, N, H, D) tensor is a view of shape (B x segments, heads, positions, D), which fused attention takes
as it is. The backward gives each fused backward the merged out and lse, so no branch keeps anything.

Dimensions: B batch, N keys, Nq queries (the last Nq positions), H query heads, G key heads, D head_dim, S segments.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.engines.merge import lse_dtype, merge_
from workbench.engines.torch import fused, steps

ELEMENTS = 1 << 24  # of a fused call's output: bounds a forward's memory beyond its result


class Piece(NamedTuple):
    """One fused call: `count` segments of `length` positions from `start`, and what is kept inside each."""

    start: int
    length: int
    count: int
    queries: slice
    keys: slice
    heads: slice
    key_heads: slice
    causal: bool


def pieces(pattern, n: int, nq: int, heads: int, key_heads: int) -> Iterator[Piece]:
    """The fused calls that make up the pattern; those without a query or a key are left out."""
    group = heads // key_heads
    for branch, (w, r) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)):
        for start, length, count, skip in spans(n, nq, w):
            for offset, head_slice in offset_slices(pattern, branch, heads):
                first = offset + max(0, -(-(skip - offset) // r)) * r  # the first kept position that is a query
                if first >= length:
                    continue
                for q_heads, k_heads in share_heads(head_slice, group):
                    spot = (start, length, count, slice(first, length, r))
                    if not pattern.causal:
                        yield Piece(*spot, slice(offset, length, r), q_heads, k_heads, False)
                        continue
                    if first > offset:  # keys before the first query: all visible
                        yield Piece(*spot, slice(offset, first, r), q_heads, k_heads, False)
                    yield Piece(*spot, slice(first, length, r), q_heads, k_heads, True)


def spans(n: int, nq: int, w: int) -> Iterator[tuple[int, int, int, int]]:
    """Runs of equal segments that hold queries: (start, segment length, segments, positions before the first query)."""
    position = n - nq
    if position % w and position < n:  # the first query is inside a segment
        start = position // w * w
        yield start, min(w, n - start), 1, position - start
        position = min(n, start + w)
    if count := (n - position) // w:
        yield position, w, count, 0
        position += count * w
    if position < n:
        yield position, n - position, 1, 0


def offset_slices(pattern, branch: int, heads: int) -> Iterator[tuple[int, slice]]:
    """The heads of each offset in a branch: every rule spaces them evenly, so they are a slice."""
    of: dict[int, list[int]] = {}
    for h in pattern.head_range(branch, heads):
        of.setdefault(pattern.offset(branch, h, heads), []).append(h)
    for offset, members in of.items():
        step = members[1] - members[0] if len(members) > 1 else 1
        yield offset, slice(members[0], members[-1] + 1, step)


def share_heads(heads: slice, group: int) -> Iterator[tuple[slice, slice]]:
    """Split a slice of query heads so that each part and its key heads are slices that grouped attention accepts."""
    start, stop, step = heads.start, heads.stop, heads.step
    if group == 1:
        yield heads, heads
    elif step == 1 and start % group == 0 and stop % group == 0:
        yield heads, slice(start // group, stop // group)
    else:
        for g in range(start // group, -(-stop // group)):
            first = start + max(0, -(-(g * group - start) // step)) * step
            if first < (last := min(stop, (g + 1) * group)):
                yield slice(first, last, step), slice(g, g + 1)


def select(x: Tensor, piece: Piece, positions: slice, heads: slice, before: int = 0) -> list[Tensor]:
    """x (B, N, H, ...) -> views (B x S, heads, positions, ...); one a sequence where batch and segments don't fold.

    `before` is how many of the N positions x lacks at its front (queries: N - Nq).
    """
    start = piece.start - before
    if piece.count == 1:  # the segment may begin before x does
        y = x[:, start + positions.start : start + piece.length : positions.step, heads].unsqueeze(1)
        if positions.stop < piece.length:
            y = y[:, :, : len(range(positions.start, positions.stop, positions.step))]
    else:
        y = x[:, start : start + piece.count * piece.length].unflatten(1, (piece.count, piece.length))
        y = y[:, :, positions, heads]  # (B, S, positions, heads, ...)
    y = y.transpose(2, 3)
    # B and S fold into one stride only if the segments fill the tensor; keep the choice equal for all tensors
    return [y.flatten(0, 1)] if x.shape[0] == 1 or piece.count == 1 else list(y.unbind(0))


def parts(piece: Piece, d: int) -> Iterator[Piece]:
    """The same in runs of segments whose output stays under ELEMENTS."""
    each = len(range(*piece.queries.indices(piece.length))) * len(range(piece.heads.stop)[piece.heads]) * d
    step = max(1, ELEMENTS // max(1, each))
    for s in steps.starts(piece.count, step):
        yield piece._replace(start=piece.start + s * piece.length, count=min(step, piece.count - s))


def calls(pattern, q: Tensor, k: Tensor, of_queries: tuple, of_keys: tuple) -> Iterator[tuple]:
    """Of each fused call whether it is causal, its views of tensors like q and its views of tensors like k."""
    (_, nq, h, d), (n, g) = q.shape, k.shape[1:3]
    for piece in pieces(pattern, n, nq, h, g):
        for part in parts(piece, d):
            rows = zip(*(select(x, part, part.queries, part.heads, n - nq) for x in of_queries), strict=True)
            keys = zip(*(select(x, part, part.keys, part.key_heads) for x in of_keys), strict=True)
            yield from ((part.causal, *views) for views in zip(rows, keys, strict=True))


def forward(q: Tensor, k: Tensor, v: Tensor, pattern, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, Nq, H, D) and lse (B, H, Nq) from q (B, Nq, H, D), k and v (B, N, G, D)."""
    b, nq, h, _ = q.shape
    out = q.new_zeros(q.shape, dtype=lse_dtype(q))  # 16-bit parts are merged in float32, and rounded once
    lse = q.new_full((b, h, nq), -torch.inf, dtype=out.dtype)
    for causal, (q_, out_, lse_), keys in calls(pattern, q, k, (q, out, lse.transpose(1, 2)), (k, v)):
        merge_(out_, lse_, *fused.forward(q_, *keys, causal, scale))
    return out.to(q.dtype), lse


def backward(grad, q, k, v, out, lse, pattern, scale):
    """(dq, dk, dv) from the gradient of out, and what `forward` returned."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse_dtype(x), device=x.device) for x in (q, k, v))
    of_queries = grad, q, out, lse.transpose(1, 2), dq
    for causal, (grad_, q_, out_, lse_, dq_), (k_, v_, dk_, dv_) in calls(pattern, q, k, of_queries, (k, v, dk, dv)):
        found = fused.backward(grad_, q_, k_, v_, out_, lse_, causal, scale)
        for total, x in zip((dq_, dk_, dv_), found, strict=True):
            total += fused.sum_heads(x, total.shape[1])
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
