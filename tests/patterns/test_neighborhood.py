import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.patterns import Neighborhood, orderings

MEGAPIXEL = (1024, 1024)


def count(shape, radius, curve, heads=1):
    """The definition, cell by cell."""
    cells = list(itertools.product(*map(range, shape)))
    places = torch.tensor([cells[c] for c in curve.tolist()]).view(len(curve), len(shape))
    near = (places[:, None] - places[None]).abs() <= torch.tensor(radius)
    return near.all(-1).int().expand(heads, -1, -1)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.one_of(
        st.tuples(st.integers(1, 40)), st.tuples(*[st.integers(1, 8)] * 2), st.tuples(*[st.integers(1, 4)] * 3)
    ),
    order=st.sampled_from([None, "row_major", "morton", "hilbert", "random"]),
    reach=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    queries=st.floats(0, 1),
    holes=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_configuration(agree, shape, order, reach, queries, holes, seed):
    radius = tuple(reach[: len(shape)])
    ordering = None if order is None else getattr(orderings, order)(shape)
    if ordering is not None and holes:
        ordering = ordering.restrict(torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6)
    curve = torch.arange(math.prod(shape)) if ordering is None else ordering.curve
    agree(
        Neighborhood(shape, radius, ordering), count(shape, radius, curve, 2), round(queries * len(curve)), (4, (3, 5))
    )


def test_four_axes(agree):
    shape, radius = (2, 3, 2, 3), (1, 0, 1, 2)
    agree(Neighborhood(shape, radius), count(shape, radius, torch.arange(36)))


@pytest.mark.parametrize("question", ["pairs", "density", "coverage", "uncovered"])
def test_a_million_tokens_take_less_than_a_second(one_core_seconds, question):
    pattern = Neighborhood(MEGAPIXEL, 16, orderings.hilbert(MEGAPIXEL))
    assert one_core_seconds(lambda: getattr(pattern, question)(1 << 20, 12)) < 1


@pytest.mark.parametrize("side, seconds", [(256, 0.5), (1024, 5)])
def test_blocks_are_found_without_looking_at_pairs(one_core_seconds, side, seconds):
    pattern = Neighborhood((side, side), 16, orderings.hilbert((side, side)))
    assert one_core_seconds(lambda: pattern.blocks(side * side, 1)) < seconds


def test_pairs_of_a_large_grid_have_a_closed_form():
    axis = sum(min(1023, x + 16) - max(0, x - 16) + 1 for x in range(1024))
    assert Neighborhood(MEGAPIXEL, 16, orderings.hilbert(MEGAPIXEL)).pairs(1 << 20, 12) == 12 * axis**2


def test_an_ordering_that_leaves_out_every_cell_has_no_token():
    empty = orderings.row_major((1,)).restrict(torch.zeros(1) > 0)
    assert Neighborhood((1,), 0, empty).pairs(0, 2) == 0 and len(Neighborhood((1,), 0, empty).curve) == 0
