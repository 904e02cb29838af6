import json
import re

import pytest
import torch

from tests import browser
from workbench import Dense, Dilated, reference
from workbench.analysis import frontiers
from workbench.fit import cards, estimate, executions, frontier
from workbench.probes.case import Case

SHAPE = {"segments": [256, 1024], "rates": [1, 4], "block_size": 512}
SIZES = {"heads": 8, "head_dim": 64, "dtype": "float16", "mode": "fwd"}
MIB = 1 << 20


@pytest.mark.parametrize("causal", [False, True])
def test_eager_is_dense_attention(causal):
    """Grouped heads and fewer queries than keys, too."""
    sizes = {"nq": 11, "batch": 2, "kv_heads": 2, "dtype": "float64", "backend": "eager"}
    made, case = [], Case(Dense(causal), 17, 4, 8, **sizes)
    call, name = case.prepare_from(lambda shape: made.append(torch.randn(shape, dtype=torch.float64)) or made[-1])
    assert name == "eager"
    torch.testing.assert_close(call(), reference(*made, Dense(causal))[0])


def test_a_way_is_a_case_at_any_length():
    ways = frontiers.ways(["dense, eager", "window-tokens, triton", "dense, mine:attention"], **SHAPE, **SIZES)
    assert ways["dense, eager"](100).backend == "eager"
    assert ways["dense, mine:attention"](100).backend == "mine:attention"
    assert ways["window-tokens, triton"](640).pattern.shape == (640,) and ways["window-tokens, triton"](640).n == 640
    for name, want in (("dense", "'pattern, backend', the pattern one of dense"), ("sparse, triton", "one of dense,")):
        with pytest.raises(ValueError, match=f"want {want}"):
            frontiers.ways([name], **SHAPE, **SIZES)


def test_a_way_may_be_a_spec():
    spec = json.dumps(Dilated([256, 1024], [1, 4]).spec())
    ((name, at),) = executions.ways([f"{spec}, torch"], **SIZES).items()
    assert name == f"{spec}, torch" and at(2048).backend == "torch"
    assert at(2048).pattern.spec() == Dilated([256, 1024], [1, 4]).spec()


def test_the_ledger_follows_the_allocator():
    ledger = frontiers.ledger([("a", 1000), ("b", 30 * MIB), ("b", None), ("c", 31 * MIB)])
    assert ledger["requested"].tolist() == [1000, 1000 + 30 * MIB, 1000, 1000 + 31 * MIB]
    assert ledger["allocated"].tolist()[0] == 1024
    assert ledger["reserved"].tolist() == [2 * MIB, 32 * MIB, 32 * MIB, 64 * MIB]


def test_what_is_alive_peaks_at_what_is_requested():
    found = estimate.trace(frontiers.ways(["dilated, triton"], **SHAPE, **SIZES)["dilated, triton"](4096), "h100")
    alive = frontiers.alive(found.events)
    assert alive.sum(axis=1).max() == found.requested_bytes and (alive >= 0).all().all()
    assert list(alive.columns[:3]) == ["q", "k", "v"]


def test_scores_are_most_of_what_eager_attention_takes():
    at = frontiers.ways(["dense, eager", "dense, auto"], **SHAPE, **SIZES)
    share = {name: frontiers.scores_share(estimate.trace(case(4096), "h100"), 4096, 8) for name, case in at.items()}
    assert share["dense, eager"] > 0.8 and share["dense, auto"] == 0


def test_allocated_promises_more_than_runs():
    """allocated_n is the longest whose allocated bytes are no more than the card's, and the next is more."""
    at = frontiers.ways(["dense, auto", "dilated, triton"], **SHAPE, **SIZES)
    card = cards.find("rtx3060")
    for row in frontiers.promised(at, "rtx3060").to_dict("records"):
        seen, case = row["allocated_n"], at[row["way"]]
        assert estimate.trace(case(seen), card).allocated_bytes <= card.total_bytes
        assert estimate.trace(case(seen + frontiers.GRAIN), card).allocated_bytes > card.total_bytes
        assert row["real_n"] < seen and 0.02 < row["too_much"] < 0.2


def test_records_are_found_by_machine_with_their_labels(tmp_path, monkeypatch):
    monkeypatch.setattr(frontiers.records, "default_folder", lambda: tmp_path)
    assert frontiers.recorded("h100x1").empty
    at = frontiers.ways(["dense, eager"], **SHAPE, **SIZES)["dense, eager"]
    recorder = frontiers.records.start("frontier", "gpu", tmp_path / "h100x1")
    row = frontier.search(at, card="h100", budget_bytes=1 << 30, say=None) | {"measured": True}
    for n, more in ((1024, {}), (2048, {}), (4096, {"heads": 4}), (None, {}), (512, {"stage": "probe"})):
        recorder.row(**row | {"measured_n": n, "n": n} | more)
    found = frontiers.recorded("h100x1")
    assert found["label"].tolist() == ["dense, eager"] and found["measured_n"].item() in (2048, 4096)
    assert "run_device" in found


