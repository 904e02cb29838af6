"""What a call of attention is checked for before any work, whichever backend runs it."""

import torch
from torch import Tensor

from workbench.patterns import Pattern
from workbench.patterns.checks import FINITE, describe, number

AUTOCAST = tuple(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps", "xpu")))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CAUSAL = "the pattern says it, e.g. Dense(causal=True)"
_PADDED = "padding on the right is attention's lengths=(B,); on the left: move it to the right, by x.roll"
_MASK = "which pairs attend is the pattern's to say, e.g. Predicate(lambda h, i, j: seen[i, j]); " + _PADDED
_BIAS = "what changes scores is alibi_slopes and relative_bias; which pairs attend is the pattern's to say"
_PACKED = "packed sequences are attention's documents=, as ids (B, N) or cumulative lengths"
_RANKS = "call it for each document, or, over ranks, give ranks whole documents and call workbench.attention there"
_SCORES = "over ranks scores are not changed: give ranks whole sequences and call workbench.attention there"
_DROPOUT = "the weights are not dropped out; apply dropout to the output"
ELSEWHERE = {  # where the meaning of an option of other libraries goes
    "causal": _CAUSAL, "is_causal": _CAUSAL,
    "mask": _MASK, "attn_mask": _MASK, "key_padding_mask": _PADDED,
    "bias": _BIAS, "attn_bias": _BIAS, "rel_pos_bias": _BIAS,
    "block_mask": _MASK, "score_mod": "what changes scores is softcap, alibi_slopes and relative_bias",
    "dropout": _DROPOUT, "dropout_p": _DROPOUT, "attention_dropout": _DROPOUT,
    "enable_gqa": "key heads are shared by groups of query heads wherever there are fewer of them",
    "cu_seqlens": _PACKED, "cu_seqlens_q": _PACKED, "document_ids": _PACKED, "lengths": _RANKS, "documents": _RANKS,
    "softcap": _SCORES, "alibi_slopes": _SCORES, "relative_bias": _SCORES,
    "softmax_scale": "it is called scale", "need_weights": "the weights are never made", "window_size":
    "the pattern says it, e.g. Window(512, causal=True)",
}  # fmt: skip


def check(q, k, v, pattern, scale=None, whole=True) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, cast where torch.autocast says so. ValueError, before any work, for what `attention` cannot mean.

    whole: whether the pattern is to be one of N positions, and not of shorter documents.
    """
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern={describe(pattern)}: want a pattern, e.g. Dense() or Dilated([2048, 4096], [1, 2])")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise ValueError(f"{name} is a {type(t).__name__}: want a tensor")
        if t.layout != torch.strided:
            raise ValueError(f"{name} has layout {t.layout}: want a dense tensor")
    q, k, v = autocast(q, k, v)
    _check_shapes(q, k, v)
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        each = ", ".join(str(t.dtype).removeprefix("torch.") for t in (q, k, v))
        raise ValueError(f"dtypes {each} of {_shapes(q, k, v)}: want one of float64, float32, bfloat16, float16")
    if not q.device == k.device == v.device:
        raise ValueError(f"devices {q.device}, {k.device}, {v.device} of {_shapes(q, k, v)}: want one")
    if scale is not None:
        number("scale", scale, 0, FINITE, "a finite number above 0, or None for 1 / sqrt(head_dim)")
    if pattern.batch not in (None, q.shape[0]):
        raise ValueError(f"the layout is for a batch of {pattern.batch}, but {_shapes(q, k, v)}")
    if whole:
        pattern.for_batch(0).check(k.shape[1], q.shape[2], q.shape[1])
    return q, k, v


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"{_shapes(q, k, v)}: want q (B, Nq, H, D) and k, v (B, N, Hkv, D)")
    (b, nq, h, d), (kb, n, g, kd), of_v = q.shape, k.shape, v.shape
    wrong = None
    if (kb, n, g) != of_v[:3] or b != kb or d != kd:
        wrong = "want one batch for q, k and v, one head_dim for q and k, as many v as k"
    elif d * of_v[3] == 0:
        wrong = "head_dim is 0; want at least 1"
    elif h and (g == 0 or h % g):
        wrong = f"{g} key heads do not divide {h} query heads"
    elif nq > n:
        wrong = f"{nq} queries on {n} keys; queries are the last ones, Nq <= N"
    if wrong:
        raise ValueError(f"{_shapes(q, k, v)}: {wrong}")


def refuse(name: str, options: dict) -> None:
    """ValueError for options that the function `name` does not have: each with the place where its meaning goes."""
    for option, value in options.items():
        way = ELSEWHERE.get(option, "see its help")
        raise ValueError(f"{option}={describe(value)}: {name} has no such option; {way}")


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under torch.autocast, the inputs cast as torch casts those of its own attention: floats, except float64."""
    kind = tensors[0].device.type
    if kind not in AUTOCAST or not torch.is_autocast_enabled(kind):
        return tensors
    to = torch.get_autocast_dtype(kind)
    return tuple(t.to(to) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)
