"""What a notebook shows, on its page and in a browser: numbers, captions, data, and what the page's script does."""

import re
from xml.etree import ElementTree

import pandas as pd
import pytest
from matplotlib.figure import Figure
from nbformat import v4

from tests import browser
from tests.notebooks.build import code, text
from workbench.harness import records
from workbench.plots import style
from workbench.report import page, show

FACTS = {
    "title": "T", "status": "ok", "failure": "", "message": "", "cell": None,
    "byline": [("device", "a card"), ("date", "2026-11-30"), ("commit", "abc1234")],
    "environment": [("torch", "2.11")], "command": "python -m workbench report t",
}  # fmt: skip
FRAME = pd.DataFrame(
    {"median_ms": [2.0, None, 1024.0], 'a, "b"': ["x", "<y>\nz", "10"], "speedup": [1.23456, 0.5, 12345.6]},
    index=pd.Index(["dense", "longnet", "other"], name="pattern"),
)
WIDE = pd.DataFrame({f"a long heading {i}": [123456.789 * i] * 3 for i in range(12)}, index=["words " * 20] * 3)


def figure():
    fig = Figure(figsize=(9.5, 3))
    fig.subplots().plot([1, 2], [3, 4])
    fig.set_label("Time grows.")
    return fig


@pytest.fixture
def html(tmp_path, monkeypatch):
    """A page on which each thing is shown."""
    shown = []
    monkeypatch.setenv(show.MARK, "1")
    monkeypatch.setattr(records, "DRAWN", {"h200x1/a.jsonl": 3, "cpu/b.jsonl": 1})
    monkeypatch.setattr(show, "_display", lambda bundle, about: shown.append((bundle, about)))
    fig = figure()
    show.figure(figure(), "First **claim**, $N = 4$.")
    show.figure(fig, "Second claim.", FRAME)
    show.table(FRAME, "All of them.")
    show.table(WIDE.style.format("{:.1f}"), "Wide.", fold=True)
    show.in_short(["Twice `N` is **four**.", "And so on."], fig, "4 of 4")
    cells = [text("# T"), text("## One\n\n### Deep"), text("## One")]
    for bundle, about in shown:
        cells.append(code("a = 1\nb = 2"))
        cells[-1].outputs = [v4.new_output("display_data", bundle, metadata={"workbench": about})]
    cells.append(text("| a | b |\n|---|---|\n| 1 | 2 |"))
    return page.render(v4.new_notebook(cells=cells), tmp_path / "t.ipynb", FACTS)


def test_figures_and_tables_are_numbered_and_the_answer_comes_first(html):
    assert re.findall(r'<figure[^>]* id="([^"]+)"', html) == ["figure-1", "figure-2", "table-1", "table-2"]
    assert re.findall(r'class="number" href="#([^"]+)">([^<]+)', html)[1] == ("figure-2", "Figure 2")
    before = html[: html.index("<main ")]
    assert "<strong>four</strong>" in before and 'href="#figure-2"' in before and "<svg" not in before
    assert 'alt="Time grows."' in before
    assert html.count(">In short<") == 1


def test_the_end_of_a_page_says_where_it_comes_from(html):
    end = html[html.index("<footer") :]
    assert "python -m workbench report t" in end and "torch" in end and "at commit abc1234" in end
    assert "read for it: 4 rows of 2 files" in end and "h200x1/a.jsonl: 3 rows" in end and "cpu/b.jsonl: 1 row<" in end
    assert "@misc{workbench-t," in end and "year = {2026}" in end


def test_numbers_are_shown_by_their_kind():
    table = show._table(show.formatted(FRAME))
    cells = re.findall(r"<td[^>]*>(.*?)</td>", table, re.S)
    assert cells[0::3] == ["2", "", "1,024"] and cells[2::3] == ["1.23", "0.5", "12,346"]
    assert cells[1] == "x" and "&lt;y&gt;" in cells[4]
    table = show._table(show.formatted(FRAME.rename({"other": "FlashAttention-4"}), FRAME[["speedup"]] > 1))
    assert re.findall(r"<b>(.*?)</b>", table) == ["1.23", "12,346"]
    assert '<span class="whole">FlashAttention-4</span>' in table, "not broken at its hyphen"
    assert re.findall(r"<th [^>]*>([^<]+)", table)[:3] == ["pattern", "ms", "a, &quot;b&quot;"]


def test_every_row_has_a_heading_also_under_two_levels_or_a_hidden_index():
    index = pd.MultiIndex.from_tuples([(1024, "x"), (1024, "y")], names=["tokens", "what"])
    frame = pd.DataFrame({"n": [1, 2]}, index)
    table = show._table(show.formatted(frame))
    assert re.findall(r"<t[hd] [^>]*>(.*?)</t", table) == ["tokens", "what", "N", "1,024", "x", "1", "1,024", "y", "2"]
    for styler in (frame.style, frame.style.hide(), show.formatted(frame)):
        body = show._table(styler).partition("<tbody>")[2]
        assert body.count("<tr>") == 2 <= body.count("<th")


def test_a_filtered_frame_shows_no_index_and_saves_none_and_a_name_within_a_heading_stays():
    some = FRAME.reset_index(drop=True)[1:]
    some = some[some["speedup"] > 1]
    assert re.findall(r"<th [^>]*>([^<]*)", show._table(show.formatted(some)))[0] == "ms"
    assert show._csv(some).startswith("median_ms,") and show._csv(FRAME).startswith("pattern,")
    table = show._table(show.formatted(pd.DataFrame({"longest N by max_memory_allocated": [1], "head_count": [2]})))
    assert "by max_memory_allocated</th>" in table and "head count</th>" in table


