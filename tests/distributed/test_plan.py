"""Plans: exactly the rows that queries see, counted without listing them, for any number of ranks in one process."""

import time

import pytest
import torch

import workbench as wb
from tests import tools
from tests.distributed.cases import CASES, drawn
from tests.distributed.work import plan_of
from workbench import layouts
from workbench.analysis.multicard import one_thread
from workbench.distributed import Shards, plan
from workbench.distributed.plans import Stage
from workbench.patterns import orderings

WORLDS = (2, 7)
EXACT = wb.Dense, wb.Dilated, wb.Window, wb.Neighborhood, wb.BlockSparse  # others by whole blocks


def seen(case, pattern) -> torch.Tensor:
    """bool (key heads, Nq, N): which rows a query sees under one of the heads of a key head, in any of the batch."""
    heads, key_heads = case.heads, case.kv_heads or case.heads
    total = sum(x.multiplicity(case.n, heads, case.nq) for x in pattern.each()) > 0
    return total.view(key_heads, heads // key_heads, *total.shape[1:]).any(1)


def test_a_halo_with_residues_of_a_long_period_is_exactly_what_is_seen(monkeypatch):
    monkeypatch.setattr("workbench.distributed.halo.PERIOD", 1)
    test_a_halo_is_exactly_what_is_seen("rates-that-share-no-divisor")


@pytest.mark.parametrize("id", CASES)
def test_a_halo_is_exactly_what_is_seen(id):
    """Of what goes by lists of blocks: whole blocks, so that it may be more."""
    case = CASES[id][0]
    pattern = case.pattern()
    count, more = seen(case, pattern), not isinstance(pattern, EXACT) or not getattr(pattern, "plain", True)
    for world in WORLDS:
        found = plan_of(case, drawn(case.n, world, id), "sequence")
        first, want = case.n - found.nq, torch.zeros(world, world, dtype=torch.int64)
        for target in range(world):
            rows = [x - first for part in found.work(target) for x in part]
            visible = count[:, rows].any(1)  # (key heads, N)
            for source in range(world):
                if source != target:
                    own = found.shards[source]
                    want[source, target] = visible[:, own.start : own.stop].sum()
        assert torch.equal(found.units, want) or more and bool((found.units >= want).all()), world
        listed = torch.zeros_like(want)
        for target in range(world):
            for need in found.halo(target):
                listed[:, target] += len(need.heads) * need.rows.counts(found.shards)
                assert bool((need.rows.positions.diff() > 0).all())
        assert torch.equal(listed, found.units)


@pytest.mark.parametrize("id", CASES)
def test_pairs_of_the_ranks_are_those_of_the_pattern(id):
    case = CASES[id][0]
    pattern = case.pattern()
    found = plan_of(case, drawn(case.n, 3, id), "sequence")
    if isinstance(pattern, wb.BlockSparse) or not isinstance(pattern, EXACT) or not getattr(pattern, "plain", True):
        # visible blocks count as a whole
        assert found.pairs.sum() >= sum(x.pairs(case.n, case.heads, case.nq) for x in pattern.each())
        return
    count = pattern.multiplicity(case.n, case.heads, case.nq)
    first = case.n - found.nq
    want = [int(count[:, [x - first for part in found.work(p) for x in part]].sum()) for p in range(3)]
    assert found.pairs.tolist() == want


def test_zigzag_is_even():
    assert plan(wb.Dense(causal=True), Shards.even(1 << 20, 8), 4).balance < 1.0001


SCALES = {
    "dilated": lambda n: wb.Dilated([4096, 16384, 65536, 262144, n], [1, 2, 4, 8, 16]),
    "dilated-causal": lambda n: wb.Dilated([2048, 5000, n], [1, 3, 7], causal=True),
    "dense": lambda n: wb.Dense(causal=True),
    "blocks": lambda n: wb.BlockSparse(layouts.local(2) | layouts.global_(1), 512),
    "neighborhood": lambda n: wb.Neighborhood((1024, n // 1024), 4),
    "window": lambda n: wb.Window(4096, causal=True, sinks=4),
}


@pytest.mark.parametrize("name", tools.tiers(SCALES, ["dilated", "blocks"]))
def test_a_thousand_ranks_and_two_million_positions_in_seconds(name):
    with one_thread():
        n, start = 1 << 21, time.process_time()
        found = plan(SCALES[name](n), Shards.even(n, 1024), 12, 4)
        assert int(found.bytes(2, 64).sum()) > 0 and found.balance >= 1
        assert time.process_time() - start < 20 * tools.slowness(time.process_time)


def test_plans_are_told_apart():
    even = Shards.even(64, 2)
    kinds = [wb.Dense(), wb.Dense(True), wb.Dilated([64], [2]), wb.Neighborhood((8, 8), 1),
             wb.Neighborhood((8, 8), 1, orderings.hilbert((8, 8)))]  # fmt: skip
    found = [plan(x, even, 2) for x in kinds] + [plan(wb.Dense(), Shards((1, 63)), 2), plan(wb.Dense(), even, 4)]
    assert len({x.digest for x in found}) == len(found)
    assert plan(wb.Dilated([64], [2]), even, 2).digest == found[2].digest


@pytest.mark.parametrize("arguments, words", [
    ((wb.Dense(), Shards((4, 4)), 4, 3), "kv_heads=3 on heads=4"),
    ((wb.Dense(), Shards((4, 4)), 4, 4, 9), "nq=9 queries on n=8 keys"),
    ((wb.Neighborhood((3, 3), 1), Shards((4, 4)), 4), "n=8 on a neighborhood"),
])  # fmt: skip
def test_refused(arguments, words):
    tools.refused(words, plan, *arguments)


def test_wrong_lengths_and_modes_are_refused():
    tools.refused("want an int", Shards, (1, -1))
    tools.refused("mode='both'", plan(wb.Dense(), Shards((4, 4)), 2).bytes, 2, 64, mode="both")


def test_a_stage_brings_about_a_sixteenth_but_not_few_rows():
    few = plan(wb.Dilated([1 << 12], [16]), Shards.even(1 << 12, 2), 16)
    assert few.stages == [Stage(range(16))]

    def dense(log_n, world=2):
        return plan(wb.Dense(), Shards.even(1 << log_n, world), 12).stages

    assert dense(12) == [Stage(range(12))]
    assert dense(15) == [Stage(range(12))] and [len(x.heads) for x in dense(17)] == [3, 3, 3, 3]
    assert dense(19) == [Stage(range(h, h + 1), piece, 2) for h in range(12) for piece in range(2)]
    assert {x.pieces for x in dense(20, 8)} == {4}
