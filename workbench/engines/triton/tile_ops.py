"""What the kernels share: one step of a tile of queries over a tile of keys, forward and backward.

The step of the forward is the online softmax (FlashAttention-2, arXiv 2307.08691, algorithm 1), in base 2: `scale` is
the softmax scale times log2(e), `peak` the running maximum of the scaled scores, `total` the running sum of their
powers. The steps of the backward take the final lse, in base 2 too, and recompute P = exp(S - lse); dS = P * (dO V^T -
delta) with delta = rowsum(dO * out) - dlse (algorithm 2 there; the gradient of lse adds its own term).

Dimensions: M queries of a tile, N keys of a tile, D head_dim. A row of a tile that does not exist is loaded as zeros,
its lse as +inf, so that its P is 0.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: F401 (the kernels call them as steps.…)

from workbench.engines.triton import tile_sizes as tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as Triton read it when it made these kernels
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
ROWS = 64  # of a program of `rows_kernel`


@triton.jit
def load(pointers, exists, columns, D: tl.constexpr, MASKED: tl.constexpr):
    """A tile (rows, D padded): columns from D on are zeros, and so, if MASKED, are rows that do not exist."""
    if MASKED:
        if columns.shape[0] == D:
            return tl.load(pointers, exists[:, None], 0.0)
        else:
            return tl.load(pointers, exists[:, None] & (columns < D)[None, :], 0.0)
    else:
        if columns.shape[0] == D:
            return tl.load(pointers)
        else:
            return tl.load(pointers, (columns < D)[None, :], 0.0)


@triton.jit
def store(pointers, tile, exists, columns, D: tl.constexpr):
    """Write the rows that exist, rounded to what is pointed to."""
    inside = exists[:, None]
    if columns.shape[0] != D:
        inside = inside & (columns < D)[None, :]
    tl.store(pointers, tile.to(pointers.dtype.element_ty), inside)


@triton.jit
def add(pointers, tile, exists, columns, D: tl.constexpr, FIRST: tl.constexpr):
    """`store`, on top of what is there unless FIRST."""
    if not FIRST:
        tile += load(pointers, exists, columns, D, True)
    store(pointers, tile, exists, columns, D)


@triton.jit
def merge(OUT, LSE, out, lse, exists, columns, D: tl.constexpr, FIRST: tl.constexpr):
    """`store` out (M, D) and lse (M,); unless FIRST, merged with what is there by their softmax denominators."""
    if not FIRST:
        before = tl.load(LSE, exists, float("-inf"))
        both = tl.maximum(before, lse)
        both = tl.where(both == float("-inf"), 0.0, both)  # neither has seen anything
        old, new = tl.exp2((before - both) * LOG2E), tl.exp2((lse - both) * LOG2E)
        total = old + new
        lse = both + tl.log2(total) * LN2
        share = (new / tl.where(total == 0, 1.0, total))[:, None]
        out = load(OUT, exists, columns, D, True) * (1 - share) + out * share
    store(OUT, out, exists, columns, D)
    tl.store(LSE, lse, exists)


@triton.jit
def queries(Q, DO, ROWS, q_n, g_n, i0, r, exists, columns, D: tl.constexpr, MASKED: tl.constexpr):
    """q, do (M, D), lse in base 2 and delta (M,) of the rows i0 * r after those that are pointed to.

    ROWS are the pairs (lse, delta) that `rows_kernel` writes: one load, whose layout the compiler keeps compact.
    """
    skip = tl.cast(i0, tl.int64) * r
    q = load(Q + skip * q_n, exists, columns, D, MASKED)
    do = load(DO + skip * g_n, exists, columns, D, MASKED)
    if MASKED:
        lse, delta = tl.split(tl.load(ROWS + 2 * skip, exists[:, None], float("inf")))
        return q, do, lse, tl.where(exists, delta, 0.0)
    else:
        lse, delta = tl.split(tl.load(ROWS + 2 * skip))
        return q, do, lse, delta


@triton.jit
def pairs(ROWS, row):
    """Pointers (M, 2) to the pairs (lse, delta) of the rows, counted through batch entries and heads."""
    return ROWS + 2 * row[:, None] + tl.arange(0, 2)[None, :]


@triton.jit
def attend(acc, peak, total, q, k, v, seen, scale, MASKED: tl.constexpr,
           bias=0.0, BIASED: tl.constexpr = False):  # fmt: skip
    """acc (M, D), peak and total (M,) updated by the keys k, v (N, D); seen (M, N) is read only if MASKED.

    bias: a number that is added to the scaled scores of all (in the backward, lse less it).
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee")  # (M, N)
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    top = tl.max(s, 1) * scale
    if BIASED:
        top += bias
    peak_new = tl.maximum(peak, top)
    base = peak_new
    if MASKED:  # a row may have seen nothing yet
        base = tl.where(peak_new == float("-inf"), 0.0, peak_new)
    p = tl.exp2(s * scale - (base - bias if BIASED else base)[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, peak_new, total


@triton.jit
def add_dq(dq, q, k, v, do, lse, delta, seen, scale, MASKED: tl.constexpr):
    """dq (M, D) / softmax scale, updated by the keys k, v (N, D); lse and delta (M,), lse in base 2."""
    p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None])  # (M, N)
    if MASKED:
        p = tl.where(seen, p, 0.0)
    ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit
