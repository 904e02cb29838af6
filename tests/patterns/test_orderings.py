import math

import pytest
import torch

from workbench.patterns import orderings

SHAPES = [(1,), (7,), (1, 1), (1, 9), (9, 1), (8, 8), (5, 12), (13, 6), (97, 131), (1, 1, 5), (2, 3, 4), (5, 7, 3)]
MAKERS = {
    "row_major": orderings.row_major, "snake": orderings.snake, "tiles": lambda shape: orderings.tiles(shape, 3),
    "morton": orderings.morton, "hilbert": orderings.hilbert, "random": lambda shape: orderings.random(shape, seed=3),
}  # fmt: skip


def classic(side, d):
    """The d-th point (x, y) of the classic Hilbert curve on a square of side 2^p, one quadrant a pair of bits."""
    x = y = 0
    s = 1
    while s < side:
        right = (d // 2) % 2
        up = (d + right) % 2
        if not up:
            if right:
                x, y = s - 1 - x, s - 1 - y
            x, y = y, x
        x, y, d, s = x + s * right, y + s * up, d // 4, s * 2
    return x, y


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("maker", MAKERS)
def test_bijection_and_its_inverse(maker, shape):
    ordering = MAKERS[maker](shape)
    cells = torch.arange(math.prod(shape))
    assert ordering.shape == shape and len(ordering) == len(cells)
    assert ordering.curve.dtype == ordering.rank.dtype == torch.int64
    assert torch.equal(ordering.curve.sort().values, cells)
    assert torch.equal(ordering.rank[ordering.curve], cells)
    assert torch.equal(ordering.curve[ordering.rank], cells)


def test_hilbert_is_continuous_on_every_rectangle_up_to_40():
    for h in range(1, 41):
        for w in range(1, 41):
            ordering = orderings.hilbert((h, w))
            assert torch.equal(ordering.curve.sort().values, torch.arange(h * w)), (h, w)
            diagonal = max(h, w) % 2 == 1 and min(h, w) % 2 == 0
            assert ordering.jumps <= (1 if diagonal else 0), (h, w)
            if ordering.jumps:
                assert ordering.coordinates.diff(dim=0).abs().max() == 1, (h, w)


@pytest.mark.parametrize("side", [1, 2, 4, 8, 32, 64])
def test_hilbert_on_a_power_of_two_is_the_classic_curve(side):
    points = [classic(side, d) for d in range(side * side)]
    assert orderings.hilbert((side, side)).curve.tolist() == [y * side + x for x, y in points]


def test_hilbert_boxes_have_unit_steps_where_all_sides_are_even():
    for d in range(1, 11):
        for h in range(1, 11):
            for w in range(1, 11):
                ordering = orderings.hilbert((d, h, w))
                assert torch.equal(ordering.curve.sort().values, torch.arange(d * h * w)), (d, h, w)
                if d % 2 == h % 2 == w % 2 == 0:
                    assert ordering.jumps == 0, (d, h, w)
    assert orderings.hilbert((5, 7, 9)).jumps > 0  # odd sides are reported, not hidden


def test_steps_and_jumps():
    ordering = orderings.row_major((3, 4))
    assert ordering.steps.tolist() == [1, 1, 1, 4, 1, 1, 1, 4, 1, 1, 1]
    assert ordering.jumps == 2
    assert ordering.coordinates[5].tolist() == [1, 1]


def test_morton_and_tiles_by_hand():
    assert orderings.morton((4, 4)).curve.tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert orderings.morton((3, 3)).curve.tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 8]
    assert orderings.morton((2, 2, 2)).curve.tolist() == list(range(8))
    assert orderings.tiles((3, 3), 2).curve.tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 8]
    assert orderings.tiles((2, 4), (2, 3)).curve.tolist() == [0, 1, 2, 4, 5, 6, 3, 7]


def test_snake_never_jumps_and_walks_each_row_where_row_major_does():
    assert orderings.snake((3, 3)).curve.tolist() == [0, 1, 2, 5, 4, 3, 6, 7, 8]
    assert orderings.snake((2, 2, 2)).curve.tolist() == [0, 1, 3, 2, 6, 7, 5, 4]
    for shape in SHAPES:
        assert orderings.snake(shape).jumps == 0
        rows = orderings.snake(shape).curve.view(-1, shape[-1]).sort(1).values
        assert {*map(tuple, rows.tolist())} == {*map(tuple, torch.arange(math.prod(shape)).view(rows.shape).tolist())}


def test_random_is_seeded():
    one, same, other = (orderings.random((9, 9), seed).curve for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_restricting_to_an_irregular_region():
    mask = torch.rand(11, 8, generator=torch.Generator().manual_seed(0)) < 0.4
    whole = orderings.hilbert((11, 8))
    part = whole.restrict(mask)
    assert len(part) == int(mask.sum())
    assert part.curve.tolist() == [cell for cell in whole.curve.tolist() if mask.flatten()[cell]]
    assert torch.equal(part.rank[part.curve], torch.arange(len(part)))
    assert torch.equal(part.rank >= 0, mask.flatten())
    field = torch.randn(2, 88, 3)
    back = part.restore(part.arrange(field), fill=float("nan"))
    assert torch.equal(back[:, mask.flatten()], field[:, mask.flatten()])
    assert back[:, ~mask.flatten()].isnan().all()
    assert len(whole.restrict(torch.zeros(11, 8, dtype=torch.bool))) == 0
