"""Rotary positions (RoFormer, arXiv 2104.09864): queries and keys are turned by their position, so that a score depends
on how far apart they are; xPos (arXiv 2212.10554) lets it also decay with that distance.

Angles are computed in float64: at position 1,000,000 one in float32 is wrong by 0.06. Dimensions: N, H, D head_dim.
"""

import torch
from torch import Tensor


def table(positions: Tensor, head_dim: int, base: float = 10_000.0, xpos: float | None = None, dtype=torch.float32):
    """(2, N, D): for queries and for keys the cosines, then the sines, by which `turned` turns what is at `positions`.

    positions (N,) of integers. Components i and i + D/2 are turned by position / base^(2i/D).
    xpos: the scale base of xPos, 512 in its paper: a score decays with (query - key) / xpos, as is meant for causal
        patterns. ValueError where a float32 cannot hold it: want a larger one for more tokens.
    """
    even = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.double()[:, None] * base**-even
    found = torch.cat([angles.cos(), angles.sin()], -1)
    if xpos is None:
        return found.to(dtype).expand(2, -1, -1)
    if len(positions) > 80 * xpos:  # (0.4 / 1.4)^(N/2 / xpos) has to be a number, with some room
        raise ValueError(f"xpos={xpos:g} on {len(positions)} positions: want at least N / 80, since scores decay to 0")
    scale = ((even + 0.4) / 1.4) ** ((positions.double()[:, None] - len(positions) // 2) / xpos)
    return torch.stack([found * (each := scale.repeat(1, 2)), found / each]).to(dtype)


def turned(x: Tensor, by: Tensor) -> Tensor:
    """x (B, N, H, D) turned by `by` (N, D), one of the two of `table`, in its dtype: like x."""
    cos, sin = by[:, None].chunk(2, -1)  # (N, 1, D / 2)
    one, other = x.to(by.dtype).chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).to(x.dtype)
