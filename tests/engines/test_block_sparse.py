"""Block-sparse attention's execution: each block once, in bounded memory, one softmax over all that is visible."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from tests import tools
from workbench import BlockSparse, Neighborhood, Predicate, attention, layouts
from workbench.engines.torch import block_sparse, fused
from workbench.patterns import orderings


def inputs(n, heads=2, d=8, nq=None, kv_heads=None, batch=1, dtype=torch.float64):
    return tools.Case("", None, n, nq, heads, kv_heads, d, batch).inputs(dtype)[:3]


def run(q, k, v, pattern):
    return attention(q, k, v, pattern, backend="torch", return_lse=True)


def dense(q, k, v):
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


# --- the fused calls -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 70), st.integers(0, 70), st.integers(1, 9), st.integers(1, 9), st.floats(0.05, 1),
    st.integers(1, 4), st.booleans(),
)  # fmt: skip
def test_every_block_is_in_one_strip(n, less, bq, bk, density, limit, per_head):
    nq = max(1, n - less)
    blocks = BlockSparse(layouts.random(density, 1, per_head), (bq, bk), causal=True).blocks(n, 3, nq)
    unit = torch.arange(len(blocks.starts) - 1).repeat_interleave(blocks.starts.diff())
    places = unit // blocks.rows, unit % blocks.rows, blocks.columns
    want = sorted(zip(*(x.tolist() for x in places), strict=True))
    got = []
    for s in block_sparse.strips(blocks, limit):
        assert s.columns.shape[1] <= limit
        assert len((s.layout * blocks.rows + s.rows).unique()) == len(s.rows)  # merging in place needs distinct rows
        for layout, row, columns in zip(s.layout.tolist(), s.rows.tolist(), s.columns.tolist(), strict=True):
            got += [(layout, row, column) for column in columns]
    assert sorted(got) == want


def computed(monkeypatch, call) -> list[int]:
    """Scores (query, key, head) in each fused call of a forward."""
    scores, forward = [], fused.forward

    def spy(q, k, *rest):
        scores.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
        return forward(q, k, *rest)

    monkeypatch.setattr(fused, "forward", spy)
    call()
    return scores


@pytest.mark.parametrize("density", [0.05, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "by-head"])
def test_the_density_asked_for_is_the_density_computed(density, per_head, monkeypatch):
    n, heads = 640, 4
    pattern = BlockSparse(layouts.random(density, 0, per_head), 16)
    scores = computed(monkeypatch, lambda: run(*inputs(n, heads), pattern))
    assert sum(scores) == pattern.pairs(n, heads) == round(density * 40 * 40) * 16 * 16 * heads


def test_fused_calls_are_few_and_of_bounded_size(monkeypatch):
    monkeypatch.setattr(block_sparse, "ELEMENTS", 16 * 8 * 2 * 20)  # 20 key blocks of 16 positions, 2 heads, head_dim 8
    pattern = BlockSparse(layouts.random(0.1), 16)
    scores = computed(monkeypatch, lambda: run(*inputs(1600), pattern))
    assert max(scores) <= 20 * 16 * 16 * 2
    assert len(scores) <= 2 * sum(scores) / max(scores)


# --- one softmax -----------------------------------------------------------------------------------------------------


def test_all_blocks_visible_is_dense_attention_not_a_sum_of_softmaxes(monkeypatch):
    monkeypatch.setattr(block_sparse, "ELEMENTS", 1)  # a merge for each block of keys
    q, k, v = inputs(100)
    out = run(q, k, v, BlockSparse(layouts.strided(1), 8))[0]
    torch.testing.assert_close(out, dense(q, k, v), rtol=1e-12, atol=1e-12)


# --- masks -----------------------------------------------------------------------------------------------------------


def test_a_predicate_is_never_asked_about_positions_that_do_not_exist():
    n, asked = 143, []

    def seen(h, i, j):
        asked.append((int(i.min()), int(i.max()), int(j.min()), int(j.max())))
        return (i - j).abs() < 30

    q, k, v = inputs(n)
    for pattern in (Predicate(seen), BlockSparse(layouts.local(1), 64, predicate=seen)):
        run(q, k, v, pattern)
    assert min(x[0] for x in asked) >= 0 and min(x[2] for x in asked) >= 0
    assert max(x[1] for x in asked) < n and max(x[3] for x in asked) < n


@pytest.mark.parametrize("dtype", tools.DTYPES, ids=tools.name_of)
def test_the_past_does_not_change_by_a_bit_with_the_future(dtype):
    pattern = BlockSparse(layouts.local(1) | layouts.global_(1), 8, causal=True)
    q, k, v = inputs(67, dtype=dtype)
    tools.check_past(lambda k, v: run(q, k, v, pattern), k, v, (1, 8, 33, 66))


def test_cached_decoding_step_by_step_is_the_full_run():
    pattern = BlockSparse(layouts.local(1) | layouts.strided(3), (4, 8), causal=True)
    q, k, v = inputs(37, heads=4, kv_heads=2)
    out = run(q, k, v, pattern)[0]
    for t in range(37):
        step = run(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], pattern)[0]
        torch.testing.assert_close(step, out[:, t : t + 1], rtol=1e-12, atol=1e-12)


# --- orderings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ordering", [orderings.hilbert((9, 7)), orderings.random((9, 7), seed=1)], ids=lambda o: o.name
)
def test_a_permuted_neighborhood_un_permuted_is_the_natural_one(ordering):
    q, k, v = inputs(63)
    want, want_lse = run(q, k, v, Neighborhood((9, 7), 2))
    out, lse = run(*(x[:, ordering.curve] for x in (q, k, v)), Neighborhood((9, 7), 2, ordering))
    torch.testing.assert_close(out[:, ordering.rank], want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse[..., ordering.rank], want_lse, rtol=1e-12, atol=1e-12)
