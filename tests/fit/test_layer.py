import pytest
import torch

from workbench import BlockSparse, Dense, Dilated, Neighborhood, attention, layouts
from workbench.fit import layer
from workbench.harness import records
from workbench.probes import speed
from workbench.probes.case import Case

TINY = {"samples": 3, "seconds": 2.0}
LONGNET = Dilated([64, 128], [1, 2])


def cases(patterns, device="cpu"):
    return {label: Case(pattern, 256, 4, 8, device=device) for label, pattern in patterns.items()}


def test_layers_are_rows_beside_the_first_and_its_noise(tmp_path):
    patterns = {"dense": Dense(), "longnet": LONGNET, "random": BlockSparse(layouts.random(0.25), 32)}
    rows = layer.measure(cases(patterns), **TINY, folder=tmp_path)
    assert rows["label"].tolist() == [x + alone for x in patterns for alone in ("", layer.ALONE)] + ["A/A"]
    assert set(rows["status"]) == {"ok"} and set(rows["against"]) == {"dense"}
    assert rows["pattern"].tolist()[::2] == ["dense", LONGNET.name, "random-0.75-blocks-32", "dense"]
    assert rows.loc[0, "speedup"] == 1 and (rows["speedup_low"] <= rows["speedup_high"]).all()
    assert all(len(x) == 3 for x in rows["samples_ms"]) and (rows["median_ms"] > 0).all()
    kept = records.load(tmp_path)
    assert len(kept) == 7 and set(kept["probe"]) == {"layer"} and kept["measured"].all()
    row = kept[kept["label"] == "longnet"].iloc[0]
    same = {"backend": "torch", "n": 256, "heads": 4, "head_dim": 8, "dtype": "float32", "mode": "fwdbwd", "batch": 1}
    same |= {"causal": False, "embed_dim": 32, "pattern_spec": LONGNET.spec(), "pairs": LONGNET.pairs(256, 4)}
    assert {name: row[name] for name in same} == same
    assert rows["extra_bytes"].isna().all()  # a CPU does not tell
    said, shown = layer.answer(rows)[0], layer.summary(rows)["speed relative to dense"]
    assert "dense attention by torch's SDPA; attention alone is" in said and "N = 256" in said
    assert len(shown) == 6 and shown.count() == 3 and shown["dense"] == 1


def test_a_layer_that_cannot_run_is_a_row(tmp_path):
    few = {"few": Case(Dense(), 256, 4, 8, nq=5)}
    patterns = {"grid": Neighborhood((5, 5), 1), "dense": Dense(), "longnet": LONGNET}
    rows = layer.measure(few | cases(patterns), **TINY, folder=tmp_path).set_index("label")
    assert rows.loc[["few", "grid"], "status"].tolist() == ["refused"] * 2 and "n=25" in rows.loc["grid", "error"]
    assert "want as many queries as keys" in rows.loc["few", "error"]
    assert rows.loc[["dense", "longnet", "A/A"], "status"].tolist() == ["ok"] * 3
    assert set(rows["against"].dropna()) == {"few" + layer.ALONE}  # the first that runs
    assert len(records.load(tmp_path)) == 9


def test_where_one_fails_while_they_are_timed_all_rows_say_so(tmp_path, monkeypatch):
    calls = []

    def grows(q, k, v, pattern, **options):
        calls.append(pattern)
        if isinstance(pattern, Dilated) and calls.count(pattern) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return attention(q, k, v, pattern, **options)

    monkeypatch.setattr("workbench.engines.dispatch.attention", grows)
    rows = layer.measure(cases({"longnet": LONGNET, "dense": Dense()}), **TINY, folder=tmp_path).set_index("label")
    assert set(rows["status"]) == {"oom"} and len(rows) == 4


def test_a_machine_that_runs_none_gives_rows_too(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this one has CUDA")
    rows = layer.measure(cases({"dense": Dense(), "longnet": LONGNET}, "cuda"), **TINY, folder=tmp_path)
    assert set(rows["status"]) <= {"unsupported", "killed"} and len(rows) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_a_card_says_how_much_memory_a_layer_takes(tmp_path):
    large = {x: Case(p, 8192, 12, 64, "bfloat16", device="cuda") for x, p in (("dense", Dense()), ("longnet", LONGNET))}
    rows = layer.measure(large, samples=3, seconds=5.0, folder=tmp_path).set_index("label")
    same = rows.loc["dense", "backend"] == rows.loc["dense" + layer.ALONE, "backend"]
    assert set(rows["status"]) == {"ok"} and same and rows.loc["dense", "backend"] in speed.dense_backends("cuda")
    assert (rows.loc[[*large]]["extra_bytes"] > 8192 * 768 * 2).all()
