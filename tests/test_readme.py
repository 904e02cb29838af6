"""The README's code runs, its commands exist, and what it points at is there."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def commands(program: str) -> list[list[str]]:
    """The argument lists with which the README calls a program, in its sh blocks and in its text."""
    lines = [line.partition("#")[0] for block in blocks("sh") for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", README)
    return [shlex.split(line)[1:] for line in lines if line.split()[:1] == [program]]


def test_python_samples_run_in_order(capsys):
    samples = blocks("python")
    assert samples
    namespace = {}
    for sample in samples:
        exec(compile(sample, "README.md", "exec"), namespace)
    assert capsys.readouterr().out.startswith("torch: ")


def test_every_pattern_has_a_row():
    import workbench as wb

    rows = re.findall(r"^\| `(\w+)\(", README, re.M)
    patterns = {name for name in wb.patterns.__all__ if name[0].isupper()} - {"Pattern", "Blocks"}
    assert set(rows) == patterns


def test_make_targets_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    asked = {word for arguments in commands("make") for word in arguments}
    assert {"report", "test"} <= asked <= targets


@pytest.mark.parametrize("arguments", commands("workbench"), ids=" ".join)
def test_workbench_commands_parse(arguments):
    from workbench.cli import parser

    parser().parse_args(arguments)


def test_papermill_commands_name_notebooks_and_their_parameters():
    from workbench.report import notebooks, parameters

    assert commands("papermill")
    for source, _, *options in commands("papermill"):
        declared = parameters.declared(notebooks.read(ROOT / source))
        assert set(options[1::3]) <= set(declared)


def test_what_it_points_at_is_there():
    paths = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    paths += re.findall(r"`((?:workbench|tests|notebooks)/[\w./]*)`", README)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
