"""One call of single-device attention as a part of a larger softmax: forward, and backward from the merged results.

Dense calls, most of what ranks compute across shards, go to cuDNN where it is available: it takes any number of queries
on any number of keys. Causal with fewer queries than keys, which it does not offer, is two calls.

Dimensions: B batch, L queries, M keys, H query heads, G key heads, D head_dim. A `call` has a scale and a backend.
"""

import torch
from torch import Tensor

from workbench.engines import dispatch, fa4_backend, torch_backend, triton_backend
from workbench.engines.merge import merge_
from workbench.engines.operators import handle_of
from workbench.engines.torch.fused import span, unit_stride
from workbench.patterns import Dense, Pattern

OPERATORS = {"torch": torch_backend, "triton": triton_backend, "fa4": fa4_backend}
BACKENDS = ("auto", "torch", "triton", "fa4")
ROWS = 1024  # queries and keys from which on cuDNN is the faster (`cudnn_views.FROM`)


def why_not(backend: str, q: Tensor, k: Tensor, pattern: Pattern) -> str | None:
    """Why the backend that the caller named cannot run this, or None."""
    if backend not in BACKENDS:
        return f"backend={backend!r}: want one of {', '.join(map(repr, BACKENDS))} on shards"
    reason = OPERATORS[backend].why_not(q, k, pattern) if backend in ("triton", "fa4") else None
    return reason and f"backend={backend!r}: {reason}"


def operators(backend: str, q: Tensor, k: Tensor, pattern: Pattern):
    """The module whose `attend` and `attend_backward` run this: as on a single device, but Triton's kernels for dense
    attention too, since torch's fastest ones return no lse."""
    if backend == "auto":
        backend = dispatch.choose("auto", q, k, k, pattern)[0]
        if backend == "torch" and isinstance(pattern, Dense) and q.device.type == "cuda" and narrow(q):
            backend = "triton"
    return OPERATORS[backend]


def _cudnn(direction: str, backend: str, pattern: Pattern, q: Tensor, k: Tensor, *others: Tensor):
    """The module that calls cuDNN, if cuDNN takes this, else None."""
    if not isinstance(pattern, Dense) or backend != "auto" or min(q.shape[1], k.shape[1]) < ROWS:
        return None
    if operators(backend, q, k, pattern) is not triton_backend:
        return None
    from workbench.engines.triton import cudnn_views

    every = (q, k, *others)
    counted = max(max(span(x), x.numel()) for x in every) < cudnn_views.INT32
    return cudnn_views if counted and cudnn_views.usable(direction, *every) else None


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, call) -> tuple[Tensor, Tensor]:
    """(out (B, L, H, D) like q, lse (B, H, L)) of this call alone; q (B, L, H, D), k and v (B, M, G, D)."""
    scale, backend = call.scale, call.backend
    q, k, v = map(unit_stride, (q, k, v))
    cudnn = _cudnn("forward", backend, pattern, q, k, v)
    if cudnn is None:
        if q.shape[1] > k.shape[1]:
            parts = [forward(x, k, v, pattern, call) for x in q.split(k.shape[1], 1)]
            return torch.cat([x for x, _ in parts], 1), torch.cat([x for _, x in parts], 2)
        return operators(backend, q, k, pattern).attend(q, k, v, handle_of(pattern), scale)
    before = k.shape[1] - q.shape[1] if pattern.causal else 0
    out, lse = cudnn.attend(*(_inner(x) for x in (q, k[:, before:], v[:, before:])), pattern.causal, scale)
    if before:
        some, its_lse = cudnn.attend(*(_inner(x) for x in (q, k[:, :before], v[:, :before])), False, scale)
        cudnn.merge(some, its_lse, out, lse)
    return _inner(out), lse


def backward(grad, grad_lse, q, k, v, out, lse, pattern: Pattern, call):
    """(dq, dk, dv) of this call's part of a softmax: out, lse and their gradients are those of the whole softmax."""
    grad, q, k, v, out = map(unit_stride, (grad, q, k, v, out))
    cudnn = _cudnn("backward", call.backend, pattern, q, k, v, grad, out) if grad_lse is None else None
    if cudnn is None:
        return _by_operators(grad, grad_lse, q, k, v, out, lse, pattern, call)

    def some(keys: slice, causal: bool) -> list[Tensor]:
        views = map(_inner, (grad, q, k[:, keys], v[:, keys], out))
        return [_inner(x) for x in cudnn.attend_backward(*views, lse, causal, call.scale)]

    before = k.shape[1] - q.shape[1] if pattern.causal else 0
    dq, dk, dv = some(slice(before, None), pattern.causal)
    if not before:
        return dq, dk, dv
    more, *first = some(slice(0, before), False)
    return dq.float() + more, *(torch.cat(x, 1) for x in zip(first, (dk, dv), strict=True))


def _by_operators(grad, grad_lse, q, k, v, out, lse, pattern: Pattern, call):
    """`backward` by the package's operators, which take at most as many queries as keys: more queries go in parts."""
    many, found = max(1, k.shape[1]), []
    for start in range(0, max(1, q.shape[1]), many):
        rows = slice(start, start + many)
        of_rows = q[:, rows], k, v, out[:, rows], lse[:, :, rows]
        its_grad_lse = None if grad_lse is None else grad_lse[:, :, rows]
        operator = operators(call.backend, q, k, pattern).attend_backward
        found.append(operator(grad[:, rows], its_grad_lse, *of_rows, handle_of(pattern), call.scale))
    if len(found) == 1:
        return found[0]
    dq, dk, dv = zip(*found, strict=True)
    return torch.cat(dq, 1), sum(dk), sum(dv)


def _inner(x: Tensor) -> Tensor:
    """(B, L, H, D) <-> (B, H, L, D)."""
    return x.transpose(1, 2)


def narrow(q: Tensor) -> bool:
    """Whether results are 16-bit and merged in place by a kernel that rounds once a call, as on a single device."""
    return q.dtype in (torch.bfloat16, torch.float16) and triton_backend.why_not(q, q, Dense()) is None


def merge(out: Tensor, lse: Tensor, some: Tensor, its_lse: Tensor) -> None:
    """Merge some (B, L, C, h, D) with its_lse (B, L, C, h) into out and lse, views of the same shapes, in place."""
    if not narrow(out):
        merge_(out, lse, some, its_lse.to(lse.dtype))
        return
    from workbench.engines.triton import cudnn_views

    every = some, its_lse, out, lse
    if out.shape[2] == 1:
        cudnn_views.merge(*(_inner(x.squeeze(2)) for x in every))
    else:
        for b in range(out.shape[0]):
            cudnn_views.merge(*(x[b].movedim(0, 2) for x in every))
