"""Errors that ranks agree on before data moves, plans that are kept; compile, checkpoints and autocast."""

import contextlib
import gc
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import workbench as wb
from tests import tools
from tests.distributed import races, work
from tests.distributed.ranks import on_ranks
from tests.distributed.work import TOLERANCE, alive, compare, mine_of, part, raised, rows_of, run, shard
from tests.tools import Case
from workbench import Dense, Dilated
from workbench.distributed import api, call
from workbench.distributed.call import plans_of
from workbench.distributed.sequence import Executor
from workbench.engines import partial


@pytest.mark.parametrize("what, words", [
    ("pattern", "pattern of rank 1 is not that of rank 0"), ("ordering", "pattern of rank 1"),
    ("dtype", "dtype of rank 1"), ("shape", "shape of rank 1"), ("device", "device of rank 1"),
    ("scale", "scale of rank 1"), ("requires_grad", "requires_grad of rank 1"),
    ("queries", "rank 0 has 32 queries on 32 keys: the last 63 of 64 positions"),
    ("v", "k (1, 32, 4, 8), v (1, 31, 4, 8)"), ("strategy", "strategy='ring': want one of"),
    ("heads", "3 heads on 3 key heads, want multiples of 2"),
    ("lengths", "give ranks whole documents"), ("softcap", "give ranks whole sequences"),
    ("tokens", "n=64 on a neighborhood of shape (9, 9)"),
])  # fmt: skip
def test_refused_on_every_rank_before_data_moves(ranks, what, words):
    for kind, text in ranks(2).run(work.refused, what):
        assert kind == "ValueError" and words in text


def test_an_error_on_one_rank_of_four_is_raised_on_all_with_its_reason(ranks):
    *others, last = ranks(4).run(work.refused, "v")
    assert last[0] == "ValueError" and not last[1].startswith("rank")
    assert set(others) == {("ValueError", f"rank 3: {last[1]}")}


@pytest.mark.parametrize("what", work.FAILS)
def test_what_goes_wrong_while_preparing_on_one_rank_is_raised_on_all_and_the_group_goes_on(ranks, what):
    first, last = ranks(2).run(work.refused, what)
    own, others = ("KeyError", "RuntimeError") if what == "bug" else ["OutOfMemoryError"] * 2
    assert last[0] == own and first == (others, f"rank 1: {last[1]}")


NO_ROOM = "OutOfMemoryError", "no room"


def no_room_on_the_last(rank, world):
    """What this rank raises where the last one has none."""
    return NO_ROOM if rank == world - 1 else (NO_ROOM[0], f"rank {world - 1}: {NO_ROOM[1]}")


@on_ranks(2)
def test_an_out_of_memory_in_the_backward_by_heads_is_raised_on_all_and_the_group_goes_on(rank, world):
    pattern, (*mine, g, _) = Dilated([64], [2]), mine_of(None, rank, world, heads=4)
    leaves = [x.clone().requires_grad_() for x in mine]
    out = api.attention(*leaves, pattern, strategy="heads")
    error = patch.object(torch.Tensor, "new_empty", side_effect=torch.OutOfMemoryError("no room"))
    with error if rank == world - 1 else contextlib.nullcontext():
        assert raised(out.backward, g, retain_graph=True) == no_room_on_the_last(rank, world)
    out.backward(g)
    assert all(x.grad is not None for x in leaves)


@on_ranks(2)
def test_queries_that_one_rank_has_changed_before_the_backward_are_an_error_on_all_and_the_group_goes_on(rank, world):
    pattern, (*mine, g, _) = Dilated([64], [2]), mine_of(None, rank, world, heads=4)
    leaves, found = [x.clone().requires_grad_() for x in mine], []
    for changed in (True, False):
        q = leaves[0] * 1
        out = api.attention(q, *leaves[1:], pattern, strategy="sequence")
        if changed and rank == world - 1:
            with torch.no_grad():
                q.add_(1)
        found.append(raised(out.backward, g))
    want = "modified by an inplace operation" if rank == world - 1 else "rank 1: one of the variables needed"
    assert want in found[0][1] and found[1] is None and all(x.grad is not None for x in leaves)


