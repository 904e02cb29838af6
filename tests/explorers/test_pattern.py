"""The pattern explorer in a browser: what it says is what Python counts, by hand and by keys, at any length."""

import pytest

import workbench as wb
from tests import browser
from workbench.explorers import pattern as explorer
from workbench.patterns import layouts

FACTS = "[...document.querySelectorAll('.x-facts dd')].map(x => x.textContent)"
NOTE = "document.querySelector('.x-note').textContent"


@pytest.fixture(scope="module")
def page():
    with browser.shown(explorer.explore(wb.Dilated([16, 64], [2, 4]), 64, 4)._repr_html_(), width=390) as tab:
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
    with browser.shown(explorer.explore(pattern, 4096, 32)._repr_html_()) as page:
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


def test_it_starts_from_any_pattern_that_the_page_computes_and_refuses_others():
    made = explorer.explore(wb.BlockSparse(layouts.local(2) | layouts.strided(4), 16), 128, 2)
    assert made.data["kind"] == "blocks" and [made.data[x] for x in ("local", "global", "strided")] == [2, None, 4]
    assert explorer.explore(wb.Neighborhood((9, 7), 2)).data["shape"] == [9, 7]
    assert explorer.explore(wb.Neighborhood((63,), 2)).data["width"] == 4
    assert explorer.explore(wb.Window(9, True, 2, 1), 63).data["sinks"] == 1
    for other in (
        wb.BlockSparse(layouts.random(0.5)),
        wb.BlockSparse(~layouts.local(1)),
        wb.Neighborhood((4, 4, 4), 1),
        wb.Neighborhood((8, 8), 1, dilation=2),
        wb.Window(3) | wb.Dense(),
    ):
        with pytest.raises(ValueError, match="want a pattern that the page can compute"):
            explorer.explore(other)
