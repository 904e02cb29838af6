"""How much of dense attention a pattern keeps: the share of the softmax weight on the pattern's pairs."""

import math

import torch
from torch import Tensor

SCORES = 1 << 24  # scores looked at at once: 64 MB of float32


@torch.no_grad()
def captured_mass(q: Tensor, k: Tensor, pattern, scale: float | None = None, **unknown) -> Tensor:
    """float64 (H,): per head, the mean over batch and rows of dense attention's weight on the pattern's visible pairs.

    q (B, Nq, H, D), k (B, N, Hkv, D). Dense means causal where the pattern is. N^2 time, memory bounded by chunks of
    rows. 1 means that the pattern loses nothing on these q and k; compare it with the pattern's `density`.
    """
    from workbench.engines.dispatch import check, refuse

    refuse("captured_mass", unknown)
    q, k, _ = check(q, k, k, pattern, scale)
    (b, nq, heads, d), n = q.shape, k.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = 1 / math.sqrt(d) if scale is None else float(scale)
    q, k = q.to(wide).transpose(1, 2), k.to(wide).transpose(1, 2).repeat_interleave(heads // max(1, k.shape[2]), 1)
    h, j = torch.arange(heads, device=q.device)[:, None, None], torch.arange(n, device=q.device)
    total = torch.zeros(heads, dtype=torch.float64, device=q.device)
    step = max(1, SCORES // max(1, heads * n))
    for entry in range(b):
        one = pattern.for_batch(entry)
        for start in range(0, nq, step):
            i = torch.arange(start, min(nq, start + step), device=q.device)[:, None] + n - nq
            with torch.autocast(q.device.type, enabled=False):  # the scores stay wide
                s = q[entry, :, start : start + step] @ k[entry].transpose(-1, -2) * scale  # (H, rows, N)
            if pattern.causal:
                s = s.masked_fill(j > i, -torch.inf)
            p = torch.softmax(s, -1)
            visible = one.count(h, i[None], j[None, None], n, heads) > 0
            total += (p * visible).sum((1, 2), dtype=torch.float64)
    return total / max(1, b * nq)
