"""The command line: quick to answer, plain about what it refuses, honest in its exit code."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.notebooks.build import code, write
from workbench import cli, report

PARAMETERS = code('profile = "quick"\nn = 512\nlengths = [128, 256]\nscale = 0.5', "parameters")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
QUICK = 6  # times what Python takes to start: what the answer of a command that computes nothing may take


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with notebooks/, which is the current one."""
    profiles = {"tiny": {"n": 64, "lengths": [8]}, "gpu": {"n": 65536}}
    first = ("# The first one", PARAMETERS, "print(n, lengths)")
    write(tmp_path / "notebooks" / "01_one.ipynb", *first, profiles=profiles)
    write(tmp_path / "notebooks" / "02_two.ipynb", "# The second one", "print(2)")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(report, "describe", lambda: {"device": "a test", "kind": "cpu", "commit": "abc1234"})


def refusal(capsys, *arguments: str) -> str:
    """What the command says as it refuses, in one line."""
    assert cli.main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("workbench: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize("arguments", [["list"], ["fit", "--help"]], ids=" ".join)
def test_what_computes_nothing_answers_at_once(folder, arguments):
    """In processor time, beside that of a Python that does nothing: neither a load nor a slow machine matters."""

    def once(*command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], check=True, capture_output=True, cwd=folder, env=ENVIRONMENT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    idle = min(once("-c", "pass") for _ in range(3))
    assert min(once("-m", "workbench", *arguments) for _ in range(3)) < QUICK * idle


def test_the_command_line_imports_nothing_heavy_and_gradients_no_compiler():
    heavy = ("torch", "numpy", "nbformat", "nbconvert", "papermill", "IPython", "matplotlib", "pandas")
    script = "import sys, workbench.cli, workbench.report.show, workbench.explorers\n"
    script += f"print([name for name in {heavy} if name in sys.modules])\n"
    script += "import torch, workbench as wb\nx = torch.ones(1, 4, 1, 8, requires_grad=True)\n"
    script += "wb.attention(x, x, x, wb.Dilated([2], [1])).sum().backward()\nprint('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.stdout == "[]\nFalse\n", done.stderr


def test_a_shell_completes_the_names_of_notebooks_cards_and_patterns(folder, monkeypatch, capsys):
    """By argcomplete, which asks the parser's completers."""
    seen = []
    monkeypatch.setitem(sys.modules, "argcomplete", SimpleNamespace(autocomplete=seen.append))
    assert cli.main(["list"]) == 0
    *_, commands = seen[0]._actions
    found = {name: {} for name in commands.choices}
    for name, command in commands.choices.items():
        for action in command._actions:
            if hasattr(action, "completer"):
                found[name][action.dest] = action.completer()
    assert found["report"] == {"notebooks": ["01_one", "02_two"]} and found["scale"].keys() == {"pattern"}
    assert "rtx4090" in found["fit"]["card"] and "longnet-paper" in found["fit"]["pattern"]
    assert "PYTHON_ARGCOMPLETE_OK" in Path(cli.__file__).read_text()[:1024]


def test_list_tells_notebooks_and_their_parameters(folder, capsys):
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "01_one: The first one",
        "    n (int) = 512   [tiny: 64, gpu: 65536]",
        "    lengths (list of int, not empty) = [128, 256]   [tiny: [8]]",
        "    scale (float) = 0.5",
        "02_two: The second one",
    ]


def test_list_prints_the_cards_once(capsys):
    assert cli.main(["list"]) == 0
    said = capsys.readouterr().out
    assert said.count('"v100-16gb"') == 1 and "fit_card (str, choices as for card of 03_oom_frontiers) =" in said


