"""Block-sparse attention: a program takes a tile of queries (or keys) and walks the list of blocks that it sees.

Full blocks (all pairs visible) and partial ones are two lists: only the second pays for a mask, which is computed from
positions (causal, windows), from a token's place in time, or from its coordinates on a grid (neighborhoods, in whatever
order the tokens lie). A tile divides a block. No two programs write the same row: results are reproducible bit for bit.

Dimensions: B batch, N keys, Nq queries (the last Nq positions), H query heads, G key heads, D head_dim. In a kernel M
and N are the queries and keys of a tile, i and j absolute positions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.engines.triton import tile_ops, tile_sizes
from workbench.patterns.base import Blocks

UNSPECIALIZED = ["n", "nq", "heads", "count", "block0", "by_batch", "by_head", "reach"]


@triton.jit
def table(TABLE, i, exists, AXIS: tl.constexpr, MASK: tl.constexpr):
    """(low, high) of positions i, for `visible`, with a new axis AXIS; zeros where the mask needs no table."""
    if MASK == "near":
        low, high = tl.split(tl.load(TABLE + 2 * i[:, None] + tl.arange(0, 2)[None, :], exists[:, None], 0))
        return tl.expand_dims(low, AXIS), tl.expand_dims(high, AXIS)
    else:
        return tl.expand_dims(tl.zeros_like(i), AXIS), tl.expand_dims(tl.zeros_like(i), AXIS)


@triton.jit
def visible(i, j, low_i, high_i, low_j, high_j, reach, MASK: tl.constexpr):
    """Which pairs of a partial block are visible: i, low_i and high_i broadcast against j, low_j and high_j.

    The numbers of the table are packed bit fields, and `reach` has the top bit of each field. low has a token's
    coordinates x with the top bits clear, high has x + radius with the top bits
    set: in high_i - low_j the top bit of a field stays set exactly where x_i + radius >= x_j.
    """
    if MASK == "causal":
        seen = j <= i
    elif MASK == "window":
        seen = tl.abs(i - j) <= reach
    elif MASK == "near":
        seen = ((high_i - low_j) & (high_j - low_i) & reach) == reach
    else:
        seen = (i >= 0) & (j >= 0)
    return seen


@triton.jit
def place(count, heads, SUB: tl.constexpr):
    """Of this program: batch entry, head, block of `count`, tile within it of SUB."""
    x = tl.program_id(0)
    part, x = x % SUB, x // SUB
    block, x = x % count, x // count
    return (x // heads).to(tl.int64), (x % heads).to(tl.int64), block, part  # int64: they are multiplied by strides


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(Q, K, V, OUT, LSE, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, o_b, o_n, o_h, l_b, l_h, l_n,
                   FULL, FULL_BLOCKS, PART, PART_BLOCKS, TABLE, scale, n, nq, heads, count, block0, by_batch,
                   by_head, reach, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
                   M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
                   MASK: tl.constexpr, FIRST: tl.constexpr):  # fmt: skip
    b, h, block, part = place(count, heads, ROWS // M)
    if CAUSAL:
        block = count - 1 - block  # the longest first
    i, j, d = (block0 + block) * ROWS + part * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_D)
    ours = (i >= n - nq) & (i < n)
    row = (i - (n - nq)).to(tl.int64)
    q = tile_ops.load(Q + b * q_b + h * q_h + row[:, None] * q_n + d[None, :], ours, d, D, True)
    K += b * k_b + (h // GROUP) * k_h + j.to(tl.int64)[:, None] * k_n + d[None, :]
    V += b * v_b + (h // GROUP) * v_h + j.to(tl.int64)[:, None] * v_n + d[None, :]
    low_i, high_i = table(TABLE, i, ours, 1, MASK)
    acc = tl.zeros((M, BLOCK_D), tl.float32)
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    line = (b * by_batch + h * by_head) * count + block
    for x in range(tl.load(FULL + line) * (COLS // N), tl.load(FULL + line + 1) * (COLS // N)):
        j0 = (tl.load(FULL_BLOCKS + x // (COLS // N)) * COLS + x % (COLS // N) * N).to(tl.int64)
        k = tile_ops.load(K + j0 * k_n, j < N, d, D, False)
        v = tile_ops.load(V + j0 * v_n, j < N, d, D, False)
        acc, peak, total = tile_ops.attend(acc, peak, total, q, k, v, True, scale, False)
    for x in range(tl.load(PART + line) * (COLS // N), tl.load(PART + line + 1) * (COLS // N)):
        j0 = tl.load(PART_BLOCKS + x // (COLS // N)) * COLS + x % (COLS // N) * N
        k = tile_ops.load(K + j0.to(tl.int64) * k_n, j0 + j < n, d, D, True)
        v = tile_ops.load(V + j0.to(tl.int64) * v_n, j0 + j < n, d, D, True)
        low_j, high_j = table(TABLE, j0 + j, j0 + j < n, 0, MASK)
        seen = visible(i[:, None], j0 + j[None, :], low_i, high_i, low_j, high_j, reach, MASK) & (j0 + j < n)[None, :]
        acc, peak, total = tile_ops.attend(acc, peak, total, q, k, v, seen, scale, True)
    out, lse = tile_ops.finish(acc, peak, total)
    tile_ops.merge(OUT + b * o_b + h * o_h + row[:, None] * o_n + d[None, :], LSE + b * l_b + h * l_h + row * l_n,
                out, lse, ours, d, D, FIRST)  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dq_kernel(Q, K, V, DO, OF_ROWS, DQ, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, g_b, g_n, g_h, o_b, o_n, o_h,
              FULL, FULL_BLOCKS, PART, PART_BLOCKS, TABLE, scale, softmax_scale, n, nq, heads, count, block0,
              by_batch, by_head, reach, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
              M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
              MASK: tl.constexpr):  # fmt: skip
    b, h, block, part = place(count, heads, ROWS // M)
    if CAUSAL:
        block = count - 1 - block
    i, j, d = (block0 + block) * ROWS + part * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_D)
    ours = (i >= n - nq) & (i < n)
    row = (i - (n - nq)).to(tl.int64)
    Q += b * q_b + h * q_h + row[:, None] * q_n + d[None, :]
    DO += b * g_b + h * g_h + row[:, None] * g_n + d[None, :]
    OF_ROWS = tile_ops.pairs(OF_ROWS, (b * heads + h) * nq + row)
    q, do, lse, delta = tile_ops.queries(Q, DO, OF_ROWS, q_n, g_n, 0, 1, ours, d, D, True)
    K += b * k_b + (h // GROUP) * k_h + j.to(tl.int64)[:, None] * k_n + d[None, :]
    V += b * v_b + (h // GROUP) * v_h + j.to(tl.int64)[:, None] * v_n + d[None, :]
    low_i, high_i = table(TABLE, i, ours, 1, MASK)
    dq = tl.zeros((M, BLOCK_D), tl.float32)
    line = (b * by_batch + h * by_head) * count + block
    for x in range(tl.load(FULL + line) * (COLS // N), tl.load(FULL + line + 1) * (COLS // N)):
        j0 = (tl.load(FULL_BLOCKS + x // (COLS // N)) * COLS + x % (COLS // N) * N).to(tl.int64)
        k = tile_ops.load(K + j0 * k_n, j < N, d, D, False)
        v = tile_ops.load(V + j0 * v_n, j < N, d, D, False)
        dq = tile_ops.add_dq(dq, q, k, v, do, lse, delta, True, scale, False)
    for x in range(tl.load(PART + line) * (COLS // N), tl.load(PART + line + 1) * (COLS // N)):
        j0 = tl.load(PART_BLOCKS + x // (COLS // N)) * COLS + x % (COLS // N) * N
        k = tile_ops.load(K + j0.to(tl.int64) * k_n, j0 + j < n, d, D, True)
        v = tile_ops.load(V + j0.to(tl.int64) * v_n, j0 + j < n, d, D, True)
        low_j, high_j = table(TABLE, j0 + j, j0 + j < n, 0, MASK)
        seen = visible(i[:, None], j0 + j[None, :], low_i, high_i, low_j, high_j, reach, MASK) & (j0 + j < n)[None, :]
        dq = tile_ops.add_dq(dq, q, k, v, do, lse, delta, seen, scale, True)
    tile_ops.store(DQ + b * o_b + h * o_h + row[:, None] * o_n + d[None, :], dq * softmax_scale, ours, d, D)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dkdv_kernel(Q, K, V, DO, OF_ROWS, DK, DV, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, g_b, g_n, g_h,
                o_b, o_n, o_h, FULL, FULL_BLOCKS, PART, PART_BLOCKS, TABLE, scale, softmax_scale, n, nq, heads,
                count, block0, by_batch, by_head, reach, GROUP: tl.constexpr, D: tl.constexpr,
                BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                CAUSAL: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """DK and DV have the strides o; the lists are of the blocks of queries that see each of `count` blocks of keys."""
    b, g, block, part = place(count, heads // GROUP, COLS // N)
    i, j, d = tl.arange(0, M), block * COLS + part * N + tl.arange(0, N), tl.arange(0, BLOCK_D)
    ours, at = j < n, j.to(tl.int64)
    k = tile_ops.load(K + b * k_b + g * k_h + at[:, None] * k_n + d[None, :], ours, d, D, True)
    v = tile_ops.load(V + b * v_b + g * v_h + at[:, None] * v_n + d[None, :], ours, d, D, True)
    low_j, high_j = table(TABLE, j, ours, 1, MASK)
    dk = tl.zeros((N, BLOCK_D), tl.float32)
    dv = tl.zeros((N, BLOCK_D), tl.float32)
    row = (i - (n - nq)).to(tl.int64)
    for h in range(g * GROUP, g * GROUP + GROUP):
        Qh = Q + b * q_b + h * q_h + row[:, None] * q_n + d[None, :]
        Gh = DO + b * g_b + h * g_h + row[:, None] * g_n + d[None, :]
        Rh = tile_ops.pairs(OF_ROWS, (b * heads + h) * nq + row)
        line = (b * by_batch + h * by_head) * count + block
        for x in range(tl.load(FULL + line) * (ROWS // M), tl.load(FULL + line + 1) * (ROWS // M)):
            i0 = (block0 + tl.load(FULL_BLOCKS + x // (ROWS // M))) * ROWS + x % (ROWS // M) * M
            q, do, lse, delta = tile_ops.queries(Qh, Gh, Rh, q_n, g_n, i0, 1, i < M, d, D, False)
            dk, dv = tile_ops.add_dkdv(dk, dv, q, k, v, do, lse, delta, True, scale, False)
        for x in range(tl.load(PART + line) * (ROWS // M), tl.load(PART + line + 1) * (ROWS // M)):
            i0 = (block0 + tl.load(PART_BLOCKS + x // (ROWS // M))) * ROWS + x % (ROWS // M) * M
            exists = (i0 + i >= n - nq) & (i0 + i < n)
            q, do, lse, delta = tile_ops.queries(Qh, Gh, Rh, q_n, g_n, i0, 1, exists, d, D, True)
            low_i, high_i = table(TABLE, i0 + i, exists, 0, MASK)
            seen = visible(i0 + i[None, :], j[:, None], low_i, high_i, low_j, high_j, reach, MASK)
            dk, dv = tile_ops.add_dkdv(dk, dv, q, k, v, do, lse, delta, seen, scale, True)
    out = b * o_b + g * o_h + at[:, None] * o_n + d[None, :]
    tile_ops.store(DK + out, dk * softmax_scale, ours, d, D)
    tile_ops.store(DV + out, dv, ours, d, D)


# --- the pattern in the kernels' terms -------------------------------------------------------------------------------


class Lists(NamedTuple):
    """Of each line (batch entry, layout, block) the full and the partial blocks that it sees: int32, CSR."""

    full: Tensor
    full_blocks: Tensor
    part: Tensor
    part_blocks: Tensor


class Plan(NamedTuple):
    """by_queries: the key blocks that each block of queries sees; by_keys: the other way round.

    count: blocks of queries and of keys. block0: the number of the first block of queries. by_batch, by_head: strides,
    in layouts, from one batch entry to the next and from one head to the next. table, reach, mask: see `visible`.
    """

    by_queries: Lists
    by_keys: Lists
    block_size: tuple[int, int]
    count: tuple[int, int]
    block0: int
    by_batch: int
    by_head: int
    table: Tensor | None
    reach: int
    mask: str


def make_plan(each: list[Blocks], pattern, device) -> Plan:
    """From the blocks of each batch entry (or of all: one)."""
    one = each[0]
    (bq, bk), rows, cols = one.block_size, one.rows, one.cols
    width = torch.cat([x.starts.diff() for x in each])
    line = torch.arange(len(width), device=width.device).repeat_interleave(width)
    column, full = torch.cat([x.columns for x in each]).long(), torch.cat([x.full for x in each])
    row, layout = line % max(1, rows), line // max(1, rows)
    # A block that does not exist as a whole needs the mask.
    if one.n % bk:
        full = full & (column < cols - 1)
    if one.n % bq:
        full = full & (row < rows - 1)
    if (one.n - one.nq) % bq:
        full = full & (row > 0)
    by_queries = lists(line, column, full, len(width))
    turned = layout * cols + column
    order = turned.argsort(stable=True)
    by_keys = lists(turned[order], row[order], full[order], len(each) * one.layouts * cols)
    several = one.layouts > 1
    return Plan(
        Lists(*(x.to(device) for x in by_queries)), Lists(*(x.to(device) for x in by_keys)), (bq, bk), (rows, cols),
        one.first, one.layouts if len(each) > 1 else 0, int(several), *mask_of(pattern, one.n, device),
    )  # fmt: skip


def lists(line: Tensor, block: Tensor, full: Tensor, lines: int) -> Lists:
    found = []
    for chosen in (full, ~full):
        starts = torch.zeros(lines + 1, dtype=torch.int32, device=line.device)
        starts[1:] = torch.bincount(line[chosen], minlength=lines).cumsum(0)
        found += [starts, block[chosen].to(torch.int32)]
    return Lists(*found)


def mask_of(pattern, n: int, device) -> tuple[Tensor | None, int, str]:
    """(TABLE (N, 2) or None, reach, MASK) for `visible`."""
    if hasattr(pattern, "radius"):
        if len(pattern.shape) == 1 and pattern.ordering is None:
            return None, min(pattern.radius[0], n), "window"
        radius = [min(r, side) for r, side in zip(pattern.radius, pattern.shape, strict=True)]
        return pack(pattern.coordinates(torch.arange(n)), radius, n, device) + ("near",)
    return None, 0, "causal" if pattern.causal else "all"


def pack(fields: list[Tensor], radius: list[int], n: int, device) -> tuple[Tensor, int]:
    """(TABLE, reach): each field as wide as its largest number plus its radius, and one bit more."""
    low, high, reach, shift = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64), 0, 0
    for field, r in zip(fields, radius, strict=True):
        width = (int(field.max()) + r).bit_length() if n else 0
        low += field.cpu() << shift
        high += field.cpu() + r + (1 << width) << shift
        reach |= 1 << shift + width
        shift += width + 1
    if shift > 62:
        raise ValueError(f"the coordinates of {n:,} tokens take {shift} bits: the kernels have 62")
    return torch.stack([low, high], 1).to(torch.int32 if shift <= 31 else torch.int64).contiguous().to(device), reach


# --- launching -------------------------------------------------------------------------------------------------------


def forward(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, causal: bool, scale: float, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """out (B, Nq, H, D) and lse (B, H, Nq) from q (B, Nq, H, D), k and v (B, N, G, D), last strides 1.

    into: an out and lse of other keys, with which these are merged in place by their softmax denominators
    """
    b, nq, h, _ = q.shape
    out, lse = into or (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        torch.empty((b, h, nq), dtype=torch.float32, device=q.device),
    )
    scales = (scale * math.log2(math.e),)
    launch("forward", forward_kernel, plan, causal, (q, k, v), (out, lse), (out, lse), scales, FIRST=into is None)
    return out, lse


def backward(grad: Tensor, grad_lse: Tensor | None, q, k, v, out, lse, plan: Plan, causal: bool, scale: float):
    """(dq, dk, dv) from the gradients of out and lse, the inputs, and what `forward` returned."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    scales = scale * math.log2(math.e), scale
    given = grad, tile_ops.rows(grad, grad_lse, out, lse)
    launch("dq", dq_kernel, plan, causal, (q, k, v), (*given, dq), (grad, dq), scales)
    launch("dkdv", dkdv_kernel, plan, causal, (q, k, v), (*given, dk, dv), (grad, dk), scales)
    return dq, dk, dv


def launch(name, kernel, plan: Plan, causal: bool, inputs, others, strided, scales, **options) -> None:
    """The kernel over every tile; `strided` are those of `others` whose strides it takes."""
    q, k, _ = inputs
    (b, nq, h, d), (n, g) = q.shape, k.shape[1:3]
    (rows, cols), keys = plan.block_size, name == "dkdv"
    tile = tile_sizes.choose(f"blocks {name}", q, plan.block_size)
    count = plan.count[keys]
    programs = count * (cols // tile.N if keys else rows // tile.M) * (g if keys else h) * b
    strides = [stride for t in (*inputs, *strided) for stride in t.stride()[:3]]
    if programs:
        kernel[(programs,)](
            *inputs, *others, *strides, *(plan.by_keys if keys else plan.by_queries), plan.table, *scales,
            n, nq, h, count, plan.block0, plan.by_batch, plan.by_head, plan.reach,
            GROUP=h // g, D=d, BLOCK_D=tile_sizes.padded(d), ROWS=rows, COLS=cols, CAUSAL=causal,
            MASK=plan.mask, **options, **tile.options(),
        )  # fmt: skip
