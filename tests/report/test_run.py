"""`workbench report`: complete where notebooks run, and complete about what happened where they do not."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import browser, tools
from tests.notebooks.build import code, write
from tests.tools import gone
from workbench import report
from workbench.report import index

PARAMETERS = code('profile = "quick"\nn = 512\nlengths = [1, 2]', "parameters")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine that is described at once; test_cli asks the real one."""
    monkeypatch.setattr(report, "describe", lambda: {"device": "a test", "kind": "cpu", "commit": "abc1234"})


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Write notebooks {name: cells}, report them, and return (reports, what was said, the folder)."""

    def go(notebooks: dict[str, list], profiles: dict | None = None, **options):
        here = tmp_path / "in"
        paths = [write(here / f"{name}.ipynb", *cells, profiles=profiles) for name, cells in notebooks.items()]
        monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)  # ipykernel captures less where it sees that
        said: list[str] = []
        options = {"profile": "tiny", "out": tmp_path / "out", "say": said.append} | options
        return report.run(paths, **options), "".join(said), tmp_path / "out"

    return go


def test_a_notebook_becomes_a_page_and_an_entry_of_the_index(run):
    plot = "import matplotlib.pyplot as plt\nplt.plot([n, 1])\nplt.show()"
    cells = ["# One thing", PARAMETERS, "print(n, lengths, profile)", "## A plot", plot]
    (done,), said, out = run({"01_one": cells}, {"tiny": {"n": 7}}, parameters={"lengths": [3, 4]})
    html, entry = done.path.read_text(), index.read(done.path)
    assert (done.name, done.title, done.status, done.failure) == ("01_one", "One thing", "ok", "")
    assert "7 [3, 4] tiny" in html and 'alt="Figure: A plot"' in html
    assert "[1/1] 01_one ... ok" in said and said.splitlines()[0] == "profile tiny, on a test"
    assert dict(entry["byline"]).keys() == {"device", "profile", "date", "commit", "ran for"}
    for fact in ("a test", "tiny", "abc1234"):
        assert fact in html and fact in (out / "index.html").read_text()
    assert {path.name for path in out.iterdir()} == {"01_one.html", "index.html"}


@pytest.mark.parametrize("options, message", [
    ({"parameters": {"N": 1}}, "parameter N=1: no notebook here declares it. Declared: a: n, lengths"),
    ({"parameters": {"n": "1"}}, "parameter n='1' of a: should be int"),
    ({"profile": "huge"}, "profile='huge': one of tiny, quick, gpu"), ({"timeout": 0}, "timeout=0"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_runs(run, tmp_path, options, message):
    tools.refused(message, run, {"a": [PARAMETERS, f"open({str(tmp_path / 'ran')!r}, 'w')"]}, **options)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def test_a_cell_that_raises_is_reported_and_the_next_notebook_runs(run):
    cells = ["# T", PARAMETERS, "print('be' + 'fore')", "## Boom", "def f():\n    1 / 0\nf()", "print('un' + 'seen')"]
    (bad, good), said, out = run({"01_bad": cells, "02_good": ["print(6 * 7)"]})
    html = bad.path.read_text()
    assert (bad.status, bad.failure) == ("error", "Failed in cell 4 (“Boom”): ZeroDivisionError: division by zero.")
    assert "before" in html and "unseen" not in html and html.count(bad.failure) >= 1 and 'id="failed"' in html
    assert "Traceback" in html
    assert good.status == "ok" and "42" in good.path.read_text()
    line = next(line for line in said.splitlines() if "01_bad" in line)
    assert line.startswith("[1/2] 01_bad ... error") and line.endswith(bad.failure)
    assert bad.failure in (out / "index.html").read_text()


@pytest.mark.parametrize("death, told", [
    ("os.kill(os.getpid(), 9)", "killed by signal 9, SIGKILL"),
    pytest.param("os.kill(os.getpid(), 11)", "killed by signal 11, SIGSEGV", marks=pytest.mark.slow),
    pytest.param("os._exit(3)", "it exited with code 3", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_kernel_that_dies_leaves_a_report_that_says_so(run, death, told):
    last = f"import os, signal, time\nprint('al' + 'ive', flush=True)\ntime.sleep(0.3)\n{death}"
    (done,), said, out = run({"a": ["print('be' + 'fore')", "## Speed", last, "print('un' + 'seen')"]})
    html = done.path.read_text()
    assert done.status == "killed" and done.failure.startswith(f"Kernel died in cell 2 (“Speed”): {told}")
    assert "before" in html and "alive" in html and "unseen" not in html
    assert done.failure in html[: html.index("<main ")] and 'id="failed"' in html
    assert done.failure in said and done.failure in (out / "index.html").read_text()


def test_what_a_kernel_says_as_it_dies_is_kept(run):
    (done,), _, _ = run({"a": ["import ctypes\ndef wild():\n    ctypes.string_at(0)\nwild()"]})
    assert done.status == "killed" and "Fatal Python error: Segmentation fault" in done.path.read_text()
    assert "in wild" in done.path.read_text()


def test_a_cell_over_its_time_is_reported_as_a_time_out_in_one_line(run):
    limit = round(4 * tools.slowness(), 1)  # idle, but for the first cell
    loop = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(3600)"
    (done,), said, _ = run({"slow": ["print('be' + 'fore')", "## Wait", loop, "print('un' + 'seen')"]}, timeout=limit)
    why = f"Timed out in cell 2 (“Wait”): over the limit of {limit:g} s for a cell."
    assert (done.status, done.failure) == ("timeout", why)
    line = next(line for line in said.splitlines() if "slow" in line)
    assert "timeout" in line and done.failure in line
    html = done.path.read_text()
    assert "before" in html and "unseen" not in html and done.failure in html


CHILDREN = """
import os, subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
quiet = "start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
far = f"import subprocess; print(subprocess.Popen({sleep!r}, {quiet}).pid)"
near = subprocess.Popen(sleep)
moved = subprocess.Popen(sleep, start_new_session=True)
orphan = int(subprocess.run([sys.executable, "-c", far], capture_output=True, start_new_session=True).stdout)
forked = os.fork()
if forked == 0:
    os.setsid()
    os.execv(sleep[0], sleep)
