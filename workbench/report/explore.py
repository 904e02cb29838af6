"""One call that is sliders in Jupyter and, in a batch run, a player of pre-rendered frames that needs no kernel."""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable
from html import escape
from importlib.resources import files

MOST_FRAMES = 64
FRAME_DPI = 110


def explore(fn: Callable, start: dict | None = None, **choices: Iterable):
    """Show fn(**chosen), a slider for each choice. Let the call be the last line of a cell: what it returns is shown.

    fn: returns a matplotlib figure or a string of HTML.
    start: the values shown first, by name; the first of each choice where it is not named.
    choices: name -> the values it takes, in order; all combinations together at most 64, for each becomes a frame.

    In a live kernel this is an ipywidgets box that runs fn anew. Where WORKBENCH_BATCH is set, or without a kernel, it
    is an object with an HTML form. ValueError where choices or start do not fit; what fn raises in a live kernel after
    a slider moved is shown in place of the figure.
    """
    values = {name: _values(name, options) for name, options in choices.items()}
    if not values:
        raise ValueError("explore: no choices; give it one, such as n=[1, 2, 3]")
    frames = math.prod(map(len, values.values()))
    if frames > MOST_FRAMES:
        product = " x ".join(f"{len(options)} {name}" for name, options in values.items())
        raise ValueError(f"explore: {product} = {frames} frames; at most {MOST_FRAMES}")
    first = {name: options[0] for name, options in values.items()}
    for name, value in (start or {}).items():
        if name not in values or value not in values[name]:
            accepted = f"one of {values[name]}" if name in values else f"no such choice; there are {', '.join(values)}"
            raise ValueError(f"explore: start {name}={value!r}: {accepted}")
        first[name] = value

    def frame(**chosen) -> str:
        return _frame(fn(**chosen))

    return _live(frame, values, first) if _is_live() else Player(frame, values, first)


class Player:
    """Every frame, rendered now, behind range inputs; displayed by Jupyter as HTML."""

    def __init__(self, frame: Callable[..., str], values: dict[str, list], first: dict):
        every = [frame(**dict(zip(values, chosen, strict=True))) for chosen in itertools.product(*values.values())]
        self.frames = list(dict.fromkeys(every))  # alike ones once
        self.order = [self.frames.index(one) for one in every]
        self.values, self.first = values, first

    def _repr_html_(self) -> str:
        starts = [options.index(self.first[name]) for name, options in self.values.items()]
        at = 0
        for index, options in zip(starts, self.values.values(), strict=True):
            at = at * len(options) + index
        data = {"order": self.order, "frames": self.frames, "labels": [[*map(_label, o)] for o in self.values.values()]}
        page = files("workbench").joinpath("report", "templates", "player.html").read_text(encoding="utf-8")
        parts = {
            "CHOICES": "".join(map(_slider, self.values, self.values.values(), starts)),
            "FRAME": self.frames[self.order[at]],
            "DATA": json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"),
        }
        for name, part in parts.items():
            page = page.replace(f"@{name}@", part)
        return page

    def __repr__(self) -> str:
        return f"a player of {len(self.order)} frames over {', '.join(self.values)}"


def _slider(name: str, options: list, start: int) -> str:
    shown = escape(_label(options[start]))
    return (
        f'<label><span class="wb-name">{escape(name.replace("_", " "))}</span>'
        f'<input type="range" min="0" max="{len(options) - 1}" value="{start}" step="1" autocomplete="off" '
        f'aria-label="{escape(name.replace("_", " "))}" aria-valuetext="{shown}"><output>{shown}</output></label>'
    )


def _live(frame: Callable[..., str], values: dict[str, list], first: dict):
    import ipywidgets as widgets

    sliders = {
        name: widgets.SelectionSlider(
            options=[(_label(option), index) for index, option in enumerate(options)], index=options.index(first[name]),
            description=name.replace("_", " "), continuous_update=False, style={"description_width": "initial"},
        )
        for name, options in values.items()
    }  # fmt: skip
    view = widgets.HTML(frame(**first))

    def redraw(_) -> None:
        try:
            view.value = frame(**{name: values[name][slider.index] for name, slider in sliders.items()})
        except Exception as error:  # it would vanish in a log that nobody reads
            view.value = f"<pre>{escape(f'{type(error).__name__}: {error}')}</pre>"

    for slider in sliders.values():
        slider.observe(redraw, "index")
    return widgets.VBox([*sliders.values(), view])


def _frame(result) -> str:
    """A figure as an <img> with its PNG inside, and its label or titles for those who do not see it; HTML as it is."""
    if isinstance(result, str):
        return result
    if not hasattr(result, "savefig"):
        kind = type(result).__name__
        raise ValueError(f"explore: its function returned {kind}; should be a matplotlib figure or a string of HTML")
    from matplotlib import pyplot

    from workbench.report.outputs import describe, shrink

    out = io.BytesIO()
    result.savefig(out, format="png", dpi=FRAME_DPI)  # not bbox="tight": frames keep one size
    pyplot.close(result)
    encoded = base64.b64encode(shrink(out.getvalue())).decode()
    return f'<img alt="{escape(describe(result) or "figure")}" src="data:image/png;base64,{encoded}">'


def _values(name: str, options) -> list:
    values = [] if isinstance(options, str) or not isinstance(options, Iterable) else list(options)
    if not values:
        raise ValueError(f"explore: {name}={options!r}: a list of the values it takes, at least one")
    return values


def _label(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _is_live() -> bool:
    """Whether there is a kernel with somebody in front of it."""
    if os.environ.get("WORKBENCH_BATCH"):
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")
