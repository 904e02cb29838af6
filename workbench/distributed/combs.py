"""Positions that at least one of several dilated branches keeps: a union of residue classes, counted in closed form."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import torch

from workbench.distributed.shards import as_tensor, clip

PERIOD = 1 << 22  # up to which one period is tabulated; beyond it all positions are listed to be counted


class Comb:
    """Positions t with t = o (mod r) for some (o, r) of `teeth`, 0 <= o < r."""

    def __init__(self, teeth: frozenset[tuple[int, int]]):
        # a class inside another adds nothing, as (o, 2r) inside (o, r)
        held = {(o, r) for o, r in teeth for a, s in teeth if (a, s) != (o, r) and r % s == 0 and o % s == a}
        self.teeth = sorted(teeth - held)

    @cached_property
    def table(self) -> np.ndarray:
        """int64 (period + 1,): [x] is how many of the positions 0 ... x - 1 are kept."""
        period = math.lcm(*(r for _, r in self.teeth))
        kept = np.zeros(period + 1, dtype=np.int64)
        for o, r in self.teeth:
            kept[1 + o :: r] = 1
        return kept.cumsum()

    def below(self, x: np.ndarray) -> np.ndarray:
        """How many positions in [0, x) are kept, for each x."""
        x = np.asarray(x, dtype=np.int64)
        if len(self.teeth) == 1:
            o, r = self.teeth[0]
            return np.maximum(0, (x - o + r - 1) // r)
        if math.lcm(*(r for _, r in self.teeth)) > PERIOD:
            return np.searchsorted(self.rows(0, int(x.max(initial=0)))[0].numpy(), x)
        whole, rest = np.divmod(x, len(self.table) - 1)
        return whole * self.table[-1] + self.table[rest]

    def rows(self, start: int, stop: int) -> list[range | torch.Tensor]:
        """The kept positions in [start, stop), ascending, as one piece of `Rows`."""
        pieces = [clip(range(o, stop, r), start, stop) for o, r in self.teeth]
        if len(pieces) == 1:
            return pieces
        return [torch.cat([*map(as_tensor, pieces)]).unique()]
