"""What all explorers are made of: controls by hand and by address, words, and the piece of HTML."""

import json

import pytest

from tests import browser
from workbench import explorers
from workbench.harness.narrate import number
from workbench.plots import style

pytestmark = pytest.mark.browser

START = """
let seen = [];
function start(root, data) {
  const made = kit.controls(root, "sample", [
    {name: "n", label: "tokens", kind: "number", value: data.n, min: 1, max: 4096},
    {name: "rates", label: "rates", kind: "text", value: [1, 2], parse: text => kit.list(text)},
    {name: "kind", label: "kind", kind: "select", value: "b", options: [["a", "an a"], "b"]},
    {name: "layers", label: "layers", kind: "range", value: 4, values: [1, 2, 4, 8]},
    {name: "causal", label: "causal", kind: "check", value: false, show: state => state.kind === "a"},
  ], state => { if (state.n === 13) throw new Error("not thirteen"); seen.push({...state}); });
  const canvas = kit.canvas(root, {label: "a picture", height: 40, draw: (ctx, w) => { ctx.fillRect(0, 0, w, 20); }});
  kit.points(root, canvas.canvas, () => [{x: 10, y: 10, text: "one"}, {x: 200, y: 10, text: "two"}]);
  window.set = made.set;
}
"""


@pytest.fixture(scope="module")
def page():
    kit, data = explorers.source("kit.js"), json.dumps({"n": 64})
    html = f"<style>{explorers.source('kit.css')}</style><div class=wb-explorer><p class=x-off>off</p></div>"
    html += f"<script>{kit}{START}{REMOUNT}kit.mount(document.querySelector('.wb-explorer'), start, {data})</script>"
    with browser.shown(html) as tab:
        yield tab


REMOUNT = """
function remount(hash) {
  history.replaceState(null, "", hash);
  const root = document.querySelector(".wb-explorer");
  root.replaceChildren();
  kit.mount(root, start, {n: 64});
}
"""


def enter(page, name: str, value: str):
    page.slide(f"[name={name}]", value)
    return page.run("seen.at(-1)")


def error(page) -> str:
    return page.run("document.querySelector('.x-error').hidden ? '' : document.querySelector('.x-error').textContent")


def test_controls_change_the_state_and_say_what_is_wrong(page):
    assert page.run("seen.length") == 1 and not page.run("document.querySelector('.x-off')")
    assert enter(page, "n", "100")["n"] == 100
    assert enter(page, "rates", "1, 4 16")["rates"] == [1, 4, 16]
    assert enter(page, "kind", "a")["kind"] == "a"
    assert page.run("document.querySelector('[name=causal]').offsetParent !== null")
    assert enter(page, "layers", "3")["layers"] == 8
    assert page.run("document.querySelector('[name=layers]').getAttribute('aria-valuetext')") == "8"
    assert enter(page, "n", "0")["n"] == 100 and "1 to 4,096" in error(page)
    assert enter(page, "n", "13")["n"] == 100 and error(page) == "not thirteen"
    assert enter(page, "rates", "1, x")["rates"] == [1, 4, 16] and "“x”" in error(page)
    assert enter(page, "rates", "3")["rates"] == [1, 4, 16]  # 13 is still there
    assert enter(page, "n", "65")["rates"] == [3] and not error(page)
    page.run("set('kind', 'b')")
    assert page.run("seen.at(-1).kind") == "b" == page.run("document.querySelector('[name=kind]').value")


def test_the_address_keeps_the_state_beside_that_of_others(page):
    page.run("remount('#~other?x=1~sample?n=7&rates=5%2C6&kind=a&layers=0&causal=true')")
    assert page.run("seen.at(-1)") == {"n": 7, "rates": [5, 6], "kind": "a", "layers": 1, "causal": True}
    enter(page, "n", "9")
    page.run("remount('#~sample?n=13')")
    assert page.run("seen.at(-1)")["n"] == 64 and not error(page)  # 13 is refused: as without an address
    page.run("remount('#~other?x=1~sample?n=9')")
    enter(page, "n", "9")
    assert page.run("location.hash").startswith("#~other?x=1~sample?n=9")


def test_arrow_keys_walk_the_points(page):
    for word in ("one", "two", "one"):
        page.press("ArrowRight")
        assert page.run("document.querySelector('.x-tip').textContent") == word


def test_numbers_are_written_as_in_python(page):
    values = [1, 12, 999, 1000, 1024, 131072, 632960, 1 << 20, 3 << 20, 123.4, 0.1234]
    assert page.run(f"{values}.map(kit.number)") == [number(x) if x < 100 else f"{x:,.0f}" for x in values]
    whole = [x for x in values if isinstance(x, int)]
    assert page.run(f"{whole}.map(kit.length)") == [*map(style.length, whole)]
    shares = {0: "0%", 1: "100%", 0.99999: ">99.9%", 0.12345: "12.3%", 0.5: "50%", 1.35: "135%"}
    assert page.run(f"{[*shares]}.map(kit.percent)") == [*shares.values()]


def test_the_piece_of_html_is_whole_and_safe():
    made = explorers.Explorer("a <label>", [], {"text": "</script><b>"})
    html = made._repr_html_()
    assert html.count("</script>") == 1 and "\\u003c/script>" in html and 'aria-label="a &lt;label&gt;"' in html
    assert repr(made) == "a <label>"
