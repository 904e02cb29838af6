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

ELEMENTS = 4096  # of a program of `move_kernel`


@triton.jit(do_not_specialize=["n", "places", "segment", "run", "rate"])
def move_kernel(TOKENS, PLACES, t_b, t_n, p_b, p_n, n, places, segment, run, rate,
                WIDTH: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, BACK: tl.constexpr):  # fmt: skip
    """Rows of WIDTH elements from their positions to their places, zeros where there is no token; or BACK."""
    place, b = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1).to(tl.int64)
    at, x = tile_ops.position(place, segment, run, rate), tl.arange(0, BLOCK)
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
    block = tile_sizes.power_of_2(width)
    m = max(1, ELEMENTS // block)
    move_kernel[(-(-order.padded // m), tokens.shape[0])](
        tokens, places, *tokens.stride()[:2], *places.stride()[:2], order.n, order.padded, order.segment, order.run,
        order.rate, WIDTH=width, BLOCK=block, M=m, BACK=back,
    )  # fmt: skip


def rows(grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, order: TileOrder) -> tuple[Tensor, Tensor]:
    """lse in base 2 and delta, float32 (H, B, P) in tile order, of out and its gradient (B, N, H, D), lse (B, H, N)."""
    found = torch.empty((2, out.shape[2], out.shape[0], order.padded), dtype=torch.float32, device=out.device)
    sizes = order.n, order.padded, order.segment, order.run, order.rate
    tile_ops.write_rows(grad, grad_lse, out, lse, *found.transpose(1, 2), sizes)
    return tuple(found)
