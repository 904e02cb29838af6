"""What may be done to scores between the product of query and key and the softmax.

    score(h, i, j) = cap tanh(scale q_i.k_j / cap) - slope_h |i - j| + bias[h, place of j seen from i]

The first is softcap (Gemma 2, arXiv 2408.00118), the second ALiBi (arXiv 2108.12409; |i - j| as flash-attn has it), the
third a learned bias by relative position (T5, arXiv 1910.10683; in two dimensions Swin's, arXiv 2103.14030).

Dimensions: H query heads, N keys; h, i and j are a query head and absolute positions of a query and a key.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workbench.patterns import Neighborhood, Pattern, Window
from workbench.patterns.checks import FINITE, describe, number


class Scores(NamedTuple):
    """What is done: alibi_slopes (H,); relative_bias (H, *`shape_of`); softcap, above 0. Or None (softcap: or 0)."""

    alibi_slopes: Tensor | None = None
    relative_bias: Tensor | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        return " and ".join(name for name, value in self._asdict().items() if value is not None)

    def change(self, s: Tensor, pattern: Pattern, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The scores of s, scaled products of queries i and keys j of heads h: int64 that broadcast with s."""
        if self.softcap:
            s = self.softcap * torch.tanh(s / self.softcap)
        if self.alibi_slopes is not None:
            s = s - self.alibi_slopes.to(s)[h] * (i - j).abs()
        if self.relative_bias is not None:
            s = s + self.relative_bias.to(s).flatten(1)[h, places(pattern, i, j)]
        return s


def others(options: dict) -> dict:
    """The options that do not change scores."""
    return {name: value for name, value in options.items() if name not in Scores._fields}


def of(options: dict, q: Tensor, pattern: Pattern) -> Scores | None:
    """What the options ask for; ValueError where it is not what `attention` can do."""
    given = {name: value for name, value in options.items() if value is not None}
    if "softcap" in given:
        given["softcap"] = number("softcap", given["softcap"], 0, FINITE)
    for name in given.keys() - {"softcap"}:
        value, want = given[name], (q.shape[2],) if name == "alibi_slopes" else (q.shape[2], *shape_of(pattern))
        if not isinstance(value, Tensor) or not value.is_floating_point() or tuple(value.shape) != want:
            raise ValueError(f"{name}={describe(value)}: want a tensor of floats of shape {want}, heads first")
        if value.device != q.device:
            raise ValueError(f"{name} is on {value.device}, q on {q.device}: want one device")
    return Scores(**given) if given else None


def shape_of(pattern: Pattern) -> tuple[int, ...]:
    """The shape of a head's table of biases: 2 r + 1 an axis, of a reach or radius r."""
    if isinstance(pattern, Window) and not pattern.sinks:
        return (2 * _reach(pattern) + 1,)
    if isinstance(pattern, Neighborhood) and pattern.plain:
        return tuple(2 * r + 1 for r in pattern.radius)
    words = "want a Window without sinks, or a Neighborhood without options, whose offsets a table can list"
    raise ValueError(f"relative_bias with {pattern.name}: {words}")


def places(pattern: Pattern, i: Tensor, j: Tensor) -> Tensor:
    """Where the bias of key j seen from query i is in a head's table, flat; some place for pairs that are hidden."""
    if isinstance(pattern, Window):
        reach = _reach(pattern)
        return (torch.div(j - i, pattern.dilation, rounding_mode="floor") + reach).clamp(0, 2 * reach)
    place = torch.zeros((), dtype=torch.int64, device=i.device)
    for x, y, r in zip(pattern.coordinates(i), pattern.coordinates(j), pattern.radius, strict=True):
        place = place * (2 * r + 1) + (y - x + r).clamp(0, 2 * r)
    return place


def _reach(pattern: Window) -> int:
    return pattern.width - 1 if pattern.causal else pattern.width // 2
