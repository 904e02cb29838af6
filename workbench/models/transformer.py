"""A transformer of tokens over any pattern, and LongNet, which is one over dilated attention.

Dimensions: B batch, N tokens, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workbench.engines.layers import MultiheadAttention
from workbench.models.layer import Layer
from workbench.models.loss import cross_entropy
from workbench.patterns import Dilated, Pattern
from workbench.patterns.checks import describe, flag, whole
from workbench.patterns.tile_order import tile_order

IGNORED = -100  # the label that counts for nothing, as in torch's cross entropy


class Transformer(nn.Module):
    """tokens (B, N) of integers below vocab -> logits (B, N, vocab): `depth` layers of width dim over a pattern.

    Layers are pre-norm with MAGNETO's Sub-LN (sub_norm) and initialisation (arXiv 2210.06423), positions rotary
    (rope; None for none), the head shares the embedding's weights where tied.
    checkpoint: layers keep their input only and are computed again in the backward (activation checkpointing).
    tokens: "tile order" moves tokens into the pattern's `tile_order` once, at the door, and back at the head.
    hidden, dropout: of `Layer`. options: of `wb.MultiheadAttention`, such as num_kv_heads, qk_norm, backend, dtype.
    """

    def __init__(
        self, vocab, dim, depth, heads, pattern: Pattern, *, tied=True, checkpoint=False, hidden=None, **options
    ):
        super().__init__()
        vocab, dim, depth = whole("vocab", vocab, 1), whole("dim", dim, 1), whole("depth", depth, 1)
        hidden = 4 * dim if hidden is None else whole("hidden", hidden, 1)
        options = {"rope": 10_000.0, "sub_norm": True, "tokens": "natural"} | options
        to = {name: options.get(name) for name in ("device", "dtype")}
        its = {"hidden": hidden, "sub_norm": options["sub_norm"], "dropout": options.get("dropout", 0.0)} | to
        self.embedding, self.pattern, self.tokens = nn.Embedding(vocab, dim, **to), pattern, options["tokens"]
        self.checkpoint = flag("checkpoint", checkpoint)
        self.layers = nn.ModuleList(
            Layer(dim, MultiheadAttention(dim, heads, pattern, **options), **its) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(dim, **to), nn.Linear(dim, vocab, bias=False, **to)
        for layer in self.layers:
            layer.initialise(depth)
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.normal_(weight, std=dim**-0.5)
        if flag("tied", tied):
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, **options) -> Tensor:
        """Logits (B, N, vocab). options: lengths and documents, as of `wb.attention`."""
        return self.head(self.features(tokens, **options))

    def features(self, tokens: Tensor, **options) -> Tensor:
        """What the head sees, (B, N, dim), normalised."""
        _check("tokens", tokens)
        order = tile_order(self.pattern, tokens.shape[1]).to(tokens.device) if self.tokens != "natural" else None
        x = self.embedding(tokens if order is None else tokens[:, order]) * self.embedding.embedding_dim**0.5
        attention = self.layers[0].attention
        options["rotation"] = attention.rotation(x.shape[1], x.device) if attention.rope else None
        for layer in self.layers:
            if self.checkpoint and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=False, **options)
            else:
                x = layer(x, **options)
        return self.norm(x if order is None else x[:, order.argsort()])

    def loss(self, tokens: Tensor, labels: Tensor | None = None, *, lengths=None, documents=None) -> Tensor:
        """The mean cross entropy of labels (B, N), by default each next token, of a causal pattern: a scalar.

        Labels of -100 do not count, nor do by default what is behind a sequence's length and the first token of another
        document. All logits at once, N times vocab, are never held.
        """
        if labels is not None:
            _check("labels", labels, tokens)
        elif not self.pattern.causal:
            raise ValueError("labels=None: want labels (B, N), since a pattern that is not causal sees the next token")
        ragged = {name: x for name, x in (("lengths", lengths), ("documents", documents)) if x is not None}
        features = self.features(tokens, **ragged)
        if labels is None:
            labels = nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED)
            if lengths is not None:
                last = torch.arange(1, tokens.shape[1] + 1, device=tokens.device) >= lengths[:, None]
                labels = labels.masked_fill(last, IGNORED)
            if documents is not None and documents.dim() == 1:  # cumulative lengths
                labels = labels.index_fill(1, documents[1:] - 1, IGNORED)
            elif documents is not None:
                labels[:, :-1].masked_fill_(documents[:, 1:] != documents[:, :-1], IGNORED)
        return cross_entropy(features, self.head.weight, labels, IGNORED)


class LongNet(Transformer):
    """LongNet (arXiv 2307.02486): a `Transformer` over Dilated(segment_lengths, dilation_rates), causal by default.

    options: of `Transformer`. The paper's positions are xPos; these are rotary, which do not decay to 0 on long ones.
    """

    def __init__(self, vocab, dim, depth, heads, segment_lengths, dilation_rates, *, causal=True, **options):
        pattern = Dilated(segment_lengths, dilation_rates, causal, offsets=options.pop("offsets", "interleaved"))
        super().__init__(vocab, dim, depth, heads, pattern, **options)


def _check(name: str, value: Tensor, like: Tensor | None = None) -> None:
    fits = isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)
    if not fits or like is not None and value.shape != like.shape:
        raise ValueError(f"{name} is {describe(value)}: want integers (B, N), of tokens and labels alike")
