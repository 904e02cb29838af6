"""How far a token sees through a stack of layers: the receptive field of a pattern."""

import torch
from torch import Tensor


def reach(pattern, n: int, heads: int, layers: int) -> Tensor:
    """bool (layers + 1, n, n): [l, i, j] tells whether token i, after l layers, can depend on token j of the input.

    A layer mixes its heads and keeps its input (the residual), so one step is the union over heads and the token
    itself. n x n memory: meant for small n.
    """
    step = (pattern.multiplicity(n, heads) > 0).any(0) | torch.eye(n, dtype=torch.bool)  # (query, key)
    seen = [torch.eye(n, dtype=torch.bool)]
    for _ in range(layers):
        seen.append(_then(step, seen[-1]))
    return torch.stack(seen)


def depth(pattern, n: int, heads: int) -> int | None:
    """How many layers it takes until every token can depend on every other; None where no number does."""
    (seen, step), layers = reach(pattern, n, heads, 1), 0
    while not seen.all():
        further = _then(step, seen)
        if torch.equal(further, seen):
            return None
        seen, layers = further, layers + 1
    return layers


def field(pattern, n: int, heads: int, token: int, layers: int) -> Tensor:
    """int64 (n,): after how many layers a token can depend on each other one; 0 itself, -1 not in `layers`."""
    h, j = torch.arange(heads)[:, None, None], torch.arange(n)
    known = torch.where(j == token, 0, -1)
    for layer in range(1, layers + 1):
        for i in (known == layer - 1).nonzero().split(64):  # (queries, 1): a few at once, to bound memory
            seen = (pattern.count(h, i, j, n, heads) > 0).flatten(0, -2).any(0)
            known[seen & (known < 0)] = layer
    return known


def _then(step: Tensor, seen: Tensor) -> Tensor:
    return step.float() @ seen.float() > 0
