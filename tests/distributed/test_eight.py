"""Eight ranks: exact, with the plan's bytes, and a rank that fails is named, as with two."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import Ranks
from tests.distributed.test_exact import check
from tests.distributed.work import exact
from tests.harness import test_ranks
from workbench.harness.ranks import Pool

WORLD = 8
IDS = ("dense", "dense-causal", "geometric", "geometric-causal", "blocks-cut-causal", "grid-rows", "grid-hilbert")
MODULES = test_ranks.MODULES
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def eight():
    ranks = Ranks(WORLD)  # not kept for other tests
    yield ranks
    ranks.close()


@pytest.mark.parametrize("id", IDS)
def test_values_gradients_and_bytes(eight, id):
    check(eight.run(exact, id))


def test_one_of_eight_that_is_killed_or_sleeps_is_named_and_the_next_job_runs(folder):
    with Pool(WORLD, "gloo") as pool:
        for how, seconds, status, reason in (
            ("is_killed", test_ranks.LONGEST_S, "killed", "rank 5 of 8: ended by signal 9"),
            ("sleeps", 2, "timeout", "rank 5 of 8: no answer within 2 s"),
        ):
            before = [x["pid"] for x in pool.run("faults:whoami")]
            outcome = pool.attempt("faults:fails", {"culprit": 5, "how": how}, timeout_s=seconds)
            assert (outcome.status, outcome.rank) == (status, 5) and outcome.error.startswith(reason)
            assert test_ranks.gone(before)
        assert [x["sum"] for x in pool.run("faults:whoami")] == [36.0] * WORLD
