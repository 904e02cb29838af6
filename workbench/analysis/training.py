"""Small models side by side: one task, the same first weights and sequences, a pattern each.

The task is a needle in a haystack: text, here this package's own source, byte by byte; early in it one of VALUES tokens
that are no bytes; and at half of the places of its second half the token ASK, to which that value is the answer. Only
the answers count: they cannot be learnt from what is near.

Dimensions: B batch, N tokens.
"""

import functools
import math
import time
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from workbench.harness.narrate import number, title
from workbench.models.transformer import IGNORED, Transformer
from workbench.patterns import Pattern

VALUES = 8
ASK = 256 + VALUES
VOCAB = ASK + 1
GUESS = math.log(VALUES)  # the loss of an answer by one who has not seen the needle


@functools.cache
def source() -> Tensor:
    """The bytes of the package's Python files, int64."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return torch.frombuffer(bytearray(b"".join(x.read_bytes() for x in files)), dtype=torch.uint8).long()


def haystack(batch: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """tokens and labels (B, N), on the CPU; labels are IGNORED but where it is asked."""
    at = torch.randint(len(source()) - n, (batch, 1), generator=generator)
    tokens, labels = source()[at + torch.arange(n)], torch.full((batch, n), IGNORED)
    value = torch.randint(256, ASK, (batch, 1), generator=generator)
    places = n // 2 + torch.rand(batch, n // 2, generator=generator).argsort(1)[:, : n // 4]
    tokens.scatter_(1, torch.randint(max(1, n // 8), (batch, 1), generator=generator), value).scatter_(1, places, ASK)
    return tokens, labels.scatter_(1, places, value.expand(-1, places.shape[1]))


def compare(
    patterns: Mapping[str, Pattern], sizes: dict, n: int, batch: int, steps: int, lr: float, device: str = "cpu"
) -> tuple[dict[str, Transformer], pd.DataFrame]:
    """({label: trained model}, a row for each step: label, step, seconds so far, loss).

    sizes: dim, depth, heads and options of `Transformer`. AdamW, its rate rising over 20 steps; bfloat16 on a card.
    """
    models, rows = {}, []
    for label, pattern in patterns.items():
        torch.manual_seed(0)
        model = models[label] = Transformer(VOCAB, pattern=pattern, device=device, **sizes)
        generator, seconds = torch.Generator().manual_seed(0), 0.0
        optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98))
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (step + 1) / 20)
            tokens, labels = (x.to(device) for x in haystack(batch, n, generator))
            begin = time.perf_counter()
            with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
                loss = model.loss(tokens, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.item()  # which waits for a card
            seconds += time.perf_counter() - begin
            rows.append({"label": label, "step": step + 1, "seconds": seconds, "loss": loss})
    return models, pd.DataFrame(rows)


def summary(rows: pd.DataFrame, patterns: Mapping[str, Pattern], n: int, heads: int) -> pd.DataFrame:
    """A line per model: pairs per token and head, the mean loss of its last tenth of steps, the step from which it is
    below half a guess, and the milliseconds of a step."""
    last = rows[rows["step"] > 0.9 * rows["step"].max()].groupby("label", sort=False)["loss"].mean()
    smooth = rows.assign(loss=rows.groupby("label")["loss"].transform(lambda x: x.rolling(5).mean()))
    return pd.DataFrame({
        "pairs per token": [patterns[label].pairs(n, heads) / n / heads for label in last.index], "loss": last,
        "learnt at step": smooth[smooth["loss"] < GUESS / 2].groupby("label")["step"].min().reindex(last.index),
        "ms per step": rows.groupby("label")["seconds"].agg(lambda x: 1e3 * x.diff().median()),
    }, index=last.index)  # fmt: skip


def answer(table: pd.DataFrame) -> list[str]:
    """Which pattern finds the needle, in sentences. table: of `summary`."""
    said = []
    for label, one in table.iterrows():
        learnt = one["learnt at step"]
        how = f"answers from step **{learnt:.0f}** on" if learnt == learnt else "has not learnt to answer"
        of = f", with {number(one['pairs per token'])} pairs per token,"
        name = title(label)
        said.append(f"{name[0].upper()}{name[1:]}{of} {how} (loss {one['loss']:.2f}; a guess: {GUESS:.2f}).")
    return said


def differences(model: Transformer, losses: Mapping[str, Tensor]) -> pd.DataFrame:
    """A line per way to compute one loss: its value, and the largest difference of its gradients from the first's."""
    parameters = [*model.parameters()]
    found = {x: torch.cat([g.flatten() for g in torch.autograd.grad(y, parameters)]) for x, y in losses.items()}
    first = next(iter(found.values()))
    rows = [(x, y.item(), float((found[x] - first).abs().max() / first.abs().max())) for x, y in losses.items()]
    return pd.DataFrame(rows, columns=["way", "loss", "gradients differ by"]).set_index("way")
