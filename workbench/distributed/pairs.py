"""How many (head, query, key) each rank of a plan computes, in closed form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from workbench.patterns import BlockSparse, Dense, Dilated, Neighborhood

if TYPE_CHECKING:
    from workbench.distributed.plans import Plan


def of_ranks(plan: Plan) -> np.ndarray:
    """(world,) Python ints, which do not overflow; see `Plan.pairs`."""
    pattern, ranks = plan.pattern, range(plan.world)
    if isinstance(pattern, Dense):
        return np.array([sum(_dense_pairs(plan, x) for x in plan.work(rank)) for rank in ranks], dtype=object)
    if isinstance(pattern, BlockSparse):
        return np.array([int(plan.finder.visible(plan.shards[rank])[1]) for rank in ranks], dtype=object)
    bounds = [min(max(x, plan.n - plan.nq), plan.n) for x in plan.shards.starts]
    if isinstance(pattern, Neighborhood):
        total = torch.cat([torch.zeros(1, dtype=torch.int64), pattern.keys().cumsum(0)])[bounds]
        return plan.heads * total.diff().numpy().astype(object)
    return np.diff(sum(_dilated_pairs(pattern, plan.n, plan.heads, np.array(bounds, dtype=object))))


def _dense_pairs(plan: Plan, x: range) -> int:
    return plan.heads * (sum((x.start + 1, x.stop)) * len(x) // 2 if plan.pattern.causal else len(x) * plan.n)


def _dilated_pairs(pattern: Dilated, n: int, heads: int, x: np.ndarray):
    """For each branch and offset, the pairs of the queries before x (Python ints, which do not overflow)."""
    for branch, (w, r) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)):
        offsets = [pattern.offset(branch, h, heads) for h in pattern.head_range(branch, heads)]
        segments, inside = x // w, x % w
        length = np.minimum(w, n - segments * w)
        for o in set(offsets):
            whole, part, last = (np.maximum(0, -((o - y) // r)) for y in (np.array(w, dtype=object), inside, length))
            if pattern.causal:
                pairs = segments * (whole * (whole + 1) // 2) + part * (part + 1) // 2
            else:
                pairs = segments * whole * whole + part * last
            yield pairs * offsets.count(o)
    yield np.zeros(len(x), dtype=object)  # their sum is an array, also without heads
