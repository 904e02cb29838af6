"""The memory of a rank that is traced alone is that of the same rank in a run of all ranks."""

import pytest

import workbench as wb
from tests import tools
from tests.distributed import work
from workbench import distributed
from workbench.distributed import halo, partials, plans
from workbench.engines.torch import fused
from workbench.fit import cards, estimate, frontier
from workbench.patterns.dilated import geometric
from workbench.probes.case import Case

layouts = wb.layouts
PATTERNS = {
    "dense": wb.Dense(), "causal": wb.Dense(True), "dilated": wb.Dilated([64, 512, 1024], [1, 2, 3]),
    "dilated-causal": wb.Dilated([100, 700], [1, 3], True),
    "blocks": wb.BlockSparse(layouts.local(1) | layouts.global_(1), 64),
    "blocks-causal": wb.BlockSparse(layouts.local(2), 64, True), "grid": wb.Neighborhood((32, 32), 2),
}  # fmt: skip


SIZES = {"n": 1024, "heads": 4, "head_dim": 16, "dtype": "float32", "backend": "torch"}
MODES = ["fwd", "fwdbwd"]
# What is on the host with a real card, in numbers of 8 bytes, when a peak is reached. The cells of a grid: all, the
# rank's own ones or, behind the call at its border, also those of 2 lines of the other rank, 2 lines that see these,
# and 2 that those see. The columns of a rank's own blocks, once a mask has been made of them.
ON_HOST = {
    "grid heads fwd": 1024, "grid heads fwdbwd": 1024, "grid sequence fwd": 512, "grid sequence fwdbwd": 512 + 3 * 64,
    "blocks-causal sequence fwdbwd": 8,
}  # fmt: skip


@pytest.fixture
def nothing_fused(monkeypatch):
    """As the ranks of the tests run: no fused attention, many stages and calls."""
    monkeypatch.setattr(fused, "kernel", lambda q, mask=None: "unfused")
    for module, name in ((plans, "LEAST"), (plans, "DENSE"), (partials, "FIRST"), (halo, "PIECE")):
        monkeypatch.setattr(module, name, 1)


def alone(case, world, rank, strategy):
    return frontier._trace(case, None, world=world, rank=rank, strategy=strategy).requested_bytes


EACH = [(name, strategy, mode) for name in PATTERNS for strategy in ("sequence", "heads") for mode in MODES]
DAILY = [(x, "sequence", "fwdbwd") for x in ("causal", "dilated-causal", "blocks", "grid")]
DAILY += [("dense", "sequence", "fwd"), ("dilated", "heads", "fwdbwd")]


@pytest.mark.parametrize("call", tools.tiers(EACH, DAILY), ids=" ".join)
def test_a_lone_rank_takes_what_it_takes_among_others(ranks, nothing_fused, call):
    """To the byte, except for what is `ON_HOST`."""
    name, strategy, mode = call
    case = Case(PATTERNS[name], mode=mode, **SIZES)
    real = ranks(2).run(work.peak, case, strategy)
    host = 8 * ON_HOST.get(" ".join(call), 0)
    assert [alone(case, 2, rank, strategy) for rank in range(2)] == [x - host for x in real]


@pytest.mark.parametrize("name", ["causal", "dilated"])
def test_a_lone_rank_takes_what_it_takes_among_others_where_heads_share_keys(ranks, nothing_fused, name):
    case = Case(PATTERNS[name], mode="fwd", **SIZES | {"kv_heads": 2})
    real = ranks(2).run(work.peak, case, "sequence")
    assert [alone(case, 2, rank, "sequence") for rank in range(2)] == real


LARGE = {"heads": 16, "head_dim": 64, "dtype": "bfloat16", "backend": "auto"}
EVERY = {"dense": wb.Dense(), "causal": wb.Dense(True), "dilated": wb.Dilated([2048, 1 << 19], [1, 6]),
         "blocks": wb.BlockSparse(layouts.local(4), 1024), "grid": wb.Neighborhood((1024, 1024), 8)}  # fmt: skip
