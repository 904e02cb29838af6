"""A transformer of tokens over any pattern, and LongNet, which is one over dilated attention.

Dimensions: B batch, N tokens, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workbench.engines.cache import Cache
from workbench.engines.layers import MultiheadAttention
from workbench.engines.ragged import starts_of
from workbench.models.layer import Layer
from workbench.models.loss import cross_entropy
from workbench.patterns import Dilated, Pattern
from workbench.patterns.checks import FINITE, describe, flag, number, whole
from workbench.patterns.tile_order import tile_order

IGNORED = -100  # the label that counts for nothing, as in torch's cross entropy


class Transformer(nn.Module):
    """tokens (B, N) of integers below vocab -> logits (B, N, vocab): `depth` layers of width dim over a pattern.

    Layers are pre-norm with MAGNETO's Sub-LN (sub_norm) and initialisation (arXiv 2210.06423), positions rotary
    (rope; None for none), the head shares the embedding's weights where tied.
    checkpoint: layers keep their input only and are computed again in the backward (activation checkpointing).
    tokens: "tile order" moves tokens into the pattern's `tile_order` once, before the first layer, and back
        after the last.
    hidden, dropout: of `Layer`. options: of `wb.MultiheadAttention`, such as num_kv_heads, qk_norm, backend, dtype.
    attention: what has these options; with wb.distributed.MultiheadAttention the tokens are spread over ranks.
    """

    def __init__(
        self, vocab, dim, depth, heads, pattern: Pattern, *, tied=True, checkpoint=False, hidden=None, **options
    ):
        super().__init__()
        vocab, dim, depth = whole("vocab", vocab, 1), whole("dim", dim, 1), whole("depth", depth, 1)
        hidden = 4 * dim if hidden is None else whole("hidden", hidden, 1)
        options = {"rope": 10_000.0, "sub_norm": True, "tokens": "natural"} | options
        attention = options.pop("attention", MultiheadAttention)
        to = {name: options.get(name) for name in ("device", "dtype")}
        its = {"hidden": hidden, "sub_norm": options["sub_norm"], "dropout": options.get("dropout", 0.0)} | to
        self.embedding, self.pattern, self.tokens = nn.Embedding(vocab, dim, **to), pattern, options["tokens"]
        self.checkpoint = flag("checkpoint", checkpoint)
        self.layers = nn.ModuleList(Layer(dim, attention(dim, heads, pattern, **options), **its) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim, **to), nn.Linear(dim, vocab, bias=False, **to)
        for layer in self.layers:
            layer.initialise(depth)
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.normal_(weight, std=dim**-0.5)
        if flag("tied", tied):
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None, **options) -> Tensor:
        """Logits (B, N, vocab), or the `loss` of labels (B, N): labels[:, i] is what position i has to say, the next
        token and not its own (Hugging Face's models shift them). options: lengths, documents, as of `wb.attention`."""
        if labels is not None:
            _check("labels", labels, like=tokens)
        x = self.features(tokens, **options)
        return self.head(x) if labels is None else cross_entropy(x, self.head.weight, labels, IGNORED)

    def features(self, tokens: Tensor, caches: list[Cache] | None = None, **options) -> Tensor:
        """What the head sees, (B, N, dim), normalised. caches: one a layer, and the tokens are those that come next."""
        _check("tokens", tokens)
        tiled = self.tokens != "natural" and caches is None
        order = tile_order(self.pattern, tokens.shape[1]).to(tokens.device) if tiled else None
        x = self.embedding(tokens if order is None else tokens[:, order]) * self.embedding.embedding_dim**0.5
        attention, caches = self.layers[0].attention, caches or [None] * len(self.layers)
        options["rotation"] = attention.rotation(x.shape[1], x.device, caches[0]) if attention.rope else None
        for layer, cache in zip(self.layers, caches, strict=True):
            if self.checkpoint and torch.is_grad_enabled() and cache is None:
                x = checkpoint(layer, x, use_reentrant=False, **options)
            else:
                x = layer(x, cache=cache, **options)
        return self.norm(x if order is None else x[:, order.argsort()])

    def loss(self, tokens: Tensor, labels: Tensor | None = None, *, lengths=None, documents=None) -> Tensor:
        """The mean cross entropy of labels (B, N), by default each next token, of a causal pattern: a scalar.

        Labels of -100 do not count, nor do by default what is behind a sequence's length and the first token of another
        document. All logits at once, N times vocab, are never held.
        """
        if labels is None:
            labels = self.next_tokens(tokens, lengths, documents)
        return self(tokens, labels, lengths=lengths, documents=documents)

    def next_tokens(self, tokens: Tensor, lengths=None, documents=None) -> Tensor:
        """The labels (B, N) of `loss` by default."""
        _check("tokens", tokens)
        if not self.pattern.causal:
            raise ValueError("labels=None: want labels (B, N), since a pattern that is not causal sees the next token")
        labels = nn.functional.pad(tokens[:, 1:], (0, min(1, tokens.shape[1])), value=IGNORED)
        if lengths is None and documents is None:
            return labels
        starts = starts_of(*tokens.shape, lengths, documents)
        if lengths is not None:
            at = torch.arange(tokens.shape[1], device=tokens.device)
            labels = labels.masked_fill(at >= lengths[:, None], IGNORED)
        labels.view(-1)[[start - 1 for start in starts if start]] = IGNORED  # what the last token of each would foresee
        return labels

    @torch.no_grad()
    def generate(self, tokens: Tensor, new: int, *, temperature=0.0, generator=None, chunk=4096, lengths=None):
        """The tokens (B, N) and `new` more, (B, N + new): token by token what `forward` of all so far makes likely.

        temperature: 0 takes the likeliest token; else one is drawn from softmax(logits / temperature), by `generator`.
        chunk: how many tokens of the prompt go through the layers at once. lengths (B,): of prompts that are padded on
        the right; behind what follows a prompt are zeros then. Dropout, if any, wants `eval()` first.
        """
        _check("tokens", tokens, least=1)
        new, chunk, (batch, n) = whole("new", new, 0), whole("chunk", chunk, 1), tokens.shape
        temperature = number("temperature", temperature, -1e-300, FINITE, "a number from 0 on")
        options = {"temperature": temperature, "generator": generator, "chunk": chunk}
        if lengths is not None:
            starts_of(batch, n, lengths, None)
            if not lengths.all():
                raise ValueError(f"lengths={lengths.tolist()}: want {batch} of them, from 1 to {n}")
            out = tokens.new_zeros(batch, n + new)
            for many in lengths.unique().tolist():  # those of one length together
                alike = lengths == many
                out[alike, : many + new] = self.generate(tokens[alike, :many], new, **options)
            return out
        caches = [Cache(self.pattern, n + new) for _ in self.layers]
        for some in tokens.split(chunk, 1):
            x = self.features(some, caches)
        for _ in range(new):
            logits = self.head(x[:, -1]).float()
            if temperature:
                drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                drawn = logits.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, drawn], 1)
            x = self.features(drawn, caches) if tokens.shape[1] < n + new else x
        return tokens


def _check(name: str, value, least: int = 0, like: Tensor | None = None) -> None:
    """ValueError where the value is no tensor of integers (B, N), of the shape of `like`."""
    fits = isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32) and value.dim() == 2
    if not fits or value.shape[1] < least or like is not None and value.shape != like.shape:
        more = ", N at least 1" * least + ", of tokens and labels alike" * (like is not None)
        raise ValueError(f"{name} is {describe(value)}: want integers (B, N){more}")


class LongNet(Transformer):
    """LongNet (arXiv 2307.02486): a `Transformer` over Dilated(segment_lengths, dilation_rates), causal by default.

    options: of `Transformer`. The paper's positions are xPos, `xpos=512`; by default they are rotary, for any length.
    """

    def __init__(self, vocab, dim, depth, heads, segment_lengths, dilation_rates, *, causal=True, **options):
        pattern = Dilated(segment_lengths, dilation_rates, causal, offsets=options.pop("offsets", "interleaved"))
        super().__init__(vocab, dim, depth, heads, pattern, **options)
