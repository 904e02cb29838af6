"""The oracle against its definition: loops over a list of visible keys, written without torch's operations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tools
from workbench import Dense, Dilated, Window, reference


def by_hand(q, k, v, keys_of, scale=None, change=lambda s, h, i, j: s):
    """out and lse, a number at a time; keys_of(h, i) lists the keys that query i of head h sees, some repeatedly;
    change: what is done to a score."""
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
                    weight = math.exp(change(scale * score, h, n - nq + t, j))
                    total += weight
                    sums = [s + weight * x for s, x in zip(sums, vs[b][j][h // group], strict=True)]
                if total:
                    out[b][t][h], lse[b][h][t] = [s / total for s in sums], math.log(total)
    return torch.tensor(out, dtype=torch.float64), torch.tensor(lse, dtype=torch.float64)


def agree(case, scale=None, seed=0):
    """Keys are those that `multiplicity` counts, which tests/patterns hold to definitions of their own."""
    pattern, (q, k, v, *_) = case.pattern(), case.inputs(torch.float64, seed=seed)
    found, divided = reference(q, k, v, pattern, scale), pattern.divisor(case.heads)
    for b, one in enumerate(pattern.each() if pattern.batch else [pattern] * case.batch):
        seen = one.multiplicity(case.n, case.heads)
        want = by_hand(*(x[b : b + 1] for x in (q, k, v)), lambda h, i, seen=seen: keys(seen[h, i]), scale)
        for got, right in zip(found, (want[0] / divided, want[1]), strict=True):
            assert got.dtype == torch.float64
            torch.testing.assert_close(got[b : b + 1], right, rtol=1e-12, atol=1e-12)


def keys(row):
    """The keys of a row of counts, as often as they count."""
    return torch.arange(len(row)).repeat_interleave(row).tolist()


IDS = (
    "dense-last-9-queries-causal", "dilated-29-tokens-causal", "dilated-same-branch-thrice", "dilated-blocked-offsets",
    "dilated-partition-fewer-heads", "dilated-last-query", "local-global-causal", "layout-of-each-sequence",
    "blocks-with-a-predicate", "window-dilated-sinks-causal", "only-key-block-0", "one-dark-row", "sees-nothing",
    "neighborhood-hilbert", "each-head-its-own-causal", "dilated-partition",
)  # fmt: skip


@pytest.mark.parametrize("id", IDS)
def test_is_the_softmax_over_the_keys_that_are_counted(id):
    agree(tools.TABLE[id])


@pytest.mark.parametrize("pattern, back", [(Dense(True), None), (Window(3), 1), (Window(3, True), 2),
                                           (Window(2, dilation=2), 1)], ids=str)  # fmt: skip
def test_scores_are_changed_before_the_softmax(pattern, back):
    (q, k, v), slopes, cap = torch.randn(3, 1, 7, 2, 4, dtype=torch.float64), torch.tensor([0.3, 0.1]).double(), 0.7
    bias = None if back is None else torch.randn(2, 2 * back + 1, dtype=torch.float64)

    def change(s, h, i, j):
        place = (j - i) // getattr(pattern, "dilation", 1)
        return cap * math.tanh(s / cap) - slopes[h] * abs(i - j) + (0 if bias is None else bias[h, place + back])

    seen = pattern.multiplicity(7, 2)
    want = by_hand(q, k, v, lambda h, i: keys(seen[h, i]), 0.5, change)
    given = {"alibi_slopes": slopes, "softcap": cap, "relative_bias": bias}
    torch.testing.assert_close(reference(q, k, v, pattern, 0.5, **given), want, rtol=1e-6, atol=1e-6)


def test_with_a_scale():
    agree(tools.TABLE["dilated-29-tokens"], scale=1.7)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.integers(1, 20), st.integers(0, 20), st.integers(1, 4), st.booleans(),
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 6)), min_size=1, max_size=3),
)  # fmt: skip
def test_dilated_on_drawn_shapes(n, less, heads, causal, branches):
    pattern = Dilated(*zip(*branches, strict=True), causal=causal)
    agree(tools.Case("", lambda: pattern, n, max(1, n - less), heads, None, 3))


@pytest.mark.parametrize("id", ["dilated-uncovered-rows-causal", "one-dark-row", "sees-nothing", "local-global"])
def test_gradients_by_finite_differences(id):
    case = tools.TABLE[id]
    pattern = case.pattern()

    def finite(q, k, v):
        out, lse = reference(q, k, v, pattern)
        return out, torch.where(lse == -torch.inf, 0, lse)

    small = tools.Case("", None, 12 if id.startswith("dilated") else case.n, 5, case.heads, case.kv_heads, 2)
    assert torch.autograd.gradcheck(finite, [x.requires_grad_() for x in small.inputs(torch.float64)[:3]])
