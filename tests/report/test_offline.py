"""A page fetches nothing, whatever HTML a notebook holds: a server beside the browser sees no request."""

import contextlib
import http.server
import threading
import time

import pytest
from nbformat import v4

from tests import browser
from tests.notebooks.build import code, text
from workbench.report import page

FACTS = {"title": "T", "status": "ok", "failure": "", "message": "", "cell": None, "byline": []}
HERE = "~"  # stands for the server's address
FETCHES = {  # the name is the path that it would ask for
    "script": '<script src="~script"></script>',
    "fetch": "<script>fetch('~fetch').catch(() => 0)</script>",
    "rules": '<script type="speculationrules">{"prefetch": [{"urls": ["~rules"], "eagerness": "immediate"}]}</script>',
    "image": '<img src="~image">',
    "bare": "<img src=~bare alt=x>",
    "style": '<p style="background: url(~style)">x</p>',
    "link": '<link rel="stylesheet" href="~link">',
    "inner": '<iframe srcdoc="&lt;img src=~inner&gt;"></iframe>',
    "object": '<object data="~object"></object>',
    "svg": '<svg><image href="~svg" width="9" height="9"/></svg>',
    "base": '<base href="~base/"><img src="below">',
}
LEAVES = {
    "refresh": '<meta http-equiv="refresh" content="0; url=~refresh">',
    "joined": '<me<meta>ta http-equiv="refresh" content="0; url=~joined">',
    "unquoted": "<META\nhttp-equiv=refresh content=0;url=~unquoted>",
}


@pytest.fixture
def server():
    """(its address, the paths that it was asked for)"""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path.strip("/").split("/")[0])
            self.send_response(204)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}/", asked
        serving.shutdown()


def opened(path, html: str) -> list[str]:
    """Open it; the addresses that the browser asked for, the page's own aside."""
    path.write_text(html)
    with browser.tab(path) as tab:
        time.sleep(1)
        with contextlib.suppress(RuntimeError):
            assert tab.run("location.href") == path.as_uri()
        return [address for address in tab.requests if address != path.as_uri()]


@pytest.mark.browser
def test_a_page_asks_for_nothing_whatever_its_cells_hold(server, tmp_path):
    here, asked = server
    pieces = [html.replace(HERE, here) for html in FETCHES.values()]
    opened(tmp_path / "raw.html", "<!DOCTYPE html><body>" + "\n".join(pieces))
    not_from_a_file = {"base", "rules"}
    assert set(FETCHES) - set(asked) <= not_from_a_file  # what is asked for without a policy: else this could not fail
    asked.clear()
    cells = [text(piece) for piece in pieces]
    for piece in pieces:
        cells.append(code("x"))
        cells[-1].outputs = [v4.new_output("display_data", {"text/html": piece})]
    html = page.render(v4.new_notebook(cells=cells), tmp_path / "x.ipynb", FACTS)
    opened(tmp_path / "page.html", html)
    assert asked == []


@pytest.mark.browser
@pytest.mark.parametrize("html", LEAVES.values(), ids=LEAVES)
def test_a_page_does_not_turn_to_another(server, tmp_path, html):
    here, asked = server
    html = page.render(v4.new_notebook(cells=[text(html.replace(HERE, here))]), tmp_path / "x.ipynb", FACTS)
    opened(tmp_path / "page.html", html)
    assert asked == []
