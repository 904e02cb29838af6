"""Attention over shards is that of one device, to rounding, and moves the bytes that its plan says."""

from multiprocessing import forkserver

import pytest
import torch

from tests import tools
from tests.distributed import work
from tests.distributed.cases import CASES
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.work import MUTANTS, TOLERANCE
from tests.tools import Case
from workbench import BlockSparse, Dense, Dilated, layouts

BOTH = (2, 4)
WORLDS = tools.tiers(BOTH, [2])
# The default tier has, on two ranks, the cases in which shards cut what a pattern is made of, and one of each kind of
# the others; on four ranks, of which some hold nothing, one case a pattern.
ODD = [id for id in CASES if id not in tools.TABLE]
KINDS = ["dilated-longnet-64-grouped", "dilated-uncovered-rows", "local-ragged", "neighborhood-2d", "hierarchical"]
FOUR = ["geometric", "dense-causal", "blocks-cut", "grid-near-hilbert", "window-near", "predicate-by-head"]
IN_TURN = [(id, world) for world in BOTH for id in CASES]


def check(results):
    errors = [max(found.values()) for found, _, _ in results]
    assert max(errors) < TOLERANCE, errors
    for _, sent, planned in results:
        assert sent == planned


@pytest.mark.parametrize("case", tools.tiers(IN_TURN, [(x, 2) for x in ODD + KINDS] + [(x, 4) for x in FOUR]), ids=str)
def test_values_gradients_and_bytes(ranks, case):
    id, world = case
    check(ranks(world).run(work.exact, id))


BY_HEADS = [  # 4 heads or 8 on 2 or 4 key heads, and so on: what two ranks can divide
    id
    for id, (case, _) in CASES.items()
    if case.heads % 2 == 0 and (case.kv_heads or case.heads) % 2 == 0 and "sequence" not in id and "blocked" not in id
]


DAILY_BY_HEADS = ["geometric", "dense-causal", "blocks-whole", "each-head-its-own"]


@pytest.mark.parametrize("id", tools.tiers(BY_HEADS, DAILY_BY_HEADS))
def test_by_heads(ranks, id):
    check(ranks(2).run(work.exact, id, "heads"))


@pytest.mark.parametrize("world", WORLDS)
def test_in_one_stage(ranks, world):
    """As short sequences are exchanged; the other tests make many stages of them."""
    for id in ("dense", "dense-causal", "geometric", "blocks-cut-causal"):
        check(ranks(world).run(work.in_one_stage, id))


