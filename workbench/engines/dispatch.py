"""The one entry point: `attention` checks its input and picks an execution; `explain` says which, and why.

Dimensions: B batch, N keys, Nq queries (the last Nq of the N positions), H query heads, G key heads (G divides H), D
head_dim.
"""

import contextlib
import functools
import math
import operator
import warnings

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from workbench.engines import fa4_backend, ragged, scores, torch_backend, triton_backend
from workbench.engines.check import check, refuse
from workbench.engines.merge import lse_dtype
from workbench.engines.operators import call, handle_of, refuse_transforms
from workbench.engines.reference import reference
from workbench.engines.torch import scored
from workbench.engines.torch.fused import GRID, OFFSETS, expand_heads, kernel, span, unit_stride
from workbench.engines.torch_rules import HALF
from workbench.patterns import Dense, Dilated, Pattern, tile_order
from workbench.patterns.checks import choice, flag

BACKENDS = ("reference", "torch", "triton", "fa4")
TOKENS = ("natural", "tile order")
ATTEND = {"torch": torch_backend.attend, "triton": triton_backend.attend, "fa4": fa4_backend.attend}


def attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, scale: float | None = None, backend="auto", return_lse=False,
    tokens="natural", lengths: Tensor | None = None, documents: Tensor | None = None, **options,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over the pairs of `pattern`: out (B, Nq, H, D) like q, or (out, lse (B, H, Nq)) with return_lse.

    q (B, Nq, H, D), k and v (B, N, G, D) of one dtype (float64, float32, bfloat16, float16) and device; scale (above 0)
    defaults to 1 / sqrt(D); lse is the natural logarithm of the softmax denominator, float32 (float64 for float64).
    v may have another head_dim, which out then has: the narrower tensors are padded with zeros for the kernels.
    A row that no key reaches has out 0, lse -inf and zero gradients.
    k and v have to be finite where they are hidden too, as in torch's kernels: hidden means a weight of 0, and 0 * NaN
    is NaN. A NaN or infinity reaches the rows that see it, and may reach others of its sequence and its group of heads.
    Derivatives: torch.autograd's, once. Others, and torch.func's, by backend "reference" only, and refused elsewhere.
    backend: "auto" (see `explain`), "reference", "torch", "triton" or "fa4"; one asked for by name runs or raises
    ValueError with the reason, as does any input that the pattern or the shapes do not allow.
    tokens: "natural", or "tile order" where q, k and v lie in the pattern's `tile_order`, as out and lse then do; every
    query (Nq == N).
    lengths: int (B,), of sequences that are padded on the right: padding is no key, and as a query has out 0, lse -inf.
    documents: packed sequences, each of which attends within itself: int ids (B, N), or cumulative lengths (documents +
    1,) from 0 to N of a batch of 1, flash-attn's cu_seqlens. In both, positions and segments count from each
    document's first token: results are those of a call for each. They are data: torch.compile breaks its graph there.
    Under torch.autocast the inputs are cast first, as by torch's attention.
    options: what changes scores before the softmax (`engines.scores`), with gradients; others are refused by name.
        softcap: a number above 0, cap tanh(scale q.k / cap) instead of scale q.k
        alibi_slopes (H,): slope |i - j| less
        relative_bias (H, 2 r_1 + 1, ..., 2 r_d + 1): for a Neighborhood, or a Window of reach r, the bias of a key by
            its place seen from the query, which has the place in the middle
    """
    refuse("attention", scores.others(options))
    whole = lengths is None and documents is None
    q, k, v = check(q, k, v, pattern, scale, whole)
    changes = scores.of(options, q, pattern)
    line = None if whole else ragged.cut(q, k, pattern, lengths, documents)
    return_lse = flag("return_lse", return_lse)
    if q.shape[2] >= 64 and q.shape[2] > 2 * k.shape[1] > 2 and not torch.compiler.is_compiling():
        said = f"{k.shape[1]} positions of {q.shape[2]} heads: tensors are (batch, positions, heads, head_dim) here"
        warnings.warn(f"{said}; transpose(1, 2) those of (batch, heads, positions, head_dim)", stacklevel=2)
    if backend != "reference":
        refuse_transforms(q, k, v, *(x for x in changes or () if isinstance(x, Tensor)))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    width = v.shape[-1]
    q, k, v = even(q, k, v)
    one = _natural if choice("tokens", tokens, *TOKENS) == "natural" else _tiled
    one = functools.partial(one, scale=scale, backend=backend, return_lse=return_lse, changes=changes)
    out, lse = one(q, k, v, pattern) if whole else ragged.attend(one, q, k, v, pattern, line)
    out = out if width == v.shape[-1] else out[..., :width]
    return (out, lse) if return_lse else out


def _natural(q, k, v, pattern, *, scale, backend, return_lse, changes, into=None):
    """(out, lse or None) of sequences of one length. into: like q, which may be written and returned as out."""
    return run(choose(backend, q, k, v, pattern, changes)[0], q, k, v, pattern, scale, return_lse, changes, into)


def _tiled(q, k, v, pattern, *, scale, backend, return_lse, changes, into=None):
    """`_natural` of tokens that lie in the pattern's tile order, as the results then do."""
    chosen = choose(backend, q, k, v, pattern, changes)[0]
    if _as_they_lie(chosen, q, k, pattern):
        out, lse = call(fa4_backend.attend_tiled, q, k, v, handle_of(pattern), scale)
        return divided(out, pattern), lse
    order = tile_order.tile_order(pattern, k.shape[1]).to(q.device)
    back = order.argsort()
    out, lse = run(chosen, *(x.index_select(1, back) for x in (q, k, v)), pattern, scale, return_lse, changes)
    return out.index_select(1, order), lse if lse is None else lse.index_select(2, order)


