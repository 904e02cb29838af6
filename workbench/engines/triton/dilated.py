"""Dilated attention, a launch for each branch: kept positions are addressed by strides, and branches merge in place.

In each segment of w positions a head with offset o keeps o, o + r, o + 2r, ...; a program takes a tile of those. The
forward merges its tile into out and lse in its epilogue (log-sum-exp weights, see `engines.merge`), the backward adds
to dq, dk and dv: there are no intermediate tensors. Launches follow each other in one stream, and no two programs of a
launch write the same row: results are reproducible bit for bit, except where cuDNN takes a branch of the backward
(`cudnn_views`). Where the card can (programmatic dependent launch, OVERLAP), a launch starts on the processors that the
tail of the one before leaves idle. It waits for the end of that one before it reads or writes any result.
Nested branches run in one pass of `block_sparse` instead where that is the faster (`triton_backend.in_tile_order`).

Dimensions: B batch, N keys, Nq queries (the last Nq positions), H query heads, G key heads, D head_dim. In a kernel M
and N are the queries and keys of a tile, and i and j count the positions that a head keeps in the segment.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.engines.triton import cudnn_views, tile_ops, tile_sizes

UNSPECIALIZED = ["n", "nq", "w", "r", "divide", "plus", "head0", "heads", "all_heads", "many", "segment0", "segments"]
GRID = (1 << 31) - 1  # programs of a launch


@triton.jit
def place(n, nq, w, r, divide, plus, head0, heads, many, segment0, segments):
    """Of this program: batch entry, head, tile; and its segment: start, first position, kept, the first query kept."""
    x = tl.program_id(0)
    tile, x = x % many, x // many
    h, x = head0 + x % heads, x // heads
    start = (segment0 + x % segments) * w
    b = (x // segments).to(tl.int64)
    offset = (h // divide + plus) % r
    length = tl.minimum(w, n - start)
    kept = tl.maximum(tl.cdiv(length - offset, r), 0)
    first = tl.maximum(tl.cdiv(n - nq - start - offset, r), 0)
    return b, h.to(tl.int64), tile, start + offset, kept, first  # b and h in int64: they are multiplied by strides


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(Q, K, V, OUT, LSE, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, o_b, o_n, o_h,
                   scale, n, nq, w, r, divide, plus, head0, heads, all_heads, many, segment0, segments,
                   GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                   CAUSAL: tl.constexpr, FIRST: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    b, h, tile, start, kept, first = place(n, nq, w, r, divide, plus, head0, heads, many, segment0, segments)
    if OVERLAP:
        tile_ops.gdc_launch_dependents()
    if CAUSAL:
        tile = many - 1 - tile  # the longest first
    i0 = tile * M
    if (i0 >= kept) | (i0 + M <= first):
        if OVERLAP:
            tile_ops.gdc_wait()  # else the next launch, which waits for this one alone, could overtake the last one
        return
    i, j, d = i0 + tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_D)
    ours = (i >= first) & (i < kept)
    row = (start - (n - nq)).to(tl.int64) + i.to(tl.int64) * r  # in q, out and lse
    q = tile_ops.load(Q + b * q_b + h * q_h + row[:, None] * q_n + d[None, :], ours, d, D, True)
    at = start.to(tl.int64) + j.to(tl.int64) * r
    K += b * k_b + (h // GROUP) * k_h + at[:, None] * k_n + d[None, :]
    V += b * v_b + (h // GROUP) * v_h + at[:, None] * v_n + d[None, :]
    k_step, v_step = tl.cast(k_n, tl.int64) * r, tl.cast(v_n, tl.int64) * r
    acc = tl.zeros((M, BLOCK_D), tl.float32)
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    if CAUSAL:
        end, full = tl.minimum(i0 + M, kept), (i0 + 1) // N * N
    else:
        end, full = kept, kept // N * N
    for j0 in range(0, full, N):
        k = tile_ops.load(K + j0 * k_step, j < N, d, D, False)
        v = tile_ops.load(V + j0 * v_step, j < N, d, D, False)
        acc, peak, total = tile_ops.attend(acc, peak, total, q, k, v, True, scale, False)
    for j0 in range(full, end, N):
        exists = j0 + j < kept
        k = tile_ops.load(K + j0 * k_step, exists, d, D, True)
        v = tile_ops.load(V + j0 * v_step, exists, d, D, True)
        seen = exists[None, :]
        if CAUSAL:
            seen = seen & (j0 + j[None, :] <= i[:, None])
        acc, peak, total = tile_ops.attend(acc, peak, total, q, k, v, seen, scale, True)
    out, lse = tile_ops.finish(acc, peak, total)
    OUT += b * o_b + h * o_h + row[:, None] * o_n + d[None, :]
    if OVERLAP:
        tile_ops.gdc_wait()
    tile_ops.merge(OUT, LSE + (b * all_heads + h) * nq + row, out, lse, ours, d, D, FIRST)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dq_kernel(Q, K, V, DO, OF_ROWS, DQ, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, g_b, g_n, g_h, o_b, o_n, o_h,
              scale, softmax_scale, n, nq, w, r, divide, plus, head0, heads, all_heads, many, segment0, segments,
              GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
              CAUSAL: tl.constexpr, FIRST: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    b, h, tile, start, kept, first = place(n, nq, w, r, divide, plus, head0, heads, many, segment0, segments)
    if OVERLAP:
        tile_ops.gdc_launch_dependents()
    if CAUSAL:
        tile = many - 1 - tile
    i0 = tile * M
    if (i0 >= kept) | (i0 + M <= first):
        if OVERLAP:
            tile_ops.gdc_wait()
        return
    i, j, d = i0 + tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_D)
    ours = (i >= first) & (i < kept)
    row = (start - (n - nq)).to(tl.int64) + i.to(tl.int64) * r
    Q += b * q_b + h * q_h + row[:, None] * q_n + d[None, :]
    DO += b * g_b + h * g_h + row[:, None] * g_n + d[None, :]
    OF_ROWS = tile_ops.pairs(OF_ROWS, (b * all_heads + h) * nq + row)
    q, do, lse, delta = tile_ops.queries(Q, DO, OF_ROWS, q_n, g_n, 0, 1, ours, d, D, True)
    at = start.to(tl.int64) + j.to(tl.int64) * r
    K += b * k_b + (h // GROUP) * k_h + at[:, None] * k_n + d[None, :]
    V += b * v_b + (h // GROUP) * v_h + at[:, None] * v_n + d[None, :]
    k_step, v_step = tl.cast(k_n, tl.int64) * r, tl.cast(v_n, tl.int64) * r
    dq = tl.zeros((M, BLOCK_D), tl.float32)
    if CAUSAL:
        end, full = tl.minimum(i0 + M, kept), (i0 + 1) // N * N
    else:
        end, full = kept, kept // N * N
    for j0 in range(0, full, N):
        k = tile_ops.load(K + j0 * k_step, j < N, d, D, False)
        v = tile_ops.load(V + j0 * v_step, j < N, d, D, False)
        dq = tile_ops.add_dq(dq, q, k, v, do, lse, delta, True, scale, False)
    for j0 in range(full, end, N):
        exists = j0 + j < kept
        k = tile_ops.load(K + j0 * k_step, exists, d, D, True)
        v = tile_ops.load(V + j0 * v_step, exists, d, D, True)
        seen = exists[None, :]
        if CAUSAL:
            seen = seen & (j0 + j[None, :] <= i[:, None])
        dq = tile_ops.add_dq(dq, q, k, v, do, lse, delta, seen, scale, True)
    if OVERLAP:
        tile_ops.gdc_wait()
    tile_ops.add(DQ + b * o_b + h * o_h + row[:, None] * o_n + d[None, :], dq * softmax_scale, ours, d, D, FIRST)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dkdv_kernel(Q, K, V, DO, OF_ROWS, DK, DV, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, g_b, g_n, g_h,
                o_b, o_n, o_h, scale, softmax_scale, n, nq, w, r, divide, plus, head0, heads, all_heads, many, segment0,
                segments, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
                N: tl.constexpr, CAUSAL: tl.constexpr, FIRST: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """DK and DV have the strides o. Where heads of a group keep the same keys, the first one's program sums for all."""
    b, h, tile, start, kept, first = place(n, nq, w, r, divide, plus, head0, heads, many, segment0, segments)
    if OVERLAP:
        tile_ops.gdc_launch_dependents()
    j0 = tile * N
    if GROUP > 1:
        for other in range(tl.maximum(head0, h // GROUP * GROUP), h):
            if (other // divide + plus) % r == (h // divide + plus) % r:
                kept = 0
    if (j0 >= kept) | (first >= kept):
        if OVERLAP:
            tile_ops.gdc_wait()
        return
    i, j, d = tl.arange(0, M), j0 + tl.arange(0, N), tl.arange(0, BLOCK_D)
    ours = j < kept
    at = start.to(tl.int64) + j.to(tl.int64) * r
    k = tile_ops.load(K + b * k_b + (h // GROUP) * k_h + at[:, None] * k_n + d[None, :], ours, d, D, True)
    v = tile_ops.load(V + b * v_b + (h // GROUP) * v_h + at[:, None] * v_n + d[None, :], ours, d, D, True)
    dk = tl.zeros((N, BLOCK_D), tl.float32)
    dv = tl.zeros((N, BLOCK_D), tl.float32)
    row = (start - (n - nq)).to(tl.int64) + i.to(tl.int64) * r
    begin = tl.maximum(first, j0) if CAUSAL else first
    middle = begin  # from here on a query sees all of the tile's keys
    if CAUSAL:
        middle = tl.minimum(kept, begin + tl.cdiv(tl.maximum(j0 + N - 1 - begin, 0), M) * M)
    full = middle + (kept - middle) // M * M
    for x in range(h, tl.minimum(h // GROUP * GROUP + GROUP, head0 + heads)):
        same = (x // divide + plus) % r == (h // divide + plus) % r
        stop = tl.where(same, kept, 0)
        Qx = Q + b * q_b + x * q_h + row[:, None] * q_n + d[None, :]
        Gx = DO + b * g_b + x * g_h + row[:, None] * g_n + d[None, :]
        Rx = tile_ops.pairs(OF_ROWS, (b * all_heads + x) * nq + row)
        if CAUSAL:
            for i0 in tl.range(begin, tl.minimum(middle, stop), M, num_stages=1):
                seen = j[:, None] <= i0 + i[None, :]
                q, do, lse, delta = tile_ops.queries(Qx, Gx, Rx, q_n, g_n, i0, r, i0 + i < kept, d, D, True)
                dk, dv = tile_ops.add_dkdv(dk, dv, q, k, v, do, lse, delta, seen, scale, True)
        for i0 in range(middle, tl.minimum(full, stop), M):
            q, do, lse, delta = tile_ops.queries(Qx, Gx, Rx, q_n, g_n, i0, r, i < M, d, D, False)
            dk, dv = tile_ops.add_dkdv(dk, dv, q, k, v, do, lse, delta, True, scale, False)
        for i0 in tl.range(full, stop, M, num_stages=1):
            q, do, lse, delta = tile_ops.queries(Qx, Gx, Rx, q_n, g_n, i0, r, i0 + i < kept, d, D, True)
            dk, dv = tile_ops.add_dkdv(dk, dv, q, k, v, do, lse, delta, True, scale, False)
    out = b * o_b + (h // GROUP) * o_h + at[:, None] * o_n + d[None, :]
    if OVERLAP:
        tile_ops.gdc_wait()
    tile_ops.add(DK + out, dk * softmax_scale, ours, d, D, FIRST)
    tile_ops.add(DV + out, dv, ours, d, D, FIRST)


class Branch(NamedTuple):
    """A branch in a kernel's terms. Head h of head0 ... head0 + heads - 1 has the offset (h // divide + plus) % r.

    whole: it keeps every position for every head, and is the first: it writes what the others add to.
    """

    w: int
    r: int
    divide: int
    plus: int
    head0: int
    heads: int
    whole: bool

    def launch(
        self, kernel, b: int, n: int, nq: int, all_heads: int, but: range, tile: int, *tensors, **options
    ) -> None:
        """The kernel over tiles of `tile` kept positions, in as few launches as a grid allows.

        but: segments that are left out, from none of them to all.
        """
        many = -(-self.w // (self.r * tile))
        step = max(1, GRID // (many * self.heads * b))
        begin, end = (n - nq) // self.w, -(-n // self.w)
        for start, stop in ((begin, but.start), (but.stop, end)) if but else ((begin, end),):
            for segment in range(start, stop, step):
                some = min(step, stop - segment)
                sizes = (n, nq, *self[:-1], all_heads, many, segment, some)
                kernel[(many * self.heads * some * b,)](*tensors, *sizes, **options)


def branches(pattern, n: int, heads: int, more: bool) -> list[Branch]:
    """The branches that have a head, one that keeps everything first; more: after others, so that none writes alone."""
    return pattern.kept("branches", (n, heads, more), lambda: _branches(pattern, n, heads, more))


def _branches(pattern, n: int, heads: int, more: bool) -> list[Branch]:
    found = []
    for x, (w, r) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)):
        members = pattern.head_range(x, heads)
        if members:
            r = min(r, max(n, heads) + 1)  # larger rates select the same, and could overflow
            whole = r == 1 and len(members) == heads and not more
            found.append(Branch(min(w, n), r, *pattern.rule(x, heads), members[0], len(members), whole))
    found.sort(key=lambda branch: not branch.whole)
    return found[:1] + [branch._replace(whole=False) for branch in found[1:]]


def forward(
    q: Tensor, k: Tensor, v: Tensor, pattern, scale: float, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """out (B, Nq, H, D) and lse (B, H, Nq) from q (B, Nq, H, D), k and v (B, N, G, D), last strides 1.

    into: an out and lse of other branches, with which these are merged in place by their softmax denominators
    """
    (b, nq, h, _), n = q.shape, k.shape[1]
    plan, tile = branches(pattern, n, h, into is not None), tile_sizes.choose("dilated forward", q)
    (out, lse), (overlap, later) = into or (None, None), tile_sizes.overlap(q)
    given = tile_sizes.constants(q, k, pattern.causal)
    for branch in plan:
        fused = cudnn_views.segments("forward", branch, pattern.causal, q, k, v)
        if out is None:
            if fused and cudnn_views.covers(branch, fused, q, k, v):
                out, lse = cudnn_views.whole(q, k, v, branch.w, pattern.causal, scale)
                continue
            out, lse = new(q, branch.whole), torch.full((b, h, nq), -torch.inf, device=q.device)
        if fused:
            cudnn_views.forward(q, k, v, out, lse, branch, fused, pattern.causal, scale)
        branch.launch(
            forward_kernel, b, n, nq, h, fused, tile.M, q, k, v, out, lse, *tile_ops.strides(q, k, v, out),
            scale * tile_sizes.LOG2_E, **given, FIRST=branch.whole, **tile.options(), **overlap,
        )  # fmt: skip
        overlap = later
    return out, lse


def backward(
    grad: Tensor, grad_lse: Tensor | None, q, k, v, out, lse, pattern, scale: float,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
):  # fmt: skip
    """(dq, dk, dv) from the gradients of out and lse, the inputs, and what `forward` returned.

    into: the gradients from other branches, to which these are added in place
    """
    (b, nq, h, _), n = q.shape, k.shape[1]
    plan, of_rows, (overlap, later) = branches(pattern, n, h, into is not None), None, tile_sizes.overlap(q)
    given = tile_sizes.constants(q, k, pattern.causal)
    whole = plan[0].whole
    dq, dk, dv = into or (new(q, whole), new(k, whole and nq == n), new(v, whole and nq == n))
    for branch in plan:
        fused = range(0)
        if grad_lse is None:
            fused = cudnn_views.segments("backward", branch, pattern.causal, q, k, v, grad, out)
        if fused:
            cudnn_views.backward(grad, q, k, v, out, lse, dq, dk, dv, branch, fused, pattern.causal, scale)
        if len(fused) == -(-n // branch.w):
            continue
        if of_rows is None:
            of_rows = tile_ops.rows(grad, grad_lse, out, lse)
        for name, kernel, results in (("dq", dq_kernel, (dq,)), ("dkdv", dkdv_kernel, (dk, dv))):
            tile = tile_sizes.choose(f"dilated {name}", q)
            branch.launch(
                kernel, b, n, nq, h, fused, tile.M if name == "dq" else tile.N, q, k, v, grad, of_rows, *results,
                *tile_ops.strides(q, k, v, grad, results[0]), scale * tile_sizes.LOG2_E, scale, **given,
                FIRST=branch.whole and (name == "dq" or nq == n), **tile.options(), **overlap,
            )  # fmt: skip
            overlap = later
    return dq, dk, dv


def new(like: Tensor, written: bool) -> Tensor:
    """A contiguous result: uninitialised if the first launch writes all of it, else zeros."""
    make = torch.empty if written else torch.zeros
    return make(like.shape, dtype=like.dtype, device=like.device)
