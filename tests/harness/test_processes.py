import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import workbench as wb
from tests import tools
from tests.tools import alive, gone, until
from workbench.harness import processes
from workbench.harness.processes import Process
from workbench.probes.case import Case

ROOT = Path(wb.__file__).parents[1]
GIB = 1 << 30
HERE = """
import os, signal, subprocess, sys, time
import torch

def does(code):
    exec(code)
    return lambda: 0

def leaves_a_child(path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(path, "w") as file:
        file.write(str(child.pid))
    time.sleep(600)

def state():
    return [os.getpid(), os.getppid(), torch.cuda.is_initialized(), "mine" in sys.modules, os.getpgrp()]

def adds(n):
    print("not an answer")
    sys.modules["mine"].count = getattr(sys.modules["mine"], "count", 0) + n
    return sys.modules["mine"].count

def pid(path):
    with open(path, "w") as file:
        file.write(f"{os.getpid()} {os.getppid()}")
    time.sleep(600)
"""


ENDLESS = "kept = [torch.ones(8 << 20, dtype=torch.uint8) for _ in iter(int, 1)]"
KILLS = "os.kill(os.getpid(), signal.SIGKILL)"
MODULES = {"mine.py": HERE}


def pids(path: Path) -> list[int]:
    assert until(lambda: path.exists() and path.read_text())
    return [int(x) for x in path.read_text().split()]


def test_every_job_is_in_a_process_of_its_own(folder):
    assert [processes.run("mine:adds", (2,)).result for _ in range(3)] == [2, 2, 2]  # and what is printed is no answer
    first, second = (processes.run("mine:state", ()).result for _ in range(2))
    assert first[0] != second[0] and first[1] == second[1]  # one server
    assert first[2:5] == [False, True, first[0]]
    assert first[0] != os.getpid() and first[1] != os.getpid()


def test_jobs_compute_with_all_threads_and_with_gradients():
    case = Case(wb.Dilated([256, 512], [1, 2]), 1024, 2, 16, mode="fwdbwd")
    got = processes.run("workbench.fit.trial:call", (case, GIB, 60.0))
    assert got.status == "ok" and got.result["valid"] is True, got


def test_a_job_computes_little_beside_what_it_is_given():
    """A Python that loads torch computes for a second or more; here it is what the process has used when it begins."""
    used = min(processes.run("time:process_time", ()).result for _ in range(5))
    assert used < 0.2 * tools.slowness(time.process_time)


def test_what_cannot_be_found_or_sent_is_said():
    assert "has no function" in processes.run("os:nothing", ()).error
    assert processes.run("no_such_module:fn", ()).status == "refused"
    tools.refused("module:function", processes.run, "os:getpid", (lambda: 0,))


@pytest.mark.parametrize(
    "code, error", [(KILLS, "signal 9 (SIGKILL)"), ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
                    ("print('went away', file=sys.stderr, flush=True); os._exit(1)", "went away")],
)  # fmt: skip
def test_a_job_that_dies_is_data(folder, code, error):
    outcome = processes.run("mine:does", (code,), timeout_s=3600)
    assert (outcome.status, outcome.result) == ("killed", None) and error in outcome.error
    assert processes.run("os:getpid", ()).status == "ok"


def test_an_answer_that_cannot_be_sent_is_data(folder):
    outcome = processes.run("mine:does", ("",))
    assert outcome.status == "killed" and "exit code 1" in outcome.error and "pickle" in outcome.error


def test_memory_is_capped(folder):
    outcome = processes.run("mine:does", (ENDLESS,), timeout_s=3600, memory_bytes=GIB // 4)
    assert outcome.status == "oom" and "its cap" in outcome.error and "0.25 GiB" in outcome.error
    outcome = processes.run("mine:does", ("torch.empty(1 << 60)",), memory_bytes=GIB)
    assert outcome.status == "oom" and "its cap" not in outcome.error  # an exception, as ever


def test_the_system_killing_for_memory_is_out_of_memory(folder, monkeypatch):
    kills = iter([3, 3])  # when it starts, and when it is asked
    monkeypatch.setattr(processes, "kills", lambda: next(kills, 4))
    outcome = processes.run("mine:does", (KILLS,))
    assert (outcome.status, outcome.error) == ("oom", "killed by the system, which was out of memory")


def test_a_job_past_its_time_ends_with_all_that_it_started(folder, tmp_path):
    outcome = processes.run("mine:leaves_a_child", (str(tmp_path / "pid"),), timeout_s=3)
    assert (outcome.status, outcome.error) == ("timeout", "no answer within 3 s")
    (child,) = pids(tmp_path / "pid")
    assert gone(child)


def test_an_interrupt_ends_the_job_and_leaves_no_answer_behind(folder, tmp_path, monkeypatch):
    def interrupted(process, *_):
        pids(tmp_path / "pid")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Process, "outcome", interrupted)
        processes.run("mine:pid", (str(tmp_path / "pid"),))
    assert gone(pids(tmp_path / "pid")[0]) and alive(pids(tmp_path / "pid")[1])
    assert processes.run("mine:adds", (5,)).result == 5


def test_a_job_does_not_outlive_the_one_who_asked(folder, tmp_path):
    code = f"from workbench.harness import processes; processes.run('mine:pid', ({str(tmp_path / 'pid')!r},))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as asker:
        job, forker = pids(tmp_path / "pid")
        assert alive(job) and alive(forker)
        asker.kill()
    assert gone(job, forker)


def test_the_death_of_the_server_is_data(folder):
    server = processes.run("mine:state", ()).result[1]
    outcome = processes.run("mine:does", ("os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)",))
    assert gone(server)
    assert outcome.status == "killed" and "exit code 255" in outcome.error
    assert processes.run("mine:adds", (1,)).result == 1  # of a new server