def add_dkdv(dk, dv, q, k, v, do, lse, delta, seen, scale, MASKED: tl.constexpr):
    """dk / softmax scale and dv (N, D), updated by the queries q (M, D); seen is (N, M), lse and delta (M,)."""
    p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale - lse[None, :])  # (N, M)
    if MASKED:
        p = tl.where(seen, p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
    ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def finish(acc, peak, total):
    """(out (M, D), lse (M,), natural); a row that has seen nothing gets 0 and -inf."""
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    return acc / total[:, None], tl.where(empty, float("-inf"), (peak + tl.log2(total)) * LN2)


@triton.jit
def position(place, segment, run, rate):
    """The position of the token at a place (`TileOrder.position`)."""
    inside = place % segment
    return place - inside + inside % run * rate + inside // run


@triton.jit(do_not_specialize=["heads", "n", "places", "segment", "run", "rate"])
def rows_kernel(OUT, DO, LSE, DLSE, LSE2, DELTA, o_b, o_n, o_h, g_b, g_n, g_h, l_b, l_h, l_n, r_b, r_h, r_n, heads, n,
                places, segment, run, rate, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr):  # fmt: skip
    """LSE2: lse in base 2, +inf for a row that sees nothing or is padding; DELTA: rowsum(dO * out) - dlse."""
    tiles, x = tl.cdiv(places, M), tl.program_id(0)
    tile, x = x % tiles, x // tiles
    h, b = (x % heads).to(tl.int64), (x // heads).to(tl.int64)
    place, d = tile * M + tl.arange(0, M), tl.arange(0, BLOCK_D)
    at = position(place, segment, run, rate)
    exists, row = (at < n) & (place < places), at.to(tl.int64)
    out = load(OUT + b * o_b + h * o_h + row[:, None] * o_n + d[None, :], exists, d, D, True)
    do = load(DO + b * g_b + h * g_h + row[:, None] * g_n + d[None, :], exists, d, D, True)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    lse = tl.load(LSE + b * l_b + h * l_h + row * l_n, exists, float("-inf"))
    if DLSE is not None:  # of a row that sees nothing it may be anything, NaN too
        given = tl.load(DLSE + b * l_b + h * l_h + row * l_n, exists, 0.0)
        delta -= tl.where(lse == float("-inf"), 0.0, given)
    to = b * r_b + h * r_h + place.to(tl.int64) * r_n
    tl.store(LSE2 + to, tl.where(lse == float("-inf"), float("inf"), lse * LOG2E), place < places)
    tl.store(DELTA + to, delta, place < places)


def strides(*tensors: Tensor) -> list[int]:
    """Those of the first three dimensions of each, as kernels take them."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def write_rows(grad, grad_lse: Tensor | None, out: Tensor, lse: Tensor, lse2: Tensor, delta: Tensor, order) -> None:
    """lse2, delta (B, H, places), of the same strides; order: (positions, places, segment, run, rate)."""
    (b, _, h, d), lse = out.shape, lse.contiguous()
    rows_kernel[(b * h * -(-order[1] // ROWS),)](
        out, grad, lse, None if grad_lse is None else grad_lse.contiguous(), lse2, delta,
        *strides(out, grad, lse, lse2), h, *order, D=d, BLOCK_D=tiles.padded(d), M=ROWS,
    )  # fmt: skip


def rows(grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """float32 (B, H, Nq, 2): what the backward needs of each row of queries, beside q and the gradient of out."""
    b, nq, h, _ = out.shape
    result = torch.empty((b, h, nq, 2), dtype=torch.float32, device=out.device)
    write_rows(grad, grad_lse, out, lse, *result.unbind(-1), (nq, nq, nq, nq, 1))
    return result
