"""Every query sees every key."""

from __future__ import annotations

import torch

from workbench.patterns.arguments import flag
from workbench.patterns.base import Blocks, Pattern, pair_of


class Dense(Pattern):
    """visible(h, i, j) = True, or j <= i with causal=True."""

    def __init__(self, causal: bool = False):
        self.causal = flag("causal", causal)

    def count(self, h, i, j, n, heads):
        return j <= i if self.causal else torch.ones_like(i + j, dtype=torch.bool)

    def pairs(self, n, heads, nq=None):
        nq = self.check(n, heads, nq)
        skipped = nq * (nq - 1) // 2 if self.causal else 0  # the square of the queries lacks its upper triangle
        return heads * (nq * n - skipped)

    def distinct(self, n, heads, nq=None):
        return self.pairs(n, heads, nq)

    def _uncovered(self, n, heads, nq):
        return torch.zeros(heads, dtype=torch.int64)

    def blocks(self, n, heads, nq=None, block_size=128):
        nq = self.check(n, heads, nq)
        bq, bk = block_size = pair_of(block_size)
        cols = -(-n // bk)
        row = torch.arange((n - nq) // bq, -(-n // bq)) if nq else torch.arange(0)
        low, high = (row * bq).clamp(min=n - nq), ((row + 1) * bq).clamp(max=n) - 1  # first and last query of a row
        widths = high // bk + 1 if self.causal else torch.full_like(row, cols)
        starts = torch.zeros(len(row) + 1, dtype=torch.int64)
        torch.cumsum(widths, 0, out=starts[1:])
        columns = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(widths)
        if self.causal:
            full = ((columns + 1) * bk).clamp(max=n) - 1 <= low.repeat_interleave(widths)
        else:
            full = torch.ones_like(columns, dtype=torch.bool)
        return Blocks(block_size, n, nq, 1, starts, columns.to(torch.int32), full)

    def spec(self):
        return {"pattern": "Dense", "causal": self.causal}
