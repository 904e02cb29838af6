"""Attention over shards is that of one device, to rounding, and moves the bytes that its plan says."""

from __future__ import annotations

import pytest

from tests.distributed import work
from tests.distributed.cases import CASES
from tests.distributed.ranks import Ranks
from tests.distributed.work import MUTANTS, TOLERANCE
from workbench.harness.processes import shared

WORLDS = (2, 4)


def check(results):
    errors = [max(found.values()) for found, _, _ in results]
    assert max(errors) < TOLERANCE, errors
    for _, sent, planned in results:
        assert sent == planned


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("id", CASES)
def test_values_gradients_and_bytes(ranks, world, id):
    check(ranks(world).run(work.exact, id))


BY_HEADS = [  # 4 heads or 8 on 2 or 4 key heads, and so on: what two ranks can divide
    id
    for id, (case, _) in CASES.items()
    if case.heads % 2 == 0 and (case.kv_heads or case.heads) % 2 == 0 and "sequence" not in id and "blocked" not in id
]


@pytest.mark.parametrize("id", BY_HEADS)
def test_by_heads(ranks, id):
    check(ranks(2).run(work.exact, id, "heads"))


@pytest.mark.parametrize("id", ["geometric", "rates-that-share-no-divisor-causal"])
def test_by_heads_on_four(ranks, id):
    if CASES[id][0].kv_heads % 4:
        found = ranks(4).run(work.why_not_heads, id)
        assert all("want multiples of 4" in text for text in found)
    else:
        check(ranks(4).run(work.exact, id, "heads"))


@pytest.mark.parametrize("world", WORLDS)
def test_in_one_stage(ranks, world):
    """As short sequences are exchanged; the other tests make many stages of them."""
    for id in ("dense", "dense-causal", "geometric", "blocks-cut-causal"):
        check(ranks(world).run(work.in_one_stage, id))


@pytest.fixture(scope="module")
def interpreting():
    """Two ranks in which Triton's interpreter runs the kernels."""
    pytest.importorskip("triton")
    found = Ranks(2, shared(TRITON_INTERPRET="1"))
    yield found
    found.close()


@pytest.mark.parametrize("id, dtype, most", [("dense-causal", "float32", 2e-6), ("dense-causal", "float16", 3e-3),
                                             ("geometric-causal", "float16", 3e-3), ("last-queries", "float32", 2e-6),
                                             ("partition", "float16", 3e-3), ("grid-rows", "float32", 2e-6),
                                             ("rates-that-share-no-divisor-causal", "float16", 3e-3),
                                             ("blocks-of-16-causal", "float16", 3e-3),
                                             ("blocks-of-16", "float32", 2e-6)])  # fmt: skip
def test_by_kernels(interpreting, id, dtype, most):
    """They read some tensors as they lie, and merge 16-bit results in place, also of rows that have seen nothing."""
    assert max(interpreting.run(work.by_kernels, id, dtype)) < most


SHOWN = {  # each mutant on a case in which what it breaks is used
    "dk-and-dv-swapped": "geometric",
    "a-hop-dropped": "geometric-causal",
    "a-returned-gradient-dropped": "blocks-whole-causal",
    "gradients-added-to-what-was-there": "rates-that-share-no-divisor",
    "keys-and-values-swapped": "grid-hilbert",
    "what-was-there-overwritten": "geometric",
    "results-at-the-border-not-replaced": "grid-near-hilbert",
    "gradients-at-the-border-given-twice": "grid-near-rows",
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(ranks, world, name):
    assert max(ranks(world).run(work.mutated, name, SHOWN[name])) > 1e-3


@pytest.mark.parametrize("world", WORLDS)
def test_loud_keys_of_one_rank_and_a_gradient_on_another(ranks, world):
    assert max(ranks(world).run(work.loud_keys)) < 1e-11  # absolute: the keys are ten times what they are elsewhere


@pytest.mark.parametrize("world", WORLDS)
def test_what_comes_later_changes_nothing_before_by_a_bit(ranks, world):
    ranks(world).run(work.blind_to_the_future)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_errors_of_each_dtype_stay_within_one_devices_budget_as_ranks_grow(ranks, name):
    found = {world: ranks(world).run(work.dtype_errors, name, [64 // world] * world)[0] for world in WORLDS}
    for two, four in zip(*found.values(), strict=True):
        for quantity in two:
            (less, budget), (more, _) = two[quantity], four[quantity]
            assert less <= budget and more <= budget, f"{quantity}: {less:.3g}, {more:.3g} > {budget:.3g}"
            assert more < 1.3 * less + budget / 20, f"{quantity} grows from {less:.3g} to {more:.3g}"


def test_strided_inputs_give_the_same_numbers(ranks):
    assert ranks(2).run(work.strided) == [0.0, 0.0]


def test_fifty_iterations_hold_what_one_does(ranks):
    ranks(2).run(work.living_bytes, 1)  # what is kept once is there: the modules' own tensors
    once, fifty = (ranks(2).run(work.living_bytes, times) for times in (1, 50))
    assert once == fifty
    assert all(during > after > 0 for after, during in once)


def test_a_gradient_through_lse_on_one_rank_alone(ranks):
    assert max(ranks(2).run(work.partly_used)) < TOLERANCE
