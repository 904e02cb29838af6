"""Merging attention over disjoint sets of keys: one softmax from its parts (log-sum-exp weights).

    out = sum_p exp(lse_p - lse) out_p,   lse = log sum_p exp(lse_p)

Dimensions: ... any, D head_dim. A part that sees nothing has lse -inf and changes nothing.
"""

import torch
from torch import Tensor


def lse_dtype(x: Tensor) -> torch.dtype:
    """Of the lse of x, and of what is summed for it: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two parts (out (..., D), lse (...)) as one. Merging (0, -inf), which saw nothing, with any x gives exactly x."""
    out, lse = one[0].clone(), one[1].clone()
    merge_(out, lse, *other)
    return out, lse


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part into (out, lse) in place. The part's share of the weights is sigmoid(part_lse - lse)."""
    share = torch.sigmoid(part_lse - lse)
    share.masked_fill_(part_lse == -torch.inf, 0)  # -inf - -inf is NaN: nothing merged with nothing
    out.lerp_(part.to(out.dtype), share[..., None].to(out.dtype))
    torch.logaddexp(lse, part_lse, out=lse)