@pytest.fixture(scope="module")
def interpreting():
    """Two ranks in which Triton's interpreter runs the kernels, of a server that has loaded Triton for it."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(forkserver, "connect_to_new_process", forkserver.ForkServer().connect_to_new_process)
        found = Ranks(2)
        yield found
        found.close()


BY_KERNELS = [
    *((id, "float32") for id in ("dense-causal", "last-queries", "grid-rows", "grid-near-hilbert", "blocks-of-16")),
    *((id, "float32") for id in ("window-near", "union-of-blocks", "by-head-causal")),
    *((id, "float16") for id in ("dense-causal", "geometric-causal", "partition", "blocks-of-16-causal")),
]
DAILY = [("blocks-of-16", "float32"), ("geometric-causal", "float16"), ("grid-rows", "float32"),
         ("by-head-causal", "float32")]  # fmt: skip


@pytest.mark.parametrize("case", tools.tiers(BY_KERNELS, DAILY), ids=str)
def test_by_kernels(interpreting, case):
    """They read some tensors as they lie, and merge 16-bit results in place, also of rows that have seen nothing."""
    assert max(interpreting.run(work.by_kernels, *case)) < {"float32": 2e-6, "float16": 3e-3}[case[1]]


SHOWN = {  # each mutant on a case in which what it breaks is used
    "dk-and-dv-swapped": "geometric",
    "a-hop-dropped": "geometric-causal",
    "a-returned-gradient-dropped": "blocks-whole-causal",
    "gradients-added-to-what-was-there": "rates-that-share-no-divisor",
    "keys-and-values-swapped": "grid-hilbert",
    "results-at-the-border-not-replaced": "grid-near-hilbert",
    "gradients-at-the-border-given-twice": "grid-near-rows",
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(ranks, world, name):
    assert max(ranks(world).run(work.mutated, name, SHOWN[name])) > 1e-3


@pytest.mark.parametrize("name", tools.tiers(["float32", "bfloat16", "float16"], ["bfloat16"]))
def test_errors_of_each_dtype_stay_within_one_devices_budget_as_ranks_grow(ranks, name):
    found = {world: ranks(world).run(work.dtype_errors, name, [64 // world] * world)[0] for world in BOTH}
    for two, four in zip(*found.values(), strict=True):
        for quantity in two:
            (less, budget), (more, _) = two[quantity], four[quantity]
            assert less <= budget and more <= budget, f"{quantity}: {less:.3g}, {more:.3g} > {budget:.3g}"
            assert more < 1.3 * less + budget / 20, f"{quantity} grows from {less:.3g} to {more:.3g}"


@on_ranks(2)
def test_strided_inputs_give_the_same_numbers(rank, world):
    """Also permuted in the last dimension."""
    for pattern in (Dilated([64, 24], [2, 1], True), Dense(), Dense(True), BlockSparse(layouts.strided(2), 8)):
        mine = work.mine_of(None, rank, world, heads=4)
        plain = tools.differentiate(work.run(pattern), [x.contiguous() for x in mine], pattern)
        for order in ((3, 1, 0, 2), (0, 2, 1, 3)):  # how the dimensions lie in memory
            back = [order.index(x) for x in range(4)]
            turned = [x.permute(order).contiguous().permute(back) for x in mine[:4]]
            got = tools.differentiate(work.run(pattern), [*turned, mine[4]], pattern)
            assert all(torch.equal(got[name], plain[name]) for name in tools.NAMES)


@pytest.mark.parametrize("many", tools.tiers([5, 50], [5]))
def test_many_iterations_hold_what_one_does(ranks, many):
    ranks(2).run(work.living_bytes, 1)  # what is kept once is there: the modules' own tensors
    once, more = (ranks(2).run(work.living_bytes, times) for times in (1, many))
    assert once == more
    assert all(during > after > 0 for after, during in once)


@on_ranks(2)
def test_a_gradient_through_lse_on_one_rank_alone(rank, world):
    """Rank 0 uses nothing but its lse, and the other only its out."""
    for pattern in (Dilated([64, 24], [2, 1]), Dense(True)):
        case, own = Case("", lambda p=pattern: p, 64), 64 // world
        q, k, v, g, gl = case.inputs(torch.float64)
        gl[..., own:] = 0
        g[:, :own] = 0
        want, rows = tools.oracle((q, k, v, g, gl), pattern), work.rows_of(case, [own] * world, rank)
        *mine, g, gl = work.shard((q, k, v, g, gl), rows)
        leaves = [x.clone().requires_grad_() for x in mine]
        out, lse = work.run(pattern)(*leaves, pattern)
        ((lse * gl).sum() if rank == 0 else (out * g).sum()).backward()
        for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True):
            assert tools.relative(leaf.grad, work.part(name, want[name], rows), g) < TOLERANCE


IDS = ("dense", "dense-causal", "geometric", "rates-that-share-no-divisor-causal", "blocks-cut-causal",
       "blocks-whole-at-both-ends", "grid-hilbert", "grid-near-hilbert")  # fmt: skip


@pytest.mark.parametrize("id", tools.tiers(IDS, ["dense-causal", "geometric", "grid-near-hilbert"]))
def test_streams_are_ordered_and_give_what_one_device_gives(ranks, id):
    for errors, races in ranks(2).run(work.on_streams, id):
        assert max(errors) < work.TOLERANCE and races == []


@pytest.mark.parametrize("by_host", [False, True])
def test_streams_are_ordered_where_a_rank_has_forgotten_the_plan(ranks, by_host):
    """What has been computed is discarded, and the plan and buffers are made anew, on the stream that uses them."""
    for id in ("dense-causal", "geometric", "blocks-whole-causal"):
        for errors, races in ranks(2).run(work.on_streams, id, forgets=1, by_host=by_host):
            assert max(errors) < work.TOLERANCE and races == []


RACES = [("what is there", "beside, not behind {'main'}"), ("what arrives", "main, not behind {'wire'}")]


@pytest.mark.parametrize("what, words", RACES)
def test_a_wait_that_is_left_out_is_found(ranks, what, words):
    for _, races in ranks(2).run(work.on_streams, "dense-causal", hastens=what):
        assert any(words in x for x in races)
