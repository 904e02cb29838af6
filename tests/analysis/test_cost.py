import pytest

import workbench as wb
from workbench.analysis import cost


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
