"""Sentences of a notebook that are computed from its results."""

from __future__ import annotations

import textwrap


def say(text: str) -> None:
    """Display Markdown, e.g. say(f"**{fastest}** is the fastest here.")."""
    from IPython.display import Markdown, display

    display(Markdown(textwrap.dedent(text).strip()))
