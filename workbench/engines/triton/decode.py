"""One new token of a dilated pattern, in one launch: a softmax over what a cache holds of all branches.

A program takes a head of a batch entry: through the rows that its lane of each branch holds goes the online softmax
(FlashAttention-2, arXiv 2307.08691, algorithm 1), and the token's own row is written beside them.

Dimensions: B batch, H query heads, G key heads, D head_dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.engines.triton import tile_ops, tile_sizes

FIELDS = tl.constexpr(8)  # of a lane: two addresses, strides of B and rows, segment, rate, offset, whether it writes


@triton.jit(do_not_specialize=["at", "heads"])
def token_kernel(Q, K, V, OUT, LSE, LANES, at, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, o_b, o_n, o_h, scale,
                 divisor, heads, GROUP: tl.constexpr, BRANCHES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
                 ROWS: tl.constexpr):  # fmt: skip
    h, b = tl.program_id(0).to(tl.int64) % heads, tl.program_id(0).to(tl.int64) // heads
    j, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    wide = d < D
    q = tl.load(Q + b * q_b + h * q_h + d, wide, 0.0).to(tl.float32) * scale
    k = tl.load(K + b * k_b + h // GROUP * k_h + d, wide, 0.0)
    v = tl.load(V + b * v_b + h // GROUP * v_h + d, wide, 0.0)
    own = tl.sum(q * k.to(tl.float32), 0)
    acc, total, peak = tl.zeros((BLOCK_D,), tl.float32), 0.0, float("-inf")
    for branch in range(BRANCHES):
        lane = LANES + (branch * heads + h) * FIELDS
        inside, rate = at % tl.load(lane + 4), tl.load(lane + 5)
        if inside % rate == tl.load(lane + 6):
            held, step = inside // rate, tl.load(lane + 3)
            keys = tl.load(lane).to(tl.pointer_type(K.dtype.element_ty)) + b * tl.load(lane + 2) + d
            values = tl.load(lane + 1).to(tl.pointer_type(V.dtype.element_ty)) + b * tl.load(lane + 2) + d
            peak_new = tl.maximum(peak, own)
            shrink, p = tl.exp2(peak - peak_new), tl.exp2(own - peak_new)
            acc, total, peak = acc * shrink + p * v.to(tl.float32), total * shrink + p, peak_new
            for start in range(0, held, ROWS):
                row = start + j
                some = row < held
                ks = tile_ops.load(keys[None, :] + row[:, None] * step, some, d, D, True).to(tl.float32)
                vs = tile_ops.load(values[None, :] + row[:, None] * step, some, d, D, True).to(tl.float32)
                s = tl.where(some, tl.sum(ks * q[None, :], 1), float("-inf"))
                peak_new = tl.maximum(peak, tl.max(s, 0))
                shrink, ps = tl.exp2(peak - peak_new), tl.exp2(s - peak_new)
                acc = acc * shrink + tl.sum(ps[:, None] * vs, 0)
                total, peak = total * shrink + tl.sum(ps, 0), peak_new
            if tl.load(lane + 7):
                tl.store(keys + held * step, k, wide)
                tl.store(values + held * step, v, wide)
    seen = total > 0
    out = acc / (tl.where(seen, total, 1.0) * divisor)
    tl.store(OUT + b * o_b + h * o_h + d, out.to(OUT.dtype.element_ty), wide)
    tl.store(LSE + b * heads + h, tl.where(seen, (peak + tl.log2(total)) * tile_ops.LN2, float("-inf")))


def table(lanes: list, heads: int, key_heads: int, device) -> Tensor:
    """int64 (branches, H, FIELDS): of each head its lane of each branch. lanes: of a cache, with room for the next."""
    rows = [[[0, 0, 0, 0, 1, 1, -1, 0]] * heads for _ in range(1 + max(x.branch for x in lanes))]  # -1: no position
    for lane in lanes:
        (_, of_b, of_row, of_head, _), (keys, values) = lane.kept.room.stride(), lane.kept.room
        mine, seen = range(key_heads)[lane.key_heads], set()
        for h in range(heads)[lane.heads]:
            skip = lane.kept.room.element_size() * of_head * mine.index(h * key_heads // heads)
            where = keys.data_ptr() + skip, values.data_ptr() + skip, of_b, of_row
            rows[lane.branch][h] = [*where, lane.segment, lane.rate, lane.offset, skip not in seen]
            seen.add(skip)
    return torch.tensor(rows, dtype=torch.int64).to(device)


def token(q: Tensor, k: Tensor, v: Tensor, lanes: Tensor, at: int, scale: float, divisor: int) -> tuple[Tensor, Tensor]:
    """out (B, 1, H, D) and lse (B, H, 1) of the token at position `at`, which is held, too: k, v (B, 1, G, D)."""
    b, _, h, d = q.shape
    out, lse = torch.empty_like(q), torch.empty((b, h, 1), dtype=torch.float32, device=q.device)
    token_kernel[(b * h,)](
        q, k, v, out, lse, lanes, at, *tile_ops.strides(q, k, v, out), scale * tile_sizes.LOG2_E, divisor, h,
        GROUP=h // k.shape[2], BRANCHES=len(lanes), D=d, BLOCK_D=(wide := tile_sizes.padded(d)), ROWS=8192 // wide,
    )  # fmt: skip
    return out, lse
