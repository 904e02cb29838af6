"""Sweeps of speed, and the sentences of notebook 05 on rows that would make them false if they took the most."""

import re

import pandas as pd
import pytest

from tests.tools import refused
from workbench.harness import records
from workbench.patterns import BlockSparse, Dense, Neighborhood, layouts
from workbench.plots import speed as draw
from workbench.probes import decode, roofline, speed, timing
from workbench.probes.case import Case

SIZES = {"heads": 2, "head_dim": 16}
SMALL = {"samples": 2, "seconds": 0.2}


@pytest.fixture(scope="module")
def lineup():
    return speed.lineup([32, 64], [1, 2], sparsity=0.75, radius=2, block_size=16, **SIZES)


def test_a_lineup_has_each_kind_of_pattern_at_any_length(lineup):
    for n in (97, 128):
        kinds = [type(at(n).pattern).__name__ for at in lineup.values()]
        assert kinds == ["Dense", "Dilated", "BlockSparse", "Neighborhood"]
    assert lineup["neighborhood"](128).pattern.shape == (8, 16)
    assert lineup["neighborhood"](97).pattern.pairs(97, 1) == Neighborhood((1, 97), 2).pairs(97, 1)


def test_a_sweep_records_a_row_for_each_pattern_length_and_mode(lineup, tmp_path):
    rows = speed.sweep(lineup, [64, 128], modes=("fwd", "fwdbwd"), folder=tmp_path, **SMALL)
    assert len(rows) == 4 * 2 * 2 == len(records.load(tmp_path)) and set(rows["status"]) == {"ok"}
    assert set(rows["backend"]) == {"sdpa", "torch"} and set(rows["label"]) == set(lineup)
    row = rows[(rows["label"] == "dense") & (rows["n"] == 128) & (rows["mode"] == "fwdbwd")].iloc[0]
    assert row["tflops"] == pytest.approx(14 * 2 * 128**2 * 16 / row["median_ms"] / 1e9)


def test_a_resumed_sweep_measures_only_what_is_missing(lineup, tmp_path, monkeypatch):
    first = speed.sweep(lineup, [64], folder=tmp_path, **SMALL)
    asked, real = [], timing.time
    monkeypatch.setattr(timing, "time", lambda case, **kw: asked.append(case.n) or real(case, **kw))
    both = speed.sweep(lineup, [64, 96], folder=tmp_path, resume=True, **SMALL)
    assert asked == [96] * 4 and len(both) == 8
    assert sorted(both[both["n"] == 64]["median_ms"]) == sorted(first["median_ms"])
    speed.sweep(lineup, [64], folder=tmp_path, **SMALL)
    assert asked.count(64) == 4  # without resume it is measured again


def test_a_refusal_is_a_row_and_not_the_end_of_the_sweep(tmp_path):
    patterns = {"slide": Neighborhood((5, 5), 1), "dense": Dense()}
    cases = {name: lambda n, p=p: Case(p, n, **SIZES) for name, p in patterns.items()}
    rows = speed.sweep(cases, [24], folder=tmp_path, **SMALL).set_index("label")
    assert rows.loc["slide", "status"] == "refused" and "n=25" in rows.loc["slide", "error"]
    assert rows.loc["dense", "status"] == "ok"


def test_against_the_ceiling_is_a_share_of_what_was_measured():
    rows = pd.DataFrame([
        {"label": "dense", "backend": "sdpa", "mode": mode, "n": n, "median_ms": 2.0, "pairs": n * n, "tflops": rate,
         "dtype": "float32", "batch": 1, "heads": 1, "head_dim": 8, "status": "ok"}
        for mode, n, rate in (("fwd", 512, 0.5), ("fwd", 1024, 1.0), ("fwdbwd", 1024, 3.0))
    ])  # fmt: skip
    shares = speed.against_ceiling(rows, {"matmul_tflops": {"float32": 4.0}}).set_index("mode")
    assert shares.loc["fwd", ["n", "share"]].tolist() == [1024, 0.25] and shares.loc["fwdbwd", "share"] == 0.75
    assert shares.loc["fwd", "intensity"] == 4 * 1024 * 1024 * 8 / (4 * 1024 * 8 * 4)  # of q, k, v and out, in float32


def test_the_table_of_times_is_relative_to_the_fastest_dense_kernel_of_a_length(lineup, tmp_path):
    rows = speed.sweep(lineup, [64, 128], folder=tmp_path, **SMALL)
    table = speed.shown(rows)
    assert len(table) == len(rows) and (table.loc["dense", "speed relative to dense"] == 1).all()
    took = rows[rows["n"] == 128].set_index("label")["median_ms"]
    dilated = table.loc["dilated"].set_index("n").loc[128, "speed relative to dense"]
    assert dilated == pytest.approx(took["dense"] / took["dilated"])
    assert speed.headline(rows).endswith("times dense (torch's SDPA) at 128")
    assert speed.headline(rows[rows["label"] == "dilated"]) == ""


