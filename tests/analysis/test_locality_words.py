"""The sentences of notebook 02, on frames in which Hilbert's order is not the winner."""

import numpy as np
import pandas as pd

from workbench.analysis import locality_words as words


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
    assert "Morton **2.20**" in said and said.endswith("Morton is faster than Hilbert here.")
    assert "not beyond the noise: Hilbert (" in words.fastest(times(tiles=2.1, hilbert=1.0))
    assert "faster than Hilbert" not in words.fastest(times(noise=0.2, morton=1.7, hilbert=1.6))
    assert words.fastest(times(hilbert=1.05)).startswith("No order is faster than row-major beyond the noise")
    assert words.fastest(times(hilbert=0.5)).startswith("No order")


def test_results_that_differ_are_said_to():
    assert "agree exactly" in words.same_results(0.0, 6.0) and "within **3e-06**" in words.same_results(3e-6, 6.0)
    assert "disagree" in words.same_results(0.5, 6.0) and "disagree" in words.same_results(np.nan, 6.0)


def test_surroundings_name_ties_and_one_branch_is_told_once():
    seen = pd.DataFrame({"row_major": [0.1, 0.3, 0.4], "morton": [0.2, 0.2, 0.5], "hilbert": [0.3, 0.1, 0.5]})
    said = words.surroundings(seen.set_index(pd.Index(["64 / 1", "256 / 2", "any"])))
    assert "most under Morton and Hilbert." in said and "longest segments alone 10% against 30%" in said
    assert "segments alone" not in words.surroundings(seen[1:].set_index(pd.Index(["64 / 1", "any"])))


def test_areas_are_the_same_or_each_is_told():
    band, square = np.full((4, 4), -1.0), np.full((4, 4), -1.0)
    band[0], square[:2, :2] = 1, 2
    said = words.areas({"row_major": band, "hilbert": square}, 2)
    assert "knows 25% of the cells, as many in every order" in said
    assert "**1 x 4** (row-major), **2 x 2** (Hilbert)" in said
    square[3, 3] = 1
    said = words.areas({"row_major": band, "hilbert": square}, 2)
    assert "25% (row-major), 31% (Hilbert)" in said and "**4 x 4** (Hilbert)" in said


def summary(**orders):
    rows = [words.BLOCKS, words.ATTENTION, words.MOVED, words.ALIKE, words.SHARDS]
    return pd.DataFrame(orders, index=rows).astype(float)


def test_the_verdict_weighs_all_orders():
    found = summary(
        row_major=[11, 1200, None, 17, 2064], tiles=[5.4, 700, 8, 88, 2176], hilbert=[6.7, 900, 9, 116, 1584]
    )
    line = {"natural": 15.0, "hilbert": 43.0}
    work, speed, moved, long_runs, on_a_line = words.verdict(found, times(tiles=1.7, hilbert=1.3), line)
    assert work.startswith("**Any order that keeps blocks compact saves work**")
    assert "5.4% (tiles), 6.7% (Hilbert), 11.0% (row-major)" in work
    assert speed.endswith("tiles is faster than Hilbert here.")
    assert "at most 9 ms, once" in moved and "takes 700 ms or more" in moved
    assert (
        "under **Hilbert** (116; row-major 17)" in long_runs
        and "under **Hilbert** (1,584; row-major 2,064)" in long_runs
    )
    assert on_a_line.endswith("43.0% of the blocks against 15.0%: leave a line in its natural order.")


def test_the_verdict_where_no_order_helps():
    found = summary(row_major=[5, 10, None, None, 40], hilbert=[6, 12, None, 30, 40])
    work, _, long_runs, on_a_line = words.verdict(found, times(hilbert=1.0), {"natural": 15.0, "hilbert": 15.0})
    assert work.startswith("**No choice of order saves much work**")
    assert "under **row-major** (more than was looked at" in long_runs and "**row-major and Hilbert** (40" in long_runs
    assert on_a_line.endswith("costs nothing.")
