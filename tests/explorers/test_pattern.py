"""The pattern explorer in a browser: what it says is what Python counts, by hand and by keys, at any length."""

import pytest

import workbench as wb
from tests import browser
from workbench.explorers import pattern as explorer

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
