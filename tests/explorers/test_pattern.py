"""Explorers in a browser, of patterns, Hilbert's curve and rooflines: what they say is what Python counts."""

import pytest

import workbench as wb
from tests import browser
from workbench.analysis import roofline as found
from workbench.explorers import hilbert as hilbert_explorer
from workbench.explorers import pattern as explorer
from workbench.explorers.roofline import roofline
from workbench.patterns import orderings
from workbench.probes import speed, suite

FACTS = "[...document.querySelectorAll('.x-facts dd')].map(x => x.textContent)"
NOTE = "document.querySelector('.x-note').textContent"


@pytest.fixture(scope="module")
def page():
    with browser.shown(explorer.explore(segments=[16, 64], dilations=[2, 4])._repr_html_(), width=390) as tab:
        yield tab


@pytest.mark.browser
def test_it_says_what_python_counts_and_follows_each_control(page):
    gappy = wb.Dilated([16, 64], [2, 4])
    pairs, seen, twice, empty = page.run(FACTS)
    assert pairs.startswith(f"{gappy.pairs(64, 4):,}, ") and seen == f"{100 * gappy.density(64, 4):.3g}%"
    assert empty.startswith(f"{gappy.uncovered(64, 4)} (") and twice != "0%"
    page.slide("[name=dilations]", "1, 4")
    assert page.run(FACTS)[3] == "none"
    page.slide("[name=n]", str(1 << 30))
    assert page.run(FACTS)[0].startswith(f"{wb.Dilated([16, 64], [1, 4]).pairs(1 << 30, 4):,}, ")
    page.slide("[name=dilations]", "1")
    assert "one of each per branch" in page.run("document.querySelector('.x-error').textContent")
    page.slide("[name=dilations]", "1, 4")
    page.slide("[name=kind]", "grid")
    assert page.run(FACTS)[0].startswith(f"{wb.Neighborhood((8, 8), 4).pairs(64, 4):,}, ")
    assert page.run("document.documentElement.scrollWidth") <= 390


@pytest.mark.browser
def test_what_would_block_the_page_is_not_counted_and_says_so():
    pattern = wb.Dilated([256, 4096], [1, 32])
    with browser.shown(explorer.explore(4096, 32, segments=[256, 4096], dilations=[1, 32])._repr_html_()) as page:
        pairs, seen = page.run(FACTS)
        assert pairs.startswith(f"{pattern.pairs(4096, 32):,}, ")
        assert seen == "not counted: 32 different heads on 4,096 tokens" and "depends on" in page.run(NOTE)
        page.run("document.querySelector('[name=all]').click()")
        assert "32 different heads" in page.run("document.querySelector('.x-error').textContent")
        page.slide("[name=heads]", "2")
        assert len(page.run(FACTS)) == 4 and page.run("document.querySelector('.x-error').hidden")


@pytest.mark.browser
def test_arrow_keys_look_at_another_token(page):
    page.slide("[name=kind]", "window")
    page.slide("[name=n]", "100")
    page.slide("[name=width]", "3")
    assert "token 32 depends on 5%" in page.run(NOTE)
    page.press("ArrowUp")
    assert "token 31" in page.run(NOTE)
    assert page.run("document.querySelector('.x-tip').textContent") == "query 31, key 32: seen once"


def test_a_setting_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"settings \['segment'\]: want some of kind, n, shape, segments"):
        explorer.explore(segment=[16])


NOTES = "[...document.querySelectorAll('.x-note')].map(x => x.textContent)"


@pytest.mark.browser
def test_both_orders_say_what_python_counts_and_follow_the_keys():
    def expected(order, cell, radius, block):
        pattern, n = wb.Neighborhood(order.shape, radius, order), len(order)
        token = int(order.rank[cell])
        keys = pattern.multiplicity(n, 1)[0, token].nonzero().flatten() // block
        words = f"token {token}, in query block {token // block} of {-(-n // block)}"
        return words, f"Its window lies in {len(keys.unique())} key block"

    def check(page, orders, cell, radius, block):
        for said, order in zip(page.run(NOTES)[:2], orders, strict=True):
            assert all(words in said for words in expected(order, cell, radius, block)), said

    with browser.shown(hilbert_explorer.explore((24, 20), 3, 32)._repr_html_(), width=390) as page:
        flat = [orderings.row_major((24, 20)), orderings.hilbert((24, 20))]
        check(page, flat, 12 * 20 + 10, 3, 32)
        page.press("ArrowRight")
        check(page, flat, 12 * 20 + 11, 3, 32)
        share = wb.Neighborhood((24, 20), 3, flat[1]).block_density(480, 1, block_size=32)
        assert f"Hilbert {100 * share:.3g}%" in page.run(NOTES)[2]
        page.slide("[name=left]", "morton")
        page.slide("[name=radius]", "1")
        page.slide("[name=shape]", "4, 6, 5")
        page.slide("[name=slice]", "2")
        check(page, [orderings.morton((4, 6, 5)), orderings.hilbert((4, 6, 5))], 2 * 30 + 3 * 5 + 2, 1, 32)
        page.slide("[name=slice]", "4")
        assert "slice: 0 to 3" in page.run("document.querySelector('.x-error').textContent")
        assert page.run("document.documentElement.scrollWidth") <= 390


@pytest.mark.browser
def test_every_kernel_and_length_is_a_mark_that_names_itself():
    rows, best = speed.recorded("h100x1")
    device = found.device(rows, best, suite.recorded("h100x1"))
    with browser.shown(roofline({"H100": device})._repr_html_()) as tab:
        said = tab.run("document.querySelector('canvas').getAttribute('aria-label')")
        assert f"{len(device['points'])} points" in said and "% of it" in said
        lines = tab.run("document.querySelector('.x-note').textContent")
        assert f"{best['copy_gbs']:,.0f} GB/s" in lines and lines.endswith("the vendor's peak, 989 TFLOP/s.")
        names = []
        for _ in device["points"].itertuples():
            tab.press("ArrowRight")
            names.append(tab.run("document.querySelector('.x-tip').textContent"))
        assert [name.rpartition("\n")[0] for name in names] == list(device["points"]["text"])
        assert not any(name.split("\n")[-1].startswith(">") for name in names)  # never more than all of a ceiling
        tab.slide("[name=mode]", "fwd")
        tab.run("new Promise(done => setTimeout(done, 200))")
        fewer = int((device["points"]["mode"] == "fwd").sum())
        assert f"{fewer} points" in tab.run("document.querySelector('canvas').getAttribute('aria-label')")
        assert not tab.requests[1:]
