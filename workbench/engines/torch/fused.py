"""Fused attention that also returns its log-sum-exp, and a backward that takes out and log-sum-exp as arguments.

One call of `forward` is one softmax over the keys it is given. Calls over disjoint parts of the keys become one softmax
by `merge.merge_`, and `backward` then takes the merged `out` and `lse`: the gradient of a part needs nothing else
(P = exp(S - lse), dS = P * (dO V^T - rowsum(dO * out)); FlashAttention-2, arXiv 2307.08691, section 3.1).

Dimensions: X batch, H query heads, G key heads (G divides H), L queries, M keys, D head_dim. Tensors are (X, H, L, D)
and (X, G, M, D) views with stride(-1) == 1; lse is (X, H, L), natural logarithm, float32 (float64 for float64).
Nothing here may be empty: callers skip empty selections (torch's CPU kernel divides by the number of keys).
"""

import torch
from torch import Tensor

from workbench.engines import torch_rules
from workbench.engines.merge import lse_dtype
from workbench.engines.torch import steps

aten = torch.ops.aten
GRID = 65_535  # the largest y and z of a CUDA grid, into which kernels fold batch and heads
MAX_BATCH = GRID // 2
OFFSETS = 2**31 - 1  # the largest offset at which flash's backward is right (`dispatch.gradients_past_2_31`)
SCORES = 1 << 25  # scores that the unfused fallback holds at once


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None = None):
    """(out (X, H, L, D), lse (X, H, L)). `causal` wants L == M; `mask` is additive, (X, 1, L, M), -inf hides.

    A row that the mask hides entirely gets out 0 and lse -inf.
    """
    kind = kernel(q, mask)
    parts = [_FORWARD[kind](*part, causal, scale) for part in _split(q, k, v, mask, MAX_BATCH)]
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(p) for p in zip(*parts, strict=True))
    if mask is not None:
        seen = (mask > -torch.inf).any(-1)  # (X, 1, L)
        lse = lse.masked_fill(~seen, -torch.inf)
        out = out.masked_fill(~seen[..., None], 0)
    return out, lse


def backward(grad: Tensor, q, k, v, out: Tensor, lse: Tensor, causal: bool, scale: float, mask: Tensor | None = None):
    """(dq, dk, dv) of one part, from the merged out and lse; a row whose lse is +inf contributes exact zeros."""
    kind, most = kernel(q, mask), MAX_BATCH
    if kind == "flash":
        each = max(max(x.stride(0), x[0].numel()) for x in (q, k, v, grad, out))
        kind, most = ("efficient", most) if each > OFFSETS else (kind, min(most, OFFSETS // each))
    parts = [
        _BACKWARD[kind](g, *part, o, s, causal, scale)
        for part, g, o, s in zip(_split(q, k, v, mask, most), *(t.split(most) for t in (grad, out, lse)), strict=True)
    ]
    return parts[0] if len(parts) == 1 else tuple(torch.cat(p) for p in zip(*parts, strict=True))


def kernel(q: Tensor, mask: Tensor | None = None) -> str:
    """Which implementation runs: 'cpu', 'flash', 'efficient' (CUDA's fused kernels) or 'unfused'."""
    if q.device.type == "cpu":
        return "cpu"
    taken, d = (), q.shape[-1]
    capability = torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None
    if capability == torch_rules.PROCESSOR:
        return "cpu"
    if capability and mask is None and d % 8 == 0 and d <= 256:
        taken = torch_rules.kernels(capability, q.dtype, d, gradients=True)  # one kernel for both directions
    return next((x for x in ("flash", "efficient") if x in taken), "unfused")


def _split(q, k, v, mask, most: int):
    masks = [None] * len(q.split(most)) if mask is None else mask.split(most)
    return list(zip(*(x.split(most) for x in (q, k, v)), masks, strict=True))


def _cpu_forward(q, k, v, mask, causal, scale):
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def _cpu_backward(grad, q, k, v, mask, out, lse, causal, scale):
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse.contiguous(), 0.0, causal, attn_mask=mask, scale=scale
    )


def _flash_forward(q, k, v, _mask, causal, scale):
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(grad, q, k, v, _mask, out, lse, causal, scale):
    k, v = expand_heads(k, q), expand_heads(v, q)
    seed = torch.zeros((), dtype=torch.int64)  # dropout is off: the generator's state is never read
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed, scale=scale
    )
    return dq, dk, dv