def test_places_in_a_picture_are_rounded():
    assert show._rounded("M 1.999 -0.126\nL 12.5 0.994999") == "M 2.00 -0.13\nL 12.5 0.99"


def test_a_live_notebook_shows_the_same_with_its_caption(monkeypatch):
    shown = []
    monkeypatch.delenv(show.MARK, raising=False)
    monkeypatch.setattr("IPython.display.display", lambda *things: shown.append(things))
    fig = figure()
    show.figure(fig, "A **claim**")
    show.table(FRAME, "All")
    show.in_short(["One.", "Two."], fig)
    (drawn, caption), (words, table), (short, key) = shown
    assert (drawn, caption.data, words.data, short.data, key) == (fig, "A **claim**", "All", "- One.\n- Two.", fig)
    assert "<td" in table.data


CHECKS = """(async () => {
  const all = (query) => Array.from(document.querySelectorAll(query)), found = {};
  const ids = all("[id]").map((x) => x.id);
  found.twice = ids.filter((id, at) => ids.indexOf(id) !== at);
  found.scopeless = all("th:not([scope])").length;
  found.nowhere = all("a[href^='#']").filter((a) => !document.getElementById(a.hash.slice(1))).length;
  found.code = [getComputedStyle(document.querySelector(".code")).display];
  document.getElementById("show-code").click();
  found.code.push(getComputedStyle(document.querySelector(".code")).display);
  Object.defineProperty(navigator, "clipboard", { value: undefined, configurable: true });
  document.querySelector(".code .tool").click();
  await new Promise((done) => setTimeout(done));
  found.selected = getSelection().toString().trim();
  Object.defineProperty(navigator, "clipboard", { value: { writeText: async (x) => { found.copied = x; } } });
  document.querySelector(".code .tool").click();
  const saved = [];
  URL.createObjectURL = (blob) => { saved.push(blob); return "data:,"; };
  HTMLAnchorElement.prototype.click = () => 0;
  all("#figure-2 .tool, #table-1 .tool").forEach((x) => x.click());
  found.saved = await Promise.all(saved.map((x) => x.text()));
  found.cells = all("#figure-2 .data td").map((x) => x.textContent);
  const heading = document.querySelectorAll("#table-1 .sort")[1];
  const order = () => all("#table-1 tbody tr").map((x) => x.cells[0].textContent);
  found.orders = [1, 2, 3].map(() => { heading.click(); return [heading.parentElement.ariaSort, ...order()]; });
  document.querySelector("#table-2 details").open = true;
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 200)));
  found.sideways = all("main .scroll").filter((x) => x.scrollWidth > x.clientWidth).map((x) => x.ariaLabel);
  found.outside = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.querySelectorAll("h2[id]")[2].scrollIntoView();
  await new Promise((done) => setTimeout(done, 800));
  found.here = document.querySelector("[aria-current]").textContent;
  return found;
})()"""


@pytest.mark.browser
@pytest.mark.parametrize("width", [1400, 390])
def test_what_the_page_does_in_a_browser(html, tmp_path, width):
    (tmp_path / "t.html").write_text(html)
    with browser.tab(tmp_path / "t.html", width) as tab:
        found = tab.run(CHECKS)
        assert tab.errors == [] and tab.requests == [(tmp_path / "t.html").as_uri()]
    assert (found["twice"], found["scopeless"], found["nowhere"]) == ([], 0, 0)
    assert found["code"] == ["none", "block"] and found["copied"] == found["selected"] == "a = 1\nb = 2"
    csv = FRAME.to_csv(lineterminator="\n")
    assert [found["saved"][0], found["saved"][2]] == [csv, csv]
    assert ElementTree.fromstring(found["saved"][1]).tag.endswith("svg")
    assert found["cells"][:3] == ["dense", "2.0", "x"] and found["cells"][6] == "<y>\nz"
    assert found["orders"] == [
        ["ascending", "dense", "other", "longnet"], ["descending", "other", "dense", "longnet"],
        [None, "dense", "longnet", "other"],
    ]  # fmt: skip
    assert found["outside"] <= 0 and found["here"].startswith("One")
    named = [label for label in found["sideways"] if label and "scrolls sideways" in label]
    assert found["sideways"] == named and (width < 600) == bool(named)


def shades() -> list[dict[str, str]]:
    """The colours of the light and of the dark scheme."""
    blocks = re.findall(r":root \{(.*?)\}", (page.TEMPLATES / "style.css").read_text(), re.S)
    each = [dict(re.findall(r"--(\w+): (#\w+)", block)) for block in blocks]
    return [each[0], each[0] | each[1]]


def light(color: str) -> float:
    """Relative luminance, as WCAG defines it."""
    digits = color[1:] if len(color) == 7 else "".join(x * 2 for x in color[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    return sum(w * (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4)
               for w, x in zip((0.2126, 0.7152, 0.0722), parts, strict=True))  # fmt: skip


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(scheme):
    colors = shades()[scheme]
    pairs = [(front, back) for front in ("ink", "soft", "accent", "plain", "key", "string", "digit")
             for back in ("paper", "wash")] + [("bad", "badwash"), ("bad", "paper"), ("soft", "badwash")]  # fmt: skip
    for front, back in pairs:
        dark, bright = sorted((light(colors[front]), light(colors[back])))
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, (front, back)


def test_what_is_drawn_stands_out_from_white():
    assert {name: x for name, x in style.COLORS.items() if 1.05 / (light(x) + 0.05) < 3} == {}
