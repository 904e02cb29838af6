"""Other people's attention as functions of q, k and v, measured by the instrument that measures ours (`Case.backend`).

A peer runs where it can be imported and is otherwise named with the reason; none of its code is here. Its values may
differ from the pattern's where its own definition does: each function says where.

- torchscale (github.com/microsoft/torchscale, LongNet's authors, arXiv 2307.02486). The package index's release lacks
  DilatedAttention: clone the repository and put it on PYTHONPATH; `torchscale/component/` and einops are all it takes.
- attn-gym (github.com/meta-pytorch/attention-gym): its window masks, which torch's FlexAttention runs.

Left out: dilated-attention-pytorch, which cannot be imported without xformers and divides each branch's output by its
sum over the tokens, which is no softmax attention.

Dimensions: B batch, N tokens, H heads, D head_dim, L tokens that a branch keeps of a segment.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from workbench.patterns import Dilated, Neighborhood

aten = torch.ops.aten
MODULES = {"torchscale": "torchscale.component.dilated_attention", "attn-gym": "attn_gym.masks"}


def available() -> dict[str, str | None]:
    """Peer -> None where it can be imported, or why it cannot."""
    return {name: _missing(module) for name, module in MODULES.items()}


def longnet(name: str, segment_lengths, dilation_rates, causal: bool = False) -> Callable[..., Tensor]:
    """A peer's dilated attention, (q, k, v) -> out, all (B, N, H, D); ValueError, with the reason, where there is none.

    name: "torchscale", which computes Dilated(..., offsets="blocked") except that
    - not causal, tokens that it pads with are seen as keys of zeros: its values are the pattern's where every segment
      length (N for a longer one) divides N and its rate divides it; LongNet's own rates 6 and 12 do not;
    - a branch's share of the output is a constant to its backward pass: dv is right, dq and dk lack a term.
    """
    pattern = Dilated(segment_lengths, dilation_rates, causal, offsets="blocked")
    return _called(name, LONGNET, pattern.segment_lengths, pattern.dilation_rates, pattern.causal)


def window(name: str, radius: int, causal: bool = False) -> Callable[..., Tensor]:
    """A peer's sliding window, (q, k, v) -> out, all (B, N, H, D); ValueError, with the reason, where there is none.

    name: "attn-gym": |i - j| <= radius, as Neighborhood((N,), radius), and j <= i if causal. Compiled on CUDA; on a CPU
    FlexAttention's N x N stand-in, forward only, which says nothing about speed. Not causal, the mask takes an integer
    abs, which attn-gym itself says CUDA 13's ptxas can get wrong in dq: compare before trusting it.
    """
    Neighborhood((1,), radius)  # refuses a radius that is none
    return _called(name, WINDOW, int(radius), bool(causal))


def _called(name: str, offered: dict[str, Callable], *first) -> Callable[..., Tensor]:
    if name not in offered:
        raise ValueError(f"peer {name!r}: want one of {', '.join(map(repr, offered))}")
    if reason := _missing(MODULES[name]):
        raise ValueError(f"peer {name!r}: {reason}")
    call = functools.partial(offered[name], *first)  # can be pickled, for fresh processes
    call.__name__ = name  # a record's `backend`
    return call


def _missing(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # another version of torch than a peer was written for raises anything
        return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return None


# --- torchscale ------------------------------------------------------------------------------------------------------


def _torchscale(segment_lengths, dilation_rates, causal, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Their module, its four projections replaced by identities: (B, N, H, D) -> (B, N, H, D)."""
    heads, head_dim = q.shape[2:]
    module = _torchscale_module(segment_lengths, dilation_rates, heads, heads * head_dim)
    out, _ = module(*(x.flatten(2) for x in (q, k, v)), is_causal=causal)  # (B, N, H * D)
    return out.unflatten(2, (heads, head_dim))


@functools.lru_cache(maxsize=8)
def _torchscale_module(segment_lengths, dilation_rates, heads: int, embed_dim: int) -> nn.Module:
    """torchscale's DilatedAttention around a flash attention: theirs where they have one, else `flash`.

    Theirs is flash_attn (or xformers, on cards before Ampere). Without it their name for it is None and their module
    stops at an assertion: this puts `flash` under that name, for the whole process.
    """
    module = importlib.import_module(MODULES["torchscale"])
    shared = importlib.import_module("torchscale.component.multihead_attention")
    if shared.flash_attn_func is None:
        shared.flash_attn_func = flash
    said = {"segment_length": list(segment_lengths), "dilated_ratio": list(dilation_rates), "flash_attention": True}
    args = SimpleNamespace(**said, seq_parallel=False, multiway=False, xpos_rel_pos=False)
    with torch.device("meta"):  # the weights are dropped
        found = module.DilatedAttention(args, embed_dim, heads, self_attention=True)
    found.q_proj = found.k_proj = found.v_proj = found.out_proj = nn.Identity()
    return found.eval()


def flash(q: Tensor, k: Tensor, v: Tensor, dropout=0.0, bias=None, softmax_scale=None, is_causal=False):
    """What torchscale calls, by torch's own kernel, FlashAttention-2 on CUDA (16 bit; its lse has no gradient).

    q, k, v (B, L, H, D) -> out (B, L, H, D), lse (B, H, L).
    """
    if bias is not None:
        raise ValueError("bias: want None, as flash attention takes none")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, L, D)
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, is_causal, scale=softmax_scale)
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, dropout, is_causal, False, scale=softmax_scale)
    return out.transpose(1, 2), lse


# --- attention gym ---------------------------------------------------------------------------------------------------


def _attn_gym(radius: int, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlexAttention with their mask: (B, N, H, D) -> (B, N, H, D)."""
    attend = flex_attention if q.device.type == "cpu" else _compiled(flex_attention)
    blocks = _window_blocks(radius, causal, q.shape[1], str(q.device))
    return attend(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=blocks).transpose(1, 2)


@functools.lru_cache(maxsize=8)
def _window_blocks(radius: int, causal: bool, n: int, device: str):
    masks = importlib.import_module(MODULES["attn-gym"])
    mask = masks.generate_sliding_window(radius) if causal else masks.generate_dilated_sliding_window(radius, 1)
    create = create_block_mask if device == "cpu" else _compiled(create_block_mask)  # else it makes an N x N tensor
    return create(mask, None, None, n, n, device=device)


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)


LONGNET = {"torchscale": _torchscale}
WINDOW = {"attn-gym": _attn_gym}
