"""Rotary positions (RoFormer, arXiv 2104.09864): queries and keys are turned by their position, so that a score depends
on how far apart they are. Angles are float64: at position 1,000,000 one in float32 is wrong by 0.06.
xPos (arXiv 2212.10554) scales them, too, queries by z^(n / base) and keys by z^(-n / base), so that a score fades with
the distance, from z = 2/7 in the first components to 1. A factor alone outgrows any float; powers are taken from the
middle of XPOS bases, whatever the length, so that they are within 3.5^32, and no score, seen or not, beyond 3.5^64.

Dimensions: B batch, N tokens, H heads, D head_dim.
"""

import torch
from torch import Tensor

XPOS = 64  # times the scale base of xPos: the tokens


def table(positions: Tensor, head_dim: int, base: float = 10_000.0, dtype=torch.float32, xpos=None) -> Tensor:
    """(N, D): cosines, then sines, by which `turned` turns components i and i + D/2 of what is at `positions` (N,), by
    position / base^(2i/D). xpos: the scale base of xPos; then (2, N, D), of queries and of keys."""
    even = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.double()[:, None] * base**-even
    by = torch.cat([angles.cos(), angles.sin()], -1)
    if xpos is not None:
        power = ((even + 0.4) / 1.4) ** (positions.double()[:, None] / xpos - XPOS / 2)
        by = by * torch.stack([power, 1 / power]).repeat(1, 1, 2)
    return by.to(dtype)


def turned(x: Tensor, by: Tensor) -> Tensor:
    """x (B, N, H, D) turned by a `table` (N, D), in its dtype: like x."""
    cos, sin = by[:, None].chunk(2, -1)  # (N, 1, D / 2)
    one, other = x.to(by.dtype).chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).to(x.dtype)
