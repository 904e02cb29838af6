"""Explorers: pieces of HTML that compute in the page, the same in Jupyter and in an exported report.

An explorer is its data, `kit.js` and `kit.css` (controls, canvas, tooltip, state in the address) and JavaScript of its
own, the last file of which defines `start(root, data)`. Nothing is fetched and no kernel is needed.
"""

import json
from html import escape
from importlib.resources import files


def source(name: str) -> str:
    """The text of a file of this folder: "kit.js", "kit.css"."""
    return files("workbench").joinpath("explorers", name).read_text(encoding="utf-8")


class Explorer:
    """One explorer, shown by Jupyter as HTML.

    label: what it is, for those who do not see it; also its text form.
    scripts: the stems of its JavaScript files, run in this order after kit.js; the last defines start(root, data).
    data: JSON-able, what `start` is given: the state at first, and whatever Python knows that the page does not.
    """

    def __init__(self, label: str, scripts: list[str], data: dict):
        self.label, self.scripts, self.data = label, scripts, data

    def _repr_html_(self) -> str:
        code = "\n".join(source(f"{name}.js") for name in ("kit", *self.scripts))
        data = json.dumps(self.data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
        label, place = escape(self.label), "document.currentScript.parentElement"
        return (
            f'<div class="wb-explorer" role="group" aria-label="{label}"><style>{source("kit.css")}</style>'
            f'<p class="x-off">{label}: it computes in the page, for which JavaScript has to be on.</p>'
            f"<script>(() => {{\n{code}\nkit.mount({place}, start, {data});\n}})();</script></div>"
        )

    def __repr__(self) -> str:
        return self.label
