"""Widgets, named on a page without Jupyter; and an IPython extension: what `workbench report` adds to its kernels."""

import contextlib
import faulthandler
import io
import sys

VIEW = "application/vnd.jupyter.widget-view+json"


def load_ipython_extension(_) -> None:
    """The last words of a kernel that dies reach the log that a report keeps."""
    with contextlib.suppress(io.UnsupportedOperation):  # where ipykernel does not capture file descriptors
        faulthandler.enable(sys.stderr, all_threads=False)


def make_static(nb) -> None:
    """Say of every widget that has no form of its own that it is shown only in Jupyter, and drop the widgets' state."""
    nb.metadata.pop("widgets", None)
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            view = output.get("data", {}).pop(VIEW, None)
            if view and not {"text/html", "image/png", "image/svg+xml"} & set(output.data):
                output.data["text/html"] = '<span class="absent">(a widget: shown only in Jupyter)</span>'
