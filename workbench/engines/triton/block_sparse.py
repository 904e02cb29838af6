"""Block-sparse attention: a program takes a tile of queries (or keys) and walks the list of blocks that it sees.

Full blocks (all pairs visible) and partial ones are two lists: only the second pays for a mask, which is computed from
positions (causal, windows), from a token's coordinates on a grid (neighborhoods, in whatever order the tokens lie), or
read from a table of `bit_masks` (all other patterns that show a pair at most once). A tile divides a block. No two
programs write the same row: results are reproducible bit for bit.

Nested branches of a dilated pattern are blocks of their tile order (`patterns.tile_order`): a query sees each key once,
with the log2 of how many branches show it added to its score. Tokens stay in natural order, in which such a block is
every RATE-th position from its first one on (RATE 0: blocks of the natural order).

Dimensions: B batch, N keys, Nq queries (the last Nq positions), H query heads, G key heads, D head_dim. In a kernel M
and N are the queries and keys of a tile, i and j absolute positions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.engines.triton import tile_ops, tile_sizes
from workbench.engines.triton.block_lists import Plan

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
def bits(TABLE, mask, row, col, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, ROWS: tl.constexpr,
         COLS: tl.constexpr):  # fmt: skip
    """Of mask number `mask` the tile that begins at (row, col) of its block; queries get a new axis AXIS."""
    words = TABLE + (mask * ROWS + row + tl.arange(0, M)) * ((COLS + 31) // 32) + col // 32
    place = tl.expand_dims(col % 32 + tl.arange(0, N), 1 - AXIS)
    word = tl.expand_dims(tl.load(words), AXIS)
    for x in tl.static_range(1, N // 32):
        word = tl.where(place // 32 == x, tl.expand_dims(tl.load(words + x), AXIS), word)
    return ((word >> (place % 32)) & 1) != 0


@triton.jit
def visible(i, j, low_i, high_i, low_j, high_j, reach, CAUSAL: tl.constexpr, MASK: tl.constexpr):
    """Which pairs of a partial block are visible: i, low_i and high_i broadcast against j, low_j and high_j.

    The numbers of the table are packed bit fields, and `reach` has the top bit of each field. low has a token's
    coordinates x with the top bits clear, high has x + radius with the top bits set: in high_i - low_j the top bit of a
    field stays set exactly where x_i + radius >= x_j.
    """
    if MASK == "causal":
        seen = j <= i
    elif MASK == "window":
        seen = tl.abs(i - j) <= reach
        if CAUSAL:
            seen = seen & (j <= i)
    elif MASK == "near":
        seen = ((high_i - low_j) & (high_j - low_i) & reach) == reach
    else:
        seen = (i >= 0) & (j >= 0)
    return seen


@triton.jit
def shown(TABLE, i, low_i, high_i, j, n, mask, row, x, reach, M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
          COLS: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """(M, N): which queries i, from `row` of their block on, see which keys j, tile x of the partial blocks."""
    if MASK == "bits":
        seen = bits(TABLE, mask, row, x % (COLS // N) * N, M, N, 1, ROWS, COLS)
    else:
        low_j, high_j = table(TABLE, j, j < n, 0, MASK)
        seen = visible(i[:, None], j[None, :], low_i, high_i, low_j, high_j, reach, CAUSAL, MASK)
    return seen & (j < n)[None, :]


@triton.jit
def place(count, heads, SUB: tl.constexpr):
    """Of this program: batch entry, head, block of `count`, tile within it of SUB."""
    x = tl.program_id(0)
    part, x = x % SUB, x // SUB
    block, x = x % count, x // count
    return (x // heads).to(tl.int64), (x % heads).to(tl.int64), block, part  # int64: they are multiplied by strides


@triton.jit
def positions(TABLE, block, part, heads, reach, SIZE: tl.constexpr, TILE: tl.constexpr, RATE: tl.constexpr):
    """Of tile `part` of a block of SIZE: its positions (TILE,), and where entries of its line count from: position."""
    if RATE == 0:
        return block * SIZE + part * TILE + tl.arange(0, TILE), 0
    else:
        turn = block // (reach // SIZE) * reach
        first = turn + tl.load(TABLE + heads + block % (reach // SIZE))
        return first + (part * TILE + tl.arange(0, TILE)) * RATE, turn


@triton.jit
def line_of(TABLE, b, h, block, block0, count, heads, by_batch, by_head, reach, SIZE: tl.constexpr, RATE: tl.constexpr):
    """The line of the lists that block0 + block has, for a head."""
    if RATE == 0:
        return (b * by_batch + h * by_head) * count + block
    else:
        many = reach // SIZE
        turn, block = (block0 + block) // many, (block0 + block) % many
        return tl.load(TABLE + h) + tl.load(TABLE + heads + many + turn) + block


@triton.jit
def entry(BLOCKS, x, first, SIZE: tl.constexpr, TILE: tl.constexpr, RATE: tl.constexpr, MASK: tl.constexpr):
    """Of tile x of the listed blocks of SIZE: the first position, and the bias of its scores or the number of its mask.

    first: the block or, in tile order, the position that entries count from.
    """
    if MASK == "bits":
        at = BLOCKS + x // (SIZE // TILE) * 2
        return (first + tl.load(at)) * SIZE + x % (SIZE // TILE) * TILE, tl.load(at + 1)
    elif RATE == 0:
        return (first + tl.load(BLOCKS + x // (SIZE // TILE))) * SIZE + x % (SIZE // TILE) * TILE, 0.0
    else:
        at = BLOCKS + x // (SIZE // TILE) * 2
        bias = tl.load(at + 1).to(tl.float32, bitcast=True)
        return first + tl.load(at) + x % (SIZE // TILE) * (TILE * RATE), bias


@triton.jit
def apart(TILE: tl.constexpr, RATE: tl.constexpr):
    """The positions of a tile, counted from its first one."""
    if RATE == 0:
        return tl.arange(0, TILE)
    else:
        return tl.arange(0, TILE) * RATE


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(Q, K, V, OUT, LSE, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, o_b, o_n, o_h, l_b, l_h, l_n,
                   FULL, FULL_BLOCKS, PART, PART_BLOCKS, TABLE, scale, n, nq, heads, count, block0, by_batch,
                   by_head, reach, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
                   M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
                   MASK: tl.constexpr, RATE: tl.constexpr, FIRST: tl.constexpr):  # fmt: skip
    b, h, block, part = place(count, heads, ROWS // M)
    if CAUSAL:
        block = count - 1 - block  # the longest first
    i, first = positions(TABLE, block0 + block, part, heads, reach, ROWS, M, RATE)
    j, d = apart(N, RATE), tl.arange(0, BLOCK_D)
    ours = (i >= n - nq) & (i < n)
    row = (i - (n - nq)).to(tl.int64)
    q = tile_ops.load(Q + b * q_b + h * q_h + row[:, None] * q_n + d[None, :], ours, d, D, True)
    K += b * k_b + (h // GROUP) * k_h + j.to(tl.int64)[:, None] * k_n + d[None, :]
    V += b * v_b + (h // GROUP) * v_h + j.to(tl.int64)[:, None] * v_n + d[None, :]
    low_i, high_i = table(TABLE, i, ours, 1, MASK)
    acc = tl.zeros((M, BLOCK_D), tl.float32)
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    line = line_of(TABLE, b, h, block, block0, count, heads, by_batch, by_head, reach, ROWS, RATE)
    for x in range(tl.load(FULL + line) * (COLS // N), tl.load(FULL + line + 1) * (COLS // N)):
        j0, bias = entry(FULL_BLOCKS, x, first, COLS, N, RATE, "all")
        j0 = j0.to(tl.int64)
        k = tile_ops.load(K + j0 * k_n, j < N, d, D, False)
        v = tile_ops.load(V + j0 * v_n, j < N, d, D, False)
        acc, peak, total = tile_ops.attend(acc, peak, total, q, k, v, True, scale, False, bias, RATE > 0)
    for x in range(tl.load(PART + line) * (COLS // N), tl.load(PART + line + 1) * (COLS // N)):
        j0, bias = entry(PART_BLOCKS, x, first, COLS, N, RATE, MASK)
        k = tile_ops.load(K + j0.to(tl.int64) * k_n, j0 + j < n, d, D, True)
        v = tile_ops.load(V + j0.to(tl.int64) * v_n, j0 + j < n, d, D, True)
        seen = shown(TABLE, i, low_i, high_i, j0 + j, n, bias, part * M, x, reach, M, N, ROWS, COLS, CAUSAL, MASK)
        acc, peak, total = tile_ops.attend(acc, peak, total, q, k, v, seen, scale, True, bias, RATE > 0)
    out, lse = tile_ops.finish(acc, peak, total)
    tile_ops.merge(OUT + b * o_b + h * o_h + row[:, None] * o_n + d[None, :], LSE + b * l_b + h * l_h + row * l_n,
                out, lse, ours, d, D, FIRST)  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dq_kernel(Q, K, V, DO, OF_ROWS, DQ, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, g_b, g_n, g_h, o_b, o_n, o_h,
              FULL, FULL_BLOCKS, PART, PART_BLOCKS, TABLE, scale, softmax_scale, n, nq, heads, count, block0,
              by_batch, by_head, reach, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
              M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
              MASK: tl.constexpr, RATE: tl.constexpr):  # fmt: skip
    b, h, block, part = place(count, heads, ROWS // M)
    if CAUSAL:
        block = count - 1 - block
    i, first = positions(TABLE, block0 + block, part, heads, reach, ROWS, M, RATE)
    j, d = apart(N, RATE), tl.arange(0, BLOCK_D)
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
    line = line_of(TABLE, b, h, block, block0, count, heads, by_batch, by_head, reach, ROWS, RATE)
    for x in range(tl.load(FULL + line) * (COLS // N), tl.load(FULL + line + 1) * (COLS // N)):
        j0, bias = entry(FULL_BLOCKS, x, first, COLS, N, RATE, "all")
        j0 = j0.to(tl.int64)
        k = tile_ops.load(K + j0 * k_n, j < N, d, D, False)
        v = tile_ops.load(V + j0 * v_n, j < N, d, D, False)
        dq = tile_ops.add_dq(dq, q, k, v, do, lse - bias if RATE else lse, delta, True, scale, False)
    for x in range(tl.load(PART + line) * (COLS // N), tl.load(PART + line + 1) * (COLS // N)):
        j0, bias = entry(PART_BLOCKS, x, first, COLS, N, RATE, MASK)
        k = tile_ops.load(K + j0.to(tl.int64) * k_n, j0 + j < n, d, D, True)
        v = tile_ops.load(V + j0.to(tl.int64) * v_n, j0 + j < n, d, D, True)
        seen = shown(TABLE, i, low_i, high_i, j0 + j, n, bias, part * M, x, reach, M, N, ROWS, COLS, CAUSAL, MASK)
        dq = tile_ops.add_dq(dq, q, k, v, do, lse - bias if RATE else lse, delta, seen, scale, True)
    tile_ops.store(DQ + b * o_b + h * o_h + row[:, None] * o_n + d[None, :], dq * softmax_scale, ours, d, D)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dkdv_kernel(Q, K, V, DO, OF_ROWS, DK, DV, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, g_b, g_n, g_h,
                o_b, o_n, o_h, FULL, FULL_BLOCKS, PART, PART_BLOCKS, TABLE, scale, softmax_scale, n, nq, heads,
                count, block0, by_batch, by_head, reach, GROUP: tl.constexpr, D: tl.constexpr,
                BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                CAUSAL: tl.constexpr, MASK: tl.constexpr, RATE: tl.constexpr):  # fmt: skip
    """DK and DV have the strides o; the lists are of the blocks of queries that see each of `count` blocks of keys."""
    b, g, block, part = place(count, heads // GROUP, COLS // N)
    i = apart(M, RATE)
    j, first = positions(TABLE, block, part, heads, reach, COLS, N, RATE)
    if RATE == 0:
        first = block0
    d = tl.arange(0, BLOCK_D)
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
        line = line_of(TABLE, b, h, block, 0, count, heads, by_batch, by_head, reach, COLS, RATE)
        for x in range(tl.load(FULL + line) * (ROWS // M), tl.load(FULL + line + 1) * (ROWS // M)):
            i0, bias = entry(FULL_BLOCKS, x, first, ROWS, M, RATE, "all")
            q, do, lse, delta = tile_ops.queries(Qh, Gh, Rh, q_n, g_n, i0, 1, i < M, d, D, False)
            dk, dv = tile_ops.add_dkdv(dk, dv, q, k, v, do, lse - bias if RATE else lse, delta, True, scale, False)
        for x in range(tl.load(PART + line) * (ROWS // M), tl.load(PART + line + 1) * (ROWS // M)):
            i0, bias = entry(PART_BLOCKS, x, first, ROWS, M, RATE, MASK)
            exists = (i0 + i >= n - nq) & (i0 + i < n)
            q, do, lse, delta = tile_ops.queries(Qh, Gh, Rh, q_n, g_n, i0, 1, exists, d, D, True)
            if MASK == "bits":
                seen = bits(TABLE, bias, x % (ROWS // M) * M, part * N, M, N, 0, ROWS, COLS)
            else:
                low_i, high_i = table(TABLE, i0 + i, exists, 0, MASK)
                seen = visible(i0 + i[None, :], j[:, None], low_i, high_i, low_j, high_j, reach, CAUSAL, MASK)
            dk, dv = tile_ops.add_dkdv(dk, dv, q, k, v, do, lse - bias if RATE else lse, delta, seen, scale, True)
    out = b * o_b + g * o_h + at[:, None] * o_n + d[None, :]
    tile_ops.store(DK + out, dk * softmax_scale, ours, d, D)
    tile_ops.store(DV + out, dv, ours, d, D)


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, Nq, H, D) and lse (B, H, Nq) from q (B, Nq, H, D), k and v (B, N, G, D), last strides 1."""
    b, nq, h, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((b, h, nq), dtype=torch.float32, device=q.device)
    scales, results = (scale * tile_sizes.LOG2_E,), (out, lse)
    launch("forward", forward_kernel, plan, causal, (q, k, v), results, results, scales, FIRST=True)
    return out, lse


