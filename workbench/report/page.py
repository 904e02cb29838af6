"""A notebook that ran, as one HTML file that needs nothing else: nbconvert's lab template with our own dress."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import re
from html import escape, unescape
from pathlib import Path
from urllib.parse import unquote

from jinja2 import pass_context
from latex2mathml.converter import convert
from markupsafe import Markup
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from PIL import Image
from traitlets.config import Config

from workbench.report.outputs import make_static, picture, shrink

TEMPLATES = Path(__file__).parent / "templates"
IMAGES = ("image/png", "image/jpeg", "image/svg+xml")
FUNCTION = re.compile(r'<mi>(log|ln|exp|max|min|sin|cos|arg|dim|sup|inf|lim)</mi>(<mo stretchy="false">&#x00028;)?')
PLACE_OF_CONTENTS = "<!-- contents -->"


def mathml(tex: str, display: str = "inline") -> str:
    """TeX as MathML; TeX that cannot be read stays as it is, as code."""
    try:
        return FUNCTION.sub(_spaced, convert(tex, display=display))
    except Exception:  # the converter raises whatever it stumbles on
        return f'<code class="tex">{escape(tex)}</code>'


def _spaced(match: re.Match) -> str:
    """A function's name keeps its distance from what it is applied to, but for a bracket."""
    after = "0" if match[2] else ".17em"
    return f'<mo lspace=".17em" rspace="{after}">{match[1]}</mo>{match[2] or ""}'


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
        taken = {other for _, other, _ in self.headings}
        anchor = slug if slug not in taken else f"{slug}-{len(self.headings)}"
        self.headings.append((level, anchor, text))
        return f'<h{level} id="{escape(anchor)}">{text}</h{level}>\n'

    def _embed_image_or_attachment(self, src: str) -> str:
        """The data of a picture in place of its address, which is quoted where its name has a space or an ü."""
        address = unescape(src)
        for name in (address, unquote(address)):
            for mime, data in self.attachments.get(name.removeprefix("attachment:"), {}).items():
                return f"data:{mime};base64,{data}"
            with contextlib.suppress(OSError, ValueError):  # a folder, or what cannot be a file's name
                if data := self._src_to_base64(name):
                    return data
        return src

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

    facts: title, name, status, failure (a sentence or ""), cell (the failed one's index, or None), byline (pairs), and
    whatever else the index wants to find in the page again; `thumbnail` is added here.
    """
    make_static(nb)
    _drop_title(nb)
    _describe_images(nb)
    facts = facts | {"thumbnail": _thumbnail(nb)}
    for index, cell in enumerate(nb.cells):
        cell.metadata["workbench_index"] = index
    exporter = _exporter()
    exporter.headings = []
    css = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    resources = {"metadata": {"name": facts["title"], "path": str(path.parent)}, "report": facts, "style": Markup(css)}
    html, _ = exporter.from_notebook_node(nb, resources)
    return offline(html.replace(PLACE_OF_CONTENTS, _contents(exporter.headings), 1))


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
    body = re.sub(rf"(?is)<script\b[^>]*\bsrc\s*=\s*{there}[^>]*>.*?</script>", note, body)
    paired = rf"(?is)<(iframe|video|audio|object)\b[^>]*\b(?:src|data)\s*=\s*{there}[^>]*>.*?</\1>"
    body = re.sub(paired, note, body)
    return head + end + re.sub(rf"(?is)<(?:img|embed|source|input)\b[^>]*?\bsrc\s*=\s*{there}[^>]*>", note, body)


def _drop_title(nb) -> None:
    """The page's head has it."""
    first = nb.cells[0] if nb.cells else None
    if first and first.cell_type == "markdown":
        first.source = re.sub(r"\A\s*# .*\n?", "", first.source)


def _describe_images(nb) -> None:
    """Every image output gets an alternative text: its own, else the heading it stands under. PNGs become smaller."""
    heading = "figure"
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            heading = (re.findall(r"(?m)^#+ (.+)$", cell.source) or [heading])[-1].replace("`", "").replace("$", "")
        for output in cell.get("outputs", []):
            data, meta = output.get("data", {}), output.get("metadata", {})
            alts = [meta.get(mime, {}).get("alt") for mime in IMAGES if isinstance(meta.get(mime, {}), dict)]
            if set(IMAGES) & set(data):
                output.metadata["alt"] = next(filter(None, [*alts, meta.get("alt")]), f"Figure: {heading}")
            if "image/png" in data:
                small = shrink(base64.b64decode(data["image/png"]))
                data["image/png"] = base64.b64encode(small).decode()


def _contents(headings: list[tuple[int, str, str]]) -> str:
    entries = [f'<li><a href="#{escape(anchor)}">{text}</a></li>' for level, anchor, text in headings if level == 2]
    return f'<nav class="contents" aria-label="Contents"><ol>{"".join(entries)}</ol></nav>' if len(entries) > 1 else ""


def _thumbnail(nb, size: tuple[int, int] = (480, 320)) -> str:
    """The first picture of a cell tagged `thumbnail`, else the first of all, small, as a data: address."""
    cells = sorted(nb.cells, key=lambda cell: "thumbnail" not in cell.metadata.get("tags", []))
    for output in (output for cell in cells for output in cell.get("outputs", [])):
        data = output.get("data", {})
        inside = re.search(r"data:image/png;base64,([A-Za-z0-9+/=]+)", data.get("text/html", ""))
        encoded = data.get("image/png") or (inside and inside[1])
        image = encoded and picture(base64.b64decode(encoded))
        if image:
            image = image.convert("RGB")
            image.thumbnail(size, Image.Resampling.LANCZOS)
            out = io.BytesIO()
            image.save(out, "JPEG", quality=85)
            return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()
    return ""
