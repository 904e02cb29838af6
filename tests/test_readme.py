"""Both READMEs: every block runs by itself, every command exists, and the answers are of the records or the page."""

import json
import re
import shlex
from pathlib import Path

import pytest

import workbench as wb
from workbench.analysis import frontiers, multicard, streams
from workbench.cli import parser
from workbench.harness import records
from workbench.harness.narrate import title
from workbench.probes import catalog, speed
from workbench.probes.case import imported
from workbench.report import index

ROOT = Path(__file__).parent.parent
TEXTS = {path: (ROOT / path).read_text(encoding="utf-8") for path in ("README.md", "workbench/README.md")}
README = TEXTS["README.md"]


def blocks(language: str) -> list[str]:
    return [x for text in TEXTS.values() for x in re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)]


def commands(program: str) -> list[list[str]]:
    """The argument lists with which the READMEs call a program, in their sh blocks and in their text."""
    lines = [line.partition("#")[0] for block in blocks("sh") for line in block.splitlines()]
    lines += [x for text in TEXTS.values() for x in re.findall(r"`([^`\n]+)`", text)]
    return [shlex.split(line)[1:] for line in lines if line.split()[:1] == [program]]


@pytest.mark.parametrize("sample", blocks("python"))
def test_a_block_runs_by_itself(sample):
    exec(compile(sample, "README.md", "exec"), {})


def test_it_is_short():
    assert len(README.splitlines()) <= 120 and len(README.encode()) <= 6000
    assert len(TEXTS["workbench/README.md"].encode()) <= 4096


def answers() -> dict[str, str]:
    """{notebook's number: words that its line of the README has}."""
    orders = index.read(ROOT / "outputs/reports/h200x1/02_hilbert_orderings.html")
    searched = frontiers.recorded("h200x1")

    rows = multicard.ok(multicard.recorded(["h200x2"])[0])
    longnet = rows[rows["kind"] == "longnet-geometric"]
    row = longnet.query("n == 1048576 and mode == 'fwd' and strategy == 'sequence'").iloc[0]

    timed = speed.recorded("h200x1")[0].query("mode == 'fwd' and n == 131072 and status == 'ok'")
    by = timed.sort_values("median_ms").drop_duplicates("label").set_index("label")
    gain, dense = by.loc["dense", "median_ms"] / by.loc["dilated", "median_ms"], title(by.loc["dense", "backend"])
    billion = streams.measured("h200x1").query("execution == 'layer'").nlargest(1, "n").iloc[0]
    longest = records.committed("h200x2", "frontier")["measured_n"].max() / catalog.report("report-003-131k").n
    return {
        "02": orders["headline"],
        "03": f"{frontiers.right(searched)} of {len(searched)} predictions within a step of the search",
        "04": f"LongNet, {int(row['n']):,} tokens on two: {row['speedup']:.1f} times",
        "05": f"LongNet, 131,072 tokens: {gain:.1f} times as fast as dense ({dense})",
        "06": f"8 GB hold {longest:.0f} times a report's longest sequence",
        "08": f"a layer of {int(billion['n']):,} tokens ({billion['of'].partition(', ')[2]}) in "
        f"{billion['seconds']:.1f} s, {int(billion['sampled_rows'])} rows checked",
    }


def test_the_answers_are_those_of_the_committed_records_and_of_02s_page():
    lines = dict(re.findall(r"^\| \[?(0\d)\b(.*) \|$", README, re.M))
    assert set(lines) == {path.stem[:2] for path in (ROOT / "notebooks").glob("*.ipynb")}
    found = {number: line.rpartition(" | ")[2] for number, line in lines.items()}
    for number, words in answers().items():
        assert found.pop(number).startswith(words)
    assert not re.search(r"\d", " ".join(found.values())), "what no record has"


def test_a_committed_page_is_linked_where_its_notebook_stands():
    rows = re.findall(r"^\| (?:\[(0\d)\]\((.*?)\)|(0\d)) \|", README, re.M)
    names = {path.stem[:2]: path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    for linked, page, bare in rows:
        found = sorted((ROOT / "outputs/reports").glob(f"h200x*/{names[linked or bare]}.html"))
        assert ROOT / page in found if linked else not found
    assert len(rows) == len(names)


def test_every_pattern_has_a_row():
    rows = re.findall(r"^\| `(\w+)\(", README, re.M)
    patterns = {name for name in wb.patterns.__all__ if name[0].isupper()} - {"Pattern", "Blocks"}
    assert set(rows) == patterns


def test_commands_are_known_and_what_make_and_torchrun_start_exists():
    asked = {line.split()[0] for block in blocks("sh") for line in block.splitlines() if line.strip()}
    assert asked <= {"make", "workbench", "torchrun", "conda"}
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert {"report", "test"} <= {word for arguments in commands("make") for word in arguments} <= targets
    for arguments in commands("torchrun"):
        module, target, parameters = arguments[arguments.index("-m") + 1 :]
        assert imported(target) and imported(f"{module}:main") and isinstance(json.loads(parameters), dict)


@pytest.mark.parametrize("arguments", commands("workbench"), ids=" ".join)
def test_workbench_commands_parse(arguments):
    parser().parse_args(arguments)


def test_the_map_has_every_folder_and_only_what_is_there():
    package = ROOT / "workbench"
    rows = [line.split("|")[2] for line in TEXTS["workbench/README.md"].splitlines() if line.startswith("| ")]
    named = {x.rstrip("/") for x in re.findall(r"`([^`]+)`", " ".join(rows))}
    assert [x for x in named if not ((package / x).is_dir() or (package / f"{x}.py").is_file())] == []
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert folders <= {x.split("/")[0] for x in named}


def test_what_it_points_at_is_there():
    paths = [(Path(at).parent, x) for at, text in TEXTS.items() for x in re.findall(r"\]\((?!http)([^)#]+)\)", text)]
    paths += [(Path(), x) for x in re.findall(r"`((?:workbench|tests|notebooks|outputs)/[\w./]*)`", README)]
    assert paths and [x for at, x in paths if not (ROOT / at / x).exists()] == []
