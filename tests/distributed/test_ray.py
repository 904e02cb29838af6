"""Training under Ray's TorchTrainer, as `harness.ranks` says: two workers without cards."""

import json

import pytest

ray = pytest.importorskip("ray")
STEPS = {"steps": 3, "n": 64}


@pytest.mark.slow
def test_two_workers_train_as_two_ranks_do(ranks, tmp_path, monkeypatch):
    train = pytest.importorskip("ray.train")
    from ray.train.torch import TorchConfig, TorchTrainer

    from tests.distributed.train import demo

    def work(arguments):
        from workbench.harness import ranks

        found = ranks.call("workbench.distributed.training:demo", arguments)
        (tmp_path / f"{ranks.dist.get_rank()}.json").write_text(json.dumps(found))

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        TorchTrainer(
            work, train_loop_config=STEPS, torch_config=TorchConfig("gloo"),
            scaling_config=train.ScalingConfig(num_workers=2), run_config=train.RunConfig(storage_path=str(tmp_path)),
        ).fit()  # fmt: skip
    finally:
        ray.shutdown()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for ours, theirs in zip(ranks(2).run(demo, **STEPS), found, strict=True):
        assert theirs["losses"] == pytest.approx(ours["losses"], abs=1e-4) and theirs["bytes"] == ours["bytes"]
