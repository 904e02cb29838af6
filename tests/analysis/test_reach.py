import pytest
import torch

import workbench as wb
from workbench.analysis.reach import depth, field, reach


def test_a_window_grows_by_its_radius_a_layer():
    n, radius = 12, 2
    seen = reach(wb.Neighborhood((n,), radius), n, heads=2, layers=3)
    distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    for layer in range(4):
        assert torch.equal(seen[layer], distance <= radius * layer)


def test_heads_are_united():
    pattern = wb.Predicate(lambda h, i, j: j == (i + h + 1) % 6)
    assert reach(pattern, 6, heads=2, layers=1)[1].sum(1).tolist() == [3] * 6  # itself, the next, and the one after


def test_order_of_a_causal_chain():
    """Token 3 sees 2, 2 sees 1: what a layer passes on is what the layer before has gathered."""
    chain = wb.Predicate(lambda h, i, j: j == i - 1)
    assert reach(chain, 4, 1, 2)[2, 3].tolist() == [False, True, True, True]


def test_depth_counts_layers_until_everything_is_seen_or_says_never():
    assert depth(wb.Dense(), 8, 1) == 1
    assert depth(wb.Neighborhood((9,), 2), 9, 1) == 4
    assert depth(wb.Dense(), 1, 1) == 0
    assert depth(wb.Dense(causal=True), 8, 1) is None
    assert depth(wb.Dilated([4], [1]), 8, 2) is None


@pytest.mark.parametrize("pattern", [
    wb.Dilated([4, 12], [1, 3]), wb.Dilated([5, 16], [2, 4], causal=True), wb.Neighborhood((150,), 40),
], ids=lambda p: p.name)  # fmt: skip
def test_the_field_of_a_token_is_where_its_line_of_the_whole_begins(pattern):
    n = 150 if isinstance(pattern, wb.Neighborhood) else 37
    for token in (0, 17, 36):
        seen = reach(pattern, n, 3, 3)[:, token].int()
        assert torch.equal(field(pattern, n, 3, token, 3), torch.where(seen.any(0), seen.argmax(0), -1))
