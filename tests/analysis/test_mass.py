import pytest
import torch

from tests import tools
from workbench import BlockSparse, Dense, Dilated, Neighborhood, Predicate, captured_mass, layouts


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


PATTERNS = {
    "dilated": Dilated([4, 8], [1, 2]),
    "dilated-multiset": Dilated([8, 8, 16], [1, 1, 2], causal=True),
    "dilated-uncovered": Dilated([6], [3]),
    "blocks-by-head": BlockSparse(layouts.random(0.4, 1, per_head=True), 8, causal=True),
    "blocks-by-sequence": BlockSparse(tools.batch_layout(2, 4, 5, 5), 8),
    "neighborhood": Neighborhood((5, 8), 1),
    "predicate": Predicate(tools.some_rows_only, causal=True),
}


@pytest.mark.parametrize("nq", [40, 13])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=list(PATTERNS))
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
    with pytest.raises(ValueError, match="4 key heads do not divide 6"):
        captured_mass(q, k, Dense())
    with pytest.raises(ValueError, match="scale=nan"):
        captured_mass(q, q, Dense(), scale=float("nan"))
    with pytest.raises(ValueError, match="pattern='dense': want a pattern"):
        captured_mass(q, q, "dense")
    assert captured_mass(q[:, :, :0], q[:, :, :0], Dense()).shape == (0,)
    assert not captured_mass(q[:, :0], q, Dense()).any()