@pytest.mark.parametrize("kind", ["h100x1", "h200x1", "h200x2", "no-such-card"])
def test_calls_that_computed_something_else_are_found_or_none_are(kind):
    found, rows = frontiers.wrong(kind), frontiers.records.committed(kind, "frontier").to_dict("records")
    there_are = any(row["stage"] == "probe" and row["limiter"] == "validity" for row in rows)
    assert bool(len(found)) == there_are and list(found)[-1] == "said"
    assert all(words.startswith("wrong: ") for words in found["said"])


CHOICES = {"card": ["gtx1080", "h100"], "heads": [8], "head_dim": [64], "dtype": ["float16"], "mode": ["fwd"],
           "way": ["dense, auto", "dilated, triton"]}  # fmt: skip


@pytest.fixture(scope="module")
def chooser():
    return frontiers.Chooser(10**6, **SHAPE, **CHOICES)


def test_the_chooser_answers_as_a_search_does(chooser):
    way = frontiers.ways(["dilated, triton"], **SHAPE, **SIZES)["dilated, triton"]
    most = frontier.search(way, card="h100", step=frontiers.STEP, say=None)["n"]
    chosen = ("h100", 8, 64, "float16", "fwd", "dilated, triton")
    assert chooser.answer(most, *chosen).startswith(f"N = {most:,} fits")
    assert "does not fit" in chooser.answer(most + 1, *chosen)
    assert "takes too long" in chooser.answer(10**8, "h100", 8, 64, "float16", "fwd", "dense, auto")
    assert chooser.answer(1, "gtx1080", *chosen[1:]).startswith("Does not run there: the kernels need")


def test_the_choosers_page_holds_every_answer_in_the_order_of_its_menus(chooser):
    page = chooser._repr_html_()
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page)[1])
    assert data["sizes"] == [2, 1, 1, 1, 1, 2] and len(data["found"]) == 4
    assert data["found"][3][0] == chooser.rows["n"].iloc[3] and data["found"][1][0] is None
    assert "@" not in page and "http" not in page and page.count("<select>") == 6


def test_a_chooser_does_not_say_of_wrong_results_that_they_do_not_fit():
    sizes = {"card": ["b200"], "heads": [64], "head_dim": [128], "mode": ["fwdbwd"], "way": ["dense, flash"]}
    found = frontiers.Chooser(400_000, **SHAPE, **CHOICES | sizes, seconds=1e6)
    assert "is computed wrongly: the longest is 261," in found.answer(400_000, *found.rows.iloc[0][list(found.NAMES)])
    assert 'validity: " is computed wrongly"' in found._repr_html_()


@pytest.mark.browser
@pytest.mark.skipif(browser.BINARY is None, reason=browser.MISSING)
def test_the_choosers_page_answers_in_a_browser(chooser, tmp_path):
    """As `answer` does, with no network; and no answer for what is no length."""
    (tmp_path / "page.html").write_text(f"<!DOCTYPE html><meta charset=utf-8>{chooser._repr_html_()}")
    with browser.tab(tmp_path / "page.html") as tab:

        def shown(n, card, way):
            for menu, x in ((0, card), (5, way)):
                tab.run(f"document.querySelectorAll('select')[{menu}].value = {x!r}")
            tab.run(
                f"(x => {{ x.value = '{n}'; x.dispatchEvent(new Event('input')) }})(document.querySelector('input'))"
            )
            return tab.run("document.querySelector('.answer').textContent")

        for n, card, way in (
            (5000, "h100", "dense, auto"),
            (10**8, "h100", "dense, auto"),
            (1, "gtx1080", "dilated, triton"),
        ):
            said = chooser.answer(n, card, 8, 64, "float16", "fwd", way)
            assert shown(n, card, way).startswith(said.rstrip("."))
        assert {shown(n, "h100", "dense, auto") for n in ("", "-5", "0")} == {"N: want at least 1."}
        assert not tab.requests[1:] and not tab.errors


def test_a_chooser_wants_every_choice():
    with pytest.raises(ValueError, match="want card, heads"):
        frontiers.Chooser(1, **SHAPE, **{**CHOICES, "mode": []})


def test_what_fitted_and_was_wrong_is_shown():
    found = frontiers.wrong("h100x1")
    assert "dense, cudnn" in set(found["way"]) and (found["elements"] > 2**31).all()
    assert found["said"].str.startswith("wrong: dq").all()
    assert frontiers.wrong("no such machine").empty
