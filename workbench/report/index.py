"""The index of a folder of reports, made from what the reports say of themselves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from pathlib import Path

from workbench.report.page import TEMPLATES

FACTS = re.compile(r'<script\b[^>]*\bid="report-facts"[^>]*>(.*?)</script>', re.S)


def write(path: Path, text: str) -> None:
    """Whole or not at all, whoever else writes it: under another name first, then moved."""
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def refresh(folder: Path) -> Path:
    """Write index.html for every report in the folder, also those of earlier and of simultaneous runs."""
    from jinja2 import Environment

    template = Environment(autoescape=True).from_string((TEMPLATES / "index.html.j2").read_text(encoding="utf-8"))
    with _alone_in(folder):
        reports = [read(path) for path in sorted(folder.glob("*.html")) if path.name != "index.html"]
        style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
        write(folder / "index.html", template.render(reports=[r for r in reports if r], style=style))
    return folder / "index.html"


def read(path: Path) -> dict | None:
    """What a report says of itself, or None where the file is no report (any more)."""
    try:
        found = FACTS.findall(path.read_text(encoding="utf-8", errors="replace"))
        return json.loads(found[-1]) | {"file": path.name} if found else None  # the last is the page's own
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _alone_in(folder: Path):
    """One process at a time, so that the last to list the folder is the last to write its index."""
    import fcntl

    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
