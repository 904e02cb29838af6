"""Layers over `attention`, so that what is probed is a whole layer and not only its core."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from workbench.engines import rotary, scores
from workbench.engines.check import autocast, refuse
from workbench.engines.dispatch import BACKENDS, TOKENS, attention
from workbench.engines.merge import lse_dtype
from workbench.patterns import Pattern, tile_order
from workbench.patterns.checks import FINITE, choice, describe, flag, number, whole


class MultiheadAttention(nn.Module):
    """Attention with projections q, k, v and out: query (B, Nq, embed_dim) -> (B, Nq, embed_dim), called as torch.nn's.

    num_heads divides embed_dim, num_kv_heads (default num_heads) divides num_heads.
    dropout acts on the output, in training only; dropout of the attention weights is refused by name.
    qk_norm: each head's queries and keys are normalised by nn.RMSNorm (QK norm, arXiv 2010.04245).
    rope: the base of rotary positions (`engines.rotary`), e.g. 10_000, of even head_dims. xpos: beside it the scale
        base of xPos, 512 in its paper, of causal patterns, at most 64 * xpos tokens, and not in float16.
    sub_norm: a LayerNorm before the output projection (Sub-LN of MAGNETO, arXiv 2210.06423).
    tokens: "tile order" where they come in the pattern's `tile_order`; their positions are then those of that order.
    options: what changes scores, as of `attention`: softcap; alibi_slopes (H,), which are kept as a buffer; and
        relative_bias=True, a table of biases by relative position, which is learned.

    It stands where an nn.MultiheadAttention(batch_first=True) stood, in nn.TransformerEncoderLayer too, and loads the
    state_dict of one; not one with bias_k or projections of their own (kdim, vdim). In an nn.TransformerEncoder that
    is there already, the first layer's self_attn has to be replaced too, or padded batches come as nested tensors.
    """

    # What nn.TransformerEncoder asks for. The bias that is None keeps it off its own fused attention; the weight that
    # is no tensor off nested ones, if it was made with its own attention and has ours in the first layer.
    batch_first, in_proj_bias, _qkv_same_embed_dim = True, None, True
    in_proj_weight, out_proj = SimpleNamespace(__torch_function__=None), property(lambda self: self.out)

    def __init__(
        self, embed_dim, num_heads, pattern, *, num_kv_heads=None, bias=True, dropout=0.0, backend="auto",
        qk_norm=False, rope=None, xpos=None, sub_norm=False, tokens="natural", device=None, dtype=None, **options,
    ):  # fmt: skip
        super().__init__()
        refuse("MultiheadAttention", scores.others(options))
        if not isinstance(pattern, Pattern):
            raise ValueError(f"pattern={pattern!r}: want a pattern, e.g. Dense() or Dilated([2048, 4096], [1, 2])")
        embed_dim, num_heads = whole("embed_dim", embed_dim, 1), whole("num_heads", num_heads, 1)
        num_kv_heads = num_heads if num_kv_heads is None else whole("num_kv_heads", num_kv_heads, 1)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim}, num_heads={num_heads}: num_heads must divide embed_dim")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads={num_heads}, num_kv_heads={num_kv_heads}: the second must divide the first")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, embed_dim // num_heads
        self.pattern, self.backend = pattern, choice("backend", backend, "auto", *BACKENDS)
        self.tokens = choice("tokens", tokens, *TOKENS)
        self.rope = rope if rope is None else number("rope", rope, 0, FINITE)
        if rope is not None and self.head_dim % 2:
            raise ValueError(f"rope={rope}, head_dim={self.head_dim}: want an even head_dim, or rope=None")
        self.xpos = xpos if xpos is None else number("xpos", xpos, 0, FINITE)
        if xpos is not None and (rope is None or not pattern.causal):
            raise ValueError(f"xpos={xpos}, rope={rope}, {pattern!r}: want rope and a causal pattern, or xpos=None")
        dropout = number("dropout", dropout, -1e-300, 1, "a number from 0 to 1")
        to, bias = {"device": device, "dtype": dtype}, flag("bias", bias)
        self.q = nn.Linear(embed_dim, embed_dim, bias, **to)
        self.k = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias, **to)
        self.v = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias, **to)
        self.out = nn.Linear(embed_dim, embed_dim, bias, **to)
        norms = [nn.RMSNorm(self.head_dim, **to) if flag("qk_norm", qk_norm) else nn.Identity() for _ in "qk"]
        self.q_norm, self.k_norm = norms
        self.norm = nn.LayerNorm(embed_dim, **to) if flag("sub_norm", sub_norm) else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.softcap = options.get("softcap")
        self.register_buffer("alibi_slopes", options.get("alibi_slopes"))
        learned = flag("relative_bias", options.get("relative_bias", False))
        table = torch.zeros(num_heads, *scores.shape_of(pattern), **to) if learned else None
        self.relative_bias = None if table is None else nn.Parameter(table)

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, *, rotation=None, cache=None,
        **options,
    ) -> Tensor | tuple[Tensor, None]:  # fmt: skip
        """out (B, Nq, embed_dim); with a value, as nn.MultiheadAttention is called, (out, None): there are no weights.

        key (B, N, embed_dim): what is attended to, by default the queries, which else are the last Nq of its N
        positions. value (B, N, embed_dim): by default the key.
        rotation: `rotary.table` of the key's positions, for layers that share one; by default 0, 1, 2, ...
        cache: a `Cache` of the layer's pattern, and the tokens are the next after those that it has, in natural order.
        options: lengths and documents, as of `attention`; of nn.MultiheadAttention's need_weights=False, is_causal=True
        for a causal pattern (with its attn_mask), and a key_padding_mask that hides the end of sequences.
        """
        returned = (lambda out: out) if value is None else lambda out: (out, None)
        key = query if key is None else key
        value = key if value is None else value
        options = self._options(options, key, cache)
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if isinstance(tensor, Tensor) and tensor.is_nested:
                raise ValueError(f"{name} is nested: want nn.TransformerEncoder(..., enable_nested_tensor=False)")
            if not isinstance(tensor, Tensor) or tensor.dim() != 3 or tensor.shape[-1] != self.q.in_features:
                raise ValueError(f"{name} is {describe(tensor)}: want a tensor (B, N, {self.q.in_features})")
            to = self.q.weight.dtype if type(self.q) is nn.Linear else tensor.dtype  # a quantized layer takes others
            if tensor.dtype != to and len({t.dtype for t in autocast(tensor[:0], self.q.weight[:0])}) > 1:
                words = f"{name}.to({to})" + f" or the layer's .to({tensor.dtype})" * tensor.is_floating_point()
                raise ValueError(f"{name} is {describe(tensor)}, the layer's weights are {to}: want one dtype, {words}")
        heads = (-1, self.head_dim)
        q = self.q_norm(self.q(query).unflatten(-1, heads))  # (B, Nq, H, D)
        k, v = self.k_norm(self.k(key).unflatten(-1, heads)), self.v(value).unflatten(-1, heads)  # (B, N, Hkv, D)
        if self.rope is not None:
            by = self.rotation(k.shape[1], k.device, cache) if rotation is None else rotation
            q, k = self._turned(q, k, *by.expand(2, -1, -1))
        attend = self.attend if cache is None else cache.step
        return returned(self.dropout(self.out(self.norm(attend(q, k, v, **options).flatten(-2)))))

    def rotation(self, n: int, device=None, cache=None) -> Tensor:
        """`rotary.table` of n tokens in the layer's order, or of those that come next in a cache."""
        if cache is None and self.tokens == "tile order":
            return self._table(tile_order.tile_order(self.pattern, n).to(device), n)
        first = 0 if cache is None else cache.n
        return self._table(torch.arange(first, first + n, device=device), first + n)

    def _turned(self, q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor) -> tuple[Tensor, Tensor]:
        if self.xpos and q.dtype == torch.float16:
            raise ValueError(f"xpos={self.xpos} in float16, which overflows: want bfloat16 or float32")
        if q.shape[1] > k.shape[1] or of_k.shape != k.shape[1::2]:
            sizes = f"{q.shape[1]} queries on {k.shape[1]} keys with a rotation {tuple(of_k.shape)}"
            raise ValueError(f"{sizes}: want queries that are the last, Nq <= N, and a rotation (N, {self.head_dim})")
        return rotary.turned(q, of_q[k.shape[1] - q.shape[1] :]), rotary.turned(k, of_k)

    def _table(self, positions: Tensor, n: int) -> Tensor:
        """n: more than any position."""
        if self.xpos and n > rotary.XPOS * self.xpos:
            raise ValueError(f"xpos={self.xpos} with {n} tokens, which overflow: want at least {n} / {rotary.XPOS}")
        return rotary.table(positions, self.head_dim, self.rope, lse_dtype(self.q.weight), self.xpos)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        """The attention between the projections: q (B, Nq, H, D), k and v (B, N, Hkv, D) -> (B, Nq, H, D)."""
        return attention(q, k, v, self.pattern, backend=self.backend, **options)

    def _options(self, options: dict, key: Tensor, cache) -> dict:
        """Those of `attend`; ValueError for what nn.MultiheadAttention has and the pattern does not mean."""
        options = {name: x for name, x in options.items() if x is not None and x is not False}
        if options.get("is_causal") is True and self.pattern.causal:
            options.pop("is_causal"), options.pop("attn_mask", None)
        if "key_padding_mask" in options and "lengths" not in options:
            options["lengths"] = lengths_of(options.pop("key_padding_mask"), *key.shape[:2])
        refuse("MultiheadAttention", {x: y for x, y in options.items() if x not in ("lengths", "documents")})
        changes = {name: getattr(self, name) for name in scores.Scores._fields}
        changes = {name: value for name, value in changes.items() if value is not None}
        if cache is not None and cache.pattern is not self.pattern and cache.pattern.spec() != self.pattern.spec():
            raise ValueError(f"a cache of {cache.pattern!r}: want one of the layer's pattern, {self.pattern!r}")
        if self.tokens == "natural" or cache is not None:
            return options | changes
        if options:
            raise ValueError(f"tokens={self.tokens!r} with {', '.join(options)}: want 'natural', each has its order")
        return {"tokens": self.tokens} | changes

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        for name in ("bias_k", "bias_v", "q_proj_weight"):
            if prefix + name in state_dict:
                want = "want that of an nn.MultiheadAttention without add_bias_kv, kdim and vdim"
                raise ValueError(f"state_dict has {prefix}{name}: {want}")
        for kind in ("weight", "bias"):
            for theirs, ours in ((f"in_proj_{kind}", ("q", "k", "v")), (f"out_proj.{kind}", ("out",))):
                if (projections := state_dict.pop(prefix + theirs, None)) is not None:
                    names = (f"{prefix}{name}.{kind}" for name in ours)
                    state_dict |= dict(zip(names, projections.chunk(len(ours)), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, pattern={self.pattern!r}"


def lengths_of(padding: Tensor, batch: int, n: int) -> Tensor:
    """int64 (B,), the lengths of sequences whose end a key-padding mask (B, N) hides: True, or -inf, is hidden.

    ValueError for a mask that hides anything else. It looks at the mask, for which a card has to be waited.
    """
    hidden = padding if padding.dtype == torch.bool else padding == -torch.inf
    lengths = (~hidden).sum(-1)
    want = torch.arange(n, device=padding.device) >= lengths.view(-1, 1)
    if padding.shape != (batch, n) or bool(((hidden != want) | (padding != 0) & ~hidden).any()):
        raise ValueError(f"key_padding_mask is {describe(padding)}: want (B, N) = {batch, n}, True (or -inf) where a "
                         "sequence has ended, False (or 0) before: pad at the right; biases are not added")  # fmt: skip
    return lengths
