"""Attention with scores that are changed (`engines.scores`), of every pattern, on every device: scores are made, strip
by strip of `block_sparse`, in bounded memory.

Dimensions: R strips, H query heads, G key heads, a queries and M keys of a strip, D head_dim.
"""

import torch
from torch import Tensor

from workbench.engines import operators
from workbench.engines.merge import lse_dtype
from workbench.engines.scores import Scores, places
from workbench.engines.torch import block_sparse
from workbench.engines.torch.fused import expand_heads
from workbench.engines.torch_backend import blocks_of, of_each, through_lse


class Explicit(block_sparse.Grid):
    """A grid whose strips are computed by their scores, and the sums of the gradients of what changes these."""

    def __init__(self, pattern, q: Tensor, k: Tensor, scores: Scores):
        super().__init__(pattern, blocks_of(pattern, q, k.shape[1]), q.shape[2], k.shape[2])
        self.changes, self.wide = scores, lse_dtype(q)
        self.sums = [None if x is None else torch.zeros_like(x, dtype=self.wide) for x in scores[:2]]

    def elements(self, units: Tensor) -> int:
        """As many scores of a strip as keys that are gathered at once: a few of such tensors are alive."""
        return max(super().elements(units), self.a * max(self.heads, units.shape[2] * self.group))

    def scores(self, s, q: Tensor, k: Tensor, scale: float):
        """(the scaled products, the scores of what is visible (R, H, a, M), head, query and key of each)."""
        h, i, j = (x[:, None] for x in self.positions(s))
        if not self.split:
            h = torch.arange(self.heads, device=q.device).repeat(q.shape[1] // self.heads).view(1, -1, 1, 1)
        products = q.to(self.wide) @ k.to(self.wide).transpose(-1, -2) * scale
        found, mask = self.changes.change(products, self.pattern, h, i, j), self.mask(s, self.wide)
        return products, found if mask is None else found + mask, (h, i, j)

    def forward(self, s, q, k, v, scale):
        k, v = expand_heads(k, q), expand_heads(v, q)
        _, scores, _ = self.scores(s, q, k, scale)
        lse = scores.logsumexp(-1)
        p = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
        return (p @ v.to(self.wide)).to(q.dtype), lse

    def backward(self, s, grad, q, k, v, out, lse, scale):
        k, v, (grad, out) = expand_heads(k, q), expand_heads(v, q), (x.to(self.wide) for x in (grad, out))
        products, scores, (h, i, j) = self.scores(s, q, k, scale)
        p = (scores - lse[..., None]).exp()
        ds = p * (grad @ v.to(self.wide).transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
        slopes, bias = self.sums
        if slopes is not None:
            of = (ds * -(i - j).abs()).sum((-1, -2))  # (R, H)
            slopes.index_add_(0, h[..., 0, 0].expand_as(of).flatten(), of.flatten())
        if bias is not None:
            place = h * bias[0].numel() + places(self.pattern, i, j)
            bias.view(-1).index_add_(0, place.expand_as(ds).flatten(), ds.flatten())
        if self.changes.softcap:
            ds = ds * (1 - torch.tanh(products / self.changes.softcap).square())
        ds = ds * scale
        return ds @ k.to(self.wide), ds.transpose(-1, -2) @ q.to(self.wide), p.transpose(-1, -2) @ grad


def forward(q, k, v, slopes, bias, pattern, scale, softcap) -> tuple[Tensor, Tensor]:
    """out (B, Nq, H, D) and lse (B, H, Nq)."""

    def run(one, q, k, v):
        return block_sparse.forward(q, k, v, Explicit(one, q, k, Scores(slopes, bias, softcap)), scale)

    return of_each(run, pattern, (q, k, v))


def backward(grad, grad_lse, *rest) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, slopes and bias; an empty tensor for what is None."""
    q, k, v, slopes, bias, out, lse, pattern, scale, softcap = rest
    grids = []

    def run(one, grad, q, k, *rest):
        grids.append(Explicit(one, q, k, Scores(slopes, bias, softcap)))
        return block_sparse.backward(grad, q, k, *rest, grids[-1], scale)

    found = through_lse(grad, grad_lse, q, k, v, out, lse, lambda *x: of_each(run, pattern, x))
    for at, x in enumerate((slopes, bias)):
        found = *found, q.new_empty(0) if x is None else sum(grid.sums[at] for grid in grids).to(x.dtype)
    return found


more, numbers = ", Tensor? alibi_slopes, Tensor? relative_bias", ", float softcap"
attend, attend_backward = operators.define("attend_by_scores", forward, backward, more, numbers)
