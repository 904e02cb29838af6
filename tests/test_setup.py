"""The set-up: pyproject.toml, constraints.txt, environment.yml and the Makefile agree, and `make` decides rightly."""

import ast
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from workbench import requirements

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, SETUPTOOLS = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
DECLARED = [Requirement(r) for r in requirements.declared("test")]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
OF_A_CUDA_TORCH = ("nvidia-", "cuda-", "triton")


def pins() -> dict[str, Requirement]:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in map(Requirement, lines)}


def test_each_constraint_is_one_public_version():
    for name, pin in pins().items():
        (specifier,) = pin.specifier
        assert specifier.operator == "==" and "*" not in specifier.version, name
        assert "+" not in specifier.version and not pin.url and not pin.marker and not pin.extras, name
        assert not name.startswith(OF_A_CUDA_TORCH), name


def test_every_requirement_has_a_pin_that_it_admits():
    for requirement in DECLARED:
        (pin,) = pins()[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(pin.version), requirement


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_the_whole_closure_is_pinned(python, system):
    """Also for the Python versions and systems that this test does not run on, as far as the packages here can tell."""
    os_facts = {"platform_system": system, "sys_platform": system.lower(), "os_name": "posix"}
    facts = {"python_version": python, "python_full_version": f"{python}.0", **os_facts}
    pinned, seen = pins(), set()
    todo = list(DECLARED)
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        extras = ("", *sorted(requirement.extras))
        if (name, extras) in seen or name.startswith(OF_A_CUDA_TORCH):
            continue
        seen.add((name, extras))
        assert name in pinned, f"{name} is needed on Python {python}, {system}, and is not in constraints.txt"
        try:
            needs = [Requirement(r) for r in requires(name) or []]
        except PackageNotFoundError:  # only needed elsewhere
            continue
        todo += [r for r in needs if not r.marker or any(r.marker.evaluate(facts | {"extra": e}) for e in extras)]


BROUGHT = {"triton", "cutlass", "flash_attn", "quack", "transformers", "ray"}  # by a CUDA torch, and by extras


def test_what_is_imported_is_declared():
    """No module works only because another package happens to bring what it imports."""
    names = {canonicalize_name(r.name) for r in DECLARED}
    ours_or_stdlib = sys.stdlib_module_names | {"workbench", "tests", *(p.stem for p in ROOT.glob("tests/**/*.py"))}
    distributions = packages_distributions()
    undeclared = set()
    for path in [*ROOT.glob("workbench/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("notebooks/*.ipynb")]:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            cells = (c["source"] for c in json.loads(text)["cells"] if c["cell_type"] == "code")
            text = "\n".join("".join(source) for source in cells)
            text = re.sub(r"^[%!].*$", "", text, flags=re.M)
        for node in ast.walk(ast.parse(text)):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module]
            for module in {m.partition(".")[0] for m in modules} - ours_or_stdlib:
                owners = {canonicalize_name(d) for d in distributions.get(module, ())}
                if not owners & names and module not in BROUGHT:
                    undeclared.add((module, str(path.relative_to(ROOT))))
    assert undeclared == set()


def test_conda_environment_installs_what_make_installs():
    *conda, last = ENVIRONMENT["dependencies"]
    assert [re.split("[=<>]", spec)[0] for spec in conda] == ["python", "pip"]
    assert last == {"pip": ["-c constraints.txt", "-e .[test]"]}
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "pip install --quiet -c constraints.txt -e '.[test]'" in recipe
    assert ENVIRONMENT["name"] == PROJECT["name"] and ENVIRONMENT["channels"][0] == "conda-forge"
    python = ENVIRONMENT["dependencies"][0].removeprefix("python=")
    assert SpecifierSet(PROJECT["requires-python"]).contains(python)
    assert Requirement("x[test]").extras <= PROJECT["optional-dependencies"].keys()


def test_package_data_names_every_file_that_is_not_code():
    patterns = [p.removeprefix("**/") for p in SETUPTOOLS["package-data"]["workbench"]]
    files = [p for p in (ROOT / "workbench").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    assert [f for f in files if not any(fnmatch.fnmatch(f.name, p) for p in patterns)] == []


def test_version_is_stated_once_in_effect_and_every_name_is_there():
    import workbench

    assert workbench.__version__ == PROJECT["version"]
    assert all(hasattr(workbench, name) for name in workbench.__all__) and "attention" in workbench.__all__


def test_unmet_requirements_are_named_with_what_is_there():
    assert requirements.unmet(["pytest"]) == []
    (line,) = requirements.unmet(["pytest>=1000"])
    assert re.fullmatch(r"pytest is [\d.]+, not >=1000", line)
    assert requirements.unmet(["no-such-package-anywhere>=1"]) == ["no-such-package-anywhere is not installed"]


def test_a_complete_environment_is_usable_and_an_empty_one_is_not(tmp_path):
    script = [str(ROOT / "workbench" / "requirements.py")]
    assert subprocess.run([sys.executable, "-P", *script]).returncode == 0
    bare = subprocess.run([sys.executable, "-P", "-S", *script], capture_output=True, text=True)
    assert bare.returncode == 1 and bare.stderr == ""


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


@pytest.fixture
def checkout(tmp_path):
    """A folder with what set-up needs, and a stand-in for Python that logs how it is called."""
    (tmp_path / "workbench").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "workbench/requirements.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >>"{tmp_path}/log"\n'
        'case "$*" in\n'
        f'  *"venv --clear"*) mkdir -p .venv/bin && rm -f .venv/complete && cp "$0" .venv/bin/python;;\n'
        '  *"pip install"*) test ! -e fail;;\n'
        "esac\n"
    )
    python.chmod(0o755)
    return tmp_path


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    dropped = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "ARGS", "PYTHON")
    env = {k: v for k, v in os.environ.items() if k not in dropped} | environment
    (folder / "log").unlink(missing_ok=True)
    return subprocess.run(["make", *arguments], cwd=folder, env=env, capture_output=True, text=True)


def calls(folder: Path) -> str:
    return (folder / "log").read_text()


@needs_make
def test_make_sets_up_once_and_again_when_a_pin_changes(checkout):
    python = f"PYTHON={checkout}/python"
    assert make(checkout, "report", "ARGS=01", python).returncode == 0
    assert "venv --clear" in calls(checkout) and "pip install" in calls(checkout)
    assert calls(checkout).endswith("-m workbench report 01\n")
    assert make(checkout, "report", python).returncode == 0
    assert calls(checkout) == "-m workbench report\n"
    with open(checkout / "constraints.txt", "a") as f:
        f.write("one-more==1\n")
    assert make(checkout, "report", python).returncode == 0
    assert "pip install" in calls(checkout) and "venv --clear" not in calls(checkout)


@needs_make
def test_make_redoes_an_interrupted_install(checkout):
    python = f"PYTHON={checkout}/python"
    (checkout / "fail").touch()
    assert make(checkout, "report", python).returncode != 0
    assert "workbench report" not in calls(checkout)
    (checkout / "fail").unlink()
    assert make(checkout, "report", python).returncode == 0
    assert "venv --clear" in calls(checkout)


@needs_make
def test_make_uses_an_activated_environment_that_has_everything_and_no_other(checkout):
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        active = checkout / f"with space {variable}"
        (active / "bin").mkdir(parents=True)
        shutil.copy(checkout / "python", active / "bin" / "python")  # exit status 0: nothing is unmet
        assert make(checkout, "report", "PYTHON=false", **{variable: str(active)}).returncode == 0
        assert calls(checkout).endswith("-m workbench report\n") and "pip install" not in calls(checkout)
    assert not (checkout / ".venv").exists()
    (active / "bin" / "python").unlink()
    (active / "bin" / "python").symlink_to(shutil.which("false"))
    assert make(checkout, "report", f"PYTHON={checkout}/python", VIRTUAL_ENV=str(active)).returncode == 0
    assert (checkout / ".venv" / "complete").exists()


@needs_make
@pytest.mark.parametrize("case, message", [
    ("-c import sys; sys.exit(sys.version_info", "Python 3.11 or newer is needed"),
    ("-c import ensurepip", "apt-get install python3-venv"),
], ids=["old Python", "no venv module"])  # fmt: skip
def test_make_says_what_python_lacks(checkout, case, message):
    python = checkout / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in "{case}"*) exit 1;; esac\n')
    run = make(checkout, "report", f"PYTHON={python}")
    assert run.returncode != 0 and message in run.stderr
    assert "no-such-python: not found" in make(checkout, "report", "PYTHON=no-such-python").stderr


@needs_make
def test_make_clean_keeps_records_and_named_reports(checkout):
    kept = ["outputs/records/cpu/x.jsonl", "outputs/records/h100x1/x.jsonl", "outputs/reports/h100x1/x.html"]
    for name in [*kept, "outputs/reports/quick/x.html", ".venv/x"]:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    assert make(checkout, "clean").returncode == 0
    assert all((checkout / name).exists() for name in kept)
    assert not (checkout / ".venv").exists() and not (checkout / "outputs/reports/quick").exists()


def test_ci_runs_make_test_as_its_last_word():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    assert script.read_text(encoding="utf-8").rstrip().endswith("make test")


def test_a_wheel_has_all_notebooks_and_committed_records():
    listed = subprocess.run(["git", "ls-files", "outputs/records"], cwd=ROOT, capture_output=True, text=True).stdout
    folders = {"notebooks": "ipynb"} | {line.rpartition("/")[0]: "jsonl" for line in listed.splitlines()}
    shared = {f"share/attention-workbench/{at}": [f"{at}/*.{ending}"] for at, ending in folders.items()}
    assert SETUPTOOLS["data-files"] == shared
