"""A notebook that ran, as one HTML file that needs nothing else: nbconvert's lab template with our own dress."""

import contextlib
import functools
import json
import re
from html import escape, unescape
from pathlib import Path
from urllib.parse import unquote

from jinja2 import pass_context
from latex2mathml.converter import convert
from markupsafe import Markup
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import InvalidNotebook, IPythonRenderer, MarkdownWithMath
from traitlets.config import Config

from workbench.report import shown
from workbench.report.outputs import make_static

TEMPLATES = Path(__file__).parent / "templates"
IMAGES = ("image/png", "image/jpeg", "image/svg+xml")
PLACE_OF_CONTENTS = "<!-- contents -->"
RESERVED = {"in-short", "failed", "about", "references", "show-code", "main"}  # ids of the template


def mathml(tex: str, display: str = "inline") -> str:
    """TeX as MathML; TeX that cannot be read stays as it is, as code."""
    try:
        return convert(tex, display=display)
    except Exception:  # the converter raises whatever it stumbles on
        return f'<code class="tex">{escape(tex)}</code>'


class Renderer(IPythonRenderer):
    """Markdown with MathML, headings collected for the contents, and images embedded without touching other HTML."""

    def __init__(self, headings: list[tuple[int, str, str]], **kw):
        super().__init__(escape=False, embed_images=True, exclude_anchor_links=True, **kw)
        self.headings = headings

    def inline_math(self, body: str) -> str:
        return mathml(unescape(body))

    def block_math(self, body: str) -> str:
        return mathml(unescape(body.strip()), "block")

    def latex_environment(self, name: str, body: str) -> str:
        return mathml(rf"\begin{{{name}}}{unescape(body)}\end{{{name}}}", "block")

    def heading(self, text: str, level: int, **attrs) -> str:
        plain = re.sub(r"<(annotation|style)\b.*?</\1>|<[^>]+>", "", text)
        slug = re.sub(r"[^\w]+", "-", unescape(plain).lower()).strip("-") or "section"
        taken = {other for _, other, _ in self.headings} | RESERVED
        anchor = next(x for x in (slug, *(f"{slug}-{i}" for i in range(2, len(taken) + 3))) if x not in taken)
        self.headings.append((level, anchor, text))
        link = f'<a class="anchor" href="#{escape(anchor)}" aria-label="Link to this section">¶</a>'
        return f'<h{level} id="{escape(anchor)}">{text} {link}</h{level}>\n'

    def _embed_image_or_attachment(self, src: str) -> str:
        """The data of a picture in place of its address, which is quoted where its name has a space or an ü."""
        found = src
        with contextlib.suppress(OSError, ValueError, InvalidNotebook):  # it is not there, or cannot be a file's name
            found = super()._embed_image_or_attachment(unquote(unescape(src)))
        return found if found.startswith("data:") else src

    def _html_embed_images(self, html: str) -> str:
        """In place of nbconvert's, which parses each piece of HTML and closes every tag that is open at its end."""

        def embed(match: re.Match) -> str:
            return f"{match[1]}{match[2]}{self._embed_image_or_attachment(match[3])}{match[2]}"

        return re.sub(r"""(<img\b[^>]*?\bsrc=)(["'])(.*?)\2""", embed, html, flags=re.S | re.I)


def _without_blank_streams(nb, resources):
    """Drop streams in which nothing is left, such as progress that was erased when it was over."""
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs = [x for x in cell.outputs if x.output_type != "stream" or x.text.strip()]
    return nb, resources


class Exporter(HTMLExporter):
    """Our template, with TeX as MathML."""

    template_name = "report"

    def __init__(self, **kw):
        kw["config"] = Config(CoalesceStreamsPreprocessor={"enabled": True})
        super().__init__(extra_template_basedirs=[str(TEMPLATES)], **kw)
        self.register_preprocessor(_without_blank_streams, enabled=True)
        self.headings: list[tuple[int, str, str]] = []

    def inline(self, text: str) -> str:
        """One paragraph of Markdown, without the paragraph."""
        return MarkdownWithMath(renderer=Renderer([])).render(text).strip().removeprefix("<p>").removesuffix("</p>")

    @pass_context
    def markdown2html(self, context, text: str) -> str:
        path = context.get("resources", {}).get("metadata", {}).get("path", "")
        renderer = Renderer(self.headings, attachments=context.get("cell", {}).get("attachments", {}), path=path)
        return MarkdownWithMath(renderer=renderer).render(text)

    def default_filters(self):
        yield from super().default_filters()
        yield "mathml", lambda tex: Markup(mathml(tex.strip().strip("$"), "block"))


_exporter = functools.cache(Exporter)  # one for all: its templates take a while to compile