def test_break_even_is_measured_against_dense_in_one_run(tmp_path):
    even = speed.break_even(Case(Dense(), 128, **SIZES), [0.0, 0.75], samples=3, block_size=16, folder=tmp_path)
    assert even["name"].tolist() == ["dense", "random-0.00-blocks-16", "random-0.75-blocks-16", "A/A"]
    assert even["ideal"].tolist() == [1, 1, 4, 1] and even["sparsity"].tolist() == [0, 0, 0.75, 0]
    assert even.loc[0, "speedup"] == 1 and len(records.load(tmp_path)) == 4


def test_the_fastest_dense_backend_is_one_that_runs():
    assert speed.fastest_dense(Case(Dense(), 32, 1, 8)).backend == "sdpa"
    assert speed.fastest_dense(Case(Dense(), 32, 1, 8, device="cuda:99")).backend == "auto", "where none does"


@pytest.mark.parametrize("kind", ["h100x1", "h200x2", "no-such-card"])
def test_a_machine_kind_whose_records_are_of_other_probes_has_none(kind):
    rows, _ = speed.recorded(kind)
    timed = records.committed(kind, "timing")
    swept = int(timed["asked"].notna().sum())  # a suite's rows are no sweep's
    assert len(rows) == 0 if not swept else 0 < len(rows) <= swept


def test_committed_records_have_a_ceiling_for_their_dtype(monkeypatch):
    monkeypatch.setattr(records, "DRAWN", {})
    rows, best = speed.recorded("h100x1")
    assert {name.split("-")[3] for name in records.DRAWN} == {"timing", "roofline"}, "no others are read"
    done = rows[rows["status"] == "ok"]
    assert len(done) and (done["tflops"] < done["dtype"].map(best["matmul_tflops"])).all()


def test_settings_say_in_words_what_was_timed(lineup, tmp_path):
    rows = speed.sweep(lineup, [128], folder=tmp_path, **SMALL)
    said = speed.settings(rows, None).iloc[:, 0]
    assert (said["inputs"], said["dense"]) == ("float32, 2 heads x 16", "dense (torch's SDPA)")
    assert said["dilated"] == "dilated: 32 at rate 1 and 64 at rate 2 (torch)"
    assert said["neighborhood"] == "neighborhood, radius 2, Hilbert (torch)"
    assert speed.settings(None).empty


