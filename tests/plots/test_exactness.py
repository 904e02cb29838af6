"""The exactness figure and tables show the rows of the error probe, and flag what is over budget or refused."""

import pandas as pd
import pytest

import workbench as wb
from workbench.plots import exactness
from workbench.probes import error


@pytest.fixture(scope="module")
def errors():
    both = [wb.Dense(), wb.Dilated([4, 16], [1, 4])]
    ran = error.table(both, n=16, backends=["torch"], dtypes=["float64", "bfloat16"])
    ran.loc[len(ran)] = {**ran.iloc[0], "dtype": "float16", "status": "refused"}  # beside types that ran
    return pd.concat([ran, error.table(both, n=16, backends=["fa4"], dtypes=["float64"])], ignore_index=True)


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


def test_the_summary_counts_by_kernel_and_in_all(errors):
    shown = exactness.summary(errors)
    assert list(shown.index) == ["torch", "FlashAttention-4", "all"]
    ok = int((errors.status == "ok").sum())
    assert shown.loc["all", ["runs", "within", "did not run"]].tolist() == [ok, ok, len(errors) - ok]
    assert shown.loc["all"].iloc[-1] == 100 * errors.worst.max()


def test_refusals_list_who_and_why(errors):
    shown = exactness.refusals(errors)
    assert set(shown.index) == {"FlashAttention-4"} and shown.why.str.contains("not cpu").any()
    assert list(shown.refuses) == ["all"]