N = 1 << 20


@pytest.mark.parametrize("strategy, most", [
    ("sequence", {"dense": 1.25, "causal": 1.6, "dilated": 1.05, "blocks": 1.15, "grid": 1.15}), ("heads", {}),
])  # fmt: skip
def test_two_cards_take_half_each_and_what_travels(strategy, most):
    """Half of q, k, v and out, and by sequence stages, gathered rows and moved queries; by heads q, k and v again."""
    for name, pattern in EVERY.items():
        case = Case(pattern, N, **LARGE)
        whole, *parts = (estimate.trace(case, world=x, rank=y, strategy=strategy) for x, y in ((1, 0), (2, 0), (2, 1)))
        for x in parts:
            assert x.inputs_bytes == whole.inputs_bytes / 2 and x.strategy == strategy
            assert 1 < x.requested_bytes / (whole.requested_bytes / 2) < most.get(name, 1.6), name


def test_a_length_of_no_whole_segments_takes_little_more():
    """Beside q, k, v and out there are results to be merged and lists of blocks: no kernel copies rows to pad them."""
    for n, heads, backend in ((3_518_848, 12, "auto"), (640_000, 2, "fa4")):
        case = Case(geometric(n), n, heads, 64, "bfloat16", backend, device="cuda")
        for rank in (0, 1):
            part = estimate.trace(case, world=2, rank=rank, strategy="sequence")
            assert part.requested_bytes < 1.4 * (4 / 3 * part.inputs_bytes)  # q, k and v, and out


@pytest.mark.parametrize("name", tools.tiers(EVERY, ["dilated", "blocks"]))
def test_a_rank_of_a_large_world(name):
    """Between its own rows with their gradients and sums, and these plus all that the plan brings: keys and values
    twice, and their gradients in float32."""
    world, case = 64, Case(EVERY[name], N, mode="fwdbwd", **LARGE)
    plan = distributed.plan(case.pattern, distributed.Shards.even(N, world), case.heads)
    brought, own = plan.bytes(2, case.head_dim).sum(0), 2 * N // world * 16 * 64
    for rank in (0, 37, 63):
        found = estimate.trace(case, world=world, rank=rank, strategy="sequence")
        assert found.inputs_bytes == 4 * own
        assert 10 * own < found.requested_bytes < 20 * own + 7 * int(brought[rank])
    assert found.requested_bytes < estimate.trace(case).requested_bytes / 4


def test_what_nccl_takes_is_of_the_device_and_not_of_the_allocator():
    case, card = Case(wb.Dense(), 4096, **LARGE), cards.find("h100")
    found = estimate.trace(case, card, world=2)
    assert found.device_bytes == found.reserved_bytes + card.context_bytes + card.communicator_bytes
    assert found.milliseconds is None and estimate.trace(case, card).strategy is None


def test_the_strategy_is_that_which_moves_less():
    case = Case(wb.Dense(), 4096, **LARGE)
    assert estimate.trace(case, world=16).strategy == "heads"
    assert estimate.trace(case, world=32).strategy == "sequence"


@pytest.mark.parametrize("options, message", [
    ({"world": 2, "rank": 2}, "want ints, 0 <= rank < world"), ({"world": 0}, "want ints, 0 <= rank < world"),
    ({"world": 2, "strategy": "ring"}, "strategy='ring': want one of"),
    ({"world": 3, "strategy": "heads"}, "16 heads on 16 key heads, want multiples of 3"),
])  # fmt: skip
def test_what_cannot_be_shared_out_says_why(options, message):
    tools.refused(message, estimate.trace, Case(wb.Dense(), 4096, **LARGE), **options)
    with pytest.raises(ValueError, match="want one of 'auto', 'torch', 'triton', 'fa4' on shards"):
        estimate.trace(Case(wb.Dense(), 4096, **LARGE | {"backend": "cudnn"}), world=2)
