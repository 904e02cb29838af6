"""What the engine needs beside its kernels: rows moved into and out of tile order, and what a backward knows of a row.

Dimensions: B sequences of N tokens, P places of the tile order of each (N, and padding where the last segment is
short), H heads, D head_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.engines.triton import tile_ops, tile_sizes
from workbench.patterns.tile_order import TileOrder

ROWS = 64  # of a program of `rows_kernel`
ELEMENTS = 4096  # of a program of `move_kernel`


@triton.jit
def position(place, segment, run, rate):
    """The position of the token at a place (`TileOrder.position`)."""
    inside = place % segment
    return place - inside + inside % run * rate + inside // run


@triton.jit(do_not_specialize=["n", "places", "segment", "run", "rate"])
def move_kernel(TOKENS, PLACES, t_b, t_n, p_b, p_n, n, places, segment, run, rate,
                WIDTH: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, BACK: tl.constexpr):  # fmt: skip
    """Rows of WIDTH elements from their positions to their places, zeros where there is no token; or BACK."""
    place, b = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1).to(tl.int64)
    at, x = position(place, segment, run, rate), tl.arange(0, BLOCK)
    exists, inside = (place < places)[:, None] & (x < WIDTH)[None, :], (at < n)[:, None]
    TOKENS += b * t_b + at.to(tl.int64)[:, None] * t_n + x[None, :]
    PLACES += b * p_b + place.to(tl.int64)[:, None] * p_n + x[None, :]
    if BACK:
        tl.store(TOKENS, tl.load(PLACES, exists & inside), exists & inside)
    else:
        tl.store(PLACES, tl.load(TOKENS, exists & inside, 0.0), exists)


def into(tokens: Tensor, order: TileOrder) -> Tensor:
    """(B, P, H, D) in tile order, zeros at padding, from (B, N, H, D)."""
    if tokens.stride()[2:] != (tokens.shape[3], 1):  # the kernel moves the heads of a token as one run
        tokens = tokens.contiguous()
    places = tokens.new_empty((tokens.shape[0], order.padded, *tokens.shape[2:]))
    _move(tokens, places, order, False)
    return places


def out_of(places: Tensor, tokens: Tensor, order: TileOrder) -> None:
    """Write (B, P, H, D) in tile order to tokens (B, N, H, D), whose heads may be a slice."""
    _move(places=places, tokens=tokens, order=order, back=True)


def _move(tokens: Tensor, places: Tensor, order: TileOrder, back: bool) -> None:
    width = tokens.shape[2] * tokens.shape[3]
    block = triton.next_power_of_2(width)
    m = max(1, ELEMENTS // block)
    move_kernel[(triton.cdiv(order.padded, m), tokens.shape[0])](
        tokens, places, *tokens.stride()[:2], *places.stride()[:2], order.n, order.padded, order.segment, order.run,
        order.rate, WIDTH=width, BLOCK=block, M=m, BACK=back,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "n", "places", "segment", "run", "rate"])
def rows_kernel(OUT, DO, LSE, DLSE, LSE2, DELTA, o_b, o_n, o_h, g_b, g_n, g_h, l_b, l_h, l_n, r_b, r_h, heads, n,
                places, segment, run, rate, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr):  # fmt: skip
    """LSE2: lse in base 2, +inf for a row that sees nothing or is padding; DELTA: rowsum(dO * out) - dlse."""
    tiles, x = tl.cdiv(places, M), tl.program_id(0)
    tile, x = x % tiles, x // tiles
    h, b = (x % heads).to(tl.int64), (x // heads).to(tl.int64)
    place, d = tile * M + tl.arange(0, M), tl.arange(0, BLOCK_D)
    at = position(place, segment, run, rate)
    exists, row = (at < n) & (place < places), at.to(tl.int64)
    out = tile_ops.load(OUT + b * o_b + h * o_h + row[:, None] * o_n + d[None, :], exists, d, D, True)
    do = tile_ops.load(DO + b * g_b + h * g_h + row[:, None] * g_n + d[None, :], exists, d, D, True)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    lse = tl.load(LSE + b * l_b + h * l_h + row * l_n, exists, float("-inf"))
    if DLSE is not None:  # of a row that sees nothing it may be anything, NaN too
        given = tl.load(DLSE + b * l_b + h * l_h + row * l_n, exists, 0.0)
        delta -= tl.where(lse == float("-inf"), 0.0, given)
    to = b * r_b + h * r_h + place
    tl.store(LSE2 + to, tl.where(lse == float("-inf"), float("inf"), lse * tile_ops.LOG2E), place < places)
    tl.store(DELTA + to, delta, place < places)


def rows(grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, order: TileOrder) -> tuple[Tensor, Tensor]:
    """lse in base 2 and delta, float32 (H, B, P) in tile order, of out and its gradient (B, N, H, D), lse (B, H, N)."""
    b, _, h, d = out.shape
    lse = lse.contiguous()
    lse2, delta = torch.empty((2, h, b, order.padded), dtype=torch.float32, device=out.device)
    rows_kernel[(b * h * triton.cdiv(order.padded, ROWS),)](
        out, grad, lse, None if grad_lse is None else grad_lse.contiguous(), lse2, delta, *out.stride()[:3],
        *grad.stride()[:3], *lse.stride(), lse2.stride(1), lse2.stride(0), h, order.n, order.padded,
        order.segment, order.run, order.rate, D=d, BLOCK_D=tile_sizes.padded(d), M=ROWS,
    )  # fmt: skip
    return lse2, delta
