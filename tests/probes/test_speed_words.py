"""The sentences of notebook 05, on rows that would make them false if they only took the largest number."""

import pandas as pd
import pytest

from workbench.probes import speed


def table(mode="fwd", n=1024, dtype="float32", **took):
    """Rows as of `speed.table`: milliseconds by label; the rate is 1 / ms."""
    lines = []
    for label, ms in took.items():
        lines.append({
            "label": label, "family": "Dense" if label == "dense" else "Dilated", "backend": "torch", "mode": mode,
            "n": n, "status": "ok", "median_ms": ms, "samples_ms": [0.95 * ms, ms, 1.05 * ms], "pairs": n * n,
            "tflops": 1 / ms, "dtype": dtype, "batch": 1, "heads": 2, "head_dim": 16,
        })  # fmt: skip
    return pd.DataFrame(lines)


@pytest.mark.parametrize("took, want", [
    ({"dense": 8.0, "dilated": 2.0}, "**dilated** is the fastest here, 4 times as fast as dense (3.62 to 4.42"),
    ({"dense": 2.0, "dilated": 8.0}, "**dense** attention is the fastest; dilated, the next, takes 4 times as"),
    ({"dense": 2.1, "dilated": 2.0}, "**dilated** is not ahead of dense beyond the noise (0.95 to 1.16 between"),
    ({"dense": 2.0}, "only **dense** ran: there is nothing to compare."),
    ({"dilated": 2.0}, "only **dilated** ran: there is nothing to compare."),
])  # fmt: skip
def test_the_fastest_is_told_against_dense(took, want):
    assert speed.gain(table(**took), 1024).startswith(f"At N = 1,024, forward, {want}")


def test_rows_that_failed_are_not_fastest():
    rows = table(dense=8.0, dilated=2.0)
    rows.loc[1, "status"] = "oom"
    assert "only **dense** ran" in speed.gain(rows, 1024)
    assert "nothing ran" in speed.gain(rows, 4096) and "nothing ran" in speed.gain(rows, 1024, "fwdbwd")


def test_a_time_that_falls_as_the_sequence_grows_is_flagged():
    rows = pd.concat([table(n=4096, dilated=4700.0, dense=10.0), table(n=8192, dilated=2600.0, dense=40.0)])
    (said,) = speed.falling(rows)
    assert "dilated (torch), forward, took 4,700 ms at N = 4,096 and 2,600 ms at N = 8,192" in said
    assert speed.falling(table(dense=1.0)) == []


def test_no_share_is_more_than_all_of_a_ceiling():
    """bfloat16 attention at 24 times the rate of bfloat16 matrix products, on a CPU."""
    rows, best = table(dense=1.0, dilated=2.0, dtype="bfloat16"), {"matmul_tflops": {"bfloat16": 0.04}, "copy_gbs": 9}
    assert speed.against_ceiling(rows, best)["share"].tolist() == [1.0, 0.5]
    said = speed.ceiling(rows, best)[0]
    assert said == ("bfloat16 matrix products reach 0.04, so the ceiling is the fastest attention here: 1 TFLOP/s, by "
                    "dense, forward.")  # fmt: skip
    assert "could not be measured" in speed.ceiling(rows, {"matmul_tflops": {}, "copy_gbs": 9})[0]


def test_shares_of_a_ceiling():
    best = {"matmul_tflops": {"float32": 2.0}, "copy_gbs": 1000}
    top, close = speed.ceiling(table(dense=1.0, dilated=2.0), best)
    assert top == "The ceiling is 2 TFLOP/s, by float32 matrix products."
    assert close == "**dense** comes closest to the ceiling, at 50% (forward)."
    assert speed.against_ceiling(table(dense=1.0, dilated=2.0), best)["share"].tolist() == [0.5, 0.25]
    assert speed.ceiling(table("fwdbwd", dense=1.0), best)[1].endswith("(forward + backward).")


def test_a_busy_machine_is_told():
    rows = table(dense=1.0).assign(device="cpu", run_cuda=None, run_load=6.8, run_processors=2)
    assert speed.busy(rows) == ["**This machine was busy** (load 6.8 on 2 processors): times are upper bounds."]
    assert speed.busy(rows.assign(run_load=2.0)) == []
    assert speed.busy(rows.assign(run_load=None)) == []  # of records from before loads were noted
    assert speed.busy(rows.assign(device="cuda", run_cuda="13.0")) == []


def even(noise=1.1, **speedups):
    rows = [{"name": "dense", "speedup": 1.0, "sparsity": 0.0, "ideal": 1.0}]
    rows.append(
        {"name": "A/A", "speedup": 1.6, "speedup_low": 0.9, "speedup_high": noise, "sparsity": 0.0, "ideal": 1.0}
    )
    for percent, x in speedups.items():
        at = int(percent[1:]) / 100
        rows.append({"name": f"random-{at}", "speedup": x, "speedup_low": x - 0.1, "speedup_high": x + 0.1}
                    | {"sparsity": at, "ideal": 1 / (1 - at)})  # fmt: skip
    return pd.DataFrame(rows).assign(n=4096)


def test_the_most_is_of_the_sparse_rows_and_not_of_dense_against_itself():
    said = speed.pays(even(_0=0.9, _50=0.8, _90=0.7))
    assert "from no sparsity tried here** on" in said and "at best, at 0%, it takes 1.11 times as long" in said
    assert "1.6" not in said and "0% sparsity it is" not in said
    said = speed.pays(even(_0=0.9, _50=1.5, _90=7.0))
    assert "**from 50%** sparsity on: at 90% sparsity it is 7.00 times as fast as dense; the pairs alone would" in said


def test_what_lies_in_the_noise_does_not_pay():
    assert speed.pays_from(even(_50=1.5, _60=0.9, _90=7.0)) == 0.9  # from where every sparser one wins
    assert speed.pays_from(even(noise=1.45, _50=1.5, _90=7.0)) == 0.9
    assert speed.pays_from(even(noise=9.0, _50=1.5, _90=7.0)) is None
    assert "beyond the noise: at 90% sparsity it is 7.00 times" in speed.pays(even(noise=9.0, _90=7.0))
    assert speed.pays(even()) == "No sparse layout ran: there is nothing to compare."
