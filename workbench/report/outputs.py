"""Outputs in a form that needs no Jupyter: figures described in words, widgets as plain HTML.

It is an IPython extension too: what `workbench report` adds inside its kernels.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import sys
from html import escape

VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"


def load_ipython_extension(ip) -> None:
    """Figures carry an alternative text, and the last words of a kernel that dies reach the log that a report keeps."""
    # by name: matplotlib is not imported for a notebook that does not draw
    ip.display_formatter.mimebundle_formatter.for_type_by_name("matplotlib.figure", "Figure", _metadata)
    with contextlib.suppress(io.UnsupportedOperation):  # where ipykernel does not capture file descriptors
        faulthandler.enable(sys.stderr, all_threads=False)


def _metadata(fig, include=None, exclude=None) -> tuple[dict, dict]:
    text = describe(fig)
    return {}, {"alt": text} if text else {}


def describe(fig) -> str:
    """A sentence for those who do not see the figure: its label, else what its titles and axes say; maybe empty."""
    if fig.get_label():
        return fig.get_label()
    panels = []
    for ax in fig.axes:
        axes = " against ".join(filter(None, (ax.get_ylabel(), ax.get_xlabel())))
        parts = list(filter(None, (ax.get_title() or ax.get_title("left"), axes)))
        if parts and not hasattr(ax, "_colorbar"):
            panels.append(": ".join(parts))
    return ". ".join(filter(None, [fig.get_suptitle(), *dict.fromkeys(panels)]))


def make_static(nb) -> None:
    """Replace every widget of the notebook, in place, by what it showed last, and drop the widgets' state.

    A page without a kernel cannot run a widget. Boxes, labels, progress bars, choices and captured output have a static
    form here; anything else is named.
    """
    states = nb.metadata.pop("widgets", {}).get(STATE, {}).get("state", {})
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            view = output.get("data", {}).pop(VIEW, None)
            if view and not {"text/html", "image/png", "image/svg+xml"} & set(output.data):
                output.data["text/html"] = f'<div class="widget">{_drawn(view["model_id"], states)}</div>'


def _drawn(model: str, states: dict) -> str:
    entry = states.get(model.removeprefix("IPY_MODEL_"), {})
    state, name = entry.get("state", {}), entry.get("model_name", "Widget")
    if "children" in state:
        direction = "column" if name in ("VBoxModel", "AccordionModel", "TabModel") else "row"
        return f'<div class="widget-{direction}">{"".join(_drawn(x, states) for x in state["children"])}</div>'
    if name == "OutputModel":
        return "".join(_output(output) for output in state.get("outputs", []))
    label = f"{escape(state['description'])} " if state.get("description") else ""
    value = state.get("value")
    if name in ("HTMLModel", "HTMLMathModel"):
        return f"<span>{label}{value or ''}</span>"
    if name.endswith("ProgressModel"):
        return f"<label>{label}<progress value={value or 0:g} max={state.get('max', 100):g}></progress></label>"
    if "_options_labels" in state:
        chosen = state.get("index")
        indices = [] if chosen is None else chosen if isinstance(chosen, list | tuple) else [chosen]
        value = ", ".join(state["_options_labels"][index] for index in indices)
    if isinstance(value, str | int | float):
        return f"<span>{label}<b>{escape(str(value))}</b></span>"
    return f'<span class="absent">{label}({escape(name.removesuffix("Model"))}: shown only in Jupyter)</span>'


def _output(output: dict) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        return data["text/html"]
    if "image/png" in data:
        return f'<img alt="" src="data:image/png;base64,{data["image/png"]}">'
    return f"<pre>{escape(output.get('text') or data.get('text/plain', ''))}</pre>"