def backward(grad: Tensor, grad_lse: Tensor | None, q, k, v, out, lse, plan: Plan, causal: bool, scale: float):
    """(dq, dk, dv) from the gradients of out and lse, the inputs, and what `forward` returned."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    scales = scale * tile_sizes.LOG2_E, scale
    given = grad, tile_ops.rows(grad, grad_lse, out, lse)
    launch("dq", dq_kernel, plan, causal, (q, k, v), (*given, dq), (grad, dq), scales)
    launch("dkdv", dkdv_kernel, plan, causal, (q, k, v), (*given, dk, dv), (grad, dk), scales)
    return dq, dk, dv


def launch(name, kernel, plan: Plan, causal: bool, inputs, others, strided, scales, **options) -> None:
    """The kernel over every tile; `strided` are those of `others` whose strides it takes."""
    q, k, _ = inputs
    (b, nq, h, _), (n, g) = q.shape, k.shape[1:3]
    (rows, cols), keys = plan.block_size, name == "dkdv"
    tile = tile_sizes.choose(f"blocks {name}", q, plan.block_size)
    count = plan.count[keys]
    programs = count * (cols // tile.N if keys else rows // tile.M) * (g if keys else h) * b
    if programs:
        kernel[(programs,)](
            *inputs, *others, *tile_ops.strides(*inputs, *strided), *(plan.by_keys if keys else plan.by_queries),
            plan.table, *scales, n, nq, h, count, plan.block0, plan.by_batch, plan.by_head, plan.reach,
            **tile_sizes.constants(q, k, causal), ROWS=rows, COLS=cols, MASK=plan.mask, RATE=plan.rate, **options,
            **tile.options(),
        )  # fmt: skip
