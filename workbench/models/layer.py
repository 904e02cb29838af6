"""A transformer's layer around any attention."""

import math

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """x (B, N, dim) -> (B, N, dim): x + attention(norm(x)), then x + mlp(norm(x)). A decoder has a causal pattern.

    attention: of (B, N, dim), such as `wb.MultiheadAttention`; its options go through `forward`.
    hidden: the width inside the MLP, by default 4 dim. sub_norm: a LayerNorm before its second product, too (Sub-LN of
    MAGNETO, arXiv 2210.06423; the attention has its own). dropout: of what the MLP adds.
    """

    def __init__(self, dim, attention: nn.Module, hidden=None, sub_norm=False, dropout=0.0, device=None, dtype=None):
        super().__init__()
        hidden, to = 4 * dim if hidden is None else hidden, {"device": device, "dtype": dtype}
        self.norms = nn.ModuleList(nn.LayerNorm(dim, **to) for _ in range(2))
        self.attention = attention
        self.up, self.down = nn.Linear(dim, hidden, **to), nn.Linear(hidden, dim, **to)
        self.norm = nn.LayerNorm(hidden, **to) if sub_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, **options) -> Tensor:
        x = x + self.attention(self.norms[0](x), **options)
        return x + self.dropout(self.down(self.norm(nn.functional.gelu(self.up(self.norms[1](x))))))

    @torch.no_grad()
    def initialise(self, depth: int) -> None:
        """As MAGNETO begins a stack of so many layers (its figure 2): Xavier's normal distribution, of gain
        sqrt(log(2 depth)) for what adds to the residual stream and of 1 for what makes queries and keys."""
        of = self.attention
        for linear in (of.q, of.k, of.v, of.out, self.up, self.down):
            nn.init.xavier_normal_(linear.weight, 1.0 if linear in (of.q, of.k) else math.sqrt(math.log(2 * depth)))
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
