"""The real notebooks in the tiny profile, through the report pipeline, each opened in a browser with no network."""

import pytest

from tests import browser, tools
from tests.notebooks.read_back import unread
from workbench import report
from workbench.report import index, notebooks

NAMES = [path.stem for path in notebooks.find()]
DAILY = "03_oom_frontiers"  # it calls, draws, predicts, and measures in fresh processes


def look_at(page) -> None:
    """AssertionError unless the page is whole in a wide and in a narrow window, without a network."""
    assert page.stat().st_size < 3_000_000
    for width in (1400, 390):
        with browser.tab(page, width) as tab:
            assert tab.requests == [page.as_uri()] and tab.errors == []
            tab.run("document.querySelectorAll('details').forEach(x => { x.open = true })")
            wide = tab.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{page.stem} is {wide} pixels wider than a window of {width}"
            blank = tab.run("[...document.images].filter(i => !i.naturalWidth).length")
            assert blank == 0, f"{blank} pictures of {page.stem} are blank"
            silent = tab.run("[...document.images].filter(i => !i.alt).length")
            assert silent == 0, f"{silent} pictures of {page.stem} have no alternative text"
            assert tab.run("document.querySelectorAll('.jp-RenderedText[data-mime-type*=stderr]').length") == 0
            ids = tab.run("[...document.querySelectorAll('[id]')].map(x => x.id)")
            assert len(ids) == len(set(ids)) and tab.run("document.querySelectorAll('th:not([scope])').length") == 0
            if width == 1400:
                assert tab.run(HIDDEN) == [], f"columns of {page.stem} are hidden on a wide screen"
                paper = {"width": 673, "height": 900, "deviceScaleFactor": 1, "mobile": False}
                tab.call("Emulation.setDeviceMetricsOverride", **paper)
                tab.call("Emulation.setEmulatedMedia", media="print")
                assert tab.run(HIDDEN) == [], f"columns of {page.stem} are lost on paper"


HIDDEN = """[...document.querySelectorAll("table")].filter((x) => x.offsetWidth > x.parentElement.clientWidth + 1)
  .map((x) => x.innerText.slice(0, 60))"""


@pytest.mark.parametrize("name", tools.tiers(NAMES, [DAILY]))
def test_a_notebook_runs_and_its_report_is_whole_without_a_network(name, tmp_path):
    (done,) = report.run([name], profile="tiny", out=tmp_path, say=lambda text: None, timeout=3600)
    assert (done.name, done.status, done.failure) == (name, "ok", "")
    assert {path.stem for path in tmp_path.glob("*.html")} == {"index", name}
    if browser.BINARY:
        look_at(tmp_path / f"{name}.html")
        look_at(tmp_path / "index.html")
    assert 3 <= len(index.read(tmp_path / f"{name}.html")["sentences"]) <= 5
    assert unread((tmp_path / f"{name}.html").read_text()) == []