def _as_they_lie(chosen: str, q: Tensor, k: Tensor, pattern: Pattern) -> bool:
    """Whether a backend takes tokens in tile order without copies; ValueError where not all are queries."""
    n = k.shape[1]
    if q.shape[1] != n:
        raise ValueError(f"tokens='tile order' with {q.shape[1]} queries on {n} keys: want all the queries")
    return chosen == "fa4" and pattern.answer(fa4_backend.in_its_order, operator.index(n))


def run(backend: str, q, k, v, pattern, scale, return_lse, changes, into=None) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None) of tokens in natural order."""
    if backend == "reference":
        out, lse = reference(q, k, v, pattern, scale, **(changes._asdict() if changes else {}))
        return out.to(q.dtype), lse.to(lse_dtype(q)) if return_lse else None
    square = not pattern.causal or q.shape[1] == k.shape[1]  # torch aligns its causal mask at the first query
    if changes is not None:
        softcap = changes.softcap or 0.0
        out, lse = call(scored.attend, q, k, v, *changes[:2], handle_of(pattern), scale, softcap)
    elif backend == "torch" and isinstance(pattern, Dense) and square and not return_lse and q.numel():
        return _dense(q, k, v, pattern.causal, scale), None
    else:
        into = {"out": into} if into is not None and backend == "fa4" else {}
        out, lse = call(ATTEND[backend], q, k, v, handle_of(pattern), scale, **into)
    return divided(out, pattern), lse if return_lse else None


def _dense(q, k, v, causal, scale) -> Tensor:
    """out (B, N, H, D) by whichever of its kernels torch takes; the memory-efficient one wants as many key heads."""
    if len(q) > GRID:
        parts = zip(*(tensor.split(GRID) for tensor in (q, k, v)), strict=True)
        return torch.cat([_dense(*part, causal, scale) for part in parts])
    past = gradients_past_2_31(q, k, v)
    q, k, v = (unit_stride(tensor).transpose(1, 2) for tensor in (q, k, v))
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    if grouped and q.device.type == "cuda" and (past or q.dtype == torch.float32 or kernel(q) == "efficient"):
        k, v, grouped = expand_heads(k, q), expand_heads(v, q), {}
    with right_past_2_31() if past else contextlib.nullcontext():
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, is_causal=causal, scale=scale, **grouped).transpose(1, 2)


def divided(out: Tensor, pattern: Pattern) -> Tensor:
    """out by the pattern's divisor: where each head is in one branch, the branches are averaged."""
    divisor = pattern.divisor(out.shape[2])
    return out if divisor == 1 else out / divisor


def even(*tensors: Tensor) -> list[Tensor]:
    """The tensors with the largest head_dim of them, padded with zeros: scores, lse and the columns of out that there
    were stay the same."""
    most = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == most else torch.nn.functional.pad(x, (0, most - x.shape[-1])) for x in tensors]


def explain(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, tokens="natural", lengths: Tensor | None = None,
    documents: Tensor | None = None, **options,
) -> str:  # fmt: skip
    """Which backend 'auto' takes for this call, and why, in a sentence: one a kind of document where they differ.

    tokens, lengths, documents and options: as of `attention`.
    """
    refuse("explain", scores.others(options))
    whole = lengths is None and documents is None
    q, k, v = even(*check(q, k, v, pattern, whole=whole))
    changes, tokens = scores.of(options, q, pattern), choice("tokens", tokens, *TOKENS)
    if whole:
        return _why(q, k, v, pattern, changes, tokens)
    said, patterns, lines = {}, pattern.each(), [x.flatten(0, 1) for x in (q, k, v)]
    for start, size, kind in zip(*ragged.cut(q, k, pattern, lengths, documents), strict=True):
        if kind:
            words = _why(*(x[None, start : start + size] for x in lines), patterns[kind[0]], changes, tokens)
            said.setdefault(words, []).append(size)
    return "; ".join(f"{words} (documents of {min(x):,} to {max(x):,} tokens)" for words, x in said.items())


