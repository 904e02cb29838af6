"""Every query sees every key."""

import torch

from workbench.patterns import layouts
from workbench.patterns.base import Pattern
from workbench.patterns.block_sparse import BlockSparse
from workbench.patterns.checks import flag


class Dense(Pattern):
    """visible(h, i, j) = True, or j <= i with causal=True."""

    same_heads = sees_itself = True
    by_spec = property(lambda self: type(self) is Dense)

    def __init__(self, causal: bool = False):
        self.causal = flag("causal", causal)

    def count(self, h, i, j, n, heads):
        return j <= i if self.causal else torch.ones_like(i + j, dtype=torch.bool)

    def _pairs(self, n, heads, nq):
        skipped = nq * (nq - 1) // 2 if self.causal else 0  # the square of the queries lacks its upper triangle
        return [nq * n - skipped] * heads

    _distinct = _pairs

    def _blocks(self, n, heads, nq, block_size):
        return BlockSparse(layouts.local(max(1, n)), block_size, self.causal).blocks(n, 1, nq)

    def spec(self):
        return {"pattern": "Dense", "causal": self.causal}