@pytest.mark.parametrize("arguments, message", [
    (["-p", "m", "1"], "m=1: no notebook here declares it. Declared: 01_one: n, lengths, scale; 02_two: none"),
    (["-p", "n", '"1"'], "parameter n='1' of 01_one: should be int, such as 512"),
    (["-p", "lengths", "5"], "parameter lengths=5 of 01_one: should be list of int"),
    (["-p", "lengths", "[1,"], "parameter lengths=[1,: not JSON; Expecting value: line 1 column 4 (char 3)"),
    (["-p", "scale", "NaN"], "parameter scale=nan of 01_one: should be float"),
    (["-p", "n", "four"], "parameter n=four: not JSON; a string has quotes of its own: -p n '\"four\"'"),
    (["-p", "profile", '"gpu"'], "--profile tiny|quick|gpu"), (["--timeout", "-1"], "timeout=-1.0: a positive number"),
    (["03"], "notebook='03': neither a file nor one of the notebooks here (01_one, 02_two)"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line_and_nothing_is_written(folder, machine, capsys, arguments, message):
    assert message in refusal(capsys, "report", *arguments)
    assert not (folder / "outputs").exists()


def test_no_notebooks_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report.nbs, "root", lambda: tmp_path)
    assert "there is no *.ipynb in" in refusal(capsys, "report")


def test_report_asks_the_machine_and_writes_where_the_profile_says(folder):
    done = printed("workbench report 01 --profile tiny -p n 65 -p lengths '[1, 2]'", folder)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first.startswith("profile tiny, on ") and "unknown" not in first
    assert second.startswith("[1/1] 01_one ... ok") and second.endswith("outputs/reports/tiny/01_one.html")
    assert "65 [1, 2]" in (folder / "outputs/reports/tiny/01_one.html").read_text()


def printed(shell: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run a line of the shell in which `workbench` is this one."""
    line = f"set -o pipefail; workbench() {{ '{sys.executable}' -m workbench \"$@\"; }}; {shell}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT | variables)


@pytest.mark.parametrize("line", ["list | head -1 >first", "list >&-", "report 02 --profile tiny | true"])
def test_who_reads_may_leave(folder, line):
    done = printed(f"workbench {line}", folder)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_words_that_are_lost_are_exit_code_1(folder):
    done = printed("workbench list >/dev/full", folder)
    assert (done.returncode, done.stderr) == (1, "workbench: [Errno 28] No space left on device\n")


def test_what_the_terminal_cannot_show_is_escaped(folder):
    write(folder / "notebooks" / "03_bad.ipynb", "# Größe", "1 / 0")
    listed = printed("workbench list", folder, PYTHONIOENCODING="ascii")
    assert listed.returncode == 0 and "03_bad: Gr\\xf6\\xdfe" in listed.stdout
    done = printed("workbench report 03 02 --profile tiny", folder, PYTHONIOENCODING="ascii")
    assert done.returncode == 1 and "\\u201cGr" in done.stdout and "02_two ... ok" in done.stdout


def test_doctor_returns_what_the_doctor_says(monkeypatch):
    from workbench import doctor

    monkeypatch.setattr(doctor, "main", lambda: 4)
    assert cli.main(["doctor"]) == 4


MINE = """
def mean(q, k, v):
    return v.mean(1, keepdim=True).expand_as(q).contiguous()

def looks(q, k, v):
    return q * v.sum().item()

def leaves(q, k, v):
    raise SystemExit(3)
"""


def fit(capsys, *arguments: str) -> list[dict]:
    assert cli.main(["fit", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_fit_ranks_what_fits_by_time(capsys):
    sizes = ["--mode", "fwdbwd", "--pattern", "dense", "--n", "200000"]
    rows = fit(capsys, "--card", "h100", *sizes, "--backend", "flash", "cudnn")
    assert [row["way"] for row in rows] == ["dense, cudnn", "dense, flash"] and rows[0]["ms"] < rows[1]["ms"]
    assert all(row["fits"] and row["limiter"] == "time" and row["pairs_share"] == 1 for row in rows)
    assert 1e9 < rows[0]["device_bytes"] < 10e9 and 200_000 < rows[0]["longest_n"] < 10_000_000
    (small,) = fit(capsys, "--card", "h100", *sizes, "--backend", "cudnn", "--budget-gib", "0.5")
    assert not small["fits"] and small["limiter"] == "memory" and small["longest_n"] < 200_000
    (long,) = fit(capsys, "--backend", "cudnn", "--pattern", "dense", "--seconds", "1e6")
    assert long["limiter"] == "memory" and "fits" not in long


def test_fit_does_not_offer_what_computes_wrongly(capsys):
    sizes = ["--heads", "64", "--head-dim", "128", "--mode", "fwdbwd", "--pattern", "dense", "--n", "400000"]
    right, wrong = fit(capsys, *sizes, "--seconds", "1000", "--backend", "cudnn", "efficient")
    assert right["way"] == "dense, efficient" and right["fits"] and right["note"] is None
    assert not wrong["fits"] and wrong["limiter"] == "validity" and "cuDNN's gradients are wrong" in wrong["note"]


def test_fit_prints_a_table_and_why_a_line_has_no_number(capsys):
    asked = ["--pattern", "longnet-paper", "--backend", "triton", "--n", "4096"]
    assert cli.main(["fit", "--card", "gtx1080", *asked]) == 1
    first, second, empty, header, line = capsys.readouterr().out.splitlines()
    assert first.startswith("NVIDIA GeForce GTX 1080: 7.") and "60 s per call" in first and empty == ""
    assert "12 heads x 64, bfloat16, fwd; predicted" in second and "N = 4,096" in second
    assert " ".join(header.split()) == "execution longest N limited by fits device GiB ms share of dense pairs note"
    assert line.startswith("longnet-paper, triton") and "?" in line and "no" in line.split() and "capability" in line


def test_fit_answers_for_the_others_where_one_cannot_be(folder, capsys):
    (folder / "leaves_fit.py").write_text(MINE)
    rows = fit(capsys, "--pattern", "dense", "neighborhood", "--backend", "triton", "leaves_fit:leaves", "--n", "10")
    assert [row["way"] for row in rows if row["fits"]] == ["dense, triton"] and len(rows) == 4
    said = {row["way"]: row["note"] for row in rows}
    assert "want an int >= 1" in said["neighborhood, triton"] and "SystemExit" in said["dense, leaves_fit:leaves"]
    oracle, _ = fit(capsys, "--heads", "1", "--pattern", "dense", "--backend", "reference", "auto")
    assert oracle["longest_n"] is None and "on the host" in oracle["note"]
    assert cli.main(["fit", "--pattern", "dense", "--backend", "reference"]) == 1  # nothing can be run


def test_fit_offers_the_kernels_that_torch_has_on_the_card(capsys):
    """Of dense attention: none for bfloat16 on a T4 and for grouped float32, which is then all the scores'."""
    for sizes, want in ((["--card", "t4"], 12_416), (["--dtype", "fp32", "--heads", "8", "--kv-heads", "8"], None),
                        (["--card", "t4", "--dtype", "fp16"], None)):  # fmt: skip
        (row,) = fit(capsys, "--pattern", "dense", *sizes)
        assert row["way"] == ("dense, auto" if want else "dense, efficient")
        assert row["longest_n"] == want if want else row["longest_n"] > 100_000


@pytest.mark.parametrize("text, n", [("1000000", 10**6), ("1e6", 10**6), ("1M", 1 << 20), ("1_000_000", 10**6),
                                     ("128k", 131_072), ("2.5K", 2560)])  # fmt: skip
def test_a_number_of_tokens_is_taken_as_people_write_it(text, n):
    arguments = cli.parser().parse_args(["fit", "--n", text, "--dtype", "bf16"])
    assert (arguments.n, arguments.dtype) == (n, "bfloat16")


@pytest.mark.parametrize("text", ["1.5", "0.0005k", "128Ki", "many", "1MM", "", "nan", "1e-3", "k"])
def test_what_is_no_number_of_tokens_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["fit", f"--n={text}"])
    assert "want a number of tokens" in capsys.readouterr().err


def test_fit_makes_no_lists_for_what_cannot_fit(capsys, monkeypatch):
    from workbench.fit import estimate

    trace = estimate.trace
    monkeypatch.setattr(estimate, "trace", lambda case, card: trace(case, card) if case.n < 10**8 else 1 / 0)
    sizes = ["--heads", "8", "--head-dim", "128", "--pattern", "window-blocks", "--backend", "torch"]
    (row,) = fit(capsys, *sizes, "--n", str(10**8))
    assert not row["fits"] and row["note"] == "q, k, v and out alone are 762.94 GiB"


def test_fit_says_where_no_time_is_known(folder, capsys):
    (folder / "untimed.py").write_text(MINE)
    sizes = ["--pattern", "dense", "--backend", "untimed:mean", "cudnn", "--seconds", "inf"]
    mean, cudnn = fit(capsys, *sizes)
    assert mean["longest_ms"] is None and cudnn["longest_ms"] > 0
    assert cli.main(["fit", *sizes]) == 0
    *_, mean, cudnn = capsys.readouterr().out.splitlines()
    assert mean.endswith("memory (time not modelled)") and cudnn.endswith("memory")


def test_fit_takes_a_function_and_a_spec(folder, capsys):
    (folder / "mine_to_fit.py").write_text(MINE)
    spec = '{"pattern": "Dilated", "segment_lengths": [64], "dilation_rates": [2]}'
    mean, looks = fit(capsys, "--pattern", spec, "--backend", "mine_to_fit:mean", "mine_to_fit:looks", "--heads", "2")
    assert mean["limiter"] == "memory" and mean["longest_n"] > 1_000_000 and mean["note"] is None
    assert looks["longest_n"] is None and "CannotTrace" in looks["note"]


@pytest.mark.parametrize("arguments, message", [
    (["--card", "h101"], "card='h101': want one of 'gtx1080'"),
    (["--card", "a100"], "card='a100': want 'a100-40gb' or 'a100-80gb'"),
    (["--kv-heads", "5"], "5 key heads do not divide 12 query heads"),
    (["--pattern", "longnets"], "pattern='longnets': want one of dense, longnet-paper"),
    (["--pattern", "{"], "pattern='{': not JSON"),
    (["--pattern", '{"pattern": "Sparse"}'], "pattern='Sparse': want one of Dense"),
    (["--backend", "cuda"], "backend='cuda': want one of auto, reference"),
    (["--backend", "no_such:thing"], "'no_such:thing': cannot import it"),
    (["--heads", "0"], "--heads 0: want at least 1"), (["--n", "0"], "--n 0: want at least 1"),
    (["--budget-gib", "0"], "--budget-gib 0.0: want at least 0.001"),
    (["--budget-gib", "inf"], "--budget-gib inf: want at least 0.001, at most 9,007,199,254,740,992"),
])  # fmt: skip
def test_fit_refuses_what_it_does_not_know(capsys, arguments, message):
    assert message in refusal(capsys, "fit", *arguments)


SCALE = ["scale", "--nproc", "2", "--n", "128", "--heads", "2", "--head-dim", "8", "--samples", "3", "--strategies"]


@pytest.fixture
def recorded(folder, monkeypatch):
    from workbench.harness import records

    monkeypatch.setattr(records, "default_folder", lambda: folder / "records")
    return folder


def test_scale_measures_prints_a_table_and_then_what_is_recorded(recorded, capsys):
    assert cli.main([*SCALE, "sequence"]) == 0
    out, err = capsys.readouterr()
    header, *lines = out.splitlines()
    assert header.startswith("case") and "speed-up" in header and "sent MiB" in header
    assert [line.split("  ")[1].strip() for line in lines] == ["one device", "sequence", "A/A"]
    assert err.startswith("1/1: dense, N = 128\n  one device: ") and "  sequence: " in err
    assert cli.main([*SCALE, "sequence", "--json"]) == 0
    _, row, _ = json.loads(capsys.readouterr().out)
    assert row["strategy"] == "sequence" and row["sent_bytes"] == row["planned_bytes"] == [2 * 64 * 2 * 8 * 4] * 2


def test_a_strategy_that_is_wrong_is_the_exit_code_of_scale(recorded, capsys):
    (recorded / "wrong_to_scale.py").write_text("def half(q, k, v, pattern):\n    return q / 2\n")
    assert cli.main([*SCALE, "wrong_to_scale:half"]) == 1
    assert "wrong: out is off one device's by up to" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, message", [
    (["--nproc", "0"], "--nproc 0: want at least 1"), (["--n", "0"], "--n 0: want at least 1"),
    (["--strategies", "ring"], "strategy='ring': want one of one device, data parallel"),
    (["--pattern", "longnets"], "pattern='longnets': want one of dense, longnet-paper"),
])  # fmt: skip
def test_scale_refuses_what_it_does_not_know(recorded, capsys, arguments, message):
    assert message in refusal(capsys, "scale", *arguments)
    assert not (recorded / "records").exists()


def test_scale_on_cards_wants_a_card_for_each_rank(recorded, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "--nproc 3: want at most 2, the cards of this machine" in refusal(capsys, "scale", "--nproc", "3")
