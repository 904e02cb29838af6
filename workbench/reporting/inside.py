"""What `workbench report` adds inside its kernels, as an IPython extension: alternative text, and last words."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import sys


def load_ipython_extension(ip) -> None:
    # by name: matplotlib is not imported for a notebook that does not draw
    ip.display_formatter.mimebundle_formatter.for_type_by_name("matplotlib.figure", "Figure", _metadata)
    with contextlib.suppress(io.UnsupportedOperation):  # where ipykernel does not capture file descriptors
        faulthandler.enable(sys.stderr, all_threads=False)  # past the capture, into the log that a report keeps


def _metadata(fig, include=None, exclude=None) -> tuple[dict, dict]:
    from workbench.reporting.alt import describe

    text = describe(fig)
    return {}, {"alt": text} if text else {}
