"""Pictures of patterns show what the patterns say, and each has its alternative text."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_rgb

import workbench as wb
from workbench.analysis import cost, samples
from workbench.patterns import layouts
from workbench.plots import patterns as draw
from workbench.plots import style

N = 16
PATTERNS = {
    "dense": wb.Dense(), "dilated": wb.Dilated([4, 16], [1, 4]), "blocks": wb.BlockSparse(layouts.local(1), 4),
    "near": wb.Neighborhood((4, 4), 1), "mine": wb.Predicate(lambda h, i, j: i == j),
}  # fmt: skip


def images(fig):
    return [ax.images[0].get_array() for ax in fig.axes if ax.images]


def test_masks_are_coloured_exactly_where_a_query_sees_a_key():
    fig = draw.masks(PATTERNS, N, heads=2, head=1)
    for image, pattern in zip(images(fig), PATTERNS.values(), strict=True):
        seen = pattern.multiplicity(N, 2)[1].numpy() > 0
        assert np.array_equal((np.asarray(image) < 1).any(-1), seen)
    titles = [ax.get_title("left") for ax in fig.axes]
    assert f"near\n{PATTERNS['near'].density(N, 2):.1%} of pairs" in titles


def test_heads_shade_the_rows_without_a_key_and_draw_all_heads_together():
    gappy = wb.Dilated([8], [4])
    count = gappy.multiplicity(N, 3)
    fig = draw.heads(gappy, N, 3)
    for seen, ax, image in zip([*count, count.sum(0)], fig.axes, images(fig), strict=True):
        empty = (seen == 0).all(1).numpy()
        shaded = np.isclose(np.asarray(image), to_rgb(draw.UNCOVERED)).all((1, 2))
        assert np.array_equal(shaded, empty)
        title = ax.get_title("left")
        assert f": {(seen > 0).double().mean():.1%}" in title and f"{empty.sum()} empty rows" in title
    assert [t.get_text() for t in fig.legends[0].get_texts()] == ["seen once", "a row that sees nothing"]


def test_the_sum_of_the_branches_is_the_pattern():
    fig = draw.branches(PATTERNS["dilated"], N, heads=2, head=1)
    *alone, total = [(np.asarray(image) < 1).any(-1) for image in images(fig)]
    assert len(alone) == 2 and np.array_equal(np.logical_or(*alone), total)


def test_reach_draws_the_share_of_tokens_after_each_layer_and_when_one_token_depends_on_each():
    fig, shares = draw.reach(PATTERNS, N, heads=1, layers=3)
    lines = fig.axes[0].get_lines()
    assert len(lines) == len(PATTERNS) and list(lines[0].get_ydata()) == [1 / N, 1, 1, 1] == list(shares["dense"])
    assert list(lines[-1].get_ydata()) == [1 / N] * 4 == list(shares["mine"])  # a token that sees itself alone
    assert "mine 6%" in [text.get_text() for text in fig.axes[0].texts]
    (first,) = images(fig)
    assert {*first[-1]} == {-1, 0}
    first = first[3]  # of a neighborhood of 3 x 3 on 4 x 4 cells: all but the far border after one layer
    assert first[N // 2] == 0 and {*first} == {0, 1, 2, 3}


def test_cost_draws_the_table_and_says_that_bytes_are_modelled():
    makers = {"dense": lambda n: wb.Dense(), "window": lambda n: wb.Neighborhood((n,), 2)}
    table = cost.table(makers, [64, 128], heads=2, head_dim=8)
    left, right = draw.cost(table).axes
    assert list(left.get_lines()[0].get_ydata()) == [2 * 64**2, 2 * 128**2]
    assert list(right.get_lines()[1].get_ydata()) == list(table[table.pattern == "window"].predicted_bytes)
    assert "modelled" in right.get_title("left")


def test_attention_maps_draw_each_source_and_head():
    sources = {"field": samples.field((6, 5), 8)}
    fig = draw.attention_maps(sources, {"field": samples.tokens(sources["field"], 2, 4)})
    grid, *weights = images(fig)
    assert grid.shape == (6, 5) and len(weights) == 2
    assert all(float(w.max()) == 1 and float(w.min()) >= 0 for w in weights)


def test_mass_draws_a_ring_a_head_and_a_bar_a_pattern():
    rows = [dict(source=s, pattern=p, family="Dense", head=h, density=0.5, mass=0.1 * h)
            for s in ("a", "b") for p in ("x", "y") for h in range(3)]  # fmt: skip
    fig = draw.mass(pd.DataFrame(rows))
    for ax in fig.axes:
        assert len(ax.patches) == 2 and [float(p.get_width()) for p in ax.patches] == [0.5, 0.5]
        rings = sorted(float(line.get_xdata()[0]) for line in ax.get_lines())
        assert rings == pytest.approx([0, 0, 0.1, 0.1, 0.2, 0.2])


def test_cells_are_digits_and_points():
    panels = {"a": torch.tensor([[0, 2], [1, 0]]), "b": np.array([[np.nan, -1.0], [0.0, 3.0]])}
    assert style.cells(panels).to_dict("list") == {"a": ["02", "10"], "b": ["..", "03"]}
