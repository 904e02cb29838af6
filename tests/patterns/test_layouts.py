import pytest
import torch

from workbench.patterns import BlockSparse, Neighborhood
from workbench.patterns.layouts import explicit, global_, hierarchical, local, random, strided, top_k

GRIDS = [(1, 1), (7, 7), (12, 5), (5, 12), (33, 33)]


def grid_of(layout, rows, cols, heads=1):
    h, i, j = torch.arange(heads).view(-1, 1, 1), torch.arange(rows).view(1, -1, 1), torch.arange(cols).view(1, 1, -1)
    return layout.visible(h, i, j, (rows, cols)).expand(heads, rows, cols)


def drawn(predicate, rows, cols):
    cells = [bool(predicate(i, j)) for i in range(rows) for j in range(cols)]
    return torch.tensor(cells, dtype=torch.bool).view(1, rows, cols)


def level_of(distance, window):
    level = 0
    while distance > window * 2**level:
        level += 1
    return level


DEFINITIONS = {
    "local": (local(2), lambda i, j: abs(i - j) <= 2),
    "diagonal": (local(0), lambda i, j: i == j),
    "global": (global_(2), lambda i, j: i < 2 or j < 2),
    "nothing": (global_(0), lambda i, j: False),
    "strided": (strided(3), lambda i, j: i % 3 == j % 3),
    "hierarchical": (hierarchical(2, 3), lambda i, j: (x := level_of(abs(i - j), 2)) < 3 and j % 2**x == 0),
    "hierarchical-deep": (hierarchical(1, 31), lambda i, j: j % 2 ** level_of(abs(i - j), 1) == 0),
    "or": (local(1) | global_(1) | strided(4), lambda i, j: abs(i - j) <= 1 or min(i, j) < 1 or i % 4 == j % 4),
    "and": (local(4) & strided(2), lambda i, j: abs(i - j) <= 4 and i % 2 == j % 2),
    "minus": (local(4) - local(1), lambda i, j: 1 < abs(i - j) <= 4),
    "not": (~local(3), lambda i, j: abs(i - j) > 3),
    "nested": (~(local(3) | strided(2)) & global_(4), lambda i, j: abs(i - j) > 3 and (i - j) % 2 and min(i, j) < 4),
}


@pytest.mark.parametrize("rows, cols", GRIDS)
@pytest.mark.parametrize("layout, predicate", DEFINITIONS.values(), ids=DEFINITIONS)
def test_against_the_definition(layout, predicate, rows, cols):
    assert torch.equal(grid_of(layout, rows, cols), drawn(predicate, rows, cols))


@pytest.mark.parametrize("far", [2**31, 10**30])
def test_what_is_farther_than_32_bits_is_just_far(far):
    n = 36
    for make in (local, global_, strided, lambda distance: hierarchical(distance, 3)):
        assert BlockSparse(make(far), 4).pairs(n, 1) == BlockSparse(make(99), 4).pairs(n, 1)
    grid = Neighborhood((6, 6), far)
    assert grid.pairs(n, 1) == n * n == int(grid.multiplicity(n, 1).sum()) and grid.blocks(n, 1).full.all()


@pytest.mark.parametrize("density", [0.01, 0.1, 0.37, 1.0])
@pytest.mark.parametrize("rows, cols", GRIDS)
def test_random_has_the_density_asked_for(rows, cols, density):
    layout = grid_of(random(density, seed=3), rows, cols)
    assert layout.sum() == max(rows, round(density * rows * cols))
    widths = layout.sum(-1)
    assert widths.min() >= 1 and widths.max() - widths.min() <= 1


def test_random_does_not_depend_on_how_it_is_asked():
    whole = grid_of(random(0.3, seed=5, per_head=True), 16, 16, heads=3)
    h, i, j = (torch.randint(x, (50,)) for x in (3, 16, 16))
    assert torch.equal(random(0.3, seed=5, per_head=True).visible(h, i, j, (16, 16)), whole[h, i, j])
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(grid_of(random(0.3, seed=6), 16, 16), grid_of(random(0.3, seed=5), 16, 16))
    shared = grid_of(random(0.3, seed=5), 16, 16, heads=3)
    assert torch.equal(shared[0], shared[2])


@pytest.mark.parametrize("nq, kv_heads", [(22, 4), (22, 2), (9, 1)])
def test_top_k_takes_the_best_pooled_products(nq, kv_heads):
    n, bq, bk, count = 22, 4, 3, 2
    q, k = torch.randn(2, nq, 4, 8), torch.randn(2, n, kv_heads, 8)
    blocks = top_k(q, k, (bq, bk), count).tensor
    rows, cols, first = -(-n // bq), -(-n // bk), (n - nq) // bq
    assert blocks.shape == (2, 4, rows, cols)
    assert not blocks[:, :, :first].any()
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(first, rows)).tolist():
        query = q[b, max(0, i * bq - (n - nq)) : (i + 1) * bq - (n - nq), h].mean(0)
        keys = [k[b, j * bk : (j + 1) * bk, h // (4 // kv_heads)].mean(0) for j in range(cols)]
        scores = [float(query @ key) for key in keys]
        best = sorted(range(cols), key=lambda j: -scores[j])[:count]
        assert blocks[b, h, i].nonzero().flatten().tolist() == sorted(best)


def test_a_batch_is_indexed():
    blocks = torch.rand(3, 2, 4, 4) < 0.5
    layout = explicit(blocks) | local(0)
    assert layout.batch == 3 and local(1).batch is None
    one = layout.for_batch(2)
    assert one.batch is None and grid_of(explicit(torch.ones(0, 4, 4) > 0), 4, 4, heads=0).shape == (0, 4, 4)
    assert torch.equal(grid_of(one, 4, 4, heads=2), blocks[2] | torch.eye(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="layout of batch 3: index the batch"):
        grid_of(layout, 4, 4, heads=2)
    with pytest.raises(ValueError, match="layouts of batch 3 and 2: want one batch size"):
        explicit(blocks) & explicit(blocks[:2])


def test_only_layouts_combine():
    with pytest.raises(TypeError):
        local(1) | 3
