"""Layers over `attention`, so that what is probed is a whole layer and not only its core."""

from torch import Tensor, nn

from workbench.engines.check import autocast, refuse
from workbench.engines.dispatch import BACKENDS, attention
from workbench.patterns import Pattern
from workbench.patterns.checks import describe, flag, number, whole


class MultiheadAttention(nn.Module):
    """Self-attention with projections: x (B, N, embed_dim) -> (B, N, embed_dim), like torch.nn.MultiheadAttention.

    num_heads divides embed_dim, num_kv_heads (default num_heads) divides num_heads. With `context` (B, N, embed_dim), x
    holds the queries, the last Nq of the N positions, and keys and values come from the context (cached decoding).
    dropout acts on the output, in training only. Dropout on the attention weights, key-padding masks and score biases
    are refused by name: a fused softmax that honours them is not what these patterns compute.
    """

    def __init__(
        self, embed_dim, num_heads, pattern, *, num_kv_heads=None, bias=True, dropout=0.0, attention_dropout=0.0,
        backend="auto", device=None, dtype=None, **unknown,
    ):  # fmt: skip
        super().__init__()
        refuse("MultiheadAttention", unknown)
        if not isinstance(pattern, Pattern):
            raise ValueError(f"pattern={pattern!r}: want a pattern, e.g. Dense() or Dilated([2048, 4096], [1, 2])")
        embed_dim, num_heads = whole("embed_dim", embed_dim, 1), whole("num_heads", num_heads, 1)
        num_kv_heads = num_heads if num_kv_heads is None else whole("num_kv_heads", num_kv_heads, 1)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim}, num_heads={num_heads}: num_heads must divide embed_dim")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads={num_heads}, num_kv_heads={num_kv_heads}: the second must divide the first")
        if backend not in ("auto", *BACKENDS):
            raise ValueError(f"backend={backend!r}: want 'auto' or one of {', '.join(map(repr, BACKENDS))}")
        if attention_dropout:
            raise ValueError(f"attention_dropout={attention_dropout}: want 0; `dropout` acts on the output instead")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, embed_dim // num_heads
        self.pattern, self.backend = pattern, backend
        dropout = number("dropout", dropout, -1e-300, 1, "a number from 0 to 1")
        to = {"bias": flag("bias", bias), "device": device, "dtype": dtype}
        self.q = nn.Linear(embed_dim, embed_dim, **to)
        self.k = nn.Linear(embed_dim, num_kv_heads * self.head_dim, **to)
        self.v = nn.Linear(embed_dim, num_kv_heads * self.head_dim, **to)
        self.out = nn.Linear(embed_dim, embed_dim, **to)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, context: Tensor | None = None, **unknown) -> Tensor:
        refuse("MultiheadAttention", unknown)
        context = x if context is None else context
        for name, tensor in (("x", x), ("context", context)):
            if not isinstance(tensor, Tensor) or tensor.dim() != 3 or tensor.shape[-1] != self.q.in_features:
                raise ValueError(f"{name} is {describe(tensor)}: want a tensor (B, N, {self.q.in_features})")
            to = self.q.weight.dtype if type(self.q) is nn.Linear else tensor.dtype  # a quantized layer takes others
            if tensor.dtype != to and len({t.dtype for t in autocast(tensor[:0], self.q.weight[:0])}) > 1:
                words = f"{name}.to({to})" + f" or the layer's .to({tensor.dtype})" * tensor.is_floating_point()
                raise ValueError(f"{name} is {describe(tensor)}, the layer's weights are {to}: want one dtype, {words}")
        heads = (-1, self.head_dim)
        q = self.q(x).unflatten(-1, heads)  # (B, Nq, H, D)
        k, v = (f(context).unflatten(-1, heads) for f in (self.k, self.v))  # (B, N, Hkv, D)
        return self.dropout(self.out(self.attend(q, k, v).flatten(-2)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention between the projections: q (B, Nq, H, D), k and v (B, N, Hkv, D) -> (B, Nq, H, D)."""
        return attention(q, k, v, self.pattern, backend=self.backend)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, pattern={self.pattern!r}"
