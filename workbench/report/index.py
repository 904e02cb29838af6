"""The index of reports: a row per notebook, a column per machine, made from what the pages say of themselves."""

import contextlib
import json
import os
import re
from pathlib import Path

from workbench.harness.narrate import title
from workbench.report.page import TEMPLATES
from workbench.report.parameters import PROFILES

FACTS = re.compile(r'<script\b[^>]*\bid="report-facts"[^>]*>(.*?)</script>', re.S)


def write(path: Path, text: str) -> None:
    """Whole or not at all, whoever else writes it: under another name first, then moved."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def refresh(folder: Path) -> Path:
    """Write index.html for every report in the folder, also those of earlier and of simultaneous runs.

    In a folder of a folder `reports` it has a column for each machine whose reports lie beside it. Where the folder is
    itself a machine's, and not named after a profile as the results of `make report` are, `reports` and the machines
    beside it get theirs anew.
    """
    folder = folder.resolve()
    shelf = folder.parent if folder.parent.name == "reports" else None
    with _alone_in(shelf or folder):
        beside = sorted(x for x in shelf.iterdir() if x.is_dir() and x.name not in PROFILES) if shelf else []
        machines = {x: found for x in beside if (found := _reports(x))}
        columns = {folder: _reports(folder)} | machines
        _write(folder, columns)
        if folder in machines:
            for one in (shelf, *machines):
                _write(one, machines)
    return folder / "index.html"


def _write(where: Path, columns: dict[Path, dict[str, dict]]) -> None:
    from jinja2 import Environment

    template = Environment(autoescape=True).from_string((TEMPLATES / "index.html.j2").read_text(encoding="utf-8"))
    rows = dict(sorted({x: page for pages in columns.values() for x, page in pages.items()}.items()))
    machines = [{"name": title(folder.name), "pages": pages, "at": os.path.relpath(folder, where) + "/"}
                for folder, pages in columns.items()]  # fmt: skip
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    write(where / "index.html", template.render(rows=rows, machines=machines, style=style))


def _reports(folder: Path) -> dict[str, dict]:
    """Stem -> what the report says, for the reports in a folder."""
    found = {path.stem: read(path) for path in sorted(folder.glob("*.html")) if path.name != "index.html"}
    return {name: page for name, page in found.items() if page}


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
