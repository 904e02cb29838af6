import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.patterns import Neighborhood, Predicate, from_spec, orderings

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


def test_the_work_differs_by_ordering_and_the_pairs_do_not():
    shape = (32, 32)
    patterns = [Neighborhood(shape, 4, o) for o in (None, orderings.hilbert(shape), orderings.random(shape))]
    assert len({p.pairs(1024, 3) for p in patterns}) == 1
    row_major, hilbert, random = (p.block_density(1024, 1, block_size=16) for p in patterns)
    assert hilbert < row_major < random


TOUCHED = {  # percent of 128-token blocks: grid, radius, row-major, hilbert, morton, tiles of 8 x 16
    "17x17": ((128, 128), 8, 12.84, 5.90, 6.18, 6.18),
    "33x33": ((128, 128), 16, 24.12, 10.93, 9.94, 9.94),
    "ragged": ((97, 131), 8, 18.10, 10.86, 8.48, 12.36),
}


@pytest.mark.parametrize("shape, radius, row_major, hilbert, morton, tiles", TOUCHED.values(), ids=TOUCHED)
def test_blocks_touched(shape, radius, row_major, hilbert, morton, tiles):
    got = [
        100 * Neighborhood(shape, radius, ordering).block_density(math.prod(shape), 1)
        for ordering in (
            None,
            orderings.hilbert(shape),
            orderings.morton(shape),
            orderings.tiles(shape, (8, 16)),
        )
    ]
    assert got == pytest.approx([row_major, hilbert, morton, tiles], abs=0.005)


def test_a_hilbert_order_hurts_a_mask_along_one_axis():
    n, curve = 4096, orderings.hilbert((64, 64)).curve
    assert curve[-1] == 63  # ends at (0, W - 1)
    window = Neighborhood(n, 256)
    permuted = Predicate(lambda h, i, j: (curve[i] - curve[j]).abs() <= 256)
    assert 100 * window.block_density(n, 1) == pytest.approx(15.0, abs=0.05)
    assert 100 * permuted.block_density(n, 1) == pytest.approx(43.0, abs=0.05)
    assert window.pairs(n, 1) == permuted.pairs(n, 1)


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


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Neighborhood((8, 8), -1), "radius=-1: want an int >= 0"),
        (lambda: Neighborhood((8, 8), 1.5), "radius=1.5: want an int >= 0"),
        (lambda: Neighborhood((8, 8), (1, -2)), r"radius\[1\]=-2: want an int >= 0"),
        (lambda: Neighborhood((8, 8), (1, 2, 3)), r"radius=\(1, 2, 3\): want an int >= 0, or 2 of them"),
        (lambda: Neighborhood((8, 0), 1), r"shape\[1\]=0: want an int >= 1"),
        (lambda: Neighborhood((), 1), r"shape=\(\): want a non-empty list"),
        (lambda: Neighborhood((8, True), 1), r"shape\[1\]=True: want an int >= 1"),
        (lambda: Neighborhood("8x8", 1), r"shape='8x8': want an int >= 1"),
        (
            lambda: Neighborhood((2, 2), 1, orderings.Ordering("twice", (2, 2), torch.tensor([0, 1, 1, 2]))).pairs(
                4, 1
            ),
            "curve of twice: a cell is visited twice",
        ),
        (
            lambda: Neighborhood((2, 2), 1, orderings.Ordering("out", (2, 2), torch.tensor([0, 1, 2, -1]))).pairs(4, 1),
            "curve of out: cells outside the grid",
        ),
        (lambda: Neighborhood((8, 8), 1, "hilbert"), r"ordering='hilbert': want an ordering"),
        (lambda: Neighborhood((8, 8), 1, orderings.hilbert((8, 4))), r"ordering=hilbert of shape \(8, 4\).*\(8, 8\)"),
        (lambda: Neighborhood((8, 8), 1).pairs(63, 1), r"n=63 on a neighborhood of shape \(8, 8\): want n=64"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_ordering_that_leaves_out_every_cell_has_no_token():
    empty = orderings.row_major((1,)).restrict(torch.zeros(1) > 0)
    assert Neighborhood((1,), 0, empty).pairs(0, 2) == 0 and len(Neighborhood((1,), 0, empty).curve) == 0


def test_names():
    assert Neighborhood((8, 8), 16).short_name == Neighborhood((4, 16), 16).short_name == "neighborhood-16"
    assert Neighborhood((8, 8), (1, 2), orderings.hilbert((8, 8))).name == "neighborhood-1x2-hilbert-of-8x8"
    assert Neighborhood(4096, 2048).name == "window-2048"


def test_specs_are_the_same_pattern():
    shape = (6, 7)
    holes = orderings.hilbert(shape).restrict(torch.arange(42).view(shape) % 5 > 0)
    for ordering in (None, orderings.tiles(shape, (2, 3)), holes):
        pattern = Neighborhood(shape, (1, 2), ordering)
        n = 42 if ordering is None else len(ordering.curve)
        other = from_spec(pattern.spec())
        assert other.spec() == pattern.spec()
        assert torch.equal(other.multiplicity(n, 1), pattern.multiplicity(n, 1))
