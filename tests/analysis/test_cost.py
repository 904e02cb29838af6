"""What notebook 01 counts, and its sentences."""

import pandas as pd
import pytest

import workbench as wb
from workbench.analysis import cost
from workbench.plots import exactness


def test_bytes_are_inputs_output_lse_and_the_index():
    n, heads, head_dim = 256, 2, 16
    fused = 4 * n * heads * head_dim * 4 + n * heads * 4
    assert cost.predicted_bytes(wb.Dense(), n, heads, head_dim) == fused
    assert cost.predicted_bytes(wb.Dilated([64], [2]), n, heads, head_dim) == fused
    window = wb.Neighborhood((n,), 3)
    assert cost.predicted_bytes(window, n, heads, head_dim) == fused + window.blocks(n, heads).nbytes


def test_the_table_counts_pairs_and_bytes_of_scores():
    table = cost.table({"window": lambda n: wb.Neighborhood((n,), 1)}, [64, 256], heads=3, head_dim=8)
    assert list(table.pairs) == [3 * (3 * n - 2) for n in (64, 256)]
    assert list(table.scores_bytes) == [3 * n * n * 4 for n in (64, 256)]


def test_growth_is_the_power_of_n():
    makers = {"wide": lambda n: wb.Dense(), "local": lambda n: wb.Dilated([64], [1])}
    rise = cost.growth(cost.table(makers, [1024, 64, 256], heads=1, head_dim=8))
    assert list(rise.index) == ["wide", "local"]
    assert rise["wide"] == pytest.approx(2) and rise["local"] == pytest.approx(1)


def table(**rows):
    lines = [{"pattern": x, "n": 64, "pairs": pairs, "predicted_bytes": size} for x, (pairs, size) in rows.items()]
    return pd.DataFrame(lines)


def test_extremes_name_who_and_so_does_what_has_more_pairs_than_dense_attention():
    said = cost.extremes(table(dense=(972, 2**31), window=(1, 2**32)))
    assert said.startswith("At N = 64 the most pairs (dense) are **972 times** the fewest (window); ")
    assert said.endswith("; they need **2 GiB** (dense) to **4 GiB** (window) of memory.")
    assert "**1.50 times** as many under a at N = 64" in cost.beyond(table(dense=(2, 1), a=(3, 1), b=(1, 1)))
    assert cost.beyond(table(dense=(2, 1), a=(2, 1))) == ""


def test_what_each_pattern_sees_at_a_glance():
    patterns = {"dense": wb.Dense(), "gappy": wb.Dilated([4], [4])}
    shown = cost.glance(patterns, 16, 2, {"dense": 1, "gappy": None})
    assert shown["pairs seen (%)"].tolist() == [100, 100 * patterns["gappy"].density(16, 2)]
    assert shown["rows without a key"].tolist() == [0, 24] and shown["layers to reach all"].isna().tolist() == [0, 1]
    assert cost.layers({"a": 1, "b": None}).endswith("other: a **1**, b **never**.")


def test_the_worth_of_a_pair():
    rows = [("a", "window", 0.1, 0.5), ("a", "window", 0.1, 0.3), ("a", "top blocks of q.k", 0.2, 0.2)]
    worth = cost.worth(pd.DataFrame(rows, columns=["source", "pattern", "density", "mass"]))
    assert worth["worth of a pair"].tolist() == [4, 1] and worth["weight kept (%)"].tolist() == [40, 20]
    said = cost.best_and_worst(worth, "a")
    assert said.startswith("On the a a pair of the window pattern holds **4.0 times**") and "**1.0 times**" in said


def test_a_budget_that_is_exceeded_is_not_said_to_be_kept():
    rows = pd.DataFrame({"status": ["ok", "ok"], "worst": [0.5, 2.3], "pattern": "p", "backend": ["torch", "flex"]})
    said = exactness.kept(rows.assign(dtype="float32"))
    assert said == "**1 of 2** runs keep their budgets; the worst uses 230% (p, FlexAttention, float32)."
    assert exactness.kept(rows.assign(status="refused")).startswith("Nothing ran")
