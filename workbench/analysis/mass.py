"""How much of dense attention a pattern keeps: the share of the softmax weight on the pattern's pairs."""

import torch
from torch import Tensor


@torch.no_grad()
def captured_mass(q: Tensor, k: Tensor, pattern, scale: float | None = None, **unknown) -> Tensor:
    """float64 (H,): per head, the mean over batch and rows of dense attention's weight on the pattern's visible pairs.

    q (B, Nq, H, D), k (B, N, Hkv, D). Dense means causal where the pattern is. The weight is what the two denominators
    say: exp(lse of the pairs, each once, - lse of all). N^2 time. 1 means that the pattern loses nothing on these q and
    k; compare it with the pattern's `density`.
    """
    from workbench.engines.dispatch import attention, check, refuse
    from workbench.patterns import Dense

    refuse("captured_mass", unknown)
    q, k, _ = check(q, k, k, pattern, scale)
    q, k = (x if x.dtype == torch.float64 else x.float() for x in (q, k))
    dense = Dense(pattern.causal)
    with torch.autocast(q.device.type, enabled=False):  # the scores stay wide
        once, every = (attention(q, k, k, x, scale=scale, return_lse=True)[1] for x in (pattern & dense, dense))
    return (once - every).exp().sum((0, 2), dtype=torch.float64) / max(1, len(q) * q.shape[1])
