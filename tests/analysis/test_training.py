"""The task of notebook 07, and what is said of models that learn it."""

import pytest
import torch

import workbench as wb
from workbench.analysis import training
from workbench.models.transformer import IGNORED
from workbench.plots import training as draw


def test_the_only_answer_is_the_needle_and_it_is_far():
    tokens, labels = training.haystack(50, 64, torch.Generator().manual_seed(0))
    needles = (tokens >= 256) & (tokens < training.ASK)
    assert needles.sum(1).eq(1).all() and not needles[:, 8:].any()
    asked = tokens == training.ASK
    assert asked.sum(1).eq(16).all() and not asked[:, :32].any()
    assert torch.equal(labels, torch.where(asked, tokens[needles][:, None], IGNORED))
    assert tokens[needles].unique().numel() == training.VALUES


def test_models_learn_and_the_figures_and_sentences_say_so(monkeypatch):
    patterns = {"dense": wb.Dense(True), "longnet": wb.Dilated([8, 32], [1, 2], True)}
    sizes, loss, first, clock = {"dim": 16, "depth": 1, "heads": 2}, wb.Transformer.loss, {}, [0]

    def compiling(model, *batch):
        value = loss(model, *batch)
        clock[0] += [*patterns.values()].index(model.pattern) + (1 if model.pattern in first else 1000)
        first.setdefault(model.pattern, value.item())
        return value

    monkeypatch.setattr(wb.Transformer, "loss", compiling)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    models, rows = training.compare(patterns, sizes, n=32, batch=4, steps=30, lr=0.01)
    by = {label: some["loss"].tolist() for label, some in rows.groupby("label")}
    assert all(len(x) == 30 and x[-1] < 0.8 * x[0] for x in by.values())
    assert rows.groupby("label")["seconds"].agg(["min", "max"]).to_numpy().tolist() == [[1, 30], [2, 60]]
    assert [x[0] for x in by.values()] == [*first.values()]  # what the untimed step learnt is forgotten
    table = training.summary(rows, patterns, 32, sizes)
    assert (table["loss"] == table["loss at equal time"]).tolist() == [True, False]
    assert table["pairs per token"].tolist() == [16.5, patterns["longnet"].pairs(32, 2) / 64]
    table = table.assign(**{"learnt at step": [20, float("nan")], "loss": [0.0, 2.0]})
    (found, lost), headline = training.answer(table, 30)
    words = "dense, with 16.5 pairs per token and 100% of the needles in reach, from step **20** on."
    assert found == f"**These learn to find the needle**: {words}"
    assert lost.startswith("**These do not find the needle within 30 steps (one run, one seed)**: LongNet, with 8.8")
    assert lost.endswith(" per token and 50% of the needles in reach, whose loss stays **2.00** (a guess: 2.08).")
    assert headline == "learnt within 30 steps (one run, one seed): dense at step 20; LongNet not"
    families = {label: type(pattern).__name__ for label, pattern in patterns.items()}
    assert [len(ax.lines) for ax in draw.losses(rows, families).axes] == [3, 3]
    tokens = training.haystack(1, 32, torch.Generator())[0]
    ways = {x: models["dense"].loss(tokens) * many for x, many in (("one", 1), ("other", 1.5))}
    apart = training.differences(models["dense"], ways)[["loss differs by", "gradients differ by"]].to_numpy()
    assert apart.tolist() == [[0, 0], pytest.approx([0.5, 0.5])]
