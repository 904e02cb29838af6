"""The table: every execution against the float64 oracle, odd shapes first, values and gradients, in every dtype."""

import dataclasses
import functools
import random
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tools
from tests.patterns.test_definitions import tree
from workbench import BlockSparse, Dense, Dilated, Neighborhood, Predicate, attention, layouts
from workbench.engines.torch import block_sparse, dilated, fused


@pytest.mark.parametrize("dtype", tools.DTYPES, ids=tools.name_of)
@pytest.mark.parametrize("case", tools.TABLE.values(), ids=list(tools.TABLE))
def test_agrees_with_the_oracle(case, dtype):
    tools.check(case, dtype)


def test_memory_that_is_not_written_is_nan():
    with tools.poisoned():
        assert torch.empty(5, 3).isnan().all()
        assert torch.empty(4, dtype=torch.bfloat16).new_empty(2, 2).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("id", ["dilated-29-tokens", "local-ragged", "random-by-head-grouped", "one-dark-row"])
def test_the_reference_backend_is_the_oracle(id):
    for dtype in tools.DTYPES:
        tools.check(tools.TABLE[id], dtype, backend="reference")


@pytest.mark.parametrize("id", [id for id, case in tools.TABLE.items() if case.head_dim == 8 and case.n < 100])
def test_the_unfused_fallback(id, monkeypatch):
    """What runs where no fused kernel does (float64, masks and unusual head_dims on CUDA), here on a CPU."""
    monkeypatch.setattr(fused, "kernel", lambda q, mask=None: "unfused")
    monkeypatch.setattr(fused, "SCORES", 1 << 9)  # a few rows at a time
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        tools.check(tools.TABLE[id], dtype)


SPLIT = ["dense-last-9-queries", "dilated-29-tokens", "dilated-longnet-64-grouped-causal",
         "dilated-queries-inside-a-segment", "random-by-head-grouped", "blocks-with-a-predicate-causal"]  # fmt: skip


@pytest.mark.parametrize("id", SPLIT)
def test_calls_that_are_split_for_memory_or_for_a_grid_limit(id, monkeypatch):
    monkeypatch.setattr(fused, "MAX_BATCH", 1)
    monkeypatch.setattr(dilated, "ELEMENTS", 1)
    monkeypatch.setattr(block_sparse, "ELEMENTS", 1)
    monkeypatch.setattr(block_sparse, "SCORES", 1)
    tools.check(tools.TABLE[id], torch.float64)
    tools.check(tools.TABLE[id], torch.bfloat16)


@pytest.mark.parametrize("id", ["dilated-longnet-64-grouped", "local-global", "neighborhood-2d", "dense-prime"])
def test_large_scores_stay_finite_and_right(id):
    case = tools.TABLE[id]
    q, k, v, g, gl = case.inputs(torch.float64)
    inputs = (q * 40, k * 40, v, g, gl)
    want = tools.oracle(inputs, case.pattern())
    run = functools.partial(attention, backend="torch", return_lse=True)
    got = tools.differentiate(run, inputs, case.pattern())
    for name in tools.NAMES:
        assert tools.relative(got[name], want[name], g) < 1e-10, name


OF_VALUES = ["dense-last-9-queries", "dilated-partition", "random-by-head-grouped", "window-dilated-sinks"]


