"""Which notebooks there are, what they declare and what they are told. Read as JSON, so that `list` answers at once."""

from __future__ import annotations

import ast
import json
from pathlib import Path

PROFILES = ("tiny", "quick", "gpu")


def root() -> Path:
    """The folder that holds notebooks/ and outputs/: here, or the clone that this package was installed from."""
    clone = Path(__file__).resolve().parents[2]
    return next((folder for folder in (Path.cwd(), clone) if (folder / "notebooks").is_dir()), Path.cwd())


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


def heading(text: str, level: int) -> str | None:
    """The text of the first Markdown heading of this level."""
    mark = "#" * level + " "
    return next((line[len(mark) :].strip() for line in text.splitlines() if line.startswith(mark)), None)


def title(nb: dict, name: str) -> str:
    """metadata.title, else the first heading, else the name."""
    headings = (heading(source(cell), 1) for cell in nb["cells"] if cell["cell_type"] == "markdown")
    return nb["metadata"].get("title") or next(filter(None, headings), name)


def declared(nb: dict, name: str = "notebook") -> dict[str, object]:
    """Parameter -> default, from the literals of the cell tagged `parameters`; ValueError where one is no literal."""
    cells = [cell for cell in nb["cells"] if "parameters" in cell["metadata"].get("tags", [])]
    found = {}
    try:
        statements = ast.parse(source(cells[0])).body if cells else []
    except SyntaxError as error:
        raise ValueError(f"{name}: its parameters cell is not Python ({error}); it takes `name = literal`") from None
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(targets[0], ast.Name):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            raise ValueError(f"{name}: `{ast.unparse(statement)}` in its parameters cell, which takes `name = literal`")
        try:
            found[targets[0].id] = ast.literal_eval(statement.value)
        except (ValueError, TypeError):
            raise ValueError(f"{name}: parameter `{ast.unparse(statement)}` is not a literal") from None
    return found


def kind(value: object) -> str:
    """What a parameter with this default takes: 'int', 'float', 'str', 'list of int', 'list', 'dict', 'anything'..."""
    if value is None:
        return "anything"
    if not isinstance(value, list | tuple):
        return type(value).__name__
    kinds = {kind(item) for item in value}
    if kinds == {"int", "float"}:
        return "list of float"
    return f"list of {kinds.pop()}" if len(kinds) == 1 and "anything" not in kinds else "list"


def fits(value: object, wanted: str) -> bool:
    """Whether a JSON value may be given to a parameter of this kind. An int may stand for a float; a bool is no int."""
    if wanted.startswith("list of "):
        return isinstance(value, list) and all(fits(item, wanted.removeprefix("list of ")) for item in value)
    if wanted == "float":
        return type(value) in (int, float)
    return wanted == "anything" or type(value).__name__ == wanted


def settle(notebooks: dict[str, dict], profile: str, asked: dict[str, object]) -> dict[str, dict[str, object]]:
    """Notebook name -> the parameters to inject: what its profile sets, then what is asked for.

    Something asked for goes to every notebook that declares it. ValueError, naming what is declared, where none does or
    the value is of another kind.
    """
    if "profile" in asked:
        raise ValueError(f"parameter profile={asked['profile']!r}: chosen with --profile {'|'.join(PROFILES)}")
    defaults = {name: declared(nb, name) for name, nb in notebooks.items()}
    for key, value in asked.items():
        if not any(key in own for own in defaults.values()):
            raise ValueError(f"parameter {key}={value!r}: no notebook here declares it. {_known(defaults)}")
    settled = {}
    for name, own in defaults.items():
        profiles = notebooks[name]["metadata"].get("workbench", {}).get("profiles", {})
        if unknown := set(profiles) - set(PROFILES):
            raise ValueError(f"{name}: profiles {sorted(unknown)} in its metadata; there are {', '.join(PROFILES)}")
        settled[name] = {"profile": profile} if "profile" in own else {}
        for origin, values in ((f"profile {profile}:", profiles.get(profile, {})), ("parameter", asked)):
            for key, value in values.items():
                if key in own:
                    if not fits(value, kind(own[key])):
                        accepted = f"should be {kind(own[key])}, such as {own[key]!r}"
                        raise ValueError(f"{origin} {key}={value!r} of {name}: {accepted}. {_known({name: own})}")
                    settled[name][key] = value
                elif values is not asked:
                    raise ValueError(f"{origin} {key}={value!r} of {name}: not declared. {_known({name: own})}")
    return settled


def set_of(own: dict[str, object]) -> list[str]:
    """What a user may set: everything but the profile, which has an option of its own."""
    return [key for key in own if key != "profile"]


def _known(defaults: dict[str, dict[str, object]]) -> str:
    return "Declared: " + "; ".join(f"{name}: {', '.join(set_of(own)) or 'none'}" for name, own in defaults.items())
