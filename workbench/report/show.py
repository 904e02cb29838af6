"""What a notebook shows: figures and tables with a caption and their data, and the page's answer in short.

Each call displays at once. In a live notebook that is the picture or the table with its caption; under `workbench
report` the output carries, besides, what the page needs (metadata `workbench`): `report.shown` numbers it, gives it an
anchor and buttons that save its data, and lifts "in short" to the top of the page.
"""

from __future__ import annotations

import base64
import io
import os
import re
from html import escape, unescape

from workbench.harness.narrate import heads, number

HEAVY = 2000  # marks of one kind in one axes: more are drawn as pixels inside the SVG
DPI = 200  # of what is pixels there
EMPTY = "&nbsp;"  # what pandas writes in a corner


def figure(fig, caption: str, data=None) -> None:
    """Show a matplotlib Figure under its caption.

    caption: the claim, how to read it, and N, dtype, heads and device, in a few sentences of Markdown.
    data: the DataFrame that is drawn; the page saves it as CSV and shows it as a table on demand.
    """
    alt = _described(fig)
    about = {"kind": "figure", "caption": caption, "alt": alt, "csv": _csv(data), "inches": float(fig.get_figwidth())}
    if _batch():
        _display({"image/svg+xml": svg(fig)}, about)
        return
    inside = f'<img alt="{escape(alt)}" style="max-width: 100%" src="data:image/png;base64,{_png(fig)}">'
    _display({"text/html": f"<figure>{inside}<figcaption>{_plain(caption)}</figcaption></figure>"}, about)


def table(frame, caption: str, fold: bool = False) -> None:
    """Show a DataFrame, or a pandas Styler where cells need a format of their own, under its caption.

    Whole numbers are shown whole, others with three significant digits, nothing for what is missing; a Styler's formats
    stay. Headings that `narrate.heads` knows are put in words. The page sorts by a click on a heading, and saves the
    frame as CSV as it is.
    fold: closed behind its caption until somebody opens it.
    """
    styler = frame if hasattr(frame, "to_html") and hasattr(frame, "data") else formatted(frame)
    html = _table(styler)
    about = {"kind": "table", "caption": caption, "csv": _csv(styler.data), "fold": fold}
    if not _batch():
        html = html.replace("<table>", f"<table><caption>{_plain(caption)}</caption>", 1)
    _display({"text/html": html}, about)


def in_short(sentences, key=None, headline: str = "") -> None:
    """The page's answer: the last code cell, tagged `in-short`, which the page shows first of all.

    sentences: three to five, Markdown, made from the tables of the notebook.
    key: the Figure that shows it. headline: a few words for the index, "29.6 times dense at 128K".
    """
    from workbench.harness import records

    sentences = [" ".join(sentence.split()) for sentence in sentences]
    about = {"kind": "short", "sentences": sentences, "headline": headline}
    bundle = {"text/markdown": "\n".join(f"- {sentence}" for sentence in sentences)}
    if _batch():
        about["records"] = dict(records.DRAWN)
    if key is not None and _batch():
        about |= {"svg": svg(key), "alt": _described(key), "inches": float(key.get_figwidth())}
    _display(bundle, about)
    if key is not None and not _batch():
        _display({"image/png": _png(key)}, {})


def formatted(frame):
    """The frame as a Styler with numbers formatted by kind: integers (floats too, where all of a column are whole)
    with commas, other numbers with three significant digits, yes and no, and nothing for what is missing."""
    forms = {column: _form(frame.iloc[:, at]) for at, column in enumerate(frame.columns)}
    styler = frame.style.format(forms, na_rep="", escape="html").format_index(escape="html", axis=1)
    levels = [frame.index.get_level_values(at).to_series() for at in range(frame.index.nlevels)]
    return styler.format_index(dict(enumerate(map(_form, levels))), na_rep="", escape="html")


def _form(column):
    kind = column.dtype.kind
    values = column.dropna()
    if kind == "b":
        return lambda x: "yes" if x else "no"
    if kind in "iu" or kind == "f" and len(values) and (values % 1 == 0).all():
        return lambda x: f"{x:,.0f}"
    if kind == "f":
        return number
    return lambda x: number(x) if isinstance(x, float) else f"{x:,}" if type(x) is int else x