open(path, "w").write(" ".join(map(str, [os.getpid(), near.pid, moved.pid, orphan, forked])))
"""


@pytest.mark.parametrize("end", tools.tiers(["os.kill(os.getpid(), 9)", "1 / 0", "pass"], ["pass"]))
def test_no_process_outlives_its_kernel(run, tmp_path, end):
    pids = tmp_path / "pids"
    (done,), _, _ = run({"a": [f"path = {str(pids)!r}" + CHILDREN + end]})
    assert done.status == {"o": "killed", "1": "error", "p": "ok"}[end[0]]
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 5
    assert [pid for pid in started if not gone(pid)] == []


def test_the_kernel_is_this_interpreter_whatever_kernelspecs_there_are(run, tmp_path, monkeypatch):
    spec = tmp_path / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps({"argv": ["false"], "display_name": "x", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    facts = "[sys.executable, 'WORKBENCH_RUN' in os.environ, os.getcwd(), matplotlib.get_backend()]"
    (done,), _, _ = run({"a": [f"import os, sys, matplotlib\nprint({facts})"]})
    shown = f"['{sys.executable}', True, '{tmp_path / 'in'}', '"
    assert shown in done.path.read_text() and "inline" in done.path.read_text().split(shown)[1][:60]


def test_a_kernel_that_does_not_start_is_a_report_like_any_other(run, monkeypatch):
    spec = {"argv": ["false"], "display_name": "x", "language": "python"}
    monkeypatch.setattr("ipykernel.kernelspec.get_kernel_dict", lambda: spec)
    (done,), _, _ = run({"a": ["print(1)"]})
    assert done.status in ("error", "killed") and "before the first cell" in done.failure
    assert done.failure in done.path.read_text()


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_runs(run, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        run({"a": [f"open({str(tmp_path / 'ran')!r}, 'w')"]}, out=tmp_path / "file" / "further")
    assert not (tmp_path / "ran").exists()


def test_a_page_that_cannot_be_made_is_a_banner_and_the_next_notebook_runs(run, monkeypatch):
    from workbench.report import page

    make = page.make_static
    monkeypatch.setattr(page, "make_static", lambda nb: 1 / 0 if "Notebook 01" in str(nb.cells) else make(nb))
    (bad, good), said, out = run({"01_bad": ["# Notebook 01", "1"], "02_good": ["print(6 * 7)"]})
    assert (bad.status, good.status) == ("error", "ok")
    assert bad.failure == "Its page could not be made: ZeroDivisionError: division by zero."
    assert all(bad.failure in text for text in (bad.path.read_text(), said, (out / "index.html").read_text()))


def test_the_profile_is_chosen_by_the_machine_and_said(run, monkeypatch):
    (done,), said, _ = run({"a": [PARAMETERS, "print('run as', profile)"]}, profile=None)
    assert "profile quick (by default: no CUDA here)" in said and "run as quick" in done.path.read_text()
    monkeypatch.setattr(report, "describe", lambda: {"device": "a card", "kind": "h100x1", "commit": ""})
    (done,), said, _ = run({"a": [PARAMETERS, "print('run as', profile)"]}, profile=None)
    assert "profile gpu (by default: CUDA is present), on a card" in said and "run as gpu" in done.path.read_text()


def start(*arguments, until: Path | None = None) -> subprocess.Popen:
    """The command as a process, in whose notebook a cell has written its process id into `until`."""
    command = [sys.executable, "-m", "workbench", "report", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # behind nohup or & it is ignored
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, preexec_fn=listens, **pipes)
    while until and not (until.exists() and until.read_text()) and process.poll() is None:
        time.sleep(0.1)
    return process


@pytest.mark.parametrize("number", tools.tiers([signal.SIGINT, signal.SIGTERM], [signal.SIGINT]))
def test_an_interrupt_leaves_what_is_done_and_no_process(tmp_path, number):
    flag = tmp_path / "pid"
    mark = f"import os, time\nopen({str(flag)!r}, 'w').write(str(os.getpid()))"
    cells = {"1": ["1"], "2": ["print('half' + 'way')", f"{mark}\ntime.sleep(9999)"], "3": ["3"]}
    paths = [write(tmp_path / f"{name}.ipynb", "# T", *each) for name, each in cells.items()]
    process = start(*paths, "--profile", "tiny", "--out", tmp_path / "out", until=flag)
    process.send_signal(number)
    said, complaints = process.communicate(timeout=3600)
    assert process.returncode == 130
    assert complaints == "workbench: interrupted; what is done is written\n"
    assert "[1/3] 1 ... ok" in said and "[2/3] 2 ... interrupted" in said and "[3/3]" not in said
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"1.html", "2.html", "index.html"}
    html = (tmp_path / "out" / "2.html").read_text()
    assert "halfway" in html and "Interrupted in cell 2" in html
    assert "1 not complete" in (tmp_path / "out" / "index.html").read_text()
    assert gone(int(flag.read_text()))


def test_a_report_that_is_killed_leaves_no_kernel(tmp_path):
    flag = tmp_path / "pid"
    hang = f"import os, time\nopen({str(flag)!r}, 'w').write(str(os.getpid()))\ntime.sleep(9999)"
    process = start(write(tmp_path / "1.ipynb", hang), "--profile", "tiny", "--out", tmp_path / "out", until=flag)
    process.kill()
    process.communicate()
    assert gone(int(flag.read_text()))


def test_two_reports_at_once_share_a_folder(tmp_path):
    meet = (
        "import pathlib, time\nhere = pathlib.Path({here!r})\nhere.write_text('')\n"
        "while not pathlib.Path({there!r}).exists(): time.sleep(0.05)\nprint('met' + 'before')"
    )
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    one = write(tmp_path / "1.ipynb", "# First", meet.format(here=a, there=b))
    two = write(tmp_path / "2.ipynb", "# Second", meet.format(here=b, there=a))
    same, options = write(tmp_path / "same.ipynb", "# S", "1"), ("--profile", "tiny", "--out", tmp_path / "out")
    both = [start(path, same, *options, "--timeout", 3600) for path in (one, two)]
    for process in both:
        said, complaints = process.communicate(timeout=3600)
        assert (process.returncode, complaints) == (0, ""), said
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {"1.html", "2.html", "same.html", "index.html"}
    text = (out / "index.html").read_text()
    assert "First" in text and "Second" in text and "3 reports. " in text
    assert all("metbefore" in (out / name).read_text() for name in ("1.html", "2.html"))


EXPLORERS = "from workbench.explorers import hilbert, pattern\npattern.explore()"
FULL = ["# Everything\n\nWith $x^2$", "## Explorers", EXPLORERS, "hilbert.explore()", f"x = '{300 * 'long '}'"]


@pytest.mark.browser
def test_explorers_of_a_page_do_not_disturb_each_other(run):
    (done,), _, _ = run({"full": FULL})
    with browser.tab(done.path, 390) as tab:
        texts = "[...document.querySelectorAll('.wb-explorer')].map(x => x.textContent)"
        assert tab.run("document.documentElement.scrollWidth") <= 390
        assert tab.run("document.querySelectorAll('math').length") == 1
        masks, orders = tab.run(texts)
        tab.slide("[name=n]", 100)
        assert tab.run(texts)[0] != masks and tab.run(texts)[1] == orders
        tab.slide("[name=block]", 32)  # the first is the pattern explorer's, which is hidden there
        tab.slide(".wb-explorer [name=left]", "morton")
        assert tab.run(texts)[1] != orders
        parts = tab.run("location.hash").removeprefix("#~").split("~")
        assert [part.split("?")[0] for part in parts] == ["pattern", "hilbert"]
        assert tab.requests == [done.path.as_uri()] and tab.errors == []


@pytest.mark.browser
def test_the_browser_would_notice_a_request_and_an_error(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<img src='http://127.0.0.1:9/x.png'><script>nowhere()</script>")
    with browser.tab(page) as tab:
        assert "http://127.0.0.1:9/x.png" in tab.requests
        assert any("nowhere" in error for error in tab.errors)
