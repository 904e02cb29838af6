"""What notebook 02 measures, and its sentences on frames in which Hilbert's order is not the winner."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch

import workbench as wb
from workbench.analysis import locality
from workbench.analysis import locality_words as words
from workbench.distributed import Shards
from workbench.patterns import orderings

RAGGED = (7, 9)
MASK = torch.rand(RAGGED, generator=torch.Generator().manual_seed(2)) < 0.6


def some_orders():
    return locality.orders(RAGGED, tile=3, seed=1) + locality.orders(RAGGED, tile=3, seed=1, mask=MASK)


def by_blocks(visible, block):
    """bool: which blocks of a bool matrix hold a True, one block after the other."""
    parts = [rows.split(block, 1) for rows in visible.split(block, 0)]
    return torch.tensor([[bool(part.any()) for part in row] for row in parts])


def test_orders_are_of_one_grid_or_of_a_region():
    assert [o.name for o in locality.orders((4, 4), 2)] == ["row_major", "tiles-2x2", "morton", "hilbert"]
    assert [o.name for o in locality.orders((4, 4), 2, seed=3)][4:] == ["snake", "random-3"]
    assert {len(o) for o in locality.orders(RAGGED, 3, mask=MASK)} == {int(MASK.sum())}


def test_steps_of_rows_and_of_a_hilbert_curve():
    table = locality.steps([orderings.row_major((3, 4)), orderings.hilbert((4, 4))]).set_index("order")
    assert table.loc["row_major"].tolist() == ["3 x 4", 2, 4, pytest.approx(17 / 11)]
    assert table.loc["hilbert"].tolist() == ["4 x 4", 0, 1, 1]


def test_extent_is_the_longer_side_of_the_box_around_a_run():
    got = locality.extent(some_orders(), [3])
    for order, value in zip(some_orders(), got["extent"], strict=True):
        runs = [order.coordinates[i : i + 3] for i in range(len(order) - 2)]
        sides = [int((run.amax(0) - run.amin(0)).max()) + 1 for run in runs]
        assert value == pytest.approx(sum(sides) / len(sides)), order.name


def test_within_counts_adjacent_pairs_of_occupied_cells():
    got = locality.within(some_orders(), [5])
    for order, value in zip(some_orders(), got["share"], strict=True):
        rank = {tuple(cell): i for i, cell in enumerate(order.coordinates.tolist())}
        beside = [(i, rank.get((y + a, x + b))) for (y, x), i in rank.items() for a, b in ((0, 1), (1, 0))]
        apart = [abs(i - j) for i, j in beside if j is not None]
        assert value == pytest.approx(sum(d <= 5 for d in apart) / len(apart)), order.name


def test_similarity_is_the_autocorrelation_along_the_order():
    features = torch.randn(*RAGGED, 4, generator=torch.Generator().manual_seed(0))
    order = orderings.hilbert(RAGGED)
    got = locality.similarity(features, [order], longest=6)
    x = features.double().flatten(0, 1)[order.curve]
    x = x - x.mean(0)
    want = [float((x[lag:] * x[:-lag]).sum(1).mean() / (x * x).sum(1).mean()) for lag in range(1, 7)]
    assert got["similarity"].tolist() == pytest.approx(want)
    assert got["run"].tolist() == pytest.approx([sum(want[:lag]) / lag for lag in range(1, 7)])


@pytest.mark.parametrize("order", some_orders(), ids=lambda o: f"{o.name}-{len(o)}")
def test_touched_equals_looking_at_every_pair(order):
    near = wb.Neighborhood(RAGGED, 1, order)
    n = len(order)
    assert locality.touched(near, n, 8).tolist() == by_blocks(near.multiplicity(n, 1)[0] > 0, 8).tolist()


def test_borders_are_the_cells_of_others_that_the_neediest_shard_sees():
    got = locality.borders(some_orders(), 2, [3, 4])
    for (many, order), row in zip(itertools.product([3, 4], some_orders()), got.itertuples(), strict=True):
        n = len(order)
        seen = wb.Neighborhood(order.shape, 2, order).multiplicity(n, 1)[0] > 0
        shard = torch.arange(many).repeat_interleave(torch.tensor(Shards.even(n, many).lengths))
        foreign = [int(seen[shard == x].any(0)[shard != x].sum()) for x in range(many)]
        assert (row.shards, row.order, row.cells) == (many, order.name, max(foreign)), order.name


def test_moving_puts_q_k_and_v_in_order_and_one_back():
    cells = torch.randn(3, 1, 63, 2, 4).unbind()
    assert torch.equal(locality.moving(cells, orderings.hilbert(RAGGED))(), cells[2])


def test_blocks_touched_by_the_windows_of_the_notebook():
    windows = [(128, 128, "sliding", 17), (128, 128, "sliding", 33), (128, 128, "aligned", 16)]
    windows.append((97, 131, "sliding", 17))
    percents = locality.table(locality.blocks_touched(windows), "percent", "grid", "window").round(2)
    assert percents[["row_major", "hilbert", "morton", "tiles-8x16"]].values.tolist() == [
        [12.84, 5.90, 6.18, 6.18], [24.12, 10.93, 9.94, 9.94], [12.50, 1.56, 1.56, 1.56], [18.10, 10.86, 8.48, 12.36],
    ]  # fmt: skip


def test_reordered_permutes_queries_and_keys_alike():
    pattern, curve = wb.Dilated([8, 16], [1, 2], causal=True), orderings.random((29,), 5).curve
    want = pattern.multiplicity(29, 3)[:, curve][:, :, curve] > 0
    assert torch.equal(locality.reordered(pattern, curve, 3).multiplicity(29, 3) > 0, want)


@pytest.mark.parametrize("offsets", ["interleaved", "blocked"])
def test_neighbours_equals_looking_at_every_token(offsets):
    pattern, heads, radius = wb.Dilated([6, 20], [1, 3], offsets=offsets), 2, 2
    got = locality.neighbours(some_orders(), pattern, heads, radius)
    for order in some_orders():
        n, rows = len(order), got[got["order"] == order.name]
        rows = rows.iloc[:3] if n == math.prod(RAGGED) else rows.iloc[-3:]
        x, t = order.coordinates, torch.arange(n)
        near = (x[:, None] - x).abs().amax(2) <= radius
        near &= ~torch.eye(n, dtype=torch.bool)
        inside = [t[:, None] // w == t // w for w in (6, 20)]
        seen = [(wb.Dilated([w], [r], offsets=offsets).multiplicity(n, heads) > 0).any(0) for w, r in ((6, 1), (20, 3))]
        for i in range(3):
            for name, hits in (("inside", inside), ("seen", seen)):
                hit = (hits[0] | hits[1]) if i == 2 else hits[i]
                some = near.any(1)
                want = ((near & hit).sum(1)[some] / near.sum(1)[some]).mean()
                assert rows[name].iloc[i] == pytest.approx(float(want), abs=1e-6), (order.name, name, i)


def test_receptive_field_on_a_region():
    order = orderings.hilbert(RAGGED).restrict(MASK)
    cell = locality.typical_cell(MASK)
    grid = torch.from_numpy(locality.field_on_grid(order, wb.Dilated([10], [1]), 1, cell, 2))
    assert torch.equal(grid.isnan(), ~MASK)
    segment = order.rank // 10 == order.rank.view(RAGGED)[cell] // 10
    assert grid[cell] == 0 and torch.equal((grid >= 0).flatten(), segment & MASK.flatten())


def test_neighborhood_is_the_same_under_every_order():
    features = torch.randn(*RAGGED, 5, generator=torch.Generator().manual_seed(0)).double()
    qkv = [x.double() for x in locality.project(features.float(), 2, 8)]
    assert [tuple(x.shape) for x in qkv] == [(1, 63, 2, 8)] * 3
    outs = [o.restore(locality.neighborhood_call(qkv, o, 2)()) for o in locality.orders(RAGGED, 3, seed=1)]
    want = wb.reference(*qkv, wb.Neighborhood(RAGGED, 2))[0]
    for out in outs:
        torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_region_has_the_share_asked_for_and_is_seeded(share):
    one, same, other = (locality.region((40, 50), share, seed) for seed in (1, 1, 2))
    assert abs(float(one.double().mean()) - share) < 0.01
    assert torch.equal(one, same)
    assert share == 1 or not torch.equal(one, other)


def percents(**columns):
    return pd.DataFrame(columns, index=[3, 9])


def times(noise=0.05, **speedups):
    rows = {"row_major": 1.0, **speedups, "A/A": 1.0}
    frame = pd.DataFrame({"speedup": rows})
    return frame.assign(speedup_low=frame["speedup"] - noise, speedup_high=frame["speedup"] + noise)


def test_from_which_window_on_an_order_pays():
    orders = {"row_major": [5.0, 9.0], "tiles": [4.0, 4.0], "hilbert": [6.0, 5.0], "random-0": [9.0, 99.0]}
    said = words.pays(percents(**orders))
    assert "tiles **from 3 x 3 on**, Hilbert **from 9 x 9 on** and random **in none of these windows**" in said


def test_a_simpler_order_that_is_faster_than_hilbert_is_named():
    said = words.fastest(times(tiles=2.1, morton=2.2, hilbert=1.6))
    assert "Morton **2.20** (2.15 to 2.25)" in said and said.endswith("Here Morton is faster than Hilbert.")
    assert words.fastest(times(tiles=2.1, hilbert=1.0)).count("within the noise") == 1
    near = words.fastest(times(noise=0.2, morton=1.7, hilbert=1.6))
    assert near.endswith("row-major against itself 0.80 to 1.20.")


def test_results_that_differ_are_said_to():
    assert "the results of all orders agree: they are at most **3e-06** apart" in words.same_results(3e-6, 6.0)
    assert "disagree" in words.same_results(0.5, 6.0) and "disagree" in words.same_results(np.nan, 6.0)


def test_surroundings_name_ties():
    seen = pd.DataFrame({"row_major": [0.1, 0.3, 0.4], "morton": [0.2, 0.2, 0.5], "hilbert": [0.3, 0.1, 0.5]})
    said = words.surroundings(seen.set_index(pd.Index(["64 / 1", "256 / 2", "any"])))
    assert "sees **50%** of its surroundings under Hilbert and **40%**" in said
    assert said.endswith("most under Morton and Hilbert. By the shortest segments alone 30% against 10%, by the "
                         "longest 10% against 30%.")  # fmt: skip


def test_areas_that_are_the_same_are_told_once():
    band, square = np.full((4, 4), -1.0), np.full((4, 4), -1.0)
    band[0], square[:2, :2] = 1, 2
    said = words.areas({"row_major": band, "hilbert": square}, 2)
    assert "knows 25% (row-major and Hilbert) of the cells" in said
    assert "**1 x 4** (row-major), **2 x 2** (Hilbert)" in said
    square[3, 3] = 1
    assert "25% (row-major), 31% (Hilbert)" in words.areas({"row_major": band, "hilbert": square}, 2)


def summary(**orders):
    rows = [words.BLOCKS, words.ATTENTION, words.MOVED, words.ALIKE, words.SHARDS]
    return pd.DataFrame(orders, index=rows).astype(float)


def test_the_verdict_weighs_all_orders():
    rows = [11, 1200, None, 17, 2064], [5.4, 700, 8, 88, 2176], [6.7, 700.3, 9, 116, 1584]
    found = summary(**dict(zip(("row_major", "tiles", "hilbert"), rows, strict=True)))
    line, since = {"natural": 15.0, "hilbert": 43.0}, percents(row_major=[5, 9], tiles=[4, 4], hilbert=[6, 5])
    work, speed, moved, long_runs, on_a_line = words.verdict(found, times(tiles=1.7, hilbert=1.3), line, since)
    assert work.startswith("**Any order that keeps blocks compact saves work**") and work.endswith("9 cells and more.")
    assert words.best(found).to_numpy().tolist() == [[0, 1, 0], [0, 1, 1], [0, 0, 0], [0, 0, 1], [0, 0, 1]], "as shown"
    assert "5.4% (tiles), 6.7% (Hilbert) and 11.0% (row-major)" in work
    assert speed.endswith("Here tiles is faster than Hilbert.")
    assert "at most 9 ms, once" in moved and "takes 700 ms or more" in moved
    assert "under **Hilbert** (116; row-major 17)" in long_runs
    assert "under **Hilbert** (1,584; row-major 2,064)" in long_runs
    assert on_a_line.endswith("43.0% of the blocks against 15.0%: leave a line in its natural order.")


def test_the_verdict_where_no_order_helps():
    found = summary(row_major=[5, 10, None, None, 40], hilbert=[6, 12, 3, 30, 40])
    natural, narrow = {"natural": 15.0, "hilbert": 15.0}, percents(row_major=[5, 9], hilbert=[6, 10])
    work, *_, long_runs, on_a_line = words.verdict(found, times(hilbert=1.0), natural, narrow)
    assert words.best(found).iloc[3:].to_numpy().tolist() == [[True, False], [True, True]]
    assert work.startswith("**No choice of order saves much work**")
    assert "under **row-major** (more than was looked at" in long_runs and "**row-major and Hilbert** (40" in long_runs
    assert on_a_line.endswith("costs nothing.")
