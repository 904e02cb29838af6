"""The float64 oracle: dense attention over a pattern's multiplicities, which defines what every execution must return.

    out[h, t] = sum_j C[h, t, j] exp(s[h, t, j]) v[j] / sum_j C[h, t, j] exp(s[h, t, j]),   lse = log of the denominator

with s = scale * q.k and C the pattern's `multiplicity`. A row that sees no key: out 0, lse -inf, zero gradients.
"""

import math

import torch
from torch import Tensor

from workbench.engines import scores
from workbench.engines.check import check, refuse


def reference(q: Tensor, k: Tensor, v: Tensor, pattern, scale: float | None = None, **options) -> tuple[Tensor, Tensor]:
    """out (B, Nq, H, D), lse (B, H, Nq), float64 and differentiable, from q (B, Nq, H, D), k and v (B, N, Hkv, D).

    N x N memory: meant for small N. scale defaults to 1 / sqrt(D). The D of v, and so of out, may be another one.
    options: alibi_slopes, softcap and relative_bias, as of `attention`.
    """
    refuse("reference", scores.others(options))
    q, k, v = (t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in (q, k, v))
    check(q, k, v, pattern, scale)
    changes = scores.of(options, q, pattern)
    (b, nq, h, d), n = q.shape, k.shape[1]
    c = torch.stack([one.multiplicity(n, h, nq) for one in pattern.each()])  # (B or 1, H, Nq, N)
    c = c.to(q.device, torch.float64)

    k, v = (t.repeat_interleave(h // max(1, t.shape[2]), dim=2) for t in (k, v))  # (B, N, H, D)
    scale = 1 / math.sqrt(d) if scale is None else float(scale)
    s = torch.einsum("bthd,bjhd->bhtj", q, k) * scale
    if changes is not None:
        of_heads, j = (torch.arange(x, device=q.device) for x in (h, n))
        s = changes.change(s, pattern, of_heads[:, None, None], j[n - nq :, None], j)

    visible = c > 0
    top = s.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True).detach() if n else s.new_zeros(b, h, nq, 1)
    top = top.masked_fill(top == -torch.inf, 0)
    weight = c * torch.exp((s - top).masked_fill(~visible, -torch.inf))  # (B, H, Nq, N)
    total = weight.sum(-1, keepdim=True)
    seen = total > 0
    total = total.masked_fill(~seen, 1)
    out = torch.einsum("bhtj,bjhd->bthd", weight / total, v)
    lse = (total.log() + top).masked_fill(~seen, -torch.inf).squeeze(-1)
    return out / pattern.divisor(h), lse
