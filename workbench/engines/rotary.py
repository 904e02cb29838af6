"""Rotary positions (RoFormer, arXiv 2104.09864): queries and keys are turned by their position, so that a score depends
on how far apart they are. Angles are float64: at position 1,000,000 one in float32 is wrong by 0.06.

Dimensions: B batch, N tokens, H heads, D head_dim.
"""

import torch
from torch import Tensor


def table(positions: Tensor, head_dim: int, base: float = 10_000.0, dtype=torch.float32) -> Tensor:
    """(N, D): cosines, then sines, by which `turned` turns components i and i + D/2 of what is at `positions` (N,), by
    position / base^(2i/D)."""
    even = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.double()[:, None] * base**-even
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype)


def turned(x: Tensor, by: Tensor) -> Tensor:
    """x (B, N, H, D) turned by a `table` (N, D), in its dtype: like x."""
    cos, sin = by[:, None].chunk(2, -1)  # (N, 1, D / 2)
    one, other = x.to(by.dtype).chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).to(x.dtype)
