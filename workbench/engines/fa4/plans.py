"""What a pattern is in the terms of FlashAttention-4's kernels: lists of blocks, in natural or in tile order.

In tile order (`patterns.tile_order`) a query meets each key of its branches once, with the number of branches that
show it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workbench.engines.fa4 import lists
from workbench.engines.fa4.lists import Both
from workbench.patterns import BlockSparse, Dense, Dilated, Window, tile_order
from workbench.patterns.tables import place
from workbench.patterns.tile_order import TILE, TileOrder


class Variant(NamedTuple):
    """What is compiled apart. mask: the name of what hides pairs of partial blocks, None where there are no lists."""

    dtype: torch.dtype
    head_dim: int
    group: int  # query heads of a key head
    causal: bool  # without lists
    mask: str | None  # "none", or as of `hopper.Mask`; None without lists
    band: str | None  # a window without lists: "window", or "back", which has no keys after the query
    order: tuple[int, int] | None  # (segment, rate) of tile order
    natural: bool  # whether tokens lie in natural order and are walked in tile order
    weighed: bool  # whether blocks of the lists count several times

    @property
    def listed(self) -> bool:
        return self.mask is not None


class Plan(NamedTuple):
    """A pattern in the engine's terms. mask: see `Variant`; scalar: what the mask is given, of sinks two numbers.

    order: None where blocks are those of the natural order. rest: the branches that the Triton kernels run.
    """

    mask: str | None
    scalar: int | tuple[int, int] | None
    order: TileOrder | None
    both: Both | None
    rest: Dilated | None

    def to(self, device) -> Plan:
        return self._replace(both=self.both and self.both.to(device))


def plan_of(pattern, q: Tensor, n: int) -> Plan:
    """The plan for these sizes, kept with the pattern."""
    b, nq, h, _ = q.shape
    which = () if pattern.same_heads else (b, h)  # on these the lists do not depend where all heads see the same
    return pattern.kept("fa4", (*which, nq, n, place(q)), lambda: make_plan(pattern, b, n, nq, h).to(q.device))


def make_plan(pattern, b: int, n: int, nq: int, heads: int) -> Plan:
    """The plan for `b` sequences, its lists on the host."""
    if isinstance(pattern, Dense):
        return Plan(None, None, None, None, None)
    mask = order = rest = scalar = None
    if isinstance(pattern, Dilated):
        pattern, rest = tile_order.together(pattern, n)
        order = tile_order.of(pattern, n)
        both = lists.of_pairs(tile_order.pairs(pattern, order, heads, nq), b)
        mask, scalar = ("later", None) if pattern.causal else ("padding", n % order.segment)
    else:
        layouts = 1 if pattern.same_heads else heads
        size = None if isinstance(pattern, BlockSparse) else TILE
        both = lists.of_blocks([one.blocks(n, layouts, nq, size) for one in pattern.each()])
        if isinstance(pattern, BlockSparse):
            mask = "causal"
        elif isinstance(pattern, Window):
            reach, *_, sinks = pattern.reach(n)
            mask, scalar = "back" if pattern.causal else "window", reach
            if sinks:
                mask, scalar = f"{mask} sinks", (reach, sinks)
        else:
            mask, scalar = "window", min(n, pattern.radius[0])
    if not both.masked:
        mask, scalar = "none", None
    return Plan(mask, scalar, order, both, rest)
