"""The oracle against its definition: a double loop over a list of visible keys, written without torch's operations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from tests import tools
from workbench import BlockSparse, Dense, Dilated, Neighborhood, Predicate, layouts, reference
from workbench.patterns import orderings


def by_hand(q, k, v, keys_of, scale=None):
    """out and lse, a number at a time; keys_of(h, i) lists the keys that query i of head h sees, some repeatedly."""
    (batch, nq, heads, d), n = q.shape, k.shape[1]
    group, scale = heads // k.shape[2], 1 / math.sqrt(d) if scale is None else scale
    qs, ks, vs = q.tolist(), k.tolist(), v.tolist()
    out = [[[[0.0] * d for _ in range(heads)] for _ in range(nq)] for _ in range(batch)]
    lse = [[[-math.inf] * nq for _ in range(heads)] for _ in range(batch)]
    for b in range(batch):
        for t in range(nq):
            for h in range(heads):
                total, sums = 0.0, [0.0] * d
                for j in keys_of(h, n - nq + t):
                    score = sum(x * y for x, y in zip(qs[b][t][h], ks[b][j][h // group], strict=True))
                    weight = math.exp(scale * score)
                    total += weight
                    sums = [s + weight * x for s, x in zip(sums, vs[b][j][h // group], strict=True)]
                if total:
                    out[b][t][h], lse[b][h][t] = [s / total for s in sums], math.log(total)
    return torch.tensor(out, dtype=torch.float64), torch.tensor(lse, dtype=torch.float64)


def dilated(n, branches, causal, offset):
    def keys_of(h, i):
        keys = []
        for w, r in branches:
            kept = [j for j in range(n) if j // w == i // w and (j % w) % r == offset(h, r)]
            keys += [j for j in kept if not causal or j <= i] if i in kept else []
        return keys

    return keys_of


def agree(pattern, case, keys_of, scale=None):
    q, k, v = case.inputs(torch.float64)[:3]
    got, want = reference(q, k, v, pattern, scale), by_hand(q, k, v, keys_of, scale)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == torch.float64
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def sizes(n, nq=None, heads=2, kv_heads=None, batch=1):
    return tools.Case("", None, n, nq, heads, kv_heads, 3, batch)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("nq", [29, 10])
def test_dilated_counts_a_key_once_for_each_branch(causal, nq):
    branches = [(4, 1), (8, 2), (16, 4)]
    pattern = Dilated(*zip(*branches, strict=True), causal=causal)
    keys_of = dilated(29, branches, causal, lambda h, r: h % r)
    assert max(keys_of(0, 28).count(j) for j in range(29)) == 3
    agree(pattern, sizes(29, nq, heads=6, kv_heads=2, batch=2), keys_of)


def test_dilated_with_blocked_offsets():
    branches = [(8, 2), (12, 3)]
    pattern = Dilated(*zip(*branches, strict=True), offsets="blocked")
    agree(pattern, sizes(26, heads=7), dilated(26, branches, False, lambda h, r: h // math.ceil(7 / r)))


def test_partition_gives_each_head_one_branch_and_averages():
    branches, owner = [(4, 1), (8, 2), (16, 4)], [0, 0, 0, 1, 1, 2, 2]  # 7 heads: 3, 2 and 2
    pattern = Dilated(*zip(*branches, strict=True), heads="partition")
    q, k, v = sizes(21, heads=7).inputs(torch.float64)[:3]

    def keys_of(h, i):
        b = owner[h]
        return dilated(21, [branches[b]], False, lambda h, r: b % r)(h, i)

    out, lse = by_hand(q, k, v, keys_of)
    got = reference(q, k, v, pattern)
    torch.testing.assert_close(got[0], out / 3, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[1], lse, rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.integers(1, 20), st.integers(0, 20), st.integers(1, 4), st.booleans(),
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 6)), min_size=1, max_size=3),
)  # fmt: skip
def test_dilated_on_drawn_shapes(n, less, heads, causal, branches):
    pattern = Dilated(*zip(*branches, strict=True), causal=causal)
    agree(pattern, sizes(n, max(1, n - less), heads), dilated(n, branches, causal, lambda h, r: h % r))


def test_block_sparse():
    def keys_of(h, i):
        return [j for j in range(29) if j <= i and (abs(i // 4 - j // 8) <= 0 or i // 4 < 1 or j // 8 < 1)]

    agree(BlockSparse(layouts.local(0) | layouts.global_(1), (4, 8), causal=True), sizes(29, 17, batch=2), keys_of)


def test_a_layout_of_each_sequence():
    layout = tools.batch_layout(2, 2, 4, 4)
    case = sizes(29, batch=2)
    out, lse = reference(*case.inputs(torch.float64)[:3], BlockSparse(layout, 8))
    for b in range(2):
        q, k, v = (x[b : b + 1] for x in case.inputs(torch.float64)[:3])
        table = layout.tensor[b].tolist()
        want = by_hand(q, k, v, lambda h, i, table=table: [j for j in range(29) if table[h][i // 8][j // 8]])
        torch.testing.assert_close(out[b : b + 1], want[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[b : b + 1], want[1], rtol=1e-12, atol=1e-12)


def test_neighborhood_in_any_order():
    ordering = orderings.hilbert((5, 6))
    place = [divmod(cell, 6) for cell in ordering.curve.tolist()]

    def keys_of(h, i):
        (y, x) = place[i]
        return [j for j in range(30) if abs(place[j][0] - y) <= 1 and abs(place[j][1] - x) <= 2]

    agree(Neighborhood((5, 6), (1, 2), ordering), sizes(30, kv_heads=1), keys_of)


def test_predicate_and_rows_that_see_nothing():
    def keys_of(h, i):
        return [j for j in range(23) if j <= i and i % 7 != 5 and (i * 7 + j + h) % 5 != 0]

    assert not keys_of(0, 5)
    agree(Predicate(tools.some_rows_only, causal=True), sizes(23, 20), keys_of)
    agree(Predicate(tools.some_rows_only, causal=True), sizes(23, 20), keys_of, scale=1.7)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("n", [1, 2, 37])
def test_dense_is_torchs_attention_values_and_gradients(n, causal):
    q, k, v, g, _ = tools.Case("", None, n, heads=4, kv_heads=2, batch=2).inputs(torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    heads_first = (x.transpose(1, 2) for x in leaves)
    want = scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2)
    got = reference(*leaves, Dense(causal))[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for x, y in zip(torch.autograd.grad(got, leaves, g), torch.autograd.grad(want, leaves, g), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("id", ["dilated-uncovered-rows-causal", "one-dark-row", "sees-nothing", "local-global"])
def test_gradients_by_finite_differences(id):
    case = tools.TABLE[id]
    pattern = case.pattern()

    def finite(q, k, v):
        out, lse = reference(q, k, v, pattern)
        return out, torch.where(lse == -torch.inf, 0, lse)

    small = tools.Case("", None, 12 if id.startswith("dilated") else case.n, 5, case.heads, case.kv_heads, 2)
    assert torch.autograd.gradcheck(finite, [x.requires_grad_() for x in small.inputs(torch.float64)[:3]])
