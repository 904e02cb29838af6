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


def test_models_learn_and_the_figures_and_sentences_say_so():
    patterns = {"dense": wb.Dense(True), "longnet": wb.Dilated([8, 32], [1, 2], True)}
    sizes = {"dim": 16, "depth": 1, "heads": 2}
    models, rows = training.compare(patterns, sizes, n=32, batch=4, steps=30, lr=0.01)
    by = {label: some["loss"].tolist() for label, some in rows.groupby("label")}
    assert all(len(x) == 30 and x[-1] < 0.8 * x[0] for x in by.values()) and rows["seconds"].min() > 0
    table = training.summary(rows, patterns, 32, 2)
    fastest = rows.groupby("label")["seconds"].max().idxmin()
    equal = table["loss"] == table["loss at equal time"]
    assert equal[fastest] and equal.sum() == 1
    assert table["pairs per token"].tolist() == [16.5, patterns["longnet"].pairs(32, 2) / 64]
    table = table.assign(**{"learnt at step": [20, float("nan")], "loss": [0.0, 2.0]})
    found, dense = training.answer(table)
    assert dense == "**Dense learns to find the needle**: with 16.5 pairs per token from step **20** on."
    assert found.startswith("**LongNet does not learn to find the needle**: with ")
    assert found.endswith(" pairs per token its loss stays **2.00** (a guess: 2.08).")
    several = table.set_axis(["longnet, dilation 2", "longnet, dilation 4"])
    found = "**LongNet learns to find the needle**: with dilation 2 and 16.5 pairs per token from step **20** on; "
    assert training.answer(several)[0].startswith(found)
    families = {label: type(pattern).__name__ for label, pattern in patterns.items()}
    assert [len(ax.lines) for ax in draw.losses(rows, families).axes] == [3, 3]
    tokens = training.haystack(1, 32, torch.Generator())[0]
    ways = {x: models["dense"].loss(tokens) * many for x, many in (("one", 1), ("other", 1.5))}
    assert training.differences(models["dense"], ways)["gradients differ by"].tolist() == pytest.approx([0, 0.5])