def _why(q, k, v, pattern, changes, tokens) -> str:
    chosen, why = choose("auto", q, k, v, pattern, changes)
    if changes is None and chosen == "torch" and isinstance(pattern, Dense) and gradients_past_2_31(q, k, v):
        why += "; by memory-efficient attention, since cuDNN's gradients are wrong past 2^31 elements and flash's fail"
    if tokens != "natural":
        tile_order.tile_order(pattern, k.shape[1])  # or ValueError where the pattern has none
        copies = "tokens are copied into natural order, and the result back"
        why += "; tokens are taken as they lie" if _as_they_lie(chosen, q, k, pattern) else f"; {copies}"
    return f"{chosen}: {why}"


def why_not(backend: str, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> str | None:
    """The reason why a backend does not run this call, or None. ValueError where there is no such backend."""
    choice("backend", backend, "auto", *BACKENDS)
    if backend == "triton":
        sizes = map(operator.index, (k.shape[1], q.shape[2], q.shape[1]))
        return triton_backend.why_not(q, k, pattern) or pattern.answer(triton_backend.too_many_masks, *sizes)
    if backend == "fa4":
        return fa4_backend.why_not(q, k, pattern)
    return None


def choose(backend: str, q, k, v, pattern, changes=None) -> tuple[str, str]:
    """(backend, the reason in words); ValueError where the one asked for by name does not run this."""
    if changes is not None and backend in ("auto", "triton", "fa4"):
        if backend != "auto":
            raise ValueError(f"backend={backend!r}: its kernels have no {changes}; backend='torch' computes this")
        return "torch", f"scores are made block by block in bounded memory, where {changes} can change them"
    if backend != "auto":
        if reason := why_not(backend, q, k, v, pattern):
            raise ValueError(f"backend={backend!r}: {reason}")
        return backend, "asked for by name"
    device = q.device.type
    if device == "cuda" and q.dtype in HALF and fa4_backend.preferred(q, k, pattern):
        words = "FlashAttention-4 is installed, and was measured to be the faster for such calls; its gradients"
        return "fa4", f"{words} differ in their last bits from run to run (use_deterministic_algorithms: Triton's)"
    if isinstance(pattern, Dense):
        return "torch", "every pair attends, which torch's fused attention computes as it is"
    reason = f"on a {device.upper()} there are no other kernels"
    if device == "cuda" and not (q.dtype not in HALF and isinstance(pattern, Dilated)):
        reason = why_not("triton", q, k, v, pattern)
        if reason is None:
            return "triton", "on this device the pattern has kernels of its own"
    if isinstance(pattern, Dilated):
        return "torch", "a dilated branch is a strided view that fused attention takes without a copy"
    return "torch", f"the key blocks that are needed are gathered in chunks: {reason}"


def gradients_past_2_31(*tensors: Tensor) -> bool:
    """Whether a backward may follow in which torch's fast kernels fail, because offsets exceed 2^31 elements.

    Past 2^31 the gradients of cuDNN are silently wrong and FlashAttention accesses memory that is not its own, both in
    torch 2.11 on an H100 (tests/gpu/test_validity.py); the memory-efficient kernel is right. What counts is
    the largest offset in a tensor, by its own strides and by those of its gradient, which is contiguous.
    """
    if tensors[0].device.type != "cuda" or not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return False
    return max(*map(span, tensors), *(x.numel() for x in tensors)) > OFFSETS


def right_past_2_31():
    """A context in which torch's attention takes the memory-efficient kernel or else the unfused one.

    ValueError where neither is enabled. Torch's order of kernels is left alone: one that is set before the process's
    first attention is followed by flash before cuDNN, for good (torch 2.11).
    """
    allowed = kernels_right_past_2_31()
    if not allowed:
        raise ValueError(
            "torch.nn.attention.sdpa_kernel allows none but cuDNN's and flash attention, whose gradients are wrong "
            "past 2^31 elements: allow memory-efficient attention too"
        )
    return sdpa_kernel([getattr(SDPBackend, name) for name in allowed])


def kernels_right_past_2_31() -> tuple[str, ...]:
    """The kernels of torch's attention that are right past 2^31 elements and enabled, in torch's order."""
    cuda = torch.backends.cuda
    switches = {"EFFICIENT_ATTENTION": cuda.mem_efficient_sdp_enabled, "MATH": cuda.math_sdp_enabled}
    return tuple(name for name, enabled in switches.items() if enabled())


# What torch.compiler.assume_constant_result sets; calling it would import the compiler, which takes two seconds.
kernels_right_past_2_31._dynamo_marked_constant = True