@pytest.mark.parametrize("backward, where, forgets", [
    (False, "buffers", ()), (True, "buffers", ()), (False, "own rows", ()), (True, "own rows", ()),
    (False, "own rows", (0,)), (False, "own rows", (0, 1)),
])  # fmt: skip
@on_ranks(2)
def test_an_out_of_memory_before_ranks_have_agreed_is_raised_on_all(rank, world, backward, where, forgets):
    """By gloo. The group goes on: it leaves nothing alive, and no race; then the same call, with memory, is right.

    where: what the last rank does then, make its "buffers" or attend to its "own rows"; forgets: ranks that have lost
    their plan by then
    """
    pattern, case = Dense(), Case("", Dense, 512 * world)  # 32 KB a tensor
    inputs, rows = case.inputs(torch.float32), rows_of(case, [512] * world, rank)
    want, mine = tools.oracle(inputs, pattern), shard(inputs, rows)
    leaves = [x.clone().requires_grad_() for x in mine[:3]]

    def fails(*_, **__):
        some = torch.empty(1 << 15)  # noqa: F841, which the traceback has in this frame
        raise torch.OutOfMemoryError("no room")

    with races.Races(by_host=True) as found:
        call = run(pattern, group=found.ranks)
        out = call(*leaves, pattern)[0]
        torch.autograd.grad(out, leaves, mine[3], retain_graph=True)
        if rank in forgets:
            plans_of(pattern).clear()
        gc.collect()
        gc.disable()
        before = alive()
        place = {"buffers": (Executor, "allocate"), "own rows": (partial, "backward" if backward else "forward")}[where]
        with patch.object(*place, fails) if rank == world - 1 else contextlib.nullcontext():
            error = raised(torch.autograd.grad, out, leaves, mine[3]) if backward else raised(call, *leaves, pattern)
        left = alive() - before
        gc.enable()
        got = tools.differentiate(call, mine, pattern)
    assert max(tools.relative(x, part(name, want[name], rows), inputs[3]) for name, x in got.items()) < 2e-6
    assert error == no_room_on_the_last(rank, world) and not found.found, (error, found.found)
    assert left < 1 << 14  # a thread of gloo may hold the 400 bytes of the reason a little longer


@on_ranks(2)
def test_another_strategy_may_be_the_better_one_for_other_lengths_of_other_ranks(rank, world):
    """By "auto": the last rank has 16 rows, then 64, then 16 again."""
    pattern = Dense()
    with races.Races():
        for last, strategy in ((16, "sequence"), (64, "heads"), (16, "sequence")):
            lengths = (16,) * (world - 1) + (last,)
            case = Case("", lambda: pattern, sum(lengths), heads=2 * world)
            assert max(compare(rank, case, lengths, "auto").values()) < TOLERANCE
            assert list(plans_of(pattern).values())[-1].plan.strategy == strategy


@on_ranks(2)
def test_a_gradient_of_a_gradient_is_refused_not_left_out(rank, world):
    q, k, v, *_ = mine_of(None, rank, world, n=8)
    q.requires_grad_()
    out = api.attention(q, k, v, Dense(), strategy="sequence")
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    assert "once_differentiable" in raised((out.sum() + dq.square().sum()).backward)[1]


@on_ranks(2)
def test_compiling_changes_nothing(rank, world):
    pattern, mine = Dilated([64, 24], [2, 1], True), mine_of(None, rank, world)

    def layer(q, k, v):
        return api.attention(q * 2, k, v, pattern, strategy="sequence") + 1

    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in mine[:3]]
        out = function(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, mine[3])])
    assert all(map(torch.equal, *results))


@on_ranks(4)
def test_layers_that_share_a_pattern_and_differ_in_heads_groups_and_strategy_keep_their_plans(rank, world):
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "sequence"))
    pattern, counts, real = Dilated([64, 20], [4, 1], causal=True), [], dist.all_gather
    for _ in range(3):
        with patch.object(dist, "all_gather", side_effect=real) as gathered:
            for heads, strategy in ((4, "sequence"), (8, "sequence"), (8, "heads")):
                for group in (None, mesh["sequence"].get_group()):
                    case, parts = Case("", lambda: pattern, 64, heads=heads), dist.get_world_size(group)
                    rows = rows_of(case, [64 // parts] * parts, dist.get_rank(group))
                    q, k, v, *_ = inputs = case.inputs(torch.float64)
                    found = api.attention(*shard(inputs, rows)[:3], pattern, group, strategy)
                    assert tools.relative(found, wb.attention(q, k, v, pattern)[:, rows[0]]) < TOLERANCE
        counts.append(gathered.call_count)
    for n in range(64, 64 + 2 * call.PLANS, 2):
        q = torch.ones(1, n // world, 2, 8)
        api.attention(q, q, q, pattern)
    assert counts == [12, 6, 6] and len(plans_of(pattern)) == call.PLANS, counts  # agreements in each round


@on_ranks(2)
def test_autocast_is_that_of_one_device(rank, world):
    mine = mine_of(None, rank, world, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = api.attention(*mine[:3], Dense())
    assert inside.dtype == torch.bfloat16
    assert torch.equal(inside, api.attention(*(x.bfloat16() for x in mine[:3]), Dense()))


def test_one_rank_needs_no_process_group():
    assert not torch.distributed.is_initialized()
    q = torch.randn(1, 40, 2, 8, requires_grad=True)
    pattern = wb.Dilated([8, 40], [1, 2])
    out, lse = wb.distributed.attention(q, q, q, pattern, return_lse=True)
    want = wb.attention(q, q, q, pattern, return_lse=True)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    tools.refused("strategy='ring'", wb.distributed.attention, q, q, q, pattern, strategy="ring")


def test_a_plan_loads_neither_the_exchange_nor_the_plots():
    code = (
        "import sys, workbench as wb; d = wb.distributed\n"
        "print(d.plan(wb.Dense(), d.Shards.even(10, 3), 2).balance)\n"
        "assert not {'workbench.distributed.exchange', 'matplotlib'} & set(sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(found.stdout) > 1
