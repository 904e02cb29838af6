"""The sentences of notebook 03, on rows that would make them false or end in an error."""

import pandas as pd

from workbench.analysis import frontiers


def lines(**n):
    rows = [{"label": x, "n": value, "budget_bytes": gib << 30} for x, value in n.items() for gib in (1, 4)]
    return pd.DataFrame(rows)


def test_the_most_is_told_against_the_least_that_runs():
    assert frontiers.most(lines(a=640.0, b=64.0, c=None), "h100").endswith(
        "**a** takes 640 tokens, **10 times** as many as b."
    )
    assert frontiers.most(lines(a=640.0), "h100").endswith("4 GiB for tensors: **a** takes 640 tokens.")
    assert frontiers.most(lines(a=640.0, b=640.0), "t4").endswith("as many as every other way.")
    assert frontiers.most(lines(a=None), "t4") == "On t4 none of these ways runs with the largest budget."


def measured(**fields):
    row = {"label": "a", "status": "ok", "error": None, "measured_n": 1000.0, "predicted_n": 1000.0, "step": 0.02}
    return pd.DataFrame([row | {"grain": 16, "probes": 5} | fields])


def test_predictions_are_counted_where_both_numbers_are():
    same = "In **1 of 1 search** the prediction is within a step of what was measured; "
    assert frontiers.agreement(measured())[0] == same + "all are equal."
    assert frontiers.agreement(measured(predicted_n=1000.1))[0] == same + "none is off by 0.1%."
    off = frontiers.agreement(pd.concat([measured(), measured(predicted_n=1500.0)]))
    assert "**1 of 2 searches**" in off[0] and "off by 50.0%" in off[0]
    failed = frontiers.agreement(measured(status="killed", measured_n=None, error="by signal 9"))
    assert failed == ["No search has both a prediction and a measurement.", "Not measured, a: by signal 9"]


def test_what_is_promised_too_much():
    frame = pd.DataFrame({"way": ["a", "b"], frontiers.TOO_MUCH: [0.1, 0.2]})
    assert frontiers.overpromised(frame, "t4").endswith("up to **20.0%** more tokens than run (b).")
    assert frontiers.overpromised(frame.assign(**{frontiers.TOO_MUCH: 0.0}), "t4").endswith(
        "promises no more tokens than run."
    )
    assert frontiers.overpromised(pd.DataFrame([]), "t4") == "None of these ways runs on t4."


def test_limits_are_counted_and_unknown_times_named():
    table = pd.DataFrame(
        {"status": ["ok", "ok", "refused"], "limiter": ["time", "search", None], "label": ["a", "b", "c"]}
    )
    table["predicted_ms"] = [1.0, None, None]
    first, second = frontiers.limits(table)
    assert first == "Of the 2 frontiers here, 1 are limited by time and 1 by nothing as far as was searched."
    assert second.startswith("The time of b is not modelled")
    assert frontiers.limits(table[2:]) == ["None of these ways runs on any of these cards."]


def test_frontiers_beyond_are_counted():
    table = pd.DataFrame({"status": ["ok", "ok"], "n": [2**20, None]})
    assert "at **N = 524,288**. Beyond it 1 of 2 frontiers above: measure" in frontiers.beyond(table, 32, 128)
    assert "Beyond it 0 of 2 frontiers above" in frontiers.beyond(table, 1, 64)
