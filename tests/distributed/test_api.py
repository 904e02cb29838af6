"""Errors that ranks agree on before data moves, plans that are kept; compile, checkpoints and autocast."""

import subprocess
import sys

import pytest
import torch

import workbench as wb
from tests.distributed import work
from workbench.distributed import call


@pytest.mark.parametrize("what, words", [
    ("pattern", "pattern of rank 1 is not that of rank 0"), ("ordering", "pattern of rank 1"),
    ("dtype", "dtype of rank 1"), ("shape", "shape of rank 1"), ("device", "device of rank 1"),
    ("scale", "scale of rank 1"),
    ("requires_grad", "requires_grad of rank 1"),
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


@pytest.mark.parametrize(
    ("what", "kind"),
    [("out of memory", "OutOfMemoryError"), ("out of memory by heads", "OutOfMemoryError"), ("bug", "RuntimeError")],
)
def test_what_goes_wrong_while_preparing_on_one_rank_is_raised_on_all_and_the_group_goes_on(ranks, what, kind):
    first, last = ranks(2).run(work.refused, what)
    assert first == (kind, f"rank 1: {last[1]}")
    assert last[0] == {"bug": "KeyError"}.get(what, kind)


NO_ROOM = ("OutOfMemoryError", "rank 1: no room"), ("OutOfMemoryError", "no room")  # of two ranks, the last failing


def test_an_out_of_memory_in_the_backward_by_heads_is_raised_on_all_and_the_group_goes_on(ranks):
    assert tuple(ranks(2).run(work.out_of_memory_by_heads)) == NO_ROOM


def test_queries_that_one_rank_has_changed_before_the_backward_are_an_error_on_all_and_the_group_goes_on(ranks):
    first, last = ranks(2).run(work.changed_before_the_backward)
    assert "modified by an inplace operation" in last and first.startswith("rank 1: one of the variables needed")


@pytest.mark.parametrize("backward, where, forgets", [
    (False, "buffers", ()), (True, "buffers", ()), (False, "own rows", ()), (True, "own rows", ()),
    (False, "own rows", (0,)), (False, "own rows", (0, 1)),
])  # fmt: skip
def test_an_out_of_memory_before_ranks_have_agreed_is_raised_on_all_and_the_group_goes_on(
    ranks, backward, where, forgets
):
    """It leaves nothing alive, and no race."""
    errors, left, races = zip(*ranks(2).run(work.runs_out, backward, where, forgets), strict=True)
    assert errors == NO_ROOM and races == ([], [])
    assert max(left) < 1 << 14  # a thread of gloo may hold the 400 bytes of the reason a little longer


def test_another_strategy_may_be_the_better_one_for_other_lengths_of_other_ranks(ranks):
    for found in ranks(2).run(work.flips):
        assert [strategy for strategy, _ in found] == ["sequence", "heads", "sequence"]
        assert max(error for _, error in found) < work.TOLERANCE


def test_a_gradient_of_a_gradient_is_refused_not_left_out(ranks):
    assert all("once_differentiable" in text for text in ranks(2).run(work.gradient_of_a_gradient))


def test_compiling_changes_nothing(ranks):
    assert ranks(2).run(work.compiled) == [0.0, 0.0]


def test_layers_that_share_a_pattern_and_differ_in_heads_groups_and_strategy_keep_their_plans(ranks):
    for counts, worst, kept in ranks(4).run(work.alternating):
        assert counts == [12, 6, 6] and worst < work.TOLERANCE and kept == call.PLANS


def test_autocast_is_that_of_one_device(ranks):
    assert ranks(2).run(work.autocast) == [("torch.bfloat16", 0.0)] * 2


def test_one_rank_needs_no_process_group():
    assert not torch.distributed.is_initialized()
    q = torch.randn(1, 40, 2, 8, requires_grad=True)
    pattern = wb.Dilated([8, 40], [1, 2])
    out, lse = wb.distributed.attention(q, q, q, pattern, return_lse=True)
    want = wb.attention(q, q, q, pattern, return_lse=True)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    with pytest.raises(ValueError, match="strategy='ring'"):
        wb.distributed.attention(q, q, q, pattern, strategy="ring")


def test_a_plan_loads_neither_the_exchange_nor_the_plots():
    code = (
        "import sys, workbench as wb; d = wb.distributed\n"
        "print(d.plan(wb.Dense(), d.Shards.even(10, 3), 2).balance)\n"
        "assert not {'workbench.distributed.exchange', 'matplotlib'} & set(sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(found.stdout) > 1
