"""The sentences of notebook 02, on frames in which Hilbert's order is not the winner."""

from __future__ import annotations

import numpy as np
import pandas as pd

from workbench.analysis import locality_words as words


def percents(**columns):
    return pd.DataFrame(columns, index=[3, 9])


def times(noise=0.05, **speedups):
    rows = {"row_major": 1.0, **speedups, "A/A": 1.0}
    frame = pd.DataFrame({"speedup": rows})
    return frame.assign(speedup_low=frame["speedup"] - noise, speedup_high=frame["speedup"] + noise)


def test_steps():
    one = pd.DataFrame({"order": ["row_major", "hilbert"], "jumps": [5, 0], "mean": [1.5, 1.0]})
    assert words.smooth(one).startswith("**Hilbert** never jumps. Row-major's mean step is 1.50")
    assert words.smooth(one.assign(jumps=0)).startswith("**row-major and Hilbert** never jump.")
    assert words.smooth(one.assign(jumps=1)).startswith("**Every order** jumps")


def test_seams_are_told_only_where_there_are_any():
    box = pd.Series({"row_major": 100.0, "hilbert": 12.0})
    assert words.compact(box, pd.Series({"row_major": 0.99, "hilbert": 0.8}), 96).endswith("each has seams.")
    assert words.compact(box, pd.Series({"row_major": 0.5, "hilbert": 0.8}), 96).endswith("50% in row-major.")


def test_the_fewest_blocks_are_counted_with_ties():
    said = words.fewest(percents(row_major=[10.0, 10.0], tiles=[5.0, 8.0], morton=[4.0, 5.0], hilbert=[5.0, 5.0]))
    assert "of 2 windows: Morton in 2, Hilbert in 1." in said and "**1.2 to 2.0 times** as many as the worst of" in said


def test_from_which_window_on_an_order_pays():
    said = words.pays(percents(row_major=[5.0, 9.0], tiles=[4.0, 4.0], hilbert=[6.0, 5.0], random=[9.0, 99.0]))
    assert "tiles **from 3 x 3 on**, Hilbert **from 9 x 9 on** and random **in none of these windows**" in said


def test_a_simpler_order_that_is_faster_than_hilbert_is_named():
    said = words.fastest(times(tiles=2.1, morton=2.2, hilbert=1.6))
    assert "Morton **2.20**" in said and said.endswith("Morton is faster than Hilbert here.")
    assert "faster than Hilbert" not in words.fastest(times(noise=0.2, morton=1.7, hilbert=1.6))
    assert words.fastest(times(hilbert=1.05)).startswith("No order is faster than row-major beyond the noise")
    assert words.fastest(times(hilbert=0.5)).startswith("No order")


def test_results_that_differ_are_said_to():
    assert "agree exactly" in words.same_results(0.0, 6.0) and "within **3e-06**" in words.same_results(3e-6, 6.0)
    assert "disagree" in words.same_results(0.5, 6.0) and "disagree" in words.same_results(np.nan, 6.0)


def test_surroundings_name_ties_and_one_branch_is_told_once():
    seen = pd.DataFrame({"row_major": [0.1, 0.3, 0.4], "morton": [0.2, 0.2, 0.5], "hilbert": [0.3, 0.1, 0.5]})
    said = words.surroundings(seen.set_index(pd.Index(["64 / 1", "256 / 2", "any"])))
    assert "most of all under Morton and Hilbert." in said and "longest segments alone 10% against 30%" in said
    assert "segments alone" not in words.surroundings(seen[1:].set_index(pd.Index(["64 / 1", "any"])))


def test_the_verdict_names_all_that_are_compact():
    frame = percents(row_major=[10.0, 20.0], tiles=[5.0, 8.0], morton=[5.0, 5.0], hilbert=[6.0, 6.0])
    said = words.verdict(frame, times(tiles=2.0, morton=2.2, hilbert=1.6), 3.0)
    assert "On a grid, Morton, Hilbert and tiles touch fewer" in said and "Morton is faster than Hilbert here." in said
    none = words.verdict(percents(row_major=[1.0, 1.0], hilbert=[1.0, 1.0]), times(hilbert=1.0), 1.0)
    assert "no order touches clearly fewer" in none and "costs nothing" in none
