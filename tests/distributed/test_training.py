"""Training on a mesh of (data, sequence) is that of one device: parameters after several steps, and losses."""

import json

import pytest
import torch

from tests import tools
from tests.distributed import train
from tests.distributed.train import EVEN, HOLE, PATTERNS, UNEVEN
from workbench import Cache

TOLERANCE = 1e-12
MESHES = {  # parts of the batch of 3, lengths of the shards of the 40 positions
    "1x2": ([3], EVEN[2]),
    "1x2-uneven": ([3], UNEVEN[2]),
    "1x2-one-holds-all": ([3], HOLE[2]),
    "2x2": ([2, 1], EVEN[2]),
    "2x2-uneven": ([1, 2], UNEVEN[2]),
    "4x1": ([1, 1, 1, 0], EVEN[1]),
    "1x4-uneven": ([3], UNEVEN[4]),
}


def world_of(mesh: str) -> int:
    parts, lengths = MESHES[mesh]
    return len(parts) * len(lengths)


STEPS = [(mesh, name) for mesh in MESHES for name in PATTERNS]
DAILY = [("1x2", "dense"), ("1x2-uneven", "dilated"), ("1x2-one-holds-all", "block-sparse"), ("2x2-uneven", "dilated")]


@pytest.mark.parametrize("case", tools.tiers(STEPS, DAILY), ids=" ".join)
def test_steps_are_those_of_one_device(ranks, case):
    mesh, name = case
    for parameter, loss in ranks(world_of(mesh)).run(train.errors, *MESHES[mesh], name):
        assert parameter < TOLERANCE and loss < TOLERANCE


@pytest.mark.parametrize("mutant", train.MUTANTS)
def test_a_wrong_scaling_of_the_loss_is_seen(ranks, mutant):
    assert min(ranks(4).run(train.mutated, *MESHES["2x2-uneven"], "dilated", mutant)) > 1e-3


def test_gradients_that_are_reduced_over_one_axis_are_seen(ranks):
    assert max(ranks(4).run(train.only_over_data, *MESHES["2x2"], "dilated")) > 1e-3


@pytest.mark.parametrize("strategy", ["sequence", "heads"])
@pytest.mark.parametrize("name", tools.tiers(PATTERNS, ["dilated"]))
def test_checkpoints_change_no_bit_and_all_ranks_exchange_again_in_the_same_order(ranks, name, strategy):
    found = ranks(4).run(train.checkpointed, *MESHES["2x2-uneven"], name, strategy)
    for difference, (without, within), names in found:
        assert difference == 0 and within > without > 0
        assert names == found[0][2]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", train.WRAPS)
def test_compiled_steps_are_those_of_one_device(ranks, wrap):
    for parameter, loss, graphs in ranks(4).run(train.compiled, *MESHES["2x2-uneven"], "dilated", wrap):
        assert parameter < TOLERANCE and loss < TOLERANCE and graphs > 1, graphs


def test_every_collective_is_counted_and_one_that_is_not_known_is_refused(ranks):
    for rank, (found, want, control, message) in enumerate(ranks(4).run(train.collectives)):
        assert found == want | {"broadcast": 3 * 48 * (rank == 1)} and control == 3 * 8
        assert message.startswith("collective reduce_: not counted; known are alltoall_base_")


def test_a_copy_stays_on_its_group_and_a_state_dict_fits_both_layers(ranks):
    assert all(ranks(4).run(train.copied))


def test_what_overflows_is_refused_on_all_ranks(ranks):
    assert all("xpos=1.0 with 80 tokens" in found for found in ranks(2).run(train.refused))


def test_without_a_process_group():
    x, (one, other) = torch.randn(2, 20, 5).double(), (train.model("dilated", alone=alone) for alone in (True, False))
    assert torch.equal(one(x), other(x))
    with pytest.raises(ValueError, match="a cache over ranks: want a layer of one device to decode with"):
        other[1].attention(torch.ones(1, 1, 16).double(), cache=Cache(other[1].attention.pattern))


LONGNETS = {
    "1x2-uneven": {"checkpoint": True, "xpos": 20},
    "1x2-one-holds-all": {"num_kv_heads": 2},
    "2x2-uneven": {"qk_norm": True, "xpos": 20},
    "4x1": {"rope": None},
}


@pytest.mark.parametrize("mesh", tools.tiers([*LONGNETS], ["1x2-uneven"]))
def test_a_longnet_over_ranks_has_the_loss_and_gradients_of_one_device(ranks, mesh):
    assert max(ranks(world_of(mesh)).run(train.longnet, *MESHES[mesh], **LONGNETS[mesh])) < TOLERANCE


@pytest.mark.slow
def test_the_demo_learns_alike_on_any_mesh_and_says_its_bytes(ranks):
    asked = (2, {"data": 2}), (2, {}), (4, {"data": 2})
    one, two, four = (ranks(world).run(train.demo, steps=12, n=128, **options) for world, options in asked)
    for found in (*one, *two, *four):
        torch.testing.assert_close(found["losses"], one[0]["losses"], rtol=1e-4, atol=1e-4)
        assert max(found["losses"][-3:]) < 0.9 * min(found["losses"][:2])
    assert "all-to-all" not in one[0]["bytes"] and two[0]["bytes"]["all-to-all"] > 0


@pytest.mark.slow
def test_two_workers_train_as_two_ranks_do(ranks, tmp_path, monkeypatch):
    """By Ray's TorchTrainer, as `harness.ranks` says: two workers without cards. Ray may need a minute to start, and
    with RAY_AUTH_MODE it writes nothing into the home folder."""
    env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "200"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    ray, under_ray = pytest.importorskip("ray"), pytest.importorskip("ray.train")
    from ray.train.torch import TorchConfig, TorchTrainer

    def work(arguments):
        from workbench.harness import ranks

        found = ranks.call("workbench.distributed.training:demo", arguments)
        (tmp_path / f"{ranks.dist.get_rank()}.json").write_text(json.dumps(found))

    steps = {"steps": 3, "n": 64}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        TorchTrainer(
            work, train_loop_config=steps, torch_config=TorchConfig("gloo"),
            scaling_config=under_ray.ScalingConfig(num_workers=2),
            run_config=under_ray.RunConfig(storage_path=str(tmp_path)),
        ).fit()  # fmt: skip
    finally:
        ray.shutdown()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for ours, theirs in zip(ranks(2).run(train.demo, **steps), found, strict=True):
        assert theirs["losses"] == pytest.approx(ours["losses"], abs=1e-4) and theirs["bytes"] == ours["bytes"]
