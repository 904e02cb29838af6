"""The sentences of notebook 01 that are computed from tables."""

import pandas as pd

from workbench.analysis import cost
from workbench.plots import exactness


def table(**rows):
    lines = [{"pattern": x, "n": 64, "pairs": pairs, "predicted_bytes": size} for x, (pairs, size) in rows.items()]
    return pd.DataFrame(lines)


def test_extremes_name_who_and_say_where_memory_differs():
    same = cost.extremes(table(dense=(972, 2e9), window=(1, 2e9)))
    assert same == "At N = 64 dense computes **972 times** as many pairs as window; all need about the same 2 GB."
    assert cost.extremes(table(a=(5, 1e9), b=(5, 4e9))).endswith(
        "all patterns compute as many pairs; b needs **4 times** the bytes of a."
    )
    assert cost.rises(table(a=(5, 1))) == "One length alone shows no growth."


def test_layers_that_are_never_enough():
    assert cost.layers({"a": 1, "b": None}).endswith("other: a **1**. No number of layers is enough for b.")
    assert cost.layers({"a": None}) == "No number of layers is enough for a."


def test_a_budget_that_is_exceeded_is_not_said_to_be_kept():
    rows = pd.DataFrame({"status": ["ok", "ok"], "worst": [0.5, 2.3], "pattern": "p", "backend": ["torch", "flex"]})
    said = exactness.kept(rows.assign(dtype="float32"))
    assert said == "**1 of 2** runs keep their budgets; at worst 230% of one is used (p, flex, float32)."
    assert exactness.kept(rows.assign(status="refused")).startswith("Nothing ran")
