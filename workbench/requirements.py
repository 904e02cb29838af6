"""Which of this project's requirements does a Python environment lack?

`make` runs this file by its path, with whatever Python is activated, to see whether that environment will do. So it
imports nothing that a bare Python lacks, and nothing of ours.
"""

import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

DISTRIBUTION = "attention-workbench"
PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def declared(*extras: str) -> list[str]:
    """The requirements as written in pyproject.toml, or, outside a checkout, as the installed package states them."""
    if PYPROJECT.exists():
        import tomllib

        project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
        return project["dependencies"] + [r for e in extras for r in project["optional-dependencies"][e]]
    from packaging.requirements import Requirement

    parsed = [(Requirement(r), r) for r in requires(DISTRIBUTION) or []]
    return [r for p, r in parsed if not p.marker or any(p.marker.evaluate({"extra": e}) for e in ("", *extras))]


def unmet(requirements: list[str]) -> list[str]:
    """Of these requirements, a line for each that is absent or of another version."""
    from packaging.requirements import Requirement

    lines = []
    for requirement in map(Requirement, requirements):
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            lines.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            lines.append(f"{requirement.name} is {found}, not {requirement.specifier}")
    return lines


if __name__ == "__main__":
    # Exit status 0: this environment has everything that `make` needs.
    try:
        sys.exit(bool(unmet(declared("test"))))
    except ImportError:  # no packaging: as good as empty
        sys.exit(True)