CHANGES = [{"block": 8}, {"seed": 1}, {"head_dim": 8}, {"samples": 3}, {"modes": ("fwdbwd",)}, {"dtype": "float64"}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_resumed_row_is_found_only_for_the_same_measurement(change, tmp_path):
    """Names say little: blocks of 16 and of 8, two seeds, have one name."""

    def rows(block=16, seed=0, samples=2, modes=("fwd",), **changed):
        pattern = BlockSparse(layouts.random(0.5, seed=seed), block)
        options = SMALL | {"folder": tmp_path, "resume": True, "samples": samples}
        return speed.sweep({"mine": lambda n: Case(pattern, n, **SIZES | changed)}, [64], modes, **options)

    first = rows()
    assert rows()["run"].tolist() == first["run"].tolist()
    other = rows(**change)
    assert other["run"].tolist() != first["run"].tolist() and len(other) == 1
    assert other["pattern_spec"].item()["block_size"] == [change.get("block", 16)] * 2


def test_ceilings_are_recorded_and_the_better_of_two_counts(tmp_path, monkeypatch):
    found = {"matmul_tflops": {"float32": 1.0, "float64": 4.0}, "copy_gbs": 2.0}
    monkeypatch.setattr(roofline, "ceilings", lambda device, seconds: found)
    assert speed.ceilings("cpu", folder=tmp_path) == found
    row = records.load(tmp_path).iloc[0]
    assert (row["probe"], row["matmul_tflops"], row["copy_gbs"]) == ("roofline", found["matmul_tflops"], 2)
    known = {"matmul_tflops": {"float32": 3.0}, "copy_gbs": 1.0}
    best = speed.ceilings("cpu", known=known, folder=tmp_path)
    assert best == {"matmul_tflops": {"float32": 3.0, "float64": 4.0}, "copy_gbs": 2.0}


def table(mode="fwd", n=1024, dtype="float32", **took):
    """Rows as of `speed.table`: milliseconds by label; the rate is 1 / ms."""
    return pd.DataFrame([{
        "label": label, "family": "Dense" if label == "dense" else "Dilated", "backend": "torch", "mode": mode,
        "n": n, "status": "ok", "median_ms": ms, "samples_ms": [0.95 * ms, ms, 1.05 * ms], "pairs": n * n,
        "tflops": 1 / ms, "dtype": dtype, "batch": 1, "heads": 2, "head_dim": 16,
    } for label, ms in took.items()])  # fmt: skip


@pytest.mark.parametrize("took, want", [
    ({"dense": 8.0, "dilated": 2.0}, "**dilated** is the fastest here, **4 times** as fast as dense attention by"),
    ({"dense": 2.0, "dilated": 8.0}, "**dense** attention by torch is the fastest; dilated, the next, takes **4 times"),
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
    assert "took 4,700 ms at N = 4,096 and 2,600 ms at N = 8,192, with more to do: something else may have run" in said
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
    top, close = speed.ceiling(pd.concat([table(dense=1.0, dilated=2.0), table(n=4096, dense=1.5)]), best)
    assert top == "The ceiling is 2 TFLOP/s, by float32 matrix products."
    assert close.endswith("forward, **dense** by torch comes closest to the ceiling: 50% of it at N = 1,024.")
    assert "over N, forward + backward, " in speed.ceiling(table("fwdbwd", dense=1.0), best)[1]


def test_a_busy_machine_is_told():
    rows = table(dense=1.0).assign(device="cpu", run_cuda=None, run_load=6.8, run_processors=2)
    assert speed.busy(rows) == ["**This machine was busy** (load 6.8 on 2 processors): times are upper bounds."]
    for other in ({"run_load": 2.0}, {"run_load": None}, {"device": "cuda", "run_cuda": "13.0"}):
        assert speed.busy(rows.assign(**other)) == []


def even(noise=1.1, **speedups):
    rows = [{"name": "dense", "speedup": 1.0, "sparsity": 0.0, "ideal": 1.0}]
    rows.append(rows[0] | {"name": "A/A", "speedup": 1.6, "speedup_low": 0.9, "speedup_high": noise})
    for percent, x in speedups.items():
        at = int(percent[1:]) / 100
        rows.append({"name": f"random-{at}", "speedup": x, "speedup_low": x - 0.1, "speedup_high": x + 0.1}
                    | {"sparsity": at, "ideal": 1 / (1 - at)})  # fmt: skip
    return pd.DataFrame(rows).assign(n=4096, backend="cudnn")


def test_the_most_is_of_the_sparse_rows_and_not_of_dense_against_itself():
    said = speed.pays(even(_0=0.9, _50=0.8, _90=0.7))
    assert "no sparsity tried here** on" in said and "**1.11 times** as long as dense by cuDNN (95% interval" in said
    assert "1.6" not in said and "0% sparsity it is" not in said
    said = speed.pays(even(_0=0.9, _50=1.5, _90=7.0))
    assert "**from 50%** sparsity on: at 90% sparsity" in said and "by cuDNN (95% interval 6.90 to 7.10); the" in said


def test_what_lies_in_the_noise_does_not_pay():
    assert speed.pays_from(even(_50=1.5, _60=0.9, _90=7.0)) == 0.9  # from where every sparser one wins
    assert [speed.pays_from(even(noise=noise, _50=1.5, _90=7.0)) for noise in (1.45, 9.0)] == [0.9, None]
    assert "beyond the noise: at 90% sparsity it is **7.00 times**" in speed.pays(even(noise=9.0, _90=7.0))
    assert speed.pays(even()) == "No sparse layout ran: there is nothing to compare."


DECODED = {"heads": 4, "head_dim": 16, "dtype": "float32", "device": "cpu"}


def test_a_sweep_records_what_a_token_takes_and_what_is_held_for_it(tmp_path):
    rows = decode.sweep(decode.lineup([32, 64], [1, 2]), [64, 256], DECODED, samples=3, folder=tmp_path)
    held = rows.set_index(["label", "n"])["held_bytes"] / (2 * 16 * 4 * 4)  # rows for each head
    assert (rows["q90_ms"] > rows["q10_ms"]).all() and set(rows["nq"]) == {1} and len(records.load(tmp_path)) == 6
    assert held["dense"].to_dict() == {64: 63, 256: 255} and held["window"].to_dict() == {64: 32, 256: 32}
    assert held["dilated"].to_dict() == {64: 46.5, 256: 46.5}  # 31 of a segment, and 31 for heads that still ask
    fig = draw.decoding(rows, rows[:0])
    assert [len(ax.lines) for ax in fig.axes] == [3, 3] and fig.axes[1].get_ylabel().endswith("(MiB)")
    assert re.search("after 256, beside .*: dilated .* holds 18.2% .*, window .* holds 12.5% of", decode.gain(rows))
    assert len(decode.table(records.committed("cpu-of-nobody", "decode"))) == 0


def test_a_length_too_short_to_time_is_refused(tmp_path):
    refused("length=5: want an int >= 14", decode.sweep, decode.lineup([4], [1]), [5], DECODED, folder=tmp_path)
