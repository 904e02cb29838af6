"""Outputs in a form that needs no Jupyter: figures described in words, widgets named.

It is an IPython extension too: what `workbench report` adds inside its kernels.
"""

import contextlib
import faulthandler
import io
import sys

VIEW = "application/vnd.jupyter.widget-view+json"


def load_ipython_extension(ip) -> None:
    """Figures carry an alternative text, and the last words of a kernel that dies reach the log that a report keeps."""
    # by name: matplotlib is not imported for a notebook that does not draw
    alternative = lambda fig, **_: ({}, {"alt": describe(fig)} if describe(fig) else {})  # noqa: E731
    ip.display_formatter.mimebundle_formatter.for_type_by_name("matplotlib.figure", "Figure", alternative)
    with contextlib.suppress(io.UnsupportedOperation):  # where ipykernel does not capture file descriptors
        faulthandler.enable(sys.stderr, all_threads=False)


def describe(fig) -> str:
    """A sentence for those who do not see the figure: its label, else its titles; maybe empty."""
    titles = [fig.get_suptitle(), *(ax.get_title() or ax.get_title("left") for ax in fig.axes)]
    return fig.get_label() or ". ".join(filter(None, titles))


def make_static(nb) -> None:
    """Say of every widget that has no form of its own that it is shown only in Jupyter, and drop the widgets' state."""
    nb.metadata.pop("widgets", None)
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            view = output.get("data", {}).pop(VIEW, None)
            if view and not {"text/html", "image/png", "image/svg+xml"} & set(output.data):
                output.data["text/html"] = '<span class="absent">(a widget: shown only in Jupyter)</span>'
