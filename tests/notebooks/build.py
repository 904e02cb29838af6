"""Small notebooks for tests of the report pipeline, written where a test wants them."""

from pathlib import Path

import nbformat
from nbformat import v4


def text(source: str):
    return v4.new_markdown_cell(source)


def code(source: str, *tags: str):
    return v4.new_code_cell(source, metadata={"tags": list(tags)} if tags else {})


def write(path: Path, *cells, profiles: dict | None = None, rules: dict | None = None) -> Path:
    """Write a notebook of these cells; a string is code, or text where it starts with a heading."""
    kinds = [(cell, text if str(cell).startswith("#") else code) for cell in cells]
    whole = [kind(cell) if isinstance(cell, str) else cell for cell, kind in kinds]
    metadata = {"workbench": {"profiles": profiles or {}, "parameters": rules or {}}}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(v4.new_notebook(cells=whole, metadata=metadata), path)
    return path
