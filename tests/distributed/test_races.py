"""Accesses to the same memory from a card's streams are ordered (`races` finds those that are not)."""

import pytest

from tests import tools
from tests.distributed import work

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


@pytest.mark.parametrize(
    "what, words",
    [("what is there", "beside, not behind {'main'}"), ("what arrives", "main, not behind {'wire'}")],
)
def test_a_wait_that_is_left_out_is_found(ranks, what, words):
    for _, races in ranks(2).run(work.on_streams, "dense-causal", hastens=what):
        assert any(words in x for x in races)
