"""Dilated attention's execution: which fused calls it makes, on which views, and what LongNet's users rely on."""

import json
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests import tools
from workbench import Dense, Dilated, attention


def inputs(n, heads=2, d=8, nq=None, kv_heads=None, batch=1, dtype=torch.float64, grad=False):
    case = tools.Case("", None, n, nq, heads, kv_heads, d, batch)
    return [x.requires_grad_(grad) for x in case.inputs(dtype)[:3]]


def run(q, k, v, pattern):
    return attention(q, k, v, pattern, backend="torch", return_lse=True)


# --- the fused calls -------------------------------------------------------------------------------------------------


def peak_above_inputs(call, trace) -> int:
    """The largest sum of live bytes that torch allocates during call()."""
    with torch.profiler.profile(profile_memory=True) as profile:
        result = call()
    profile.export_chrome_trace(str(trace))
    del result
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


def test_a_forward_holds_at_most_three_times_its_output(tmp_path):
    pattern = tools.longnet(8)()
    q, k, v = (torch.randn(1, 16384, 12, 64) for _ in range(3))
    output = q.numel() * q.element_size()
    with torch.no_grad():
        peak = peak_above_inputs(lambda: attention(q, k, v, pattern, backend="torch"), tmp_path / "trace.json")
    assert output <= peak <= 3 * output


# --- the multiset ----------------------------------------------------------------------------------------------------


def test_a_branch_whose_lse_is_exactly_zero_counts_with_weight_one():
    q, k, v = inputs(12)
    q = torch.zeros_like(q)  # scores of 0: a branch that sees m keys has the denominator m, so lse 0 for one key
    out, lse = run(q, k, v, Dilated([1, 4], [1, 1]))
    mean = v.unflatten(1, (3, 4)).mean(2).repeat_interleave(4, 1)
    torch.testing.assert_close(out, (v + 4 * mean) / 5)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(5)))
    assert torch.equal(run(q, k, v, Dilated([1], [1]))[1], torch.zeros_like(lse))


# --- against dense attention -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("n", [1, 7, 129])
def test_one_long_undilated_branch_is_dense_attention(n, causal):
    q, k, v = inputs(n, heads=3, batch=2)
    want = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)
    for w in (n, n + 1, 1000):
        torch.testing.assert_close(run(q, k, v, Dilated([w], [1], causal))[0], want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(run(q, k, v, Dense(causal))[0], want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(attention(q, k, v, Dense(causal)), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", tools.DTYPES, ids=tools.name_of)
@pytest.mark.parametrize(
    "pattern",
    [lambda: Dense(True), tools.longnet(512, True), lambda: Dilated([7, 13, 4], [3, 1, 2], causal=True)],
    ids=["dense", "longnet", "prime"],
)
def test_the_past_does_not_change_by_a_bit_with_the_future(pattern, dtype):
    pattern, (q, k, v) = pattern(), inputs(67, heads=12, dtype=dtype)
    tools.check_past(lambda k, v: run(q, k, v, pattern), k, v, (1, 8, 33, 66))


@pytest.mark.parametrize("kv_heads", [6, 2])
def test_cached_decoding_step_by_step_is_the_full_run(kv_heads):
    pattern = Dilated([4, 8, 16], [1, 2, 3], causal=True)
    q, k, v = inputs(37, heads=6, kv_heads=kv_heads)
    out, lse = run(q, k, v, pattern)
    for t in range(37):
        step, step_lse = run(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], pattern)
        torch.testing.assert_close(step, out[:, t : t + 1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(step_lse, lse[..., t : t + 1], rtol=1e-12, atol=1e-12)
    for nq in (5, 16, 21, 36):  # and several tokens at a time
        step, step_lse = run(q[:, -nq:], k, v, pattern)
        torch.testing.assert_close(step, out[:, -nq:], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(step_lse, lse[..., -nq:], rtol=1e-12, atol=1e-12)


# --- rows that no branch reaches -------------------------------------------------------------------------------------


def test_uncovered_rows_are_zero_in_values_and_gradients():
    pattern, (q, k, v) = Dilated([6, 12], [2, 4]), inputs(48, heads=3, grad=True)
    out, lse = run(q, k, v, pattern)
    dark = -torch.inf == lse[0].T  # (N, H)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.randn_like(out), torch.randn_like(lse)))
    assert dark.any() and not dark.all()
    assert not any(x[0][dark].any() for x in (out, dq, dk, dv))  # a row that is dark as a query is so as a key
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))
    torch.testing.assert_close((~dark).double().mean(0), pattern.coverage(48, 3))