def _table(styler) -> str:
    """The Styler's cells with one row of headings, in words, and a scope on each; words stand left, numbers right."""
    html = styler.to_html(exclude_styles=True, sparse_index=False)
    cells = re.compile(r"<(th|td) ([^>]*)>(.*?)</t[hd]>", re.S)
    head, body = ([cells.findall(row) for row in part.split("<tr>")[1:]] for part in html.split("<tbody>"))
    labels = sum(tag == "th" for tag, *_ in body[0]) if body else 0
    if len(head) > 1 and all(text == EMPTY for *_, text in head[-1][labels:]):
        names = head.pop()  # of the index: they belong over its columns
        head[-1] = [own if name[2] == EMPTY else name for own, name in zip(head[-1], names, strict=True)]
    words = [" class=words" * any(not re.match(r"[-−+]?[\d.]", row[at][2] or "0") for row in body)
             for at in range(len(body[0]) if body else 0)]  # fmt: skip
    lines = ["<table>", "<thead>"]
    for row in head:
        looks = words if row is head[-1] and len(row) == len(words) else [""] * len(row)
        each = [_head(how + look, unescape(text)) for (_, how, text), look in zip(row, looks, strict=True)]
        lines.append(f"<tr>{''.join(each)}</tr>")
    lines += ["</thead>", "<tbody>"]
    for row, before in zip(body, [None, *body], strict=False):
        line = ""
        for at, (_, _, text) in enumerate(row):
            again = labels > 1 and at < labels - 1 and before and before[: at + 1] == row[: at + 1]
            look = " class=again" * bool(again) or words[at]
            line += f'<th scope="row"{look}>{text}</th>' if at < max(labels, 1) else f"<td{look}>{text}</td>"
        lines.append(f"<tr>{line}</tr>")
    return "\n".join([*lines, "</tbody>", "</table>"])


def _head(how: str, name: str) -> str:
    if unescape(EMPTY) == name:
        return f"<td {how}></td>"
    return f'<th scope="col" {how}>{escape(heads.get(name, name.replace("_", " ")))}</th>'


def svg(fig) -> str:
    """The figure as SVG with text as paths; what has more than HEAVY marks becomes pixels inside it."""
    import matplotlib

    _rasterize(fig)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "workbench"}):
        plain = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        fig.savefig(out, format="svg", dpi=DPI, bbox_inches="tight", pad_inches=0.05, metadata=plain)
    text = re.sub(r"<!--.*?-->|\n\s*(?=<)", "", out.getvalue()[out.getvalue().index("<svg") :], flags=re.S)
    return re.sub(r' d="[^"]*"', lambda d: re.sub(r"(\.\d\d)\d+", r"\1", d[0]).replace("\n", " "), text)


def _rasterize(fig) -> None:
    for ax in fig.axes:
        many = len(ax.patches) > HEAVY
        for artist in [*ax.lines, *ax.collections, *(ax.patches if many else [])]:
            artist.set_rasterized(artist.get_rasterized() or many or _marks(artist) > HEAVY)


def _marks(artist) -> int:
    for counted in ("get_array", "get_offsets", "get_segments", "get_paths", "get_xdata"):
        found = getattr(artist, counted, lambda: None)()
        if found is not None and len(found) > 1:
            return getattr(found, "size", len(found)) if counted == "get_array" else len(found)
    return 1


def _png(fig) -> str:
    out = io.BytesIO()
    fig.savefig(out, format="png", dpi=110, bbox_inches="tight")
    return base64.b64encode(out.getvalue()).decode()


def _described(fig) -> str:
    from workbench.report.outputs import describe

    return describe(fig)


def _csv(data) -> str | None:
    return None if data is None else data.to_csv(lineterminator="\n")


def _plain(markdown: str) -> str:
    return escape(re.sub(r"[*`]", "", markdown))


def _batch() -> bool:
    return bool(os.environ.get("WORKBENCH_BATCH"))


def _display(bundle: dict, about: dict) -> None:
    from IPython.display import display

    text = re.sub(r"[*`]", "", about.get("caption", " ".join(about.get("sentences", ["a figure"]))))
    display({**bundle, "text/plain": text}, metadata={"workbench": about}, raw=True)