def _efficient_forward(q, k, v, _mask, causal, scale):
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, expand_heads(k, q), expand_heads(v, q), None, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]  # its lse is padded to a multiple of 32


def _efficient_backward(grad, q, k, v, _mask, out, lse, causal, scale):
    seed = torch.zeros((), dtype=torch.int64)
    lse = lse.contiguous()
    if lse.shape[-1] % 32:
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, expand_heads(k, q), expand_heads(v, q), None, out, lse, seed, seed, 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _unfused_rows(q, k):
    x, h, length, m = *q.shape[:3], k.shape[2]
    return max(1, SCORES // (x * h * m)), length


def _wide(t: Tensor) -> Tensor:
    return t.to(lse_dtype(t))


def _scores(q, k, mask, causal, scale, rows):
    s = _wide(q[:, :, rows]) @ k.transpose(-1, -2) * scale  # (X, H, l, M)
    if mask is not None:
        s = s + mask[:, :, rows]
    if causal:
        i = torch.arange(q.shape[2], device=q.device)[rows]
        s = s.masked_fill(torch.arange(k.shape[2], device=q.device) > i[:, None], -torch.inf)
    return s


def _unfused_forward(q, k, v, mask, causal, scale):
    k, v = _wide(expand_heads(k, q)), _wide(expand_heads(v, q))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=k.dtype)
    step, length = _unfused_rows(q, k)
    for start in steps.starts(length, step):
        rows = slice(start, start + step)
        s = _scores(q, k, mask, causal, scale, rows)
        lse[:, :, rows] = torch.logsumexp(s, -1)
        p = torch.exp(s - lse[:, :, rows, None])
        out[:, :, rows] = (p @ v).to(q.dtype)
    return out, lse


def _unfused_backward(grad, q, k, v, mask, out, lse, causal, scale):
    wide_k, wide_v = _wide(expand_heads(k, q)), _wide(expand_heads(v, q))
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    step, length = _unfused_rows(q, wide_k)
    for start in steps.starts(length, step):
        rows = slice(start, start + step)
        do = _wide(grad[:, :, rows])
        p = torch.exp(_scores(q, wide_k, mask, causal, scale, rows) - lse[:, :, rows, None])
        delta = (do * _wide(out[:, :, rows])).sum(-1, keepdim=True)
        ds = p * (do @ wide_v.transpose(-1, -2) - delta) * scale
        dq[:, :, rows] = (ds @ wide_k).to(q.dtype)
        dk += ds.transpose(-1, -2) @ _wide(q[:, :, rows])
        dv += p.transpose(-1, -2) @ do
    return dq, dk, dv


def unit_stride(x: Tensor | None) -> Tensor | None:
    """Fused kernels read a last stride other than 1 as if it were 1: copy then."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def span(x: Tensor) -> int:
    """How many elements lie between a tensor's first and last one, both included, by its strides."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1


def expand_heads(x: Tensor, q: Tensor) -> Tensor:
    """Key heads repeated to match the query heads: (X, G, M, D) -> (X, H, M, D), a view where G is 1 or H."""
    if x.shape[1] == q.shape[1]:
        return x
    if x.shape[1] == 1:
        return x.expand(-1, q.shape[1], -1, -1)
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def sum_heads(x: Tensor, groups: int) -> Tensor:
    """The gradient of `expand_heads`: (X, H, M, D) -> (X, G, M, D), summed in float32 or wider."""
    return x if x.shape[1] == groups else _wide(x.unflatten(1, (groups, -1))).sum(2)


_FORWARD = {"cpu": _cpu_forward, "flash": _flash_forward, "efficient": _efficient_forward, "unfused": _unfused_forward}
_BACKWARD = dict(zip(_FORWARD, (_cpu_backward, _flash_backward, _efficient_backward, _unfused_backward), strict=True))
