"""Other people's attention as functions of q, k and v, measured by the instrument that measures ours (`Case.backend`).

torchscale (github.com/microsoft/torchscale, LongNet's authors, arXiv 2307.02486). The package index's release lacks
DilatedAttention: clone the repository and put it on PYTHONPATH; `torchscale/component/` and einops are all it takes.
None of its code is here.

Dimensions: B batch, N tokens, H heads, D head_dim, L tokens that a branch keeps of a segment.
"""

import functools
import importlib
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from workbench.engines.torch import fused
from workbench.patterns import Dilated

PEER, MODULE = "torchscale", "torchscale.component.dilated_attention"


def missing() -> str | None:
    """Why torchscale cannot be imported, None where it can."""
    try:
        importlib.import_module(MODULE)
    except Exception as error:  # another version of torch than it was written for raises anything
        return f"{MODULE} cannot be imported: {type(error).__name__}: {error}"
    return None


def longnet(segment_lengths, dilation_rates, causal: bool = False) -> Callable[..., Tensor]:
    """torchscale's dilated attention, (q, k, v) -> out, all (B, N, H, D); ValueError where it cannot be imported.

    It computes Dilated(..., offsets="blocked") except that
    - not causal, tokens that it pads with are seen as keys of zeros: its values are the pattern's where every segment
      length (N for a longer one) divides N and its rate divides it; LongNet's own rates 6 and 12 do not;
    - a branch's share of the output is a constant to its backward pass: dv is right, dq and dk lack a term.
    """
    pattern = Dilated(segment_lengths, dilation_rates, causal, offsets="blocked")
    if reason := missing():
        raise ValueError(f"peer {PEER!r}: {reason}")
    # can be pickled, for fresh processes
    call = functools.partial(_torchscale, pattern.segment_lengths, pattern.dilation_rates, pattern.causal)
    call.__name__ = PEER  # a record's `backend`
    return call


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
    module = importlib.import_module(MODULE)
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
    if bias is not None or dropout:
        raise ValueError("bias and dropout: want none")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = fused.forward(*(x.transpose(1, 2) for x in (q, k, v)), is_causal, scale)
    return out.transpose(1, 2), lse
