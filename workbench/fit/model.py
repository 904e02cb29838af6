"""Training steps of `models.Transformer` as a case, so that `fit` says of a model, too, whether a card has room for it.

Dimensions: B batch, N tokens.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from workbench.models.transformer import Transformer
from workbench.patterns import checks
from workbench.probes.case import Case

OPTIMIZERS = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": functools.partial(torch.optim.SGD, momentum=0.9)
}  # fmt: skip


@dataclass(frozen=True)
class Model(Case):
    """Two training steps (mode "fwdbwd") of layers of width heads x head_dim on tokens (B, N): the first leaves the
    optimizer's states. Weights, gradients and states are float32, computation is in `dtype` by torch.autocast.

    mode "fwd": features and the last token's logits, with weights in `dtype`. checkpoint: as of `Transformer`.
    """

    layers: int = 12
    vocab: int = 32_000
    optimizer: str = "adamw"
    checkpoint: bool = False
    timed = False

    def __post_init__(self):
        super().__post_init__()
        checks.choice("optimizer", self.optimizer, *OPTIMIZERS)

    def fields(self) -> dict:
        its = {x: getattr(self, x) for x in ("layers", "vocab", "optimizer", "checkpoint")}
        return super().fields() | its

    def prepare_from(self, make: Callable) -> tuple[Callable, str]:
        to = {"device": self.device, "dtype": self.dtype if self.mode == "fwd" else torch.float32}
        model = Transformer(
            self.vocab, self.heads * self.head_dim, self.layers, self.heads, self.pattern, num_kv_heads=self.kv_heads,
            checkpoint=self.checkpoint, backend=self.backend, **to,
        )  # fmt: skip
        tokens = torch.zeros(self.batch, self.n, dtype=torch.int64, device=self.device)
        if self.mode == "fwd":
            return functools.partial(_forward, model, tokens), self.backend
        optimizer, low = OPTIMIZERS[self.optimizer](model.parameters()), self.dtype != torch.float32
        cast = functools.partial(torch.autocast, "cuda", self.dtype) if low else contextlib.nullcontext

        def steps():
            for _ in range(2):
                with cast():
                    loss = model.loss(tokens, tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        return steps, self.backend


@torch.no_grad()
def _forward(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    return model.head(model.features(tokens)[:, -1])
