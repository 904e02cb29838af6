"""The page of a notebook: complete in itself, every output with a form that shows."""

import base64
import io
import re

import numpy as np
import pytest
from matplotlib.image import imsave
from nbformat import v4

from tests.notebooks.build import code, text
from workbench.report import page
from workbench.report.outputs import VIEW

FACTS = {"title": "T", "status": "ok", "failure": "", "message": "", "cell": None, "byline": [("device", "a <card>")]}


def png(pixels) -> bytes:
    out = io.BytesIO()
    imsave(out, np.asarray(pixels, dtype=np.uint8), format="png")
    return out.getvalue()


def shown(data: dict, metadata: dict | None = None):
    cell = code("x")
    data = {key: base64.b64encode(value).decode() if isinstance(value, bytes) else value for key, value in data.items()}
    cell.outputs = [v4.new_output("display_data", data, metadata=metadata or {})]
    return cell


@pytest.fixture
def render(tmp_path):
    def build(*cells, **facts) -> str:
        nb = v4.new_notebook(cells=[text(cell) if isinstance(cell, str) else cell for cell in cells])
        return page.render(nb, tmp_path / "x.ipynb", FACTS | facts)

    return build


def main(html: str) -> str:
    return html[html.index("<main ") : html.index("</main>")]


@pytest.mark.parametrize("tex", [
    r"a $x^2$ b", "$$x^2$$", "$$\nx^2\n$$", r"\begin{equation}x^2\end{equation}",
    r"\begin{align}y &= x^2\end{align}", "| a |\n|---|\n| $x^2$ |",
])  # fmt: skip
def test_tex_becomes_mathml(render, tex):
    body = main(render(tex.replace("x^2", "x^2 < 1")))
    assert re.search(r"<msup>\s*<mi>x</mi>\s*<mn>2</mn>\s*</msup>", body) and "&amp;lt;" not in body
    assert "$" not in body and "begin{" not in body


def test_tex_that_cannot_be_read_stays_readable(render):
    assert r'<code class="tex">\bad{</code>' in main(render(r"so $\bad{$ it is"))


def test_latex_and_markdown_outputs_become_mathml(render):
    body = main(render(shown({"text/latex": "$$x^2$$"}), shown({"text/markdown": "so $x^2$"})))
    assert body.count("<msup>") == 2 and "$" not in body


def test_a_local_image_is_embedded_and_html_around_it_stays_as_written(render, tmp_path):
    (tmp_path / "a.png").write_bytes(png(np.zeros((2, 2, 3))))
    body = main(render('<div class="wide">\n<img src="a.png" alt="A">\n\ntext\n\n</div>\n\n![B](a.png)'))
    assert body.count("data:image/png;base64,") == 2 and "a.png" not in body
    assert body.index('class="wide"') < body.index("text") < body.rindex("</div>", 0, body.index('alt="B"'))


def test_the_page_forbids_every_fetch(render):
    policy = re.search(r'Content-Security-Policy"[^>]*|content="[^"]*"[^>]*Content-Security-Policy', render("x"))[0]
    assert "default-src 'none'" in policy and "http" not in policy.replace("http-equiv", "")


PIXELS = np.random.default_rng(0).integers(0, 2, (8, 8, 1)) * 255 * np.ones((1, 1, 3))


def test_images_of_every_kind_are_inside(render):
    svg = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"></svg>'
    images = {"image/png": png(PIXELS), "image/jpeg": b"x", "image/svg+xml": svg}
    body = main(render("## The `curve` of $N$", *(shown({mime: data}) for mime, data in images.items())))
    assert re.findall(r'src="data:(image/[a-z+]+);base64,', body) == ["image/png", "image/jpeg", "image/svg+xml"]
    assert body.count('alt="Figure: The curve of N"') == 3


def test_a_widget_is_named_and_nothing_of_jupyters_is_left(render):
    html = render(shown({VIEW: {"model_id": "gone"}, "text/plain": "Widget()"}))
    assert "a widget: shown only in Jupyter" in main(html)
    assert "widget-view" not in html and "Widget()" not in main(html)
    assert "<i>own</i>" in main(render(shown({VIEW: {"model_id": "gone"}, "text/html": "<i>own</i>"})))


def test_a_progress_bar_in_text_shows_its_last_line_only(render):
    cell = code("x")
    cell.outputs = [v4.new_output("stream", name="stderr", text=t) for t in ("\r  0%", "\r 50%", "\r100%\n", "done\n")]
    body = main(render(cell))
    assert "100%\ndone" in body and "50%" not in body
    cell.outputs = [v4.new_output("stream", name="stderr", text="\rhalf \rdone \r     \r")]
    assert main(render(cell)).count("<pre>") == main(render(code("x"))).count("<pre>"), "erased when it was over"


def test_the_title_is_in_the_head_only_and_sections_are_in_the_contents(render):
    html = render("# T\n\nabout", "## One\n\n### Deep", "## One", "## $N^2$ pairs")
    assert html.count("<h1") == 1 and "about" in main(html)
    contents = re.search(r"<nav.*?</nav>", html, re.S)[0]
    anchors = re.findall(r'href="#([^"]+)"', contents)
    assert anchors == ["one", "deep", "one-2", "n2-pairs"]
    assert all(f'id="{anchor}"' in html for anchor in anchors)


def test_a_failure_has_a_banner_a_mark_on_its_cell_and_shade_on_what_did_not_run(render):
    failing = {"status": "killed", "failure": "Kernel died in cell 2.", "message": "killed by <9>", "cell": 1}
    html = render(code("a = 1"), code("b = 2"), code("c = 3"), **failing)
    assert "Kernel died in cell 2." in html[: html.index("<main ")] and 'href="#failed"' in html
    cells = re.findall(r"<section class=\"cell[^>]*>.*?</section>", html, re.S)
    assert ["failed" in c[:40] for c in cells] == [False, True, False]
    assert ["unrun" in c[:40] for c in cells] == [False, False, True]
    assert "killed by &lt;9&gt;" in cells[1]


DOT = base64.b64encode(png(np.zeros((2, 2, 3)))).decode()


@pytest.mark.parametrize("name, source", [
    ("a.png", "![A](attachment:a.png)"), ("ü.png", "![A](attachment:%C3%BC.png)"),
    ("a&b's.png", "![A](attachment:a&b's.png)"),
    ("a.png", '<img alt="A" src="attachment:a.png">'),
])  # fmt: skip
def test_a_pasted_picture_is_inside_whatever_its_name(render, name, source):
    cell = text(source)
    cell.attachments = {name: {"image/png": DOT}}
    assert f'src="data:image/png;base64,{DOT}"' in main(render(cell))


@pytest.mark.parametrize("address", ["attachment:gone.png", ".", "a%00b.png", "x" * 300])
def test_a_picture_that_is_not_there_leaves_its_address(render, address):
    assert f"(not part of this file: {address})" in main(render(f"![A]({address})"))


TABLE = {"kind": "table", "csv": None, "fold": False}


def test_works_are_cited_for_what_a_notebook_says_and_not_for_its_scripts(render):
    script = shown({"text/html": "<style>.neighborhood {}</style><script>const Ring = 'roofline'</script>"})
    assert 'id="references"' not in render("Rings of cells, a flashy torchscaled thing", script)
    caption = shown({"text/html": "<table></table>"}, {"workbench": TABLE | {"caption": "As Ring Attention does."}})
    html = render("LongNet.", code("wb.Neighborhood((4, 4), 1)"), caption)
    assert re.findall(r'arxiv.org/abs/([^"]+)"', html) == ["2307.02486", "2204.07143", "2310.01889"]
