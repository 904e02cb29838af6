"""The model of many ranks, on rows that are made up: held against what they say was measured."""

import pandas as pd
import pytest

from tests.analysis.test_multicard import row, rows  # noqa: F401 (a fixture)
from workbench.analysis import many_ranks
from workbench.patterns.dilated import geometric
from workbench.scaling.link import Rates
from workbench.scaling.strategies import ONE

RATES = Rates(1e-4, 1e9, 1e-3)


def test_efficiency_is_over_the_ranks_and_the_weak_one_by_pairs(rows):  # noqa: F811
    found = many_ranks.efficiency(rows).set_index(["kind", "scaling", "world"])
    assert found.loc[("dense", "strong", 2), ["n", "efficiency", "low", "high"]].tolist() == [512, 0.8, 0.8, 0.8]
    assert found.loc[("dense", "strong", 4), "efficiency"] == 0.5
    # twice the positions, four times the pairs, 5 ms for 8: each rank does 3.2 times what one did
    assert found.loc[("dense", "weak", 2), "efficiency"] == pytest.approx(2 * 1.6)
    assert found.loc[("longnet-geometric", "weak", 4), "n"] == 1024
    assert ("dense", "weak", 4) not in found.index, "nothing four times as long was measured"


def test_curves_go_up_to_all_of_the_exchange_hidden_and_end_at_few_tokens(rows):  # noqa: F811
    found = many_ranks.curves(rows, RATES, (2, 16, 64), 64, 16)
    assert not found["measured"].any() and set(found["scaling"]) == {"strong", "weak"}
    assert (found["efficiency"] < found["most"]).any() and (found["efficiency"] <= found["most"]).all()
    longnet = found[found["kind"] == "longnet-geometric"].groupby("scaling")["world"].apply(list)
    assert longnet["strong"] == [2, 16, 64] and longnet["weak"] == [2, 16, 64]
    assert found.query("kind == 'dense' and scaling == 'strong'")["world"].tolist() == [2, 16], "512 tokens, 16 each"
    weak = found[(found["kind"] == "longnet-geometric") & (found["scaling"] == "weak")]
    assert weak["n"].tolist() == [512, 4096, 16_384] and set(found.query("kind == 'dense'")["n"]) >= {512}
    assert weak["pattern"].iloc[-1] == geometric(16_384, first=64).name
    assert many_ranks.curves(rows, RATES, (2, 16), 64, 1 << 20).empty


def test_the_model_is_held_against_every_forward(rows):  # noqa: F811
    found = many_ranks.checked(rows, RATES)
    assert len(found) == 10, "two lengths of dense and three of LongNet, on two numbers of ranks"
    one = found[(found.index == "dense") & (found["N"] == 512) & (found["ranks"] == 2)].iloc[0]
    seconds = 0.008 / 2 + 1e-3 + 2 * 256 * 2 * 16 * 4 / 1e9  # its half, the call, and 256 rows of k and v, two heads
    assert one["modelled (ms)"] == pytest.approx(1000 * seconds)
    assert one["off by (%)"] == pytest.approx(100 * abs(1000 * seconds / 5 - 1))
    assert many_ranks.checked(rows[rows["strategy"] != ONE], RATES).empty


def test_ranks_that_slow_each_other_are_allowed_for(rows):  # noqa: F811
    shared = pd.DataFrame([row("dense", 256, 2, "distributed data parallel", [6.4] * 3, batch=2, speedup=1.25)])
    both = pd.concat([rows, shared], ignore_index=True)
    assert many_ranks.together(rows, 2) == 1 and many_ranks.together(both, 2) == 0.625
    assert many_ranks.together(both.assign(speedup=0.3), 2) == 0.5, "they take turns at worst"
    slower = many_ranks.checked(both, RATES)["modelled (ms)"] - many_ranks.checked(rows, RATES)["modelled (ms)"]
    assert slower.tolist()[:2] == pytest.approx([8 / 2 / 0.625 - 8 / 2] * 2)


def test_the_model_says_how_far_it_is_off():
    one = {"pattern": "dense", "N": 256, "ranks": 2, "measured (ms)": 5.0, "modelled (ms)": 4.5, "off by (%)": 9.8}
    (said,) = many_ranks.model_error(pd.DataFrame([one, one | {"off by (%)": 3.0}]).set_index("pattern"))
    assert said.startswith("The model of many ranks (rates of the link and of one card) against 2 measured forwards")
    assert "2 measured forwards: largest error **9.8%**, half of them within 9.8%. The worst: dense, N = 256, 2" in said
    said = many_ranks.model_error(pd.DataFrame([one | {"off by (%)": 12.0}, one]).set_index("pattern"), "rank")
    assert said[1] == "**Off by more than 10% in 1 of 2**: do not read the curves closer than that."
    assert many_ranks.model_error(pd.DataFrame()) == ["No time of the model was measured here."]


def test_the_fit_says_how_near_it_is():
    sent = {"stage": "link", "status": "ok", "message_bytes": [1e6, 1e8], "median_ms": [1.1, 95.0]}
    said = many_ranks.rates_in_words(RATES, pd.DataFrame(sent), "rank")
    assert said.startswith("Fitted to 2 sizes of messages, each rank sends **1 GB/s** after 0.1 ms")
    assert "within 5% of that" in said and said.endswith("takes **1 ms** beside what it computes and moves.")
