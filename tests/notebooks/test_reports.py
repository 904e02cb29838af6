"""The real notebooks in the tiny profile, through the report pipeline, each opened in a browser with no network."""

import pytest

from tests import browser
from workbench import report
from workbench.report import notebooks

NAMES = [path.stem for path in notebooks.find()]


def test_every_notebook_runs(folder):
    assert {path.stem for path in folder.glob("*.html")} == {"index", *NAMES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    done = report.run(profile="tiny", out=folder, say=lambda text: None)
    assert {r.name: (r.status, r.failure) for r in done} == {name: ("ok", "") for name in NAMES}
    return folder


@pytest.mark.skipif(not browser.BINARY, reason=browser.MISSING)
@pytest.mark.parametrize("name", ["index", *NAMES])
@pytest.mark.parametrize("width", [1200, 390])
def test_a_report_is_whole_without_a_network(folder, name, width):
    page = folder / f"{name}.html"
    assert page.stat().st_size < 3_000_000
    with browser.tab(page, width) as tab:
        assert tab.requests == [page.as_uri()] and tab.errors == []
        wide = tab.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{name} is {wide} pixels wider than a window of {width}"
        blank = tab.run("[...document.images].filter(i => !i.naturalWidth).length")
        assert blank == 0, f"{blank} pictures of {name} are blank"
        if name != "index":  # whose thumbnails stand beside the title that says it all
            silent = tab.run("[...document.images].filter(i => !i.alt).length")
            assert silent == 0, f"{silent} pictures of {name} have no alternative text"
        assert tab.run("document.querySelectorAll('.jp-RenderedText[data-mime-type*=stderr]').length") == 0
