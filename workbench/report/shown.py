"""What `report.show` displayed, as parts of a page: numbered, with an anchor, a caption and the data inside."""

import json
import re
from html import escape

COLUMN, WIDE = 7.3, 1000  # inches up to which a figure stands in the column of text; pixels that wider ones may take
PIXELS = 108  # of the screen for an inch of a figure: its 9 points become 13 pixels
ENCODED = str.maketrans({"%": "%25", "#": "%23", '"': "%22", "<": "%3C", ">": "%3E", "&": "%26", "\n": " "})


def arrange(nb, inline) -> dict | None:
    """Number the figures and tables of a notebook that ran, in place: each such output becomes its HTML.

    inline: makes HTML of one paragraph of Markdown. Returns the page's "in short", taken out of its cell: `html`,
    `sentences`, `headline` and the `records` that were read or written; None where the notebook has none.
    """
    count, places, short = {"figure": 0, "table": 0}, {}, None
    for cell in nb.cells:
        for output in list(cell.get("outputs", [])):
            about = output.get("metadata", {}).get("workbench")
            if not about:
                continue
            kind = about["kind"]
            if kind == "short":
                short = about
                cell.outputs.remove(output)
                continue
            count[kind] += 1
            anchor = f"{kind}-{count[kind]}"
            name = f'<a class="number" href="#{anchor}">{kind.title()} {count[kind]}</a>'
            caption = f"{name} {inline(about['caption'])}"
            if kind == "figure":
                places[about["svg"]] = (anchor, f"{kind.title()} {count[kind]}")
                html = f"{picture(about)}<figcaption>{caption}</figcaption>"
            else:
                html = _table(about, output["data"]["text/html"], caption)
            wide = " wide" * (about.get("inches", 0) > COLUMN)
            html = f'<figure class="shown {kind}{wide}" id="{anchor}">{html}{_csv(about["csv"])}</figure>'
            output["data"] = {"text/html": html}
    return short and short | {"html": _short(short, places, inline)}


def picture(about: dict) -> str:
    """An SVG as an image with its text inside: drawn sharp, saved from there, apart from the ids of the page. After a
    wide one comes what a phone shows in its place. about: of `show.drawn`."""
    alt = escape(re.sub(r"[*`$]", "", about["alt"] or about.get("caption", "")))
    width = f'style="width: {min(WIDE, round(about["inches"] * PIXELS))}px"'
    drawn = [(width, about["svg"])] + [('class="phone"', about["phone"])] * bool(about["phone"])
    images = [f'<img alt="{alt}" {look} src="data:image/svg+xml,{svg.translate(ENCODED)}">' for look, svg in drawn]
    return f'<div class="picture">{"".join(images)}</div>'


def _table(about: dict, html: str, caption: str) -> str:
    is_open = "" if about["fold"] else " open"
    return f'<details{is_open}><summary>{caption}</summary><div class="scroll">{html}</div></details>'


def _csv(text: str | None) -> str:
    data = json.dumps(text, ensure_ascii=False).replace("<", "\\u003c")
    return "" if text is None else f'<script type="application/json" class="csv">{data}</script>'


def _short(about: dict, places: dict, inline) -> str:
    items = "".join(f"<li>{inline(sentence)}</li>" for sentence in about["sentences"])
    if "svg" not in about:
        return f"<ul>{items}</ul>"
    anchor, name = places.get(about["svg"], ("", ""))
    caption = f'<figcaption><a href="#{anchor}">{name}</a>, with its caption and data</figcaption>' if anchor else ""
    wide = " wide" * (about["inches"] > COLUMN)
    return f'<ul>{items}</ul><figure class="key{wide}">{picture(about)}{caption}</figure>'
