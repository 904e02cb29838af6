"""What tokens reach through layers, and how much of dense attention's weight a pattern captures."""

import pytest
import torch

import workbench as wb
from tests import tools
from workbench import BlockSparse, Dense, Dilated, Neighborhood, Predicate, captured_mass, layouts
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


def by_hand(q, k, pattern):
    """The share of dense attention's weight on the visible pairs, one row of N weights at a time."""
    (b, nq, heads, d), n = q.shape, k.shape[1]
    k = k.repeat_interleave(heads // k.shape[2], 2).double()
    kept = torch.zeros(heads, dtype=torch.float64)
    for x in range(b):
        one = pattern.for_batch(x) if getattr(pattern, "batch", None) else pattern
        visible = one.multiplicity(n, heads, nq) > 0
        for h in range(heads):
            for row in range(nq):
                weight = (k[x, :, h] @ q[x, row, h].double() / d**0.5).exp()
                if pattern.causal:
                    weight = weight * (torch.arange(n) <= n - nq + row)
                kept[h] += weight[visible[h, row]].sum() / weight.sum()
    return kept / (b * nq)


WEIGHED = {
    "dilated": Dilated([4, 8], [1, 2]),
    "dilated-multiset": Dilated([8, 8, 16], [1, 1, 2], causal=True),
    "dilated-uncovered": Dilated([6], [3]),
    "blocks-by-head": BlockSparse(layouts.random(0.4, 1, per_head=True), 8, causal=True),
    "blocks-by-sequence": BlockSparse(tools.batch_layout(2, 4, 5, 5), 8),
    "neighborhood": Neighborhood((5, 8), 1),
    "predicate": Predicate(tools.some_rows_only, causal=True),
}


@pytest.mark.parametrize("nq", [40, 13])
@pytest.mark.parametrize("pattern", WEIGHED.values(), ids=list(WEIGHED))
def test_agrees_with_a_loop_over_rows(pattern, nq):
    q, k = tools.Case("", None, 40, nq, heads=4, kv_heads=2, batch=2).inputs(torch.float64)[:2]
    torch.testing.assert_close(captured_mass(q, k, pattern), by_hand(q, k, pattern), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", tools.DTYPES, ids=tools.name_of)
def test_dense_attention_captures_everything(dtype):
    q, k = tools.Case("", None, 37, heads=3).inputs(dtype)[:2]
    got = captured_mass(q, k, Dense(causal=True))
    assert got.shape == (3,) and got.dtype == torch.float64
    torch.testing.assert_close(got, torch.ones(3, dtype=torch.float64), rtol=1e-6, atol=0)


def test_no_gradient_is_kept():
    q, k = (x.requires_grad_() for x in tools.Case("", None, 20).inputs(torch.float64)[:2])
    assert not captured_mass(q, k, Dense()).requires_grad


def test_bad_input_is_refused_and_nothing_is_nothing():
    q, k = torch.zeros(1, 6, 6, 4), torch.zeros(1, 6, 4, 4)
    tools.refused("4 key heads do not divide 6", captured_mass, q, k, Dense())
    tools.refused("scale=nan", captured_mass, q, q, Dense(), scale=float("nan"))
    tools.refused("pattern='dense': want a pattern", captured_mass, q, q, "dense")
    assert captured_mass(q[:, :, :0], q[:, :, :0], Dense()).shape == (0,)
    assert not captured_mass(q[:, :0], q, Dense()).any()