@pytest.mark.parametrize("widths", [(5, 3), (3, 7), (8, 1)], ids=str)
@pytest.mark.parametrize("id", OF_VALUES)
def test_values_may_have_another_head_dim(id, widths):
    """DeepSeek's latent attention has 192 of queries and keys, 128 of values."""
    case = dataclasses.replace(tools.TABLE[id], head_dim=max(widths))
    q, k, v, g, gl = case.inputs(torch.float64)
    inputs = *(x[..., : widths[0]] for x in (q, k)), *(x[..., : widths[1]] for x in (v, g)), gl
    want = tools.oracle(inputs, case.pattern())
    assert want["out"].shape[3] == widths[1]
    for backend in ("torch", "reference"):
        run = functools.partial(attention, backend=backend, return_lse=True)
        got = tools.differentiate(run, inputs, case.pattern())
        assert tools.lse_error(got["lse"], want["lse"]) < 1e-10
        for name in ("out", "dq", "dk", "dv"):
            assert got[name].shape == want[name].shape and tools.relative(got[name], want[name], g) < 1e-10, name


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 30))
def test_agrees_with_the_oracle_on_drawn_cases(seed):
    draw = random.Random(seed)
    n, kv_heads, group = draw.randint(1, 40), draw.randint(1, 3), draw.randint(1, 3)
    pattern = tree(draw, n, draw.choice([0, 0, 1, 2]))
    sizes = draw.randint(1, n), kv_heads * group, kv_heads, draw.randint(1, 9), draw.randint(1, 2)
    tools.check(tools.Case(repr(pattern), lambda: pattern, n, *sizes), torch.float64)


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("backend", tools.tiers(["reference", "torch", "triton"], ["reference", "torch"]))
@pytest.mark.parametrize("pattern", [Dense(True), Dilated([16, 32], [1, 2], True), BlockSparse(layouts.local(1), 16)],
                         ids=["dense", "dilated", "blocks"])  # fmt: skip
def test_a_value_that_is_not_finite_stays_in_its_sequence_and_with_its_heads(pattern, backend, value):
    """It reaches every row that sees it, may reach those that do not, and no other sequence or group of heads."""
    if backend == "triton" and (torch.cuda.is_available() or "workbench.engines.triton.tile_ops" not in sys.modules):
        pytest.skip("the kernels run in Triton's interpreter here")
    case = tools.Case("", None, 24, heads=4, kv_heads=2, head_dim=16, batch=2)
    inputs = case.inputs(torch.float32)
    run = functools.partial(attention, backend=backend, return_lse=True)
    want = tools.differentiate(run, inputs, pattern)
    sees = pattern.multiplicity(24, 4)[:2, :, 20] > 0  # (heads of the key head, rows)
    for which in (1, 2):  # k, v
        bad = [x.clone() for x in inputs]
        bad[which][0, 20, 0, 3] = value
        got = tools.differentiate(run, bad, pattern)
        if which == 2 or value is torch.nan:
            assert not got["out"][0, :, :2].transpose(0, 1)[sees].isfinite().all(-1).any()
        for name in ("out", "dq", "dk", "dv"):
            heads = slice(2, None) if name in ("out", "dq") else slice(1, None)
            for x, y in ((got[name][1], want[name][1]), (got[name][0, :, heads], want[name][0, :, heads])):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


LOUD = {
    "dense": Dense(True), "dilated": Dilated([8, 16], [1, 2]), "blocks": BlockSparse(layouts.local(1), 4, True),
    "neighborhood": Neighborhood((4, 6), 1), "predicate": Predicate(tools.every_third),
    "dilated-prime-causal": Dilated([7, 13, 4], [3, 1, 2], causal=True),
}  # fmt: skip


@pytest.mark.parametrize("dtype, size", [(torch.float64, 1e4), (torch.float32, 1e4), (torch.float16, 3e2)], ids=str)
@pytest.mark.parametrize("pattern", LOUD.values(), ids=list(LOUD))
def test_a_loud_key_changes_nothing_in_rows_that_do_not_see_it(pattern, dtype, size):
    q, k, v, g, gl = tools.Case("", None, 24).inputs(dtype)
    blind = (pattern.multiplicity(24, 2)[:, :, 20] == 0)[None]  # (1, heads, rows)
    assert blind.any(2).all() and not blind.all()
    inputs = q, k, v, g * blind.transpose(1, 2)[..., None], gl * blind
    loud_k, loud_v = k.clone(), v.clone()
    loud_k[:, 20], loud_v[:, 20] = size * k[:, 20].sign(), size
    run = functools.partial(attention, backend="torch", return_lse=True)
    want = tools.differentiate(run, inputs, pattern)
    got = tools.differentiate(run, (q, loud_k, loud_v, *inputs[3:]), pattern)
    assert not torch.equal(got["out"], want["out"])
    for name in ("dq", "dk", "dv"):
        assert torch.equal(got[name], want[name]), name
    assert torch.equal(got["out"].transpose(1, 2)[blind], want["out"].transpose(1, 2)[blind])
    assert torch.equal(got["lse"][blind], want["lse"][blind])
