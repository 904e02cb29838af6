"""Attention over a pattern in models of the transformers library, which is imported when `register` is called.

    huggingface.register("longnet", wb.Dilated([2048, 8192], [1, 4], causal=True))
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="longnet")

Decoding with the library's caches goes through it; padding has to be on the right.
"""

import functools

from torch import Tensor

from workbench.engines.check import refuse
from workbench.engines.dispatch import attention
from workbench.engines.layers import lengths_of
from workbench.patterns import Pattern
from workbench.patterns.checks import describe

NOT_HERE = ("sliding_window", "softcap", "s_aux", "head_mask", "position_bias")


def register(name: str, pattern: Pattern, backend: str = "auto") -> None:
    """Let attn_implementation=name of a model mean this pattern, on this backend of `wb.attention`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern={describe(pattern)}: want a pattern, e.g. Dilated([2048, 8192], [1, 4], True)")
    AttentionInterface.register(name, functools.partial(attend, pattern=pattern, backend=backend))
    AttentionMaskInterface.register(name, padding)


def attend(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling=None, dropout=0.0, *,
    pattern: Pattern, backend: str, **options,
) -> tuple[Tensor, None]:  # fmt: skip
    """query (B, H, Nq, D), key and value (B, G, N, D), attention_mask of `padding` -> (out (B, Nq, H, D), None).

    ValueError for what the model asks of its attention and this has not, such as sliding_window or dropout.
    """
    asked = {"dropout": dropout or None} | {x: options.get(x) for x in NOT_HERE}
    refuse(f"{type(module).__name__} by workbench", {x: value for x, value in asked.items() if value is not None})
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", pattern.causal) if causal is None else causal
    if causal != pattern.causal:
        raise ValueError(f"{pattern!r} in {type(module).__name__}: want causal={causal}, as the model is")
    lengths = None if attention_mask is None else lengths_of(~attention_mask, key.shape[0], key.shape[2])
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attention(q, k, v, pattern, scale=scaling, backend=backend, lengths=lengths), None


def padding(*, kv_length, mask_function, attention_mask: Tensor | None = None, **_) -> Tensor | None:
    """The bool mask (B, N) of tokens that are no padding, or None; ValueError for masks of another kind."""
    if not mask_function.__name__.startswith(("causal_mask", "bidirectional_mask")):
        want = "want a model without windows (config.sliding_window=None), chunks and packed sequences"
        raise ValueError(f"mask_function={mask_function.__qualname__}: which pairs attend the pattern says; {want}")
    mask = None if attention_mask is None else attention_mask[:, -kv_length:]
    return None if mask is None or mask.all() else mask
