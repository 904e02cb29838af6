"""The exactness figure and tables show the rows of the error probe, and flag what is over budget or refused."""

import matplotlib

matplotlib.use("Agg")

import pandas as pd
import pytest

import workbench as wb
from workbench.plots import exactness
from workbench.probes import error


@pytest.fixture(scope="module")
def errors():
    both = [wb.Dense(), wb.Dilated([4, 16], [1, 4])]
    ran = error.table(both, n=16, backends=["torch"], dtypes=["float64", "bfloat16"])
    return pd.concat([ran, error.table(both, n=16, backends=["flex"], dtypes=["float64"])], ignore_index=True)


def test_exactness_draws_each_run_as_a_share_of_its_budget_and_what_was_refused(errors):
    fig = exactness.figure(errors)
    ok = errors.status == "ok"
    for ax in fig.axes:
        dots = [x for line in ax.get_lines() if line.get_marker() == "o" for x in line.get_xdata()]
        crosses = [x for line in ax.get_lines() if line.get_marker() == "x" for x in line.get_xdata()]
        assert len(dots) == ok.sum() and max(dots) < 1 and len(crosses) == (~ok).sum()
    share = max(errors.error_out[ok] / errors.budget_out[ok])
    drawn = [x for line in fig.axes[0].get_lines() if line.get_marker() == "o" for x in line.get_xdata()]
    assert max(drawn) == pytest.approx(share)


def test_a_run_over_its_budget_is_ringed(errors):
    over = errors[errors.status == "ok"].assign(error_out=lambda rows: 2 * rows.budget_out)
    lines = [line for line in exactness.figure(over).axes[0].get_lines() if line.get_marker() == "o"]
    rings = [line for line in lines if line.get_markeredgecolor() == "red"]
    assert sum(len(line.get_xdata()) for line in rings) == len(over)


def test_the_exactness_table_flags_what_is_over_budget(errors):
    shown = exactness.table(errors)
    ok = errors.status == "ok"
    assert set(shown.verdict[ok.to_numpy()]) == {"within"} and set(shown.verdict[~ok.to_numpy()]) == {"refused"}
    over = errors.assign(worst=2.0)[ok]
    assert set(exactness.table(over).verdict) == {"OVER"}
    row = errors[ok].iloc[0]
    assert shown["values"].iloc[0] == pytest.approx(row.error_out / row.budget_out)
    gradients = [row[f"error_{x}"] / row[f"budget_{x}"] for x in error.GRADIENTS]
    assert shown["gradients"].iloc[0] == pytest.approx(max(gradients))


def test_the_summary_counts_by_kernel_and_in_all(errors):
    shown = exactness.summary(errors)
    assert list(shown.index) == ["torch", "FlexAttention", "all"]
    ok = int((errors.status == "ok").sum())
    assert shown.loc["all", ["runs", "within", "refused"]].tolist() == [ok, ok, len(errors) - ok]
    assert shown.loc["all"].iloc[-1] == 100 * errors.worst.max()


def test_values_without_gradients_are_one_row(errors):
    values = error.table([wb.Dense()], n=16, backends=["torch"], dtypes=["float32"]).iloc[0].to_dict()
    same = {key: values[key] for key in ("pattern", "causal", "backend", "dtype")}
    refused = same | {"mode": "fwdbwd", "status": "refused", "error": "no backward here"}
    grads = [f"{kind}_{name}" for kind in ("error", "budget") for name in error.GRADIENTS]
    ran = {key: value for key, value in values.items() if key not in grads} | {"mode": "fwd"}
    rows = pd.concat([errors, pd.DataFrame([refused, ran])], ignore_index=True)
    shown = exactness.table(rows)
    assert len(shown) == len(rows) - 1
    assert (
        pd.isna(shown["gradients"].iloc[-1]) and shown["verdict"].iloc[-1] == "within" and shown["values"].iloc[-1] < 1
    )
    assert shown["gradients"][:-1].notna().tolist() == (errors.status == "ok").tolist()
    assert list(exactness.refusals(rows).refuses) == ["all", "gradients"]


def test_refusals_list_who_and_why(errors):
    shown = exactness.refusals(errors)
    assert set(shown.index) == {"FlexAttention"} and shown.why.str.contains("float64").any()
