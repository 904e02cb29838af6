"""Jupyter widgets as plain HTML: what they showed last, drawn from the state that the notebook keeps.

A page without a kernel and a network cannot run a widget. Boxes, labels, progress bars, choices and captured output
have a static form here; anything else is named.
"""

from __future__ import annotations

from html import escape

VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"


def make_static(nb) -> None:
    """Replace every widget view among the outputs of the notebook, in place, and drop the state."""
    states = nb.metadata.pop("widgets", {}).get(STATE, {}).get("state", {})
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            view = output.get("data", {}).pop(VIEW, None)
            if view and not {"text/html", "image/png", "image/svg+xml"} & set(output.data):
                output.data["text/html"] = f'<div class="widget">{draw(view["model_id"], states)}</div>'


def draw(model: str, states: dict) -> str:
    entry = states.get(model.removeprefix("IPY_MODEL_"), {})
    state, name = entry.get("state", {}), entry.get("model_name", "Widget")
    if "children" in state:
        direction = "column" if name in ("VBoxModel", "AccordionModel", "TabModel") else "row"
        inner = "".join(draw(child, states) for child in state["children"])
        return f'<div class="widget-{direction}">{inner}</div>'
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
