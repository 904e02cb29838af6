import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.patterns import Dense, Window

LONG = 1 << 24


def count(n, width, causal, dilation, sinks, heads=1):
    """The definition, a query at a time: the keys that it lists."""
    seen = torch.zeros(heads, n, n, dtype=torch.int32)
    for i in range(n):
        steps = range(width) if causal else range(-(width // 2), width // 2 + 1)
        keys = {i - m * dilation for m in steps} | set(range(sinks))
        seen[:, i, [j for j in keys if 0 <= j <= (i if causal else n - 1)]] = 1
    return seen


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 40), queries=st.floats(0, 1), width=st.integers(1, 50), causal=st.booleans(),
    dilation=st.sampled_from([1, 1, 2, 3, 7, 13, 60]), sinks=st.sampled_from([0, 0, 1, 4, 5, 50]),
)  # fmt: skip
def test_any_configuration(agree, n, queries, width, causal, dilation, sinks):
    want = count(n, width, causal, dilation, sinks, heads=2)
    agree(Window(width, causal, dilation, sinks), want, round(queries * n), (1, 4, (3, 5), (8, 2), 128))


def test_numbers_of_any_size(agree):
    agree(Window(1 << 80, True, sinks=1 << 80), count(9, 9, True, 1, 9))
    agree(Window(1 << 80, dilation=1 << 80), count(9, 1, False, 1, 0))


@pytest.mark.parametrize("causal", [False, True])
def test_dense_is_a_window_of_all(agree, causal):
    for n, nq in ((0, 0), (1, 1), (7, 7), (29, 29), (29, 5), (29, 0), (12, 11)):
        agree(Dense(causal), count(n, 99, causal, 1, 0, heads=2), nq)


@pytest.mark.parametrize("pattern, seconds", [
    (Window(512, causal=True), 1), (Window(512, sinks=4), 1), (Window(512, True, 4), 5), (Window(16, True, 4096), 5),
], ids=lambda x: getattr(x, "name", x))  # fmt: skip
def test_long_sequences(one_core_seconds, pattern, seconds):
    assert one_core_seconds(lambda: pattern.blocks(LONG, 1)) < seconds
    assert one_core_seconds(lambda: (pattern.pairs(LONG, 12), pattern.coverage(LONG, 12))) < 0.1
