"""Which notebooks there are and what is in them. Read as JSON, so that `workbench list` answers at once."""

import json
import re
from pathlib import Path

from workbench.harness.records import SHARED


def root() -> Path:
    """The folder that holds notebooks/: here, the clone that this package is in, or what its wheel brings."""
    places = Path.cwd(), Path(__file__).resolve().parents[2], SHARED
    return next((folder for folder in places if (folder / "notebooks").is_dir()), Path.cwd())


def find(names: list[str] | None = None) -> list[Path]:
    """Paths of the notebooks named, by a path or by a name in notebooks/ (its beginning will do); without names all."""
    here = sorted((root() / "notebooks").glob("*.ipynb"))
    found = [_find(str(name), here) for name in names] if names else here
    if not found:
        raise ValueError(f"notebooks={names}: there is no *.ipynb in {root() / 'notebooks'}")
    stems = [path.stem for path in found]
    if "index" in stems:
        raise ValueError("notebook=index: its report would take the place of the index; want another name")
    twice = sorted({stem for stem in stems if stems.count(stem) > 1})
    if twice:
        raise ValueError(f"notebooks: {', '.join(twice)} asked for twice; each report has the name of its notebook")
    return found


def _find(name: str, here: list[Path]) -> Path:
    if Path(name).is_file():
        return Path(name).resolve()
    exact = [path for path in here if path.stem == name]
    begins = exact or [path for path in here if path.stem.startswith(name)]
    if len(begins) != 1:
        options = ", ".join(path.stem for path in begins or here) or "none"
        raise ValueError(f"notebook={name!r}: neither a file nor one of the notebooks here ({options})")
    return begins[0]


def read(path: Path) -> dict:
    try:
        nb = json.loads(Path(path).read_text(encoding="utf-8"))
        if nb["nbformat"] != 4:
            raise ValueError(f"nbformat {nb['nbformat']}")
        for part in (nb, *nb["cells"]):
            part["metadata"].get("tags")
        for cell in nb["cells"]:
            source(cell), cell["cell_type"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a notebook of format 4 ({type(error).__name__}: {error})") from None
    return nb


def source(cell: dict) -> str:
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def title(nb: dict, name: str) -> str:
    """metadata.title, else the first heading, else the name."""
    prose = "\n".join(source(cell) for cell in nb["cells"] if cell["cell_type"] == "markdown")
    return nb["metadata"].get("title") or next(iter(re.findall(r"^# +(.*\S)", prose, re.M)), name)


def without_results(model: dict, **_) -> None:
    """Jupyter's `pre_save_hook` under `make lab`: a notebook is saved as its source, whatever kernel ran it.

    What it showed stays on the screen, and `workbench report` is what keeps it.
    """
    if model["type"] != "notebook" or model["content"]["nbformat"] != 4:
        return
    nb = model["content"]
    nb["metadata"]["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nb["metadata"]["language_info"] = {"name": "python"}
    nb["metadata"].pop("widgets", None)
    for cell in nb["cells"]:
        for noted in ("collapsed", "execution", "scrolled", "trusted"):
            cell["metadata"].pop(noted, None)
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
