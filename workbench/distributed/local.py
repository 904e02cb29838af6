"""One call of single-device attention as a part of a larger softmax: forward, and backward from the merged results."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

from workbench.execution import torch_backend
from workbench.patterns import Pattern

BACKENDS = ("auto", "torch", "triton")


def why_not(backend: str, q: Tensor, k: Tensor, pattern: Pattern) -> str | None:
    """Why a backend named by the caller does not run this, or None."""
    if backend not in BACKENDS:
        return f"backend={backend!r}: want one of {', '.join(map(repr, BACKENDS))} on shards"
    if backend == "triton":
        from workbench.execution import triton_backend

        reason = triton_backend.why_not(q, k, pattern)
        return reason and f"backend='triton': {reason}"
    return None


def _operators(backend: str, q: Tensor, k: Tensor, pattern: Pattern):
    if q.device.type == "cuda" or backend == "triton":
        from workbench.execution import triton_backend

        if backend == "triton" or backend == "auto" and triton_backend.why_not(q, k, pattern) is None:
            return triton_backend
    return torch_backend


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float, backend: str) -> tuple[Tensor, Tensor]:
    """out (B, Nq, H, D) like q and lse (B, H, Nq) of the pairs of this call."""
    return _operators(backend, q, k, pattern).attend(q, k, v, pattern.handle, scale)


def backward(grad, grad_lse, q, k, v, out, lse, pattern: Pattern, scale: float, backend: str):
    """(dq, dk, dv) of this call's pairs, where out and lse (and their gradients) may be of more pairs than these."""
    saved = SimpleNamespace(saved_tensors=(q, k, v, out, lse), handle=pattern.handle, scale=scale)
    return _operators(backend, q, k, pattern)._autograd(saved, grad, grad_lse)[:3]
