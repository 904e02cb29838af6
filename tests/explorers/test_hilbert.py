"""The Hilbert explorer in a browser: what it says of a cell is what Python counts, in a grid and in a box."""

import pytest

import workbench as wb
from tests import browser
from workbench.explorers import hilbert as explorer
from workbench.patterns import orderings

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

    with browser.shown(explorer.explore((24, 20), 3, 32)._repr_html_(), width=390) as page:
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
