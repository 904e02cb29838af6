"""The error probe: what it measures against the oracle, and that its budgets can be missed."""

import pytest
import torch

import workbench as wb
from workbench.engines import dispatch
from workbench.patterns import layouts
from workbench.plots import exactness
from workbench.probes import error
from workbench.probes.case import Case

N = 24
PATTERNS = [
    wb.Dense(causal=True), wb.Dilated([4, 8], [1, 2]), wb.BlockSparse(layouts.local(1), 8),
    wb.Neighborhood((4, 6), 1), wb.Predicate(lambda h, i, j: (i - j).abs() < 3),
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_every_error_is_within_its_budget(pattern, dtype):
    rows = error.table([pattern], n=N, backends=["reference", "torch"], dtypes=[dtype], head_dim=8, kv_heads=1, nq=17)
    assert list(rows.status) == ["ok", "ok"]
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert (rows[f"error_{name}"] <= rows[f"budget_{name}"]).all(), name
    assert (rows.worst <= 1).all() and (rows.filter(regex="budget_") < 0.05).all(axis=None)


def case(pattern, dtype, backend):
    return Case(pattern, N, 2, 32, dtype, backend, "fwdbwd")


DEGRADED = {
    "output scaled": (lambda out, lse: (out * 1.03, lse), "out"),
    "lse shifted": (lambda out, lse: (out, lse + 0.01), "lse"),
    "lse no number": (lambda out, lse: (out, lse * torch.nan), "lse"),
    "gradient scaled": (lambda out, lse: (out + 0.1 * (out - out.detach()), lse), "dq"),  # and the value is right
    "gradient dropped": (lambda out, lse: (out.detach().clone().requires_grad_() + 0 * out, lse), "dv"),
}


@pytest.mark.parametrize("dtype", error.DTYPES, ids=str)
@pytest.mark.parametrize("how, name", DEGRADED.values(), ids=list(DEGRADED))
def test_a_degraded_backend_misses_its_budget(monkeypatch, dtype, how, name):
    right = dispatch.attention
    monkeypatch.setattr(dispatch, "attention", lambda *x, **options: how(*right(*x, **options)))
    row = error.of(case(PATTERNS[1], dtype, "torch"))
    assert row[f"error_{name}"] > row[f"budget_{name}"] and row["worst"] > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_budget_of_16_bits_is_twice_torchs_own_error_and_a_rounding(dtype):
    row = error.of(case(wb.Dense(), dtype, "reference"))
    rounding = row["error_out"]  # the oracle, rounded once
    assert rounding > 0 and row["budget_out"] > 2 * 1.5 * rounding
    assert row["error_dq"] > 0  # its gradients are rounded once, too, and compared with those of float64


def test_a_refusal_is_a_row_with_its_reason():
    rows = error.table([PATTERNS[1]], n=N, backends=["fa4", "torch"], dtypes=["float64"])
    assert list(rows.status) == ["refused", "ok"]
    assert "not cpu" in rows.error[0]


def test_where_gradients_are_refused_the_values_are_a_row_of_their_own(monkeypatch):
    def why_not(backend, q, k, v, pattern):
        return "no backward here" if q.requires_grad else None

    monkeypatch.setattr(dispatch, "why_not", why_not)
    rows = error.table([wb.Dense()], n=N, backends=["torch"], dtypes=["float32"])
    assert list(zip(rows["mode"], rows.status, strict=True)) == [("fwdbwd", "refused"), ("fwd", "ok")]
    assert list(exactness.refusals(rows).refuses) == ["gradients"]
    assert exactness.refusals(rows[rows.status == "ok"].drop(columns="error")).empty, "where nothing is refused"
    assert rows.error[0] == "no backward here" and rows.error_out[1] <= rows.budget_out[1]


def test_where_values_are_refused_too_the_reason_is_theirs(monkeypatch):
    monkeypatch.setattr(dispatch, "why_not", lambda *_: "there is no compiler here")
    rows = error.table([PATTERNS[2]], n=N, backends=["torch"], dtypes=["float32"])
    assert list(rows.error) == ["there is no compiler here"]
    assert list(exactness.refusals(rows).refuses) == ["all"]


def test_one_token_whose_gradients_are_exactly_zero_has_no_division_by_zero():
    row = error.of(Case(wb.Dense(), 1, 2, 32, torch.bfloat16, "reference", "fwdbwd"))
    assert row["status"] == "ok" and row["worst"] <= 1


@pytest.mark.parametrize("backend", ["sdpa", "eager", "auto", "workbench.probes.case:eager"])
def test_any_backend_of_a_case_is_measured_by_the_same_budgets(backend):
    row = error.of(Case(wb.Dense(causal=":" not in backend), N, 4, 32, "float64", backend, "fwdbwd", kv_heads=2))
    assert row["status"] == "ok" and row["worst"] <= 1 and row["backend"] != "auto" and row["error_dv"] > 0
    off = error.of(case(wb.Dense(), torch.float64, lambda q, k, v: 1.01 * wb.attention(q, k, v, wb.Dense())))
    assert off["worst"] > 1 and "error_lse" not in off


def test_what_is_no_case_is_refused_and_what_cannot_run_is_a_row():
    with pytest.raises(ValueError, match="case='dense': want a Case"):
        error.of("dense")
    assert error.of(case(wb.Dilated([4], [1]), torch.float64, "sdpa"))["status"] == "refused"
