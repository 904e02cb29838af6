"""What a notebook shows: figures and tables with a caption and their data, and the page's answer in short.

Each call displays at once. In a live notebook that is the picture or the table with its caption; under `workbench
report` the output carries, besides, what the page needs (metadata `workbench`): `report.shown` numbers it, gives it an
anchor and buttons that save its data, and lifts "in short" to the top of the page.
"""

import io
import os
import re
from html import escape, unescape

from workbench.harness.narrate import heads, number, title
from workbench.report.parameters import MARK

DPI = 200  # of what is pixels in an SVG


def figure(fig, caption: str, data=None) -> None:
    """Show a matplotlib Figure under its caption.

    caption: the claim, how to read it, and N, dtype, heads and device, in a few sentences of Markdown.
    data: the DataFrame that is drawn; the page saves it as CSV and shows it as a table on demand.
    """
    if not _live(fig, caption):
        about = {"kind": "figure", "caption": caption, "csv": _csv(data)} | drawn(fig)
        _display({"image/svg+xml": about["svg"]}, about)


def table(frame, caption: str, fold: bool = False) -> None:
    """Show a DataFrame, or a pandas Styler where cells need a format of their own, under its caption.

    Whole numbers are shown whole, others with three significant digits, nothing for what is missing; a Styler's formats
    stay. Headings that `narrate.heads` knows are put in words. The page sorts by a click on a heading, and saves the
    frame as CSV as it is.
    fold: closed behind its caption until somebody opens it.
    """
    from IPython.display import HTML

    styled = hasattr(frame, "data")
    html = _table(frame if styled else formatted(frame))
    if not _live(caption, HTML(html)):
        csv = _csv(frame.data if styled else frame)
        _display({"text/html": html}, {"kind": "table", "caption": caption, "csv": csv, "fold": fold})


def in_short(sentences, key=None, headline: str = "") -> None:
    """The page's answer: the last code cell, tagged `in-short`, which the page shows first of all.

    sentences: three to five, Markdown, made from the tables of the notebook.
    key: the Figure that shows it. headline: a few words for the index, "29.6 times dense at 128K".
    """
    from workbench.harness import records

    sentences = [" ".join(sentence.split()) for sentence in sentences]
    listed = "\n".join(f"- {sentence}" for sentence in sentences)
    if not _live(listed, *[key] * (key is not None)):
        about = {"kind": "short", "sentences": sentences, "headline": headline, "records": dict(records.DRAWN)}
        _display({"text/markdown": listed}, about | (drawn(key) if key is not None else {}))


def formatted(frame, bold=None):
    """The frame as a Styler, an index that says something as its first columns, numbers formatted by kind: integers
    (floats too, where all of a column are whole) with commas, other numbers with three significant digits, yes and no,
    and nothing for what is missing. bold: a frame of bools, with the same rows and columns."""
    if not _plain_index(frame):
        frame = frame.rename_axis(index=[name or " " * at for at, name in enumerate(frame.index.names)]).reset_index()
    forms = {column: _form(frame.iloc[:, at]) for at, column in enumerate(frame.columns)}
    forms |= dict.fromkeys({"mode", "backend"} & {*forms}, title)
    styler = frame.style.format(forms, na_rep="", escape="html").format_index(escape="html", axis=1).hide()
    for name in () if bold is None else bold:
        styler.format(lambda x, form=forms[name]: f"<b>{escape(form(x))}</b>", (frame.index[bold[name]], [name]), "")
    return styler


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
    """The Styler's cells, headings in words; the first of a row heads it. The rest of the look is the page's."""
    html = styler.hide(names=True).to_html(exclude_styles=True, sparse_index=False)
    head, middle, body = html.partition("<tbody>")
    if "<th" not in body:
        body = re.sub(r"(<tr>\s*)<td >(.*?)</td>", r"\1<th >\2</th>", body, flags=re.S)
    body = re.sub(r"FlashAttention-\d", r'<span class="whole">\g<0></span>', body)
    return re.sub(r"(<th [^>]*>)(.*?)</th>", _heading, head) + middle + body


def _heading(found: re.Match) -> str:
    name = unescape(found[2]).strip()
    plain = name.replace("_", " ") if name.isidentifier() else name  # what is named within words stays
    return f"{found[1]}{escape(heads.get(name, plain))}</th>" if name else "<td></td>"


def drawn(fig) -> dict:
    """What a page needs of a figure: its SVG with text as paths, one for a phone where it is wider, its width and words
    for it. Made once, for a layout moves a little each time that it is drawn; the figure is then as for the phone."""
    from workbench.plots import phone

    if not hasattr(fig, "workbench_drawn"):
        about = {"svg": _svg(fig, DPI), "alt": fig.get_label(), "inches": float(fig.get_figwidth())}
        fig.workbench_drawn = about | {"phone": _svg(fig, DPI // 2) if phone.narrow(fig) else None}
    return fig.workbench_drawn


def _svg(fig, dpi: int) -> str:
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "workbench"}):
        plain = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        fig.savefig(out, format="svg", dpi=dpi, bbox_inches="tight", pad_inches=0.05, metadata=plain)
    text = re.sub(r"<!--.*?-->|\n\s*(?=<)", "", out.getvalue()[out.getvalue().index("<svg") :], flags=re.S)
    return re.sub(r' d="[^"]*"', lambda d: _rounded(d[0]).replace("\n", " "), text)


def _rounded(path: str) -> str:
    return re.sub(r"\d*\.\d{3,}", lambda x: f"{float(x[0]):.2f}", path)


def _csv(data) -> str | None:
    return None if data is None else data.to_csv(index=not _plain_index(data), lineterminator="\n")


def _plain_index(frame) -> bool:
    """Whether the index only counts the rows, also of a frame from which some were taken."""
    return list(frame.index.names) == [None] and frame.index.dtype.kind in "iu"


def _live(*things) -> bool:
    """Display figures, tables and Markdown in a live notebook; False under `workbench report`, without doing it."""
    from IPython.display import Markdown, display

    if MARK in os.environ:
        return False
    display(*(Markdown(x) if isinstance(x, str) else x for x in things))
    return True


def _display(bundle: dict, about: dict) -> None:
    from IPython.display import display

    display(bundle, metadata={"workbench": about}, raw=True)