def render(nb, path: Path, facts: dict) -> str:
    """The page of a notebook from `path` that ran (changed in place); `facts` is what its head, banner and index say.

    facts: title, name, status, failure (a sentence or ""), cell (the failed one's index, or None), byline (pairs),
    environment (pairs), command, and whatever else the index wants to find in the page again; `headline` and
    `sentences`, the page's "in short", are added here.
    """
    exporter = _exporter()
    exporter.headings = []
    make_static(nb)
    _drop_title(nb)
    short = shown.arrange(nb, exporter.inline) or {"html": "", "records": {}, "headline": "", "sentences": []}
    _describe_images(nb)
    facts = facts | {"headline": short["headline"], "sentences": short["sentences"]}
    for index, cell in enumerate(nb.cells):
        cell.metadata["workbench_index"] = index
    css, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("style.css", "page.js"))
    resources = {
        "metadata": {"name": facts["title"], "path": str(path.parent)}, "report": facts, "style": Markup(css),
        "script": Markup(script), "short": Markup(short["html"]), "records": short["records"],
        "references": _references(nb), "name": path.stem,
    }  # fmt: skip
    html, _ = exporter.from_notebook_node(nb, resources)
    html = html.replace(PLACE_OF_CONTENTS, _contents(exporter.headings), 1)
    return offline(_scoped(html))


def _references(nb) -> list[dict]:
    """Those works whose word occurs in the notebook's cells or captions, not in data and scripts that it shows."""
    known = json.loads((TEMPLATES / "references.json").read_text(encoding="utf-8"))
    about = [x.get("metadata", {}).get("workbench") or {} for cell in nb.cells for x in cell.get("outputs", [])]
    said = "\n".join([*(cell.source for cell in nb.cells), *(x.get("caption", "") for x in about)])
    return [work for work in known if re.search(work["word"], said)]


def _scoped(html: str) -> str:
    """Every heading of a table says what it heads, also in tables that Markdown or pandas made."""
    heading = re.compile(r"<th(?=[\s>])(?![^>]*\bscope=)")
    html = re.sub(r"<thead\b.*?</thead>", lambda head: heading.sub('<th scope="col"', head[0]), html, flags=re.S)
    return heading.sub('<th scope="row"', html)


def offline(html: str) -> str:
    """Without what a browser would fetch: a script, image or frame that is elsewhere leaves its address behind.

    That is for the reader. What keeps a page from fetching, in whatever way its HTML asks for it, is the policy in its
    head, which allows what is inside the file; here goes what no policy governs, elements that lead elsewhere (a
    refresh), look up names, or change what addresses mean. Where a script of the author's goes to is the author's.
    """
    there = r"""(?:"(?!data:|\#|")[^"]*"|'(?!data:|\#|')[^']*'|(?!data:|\#)[^\s"'>]+)"""

    def note(match: re.Match) -> str:
        address = re.search(rf"(?i)\b(?:src|data)\s*=\s*({there})", match[0])[1].strip("\"'")
        return f'<span class="absent">(not part of this file: {address})</span>'

    head, end, body = html.partition("</head>")
    body = re.sub(r"(?is)<(meta|link|base)\b[^>]*>", r"<x-\1></x-\1>", body)  # not nothing, which could join its ends
    body = re.sub(r"(?i)(<script\b[^>]*)\bspeculationrules\b", r"\1text/plain", body)
    body = re.sub(r"(?i)(<(?:img|source)\b[^>]*?\s)(srcset\s*=)", r"\1data-\2", body)
    paired = rf"(?is)<(script|iframe|video|audio|object)\b[^>]*\b(?:src|data)\s*=\s*{there}[^>]*>.*?</\1>"
    body = re.sub(paired, note, body)
    return head + end + re.sub(rf"(?is)<(?:img|embed|source|input)\b[^>]*?\bsrc\s*=\s*{there}[^>]*>", note, body)


def _drop_title(nb) -> None:
    """The page's head has it."""
    first = nb.cells[0] if nb.cells else None
    if first and first.cell_type == "markdown":
        first.source = re.sub(r"\A\s*# .*\n?", "", first.source)


def _describe_images(nb) -> None:
    """Every image that `show.figure` did not show gets an alternative text: the heading it stands under."""
    heading = "figure"
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            heading = (re.findall(r"(?m)^#+ (.+)$", cell.source) or [heading])[-1].replace("`", "").replace("$", "")
        for output in cell.get("outputs", []):
            if set(IMAGES) & set(output.get("data", {})):
                output.metadata["alt"] = f"Figure: {heading}"


def _contents(headings: list[tuple[int, str, str]]) -> str:
    named = [heading for heading in headings if heading[0] in (2, 3)]
    return "".join(f'<li class="level-{x}"><a href="#{escape(anchor)}">{text}</a></li>' for x, anchor, text in named)
