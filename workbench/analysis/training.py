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

from workbench.analysis.reach import reach
from workbench.fit.model import Model
from workbench.harness.narrate import title
from workbench.models.transformer import IGNORED, Transformer
from workbench.patterns import Pattern
from workbench.probes import timing

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
        for last in (1, steps):  # first a step of a model to throw away: what it compiles is no time of training
            torch.manual_seed(0)
            model = models[label] = Transformer(VOCAB, pattern=pattern, device=device, **sizes)
            generator, seconds, some = torch.Generator().manual_seed(0), 0.0, []
            optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98))
            for step in range(last):
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
                some.append({"label": label, "step": step + 1, "seconds": seconds, "loss": loss})
        rows += some
    return models, pd.DataFrame(rows)


def summary(rows: pd.DataFrame, patterns: Mapping[str, Pattern], n: int, sizes: dict) -> pd.DataFrame:
    """A line per model: pairs per token and head; of how many questions the needle is in reach through all layers; its
    loss, a mean of nine steps, after all steps and when the fastest model had done all of its own; and from which step
    and second on that is below half a guess."""
    heads = sizes["heads"]
    seen = [reach(x, n, heads, sizes["depth"])[-1, n // 2 :, : n // 8] for x in patterns.values()]
    rows = rows.assign(loss=rows.groupby("label")["loss"].transform(lambda x: x.rolling(9, min_periods=1).mean()))
    by = rows.groupby("label")
    equal = rows[rows["seconds"] <= by["seconds"].max().min()].groupby("label")
    learnt = rows[(rows["loss"] < GUESS / 2) & (rows["step"] >= 9)].groupby("label").first().reindex(patterns)
    return pd.DataFrame({
        "pairs per token": [pattern.pairs(n, heads) / n / heads for pattern in patterns.values()],
        "needle in reach (%)": [100 * x.double().mean().item() for x in seen],
        "loss": by["loss"].last(), "loss at equal time": equal["loss"].last(),
        "learnt at step": learnt["step"], "at second": learnt["seconds"],
    }, index=pd.Index(patterns, name="pattern"))  # fmt: skip


def answer(table: pd.DataFrame, steps: int) -> tuple[list[str], str]:
    """(which models learn to find the needle, and which do not; a headline that has them all). table: of `summary`."""
    found, lost, heads = [], [], []
    columns = ["pairs per token", "needle in reach (%)", "learnt at step", "loss"]
    for label, pairs, reached, step, loss in table[columns].itertuples():
        name = f"{title(label)}, with {pairs:,.1f} pairs per token and {reached:.0f}% of the needles in reach"
        found += [f"{name}, from step **{step:.0f}** on"] * (step > 0)
        lost += [] if step > 0 else [f"{name}, whose loss stays **{loss:.2f}** (a guess: {GUESS:.2f})"]
        heads.append(f"{title(label)} {f'at step {step:.0f}' if step > 0 else 'not'}")
    once = f"within {steps} steps (one run, one seed)"
    said = {"These learn to find the needle": found, f"These do not find the needle {once}": lost}
    headline = f"learnt {once}: {'; '.join(heads)}"
    return [f"**{who}**: {'; '.join(each)}." for who, each in said.items() if each], headline


def seconds_of_a_step(pattern: Pattern, n: int, sizes: dict, device: str) -> float:
    """Of training `fit.model.Model` with checkpoints on this device, bfloat16 on a card; nan where it does not run."""
    low = "bfloat16" if device == "cuda" else "float32"
    steps = Model(pattern, n, dtype=low, device=device, mode="fwdbwd", checkpoint=True, **sizes)
    return (timing.time(steps, warmup=0, samples=3)["median_ms"] or math.nan) / 2000  # it takes two


def differences(model: Transformer, losses: Mapping[str, Tensor]) -> pd.DataFrame:
    """A line per way to compute one loss: its value, its difference from the first's, and the largest of gradients."""
    parameters = [*model.parameters()]
    found = {x: torch.cat([g.flatten() for g in torch.autograd.grad(y, parameters)]) for x, y in losses.items()}
    one, first = next(iter(losses.values())).item(), next(iter(found.values()))
    apart = [float((g - first).abs().max() / first.abs().max()) for g in found.values()]
    rows = [(x, y.item(), abs(y.item() / one - 1), far) for (x, y), far in zip(losses.items(), apart, strict=True)]
    return pd.DataFrame(rows, columns=["way", "loss", "loss differs by", "gradients differ by"]).set_index("way")
