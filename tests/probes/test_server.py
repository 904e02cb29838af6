import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import workbench as wb
from workbench.probes import server
from workbench.probes.case import Case
from workbench.probes.server import Server

ROOT = Path(wb.__file__).parents[1]
GIB = 1 << 30
HERE = """
import os, signal, subprocess, sys, time
import torch

def endless():
    kept = []
    while True:
        kept.append(torch.ones(8 << 20, dtype=torch.uint8))

def hungry():
    return torch.empty(1 << 60)

def dies(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        import ctypes
        ctypes.string_at(0)
    print("went away", file=sys.stderr, flush=True)
    os._exit(1)

def sleeps():
    time.sleep(600)

def leaves_a_child(path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(path, "w") as file:
        file.write(str(child.pid))
    time.sleep(600)

def state():
    here = [os.getpid(), os.getppid(), torch.cuda.is_initialized(), "mine" in sys.modules, os.getsid(0)]
    return here + [len(os.listdir(f"/proc/{os.getppid()}/task"))]

def adds(n):
    print("not an answer")
    sys.modules["mine"].count = getattr(sys.modules["mine"], "count", 0) + n
    return sys.modules["mine"].count

def pid(path):
    with open(path, "w") as file:
        file.write(f"{os.getpid()} {os.getppid()}")
    time.sleep(600)

def kills_the_server():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)

def no_answer():
    return lambda: 0
"""


@pytest.fixture(scope="module")
def running():
    with Server() as one:
        yield one


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(HERE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds, seconds=60.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def pids(path: Path) -> list[int]:
    assert until(lambda: path.exists() and path.read_text())
    return [int(x) for x in path.read_text().split()]


def test_every_job_is_in_a_process_of_its_own(running, mine):
    assert [running.run("mine:adds", (2,)).result for _ in range(3)] == [2, 2, 2]  # and what is printed is no answer
    first, second = (running.run("mine:state", ()).result for _ in range(2))
    assert first[0] != second[0] and first[1] == second[1]  # one server
    assert first[2:5] == [False, True, first[0]]
    assert first[0] != os.getpid() and first[1] != os.getpid()


def test_jobs_compute_with_all_threads_and_with_gradients(running):
    case = Case(wb.Dilated([256, 512], [1, 2]), 1024, 2, 16, mode="fwdbwd")
    got = running.run("workbench.probes.frontier:call", (case, GIB, 60.0, True))
    assert got.status == "ok" and got.result["valid"] is True, got


def test_a_job_takes_milliseconds(running):
    def once() -> float:
        begin = time.perf_counter()
        assert running.run("os:getpid", ()).status == "ok"
        return time.perf_counter() - begin

    once()
    assert min(once() for _ in range(10)) < 0.1  # a Python with torch takes a second or more to start


def test_what_cannot_be_found_or_sent_is_said(running):
    assert "has no function" in running.run("os:nothing", ()).error
    assert running.run("no_such_module:fn", ()).status == "killed"
    with pytest.raises(ValueError, match="module:function"):
        running.run("os:getpid", (lambda: 0,))


@pytest.mark.parametrize(
    "how, status, error",
    [("kill", "killed", "signal 9 (SIGKILL)"), ("segfault", "killed", "SIGSEGV"), ("exit", "killed", "went away")],
)
def test_a_job_that_dies_is_data(running, mine, how, status, error):
    outcome = running.run("mine:dies", (how,), timeout_s=60)
    assert (outcome.status, outcome.result) == (status, None) and error in outcome.error
    assert running.run("os:getpid", ()).status == "ok"


def test_an_answer_that_cannot_be_sent_is_data(running, mine):
    outcome = running.run("mine:no_answer", ())
    assert outcome.status == "killed" and "exit code 1" in outcome.error and "pickle" in outcome.error


def test_memory_is_capped(running, mine):
    begin = time.monotonic()
    outcome = running.run("mine:endless", (), timeout_s=60, memory_bytes=GIB // 4)
    assert outcome.status == "oom" and "its cap" in outcome.error and "0.25 GiB" in outcome.error
    assert time.monotonic() - begin < 30
    outcome = running.run("mine:hungry", (), memory_bytes=GIB)
    assert outcome.status == "oom" and "its cap" not in outcome.error  # an exception, as ever


def test_the_system_killing_for_memory_is_out_of_memory(mine, monkeypatch):
    kills = iter([3, 4])
    monkeypatch.setattr(server, "kills", lambda: next(kills))
    monkeypatch.setattr(server, "_child", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    ours, _theirs = server.Pipe()
    outcome = server.pickle.loads(server._serve(ours, b"", [], ".", 60.0, None))
    assert (outcome.status, outcome.error) == ("oom", "killed by the system, which was out of memory")


def test_a_job_past_its_time_ends_with_all_that_it_started(running, mine):
    begin = time.monotonic()
    outcome = running.run("mine:leaves_a_child", (str(mine / "pid"),), timeout_s=3)
    assert (outcome.status, outcome.error) == ("timeout", "no answer within 3 s")
    assert time.monotonic() - begin < 30
    (child,) = pids(mine / "pid")
    assert until(lambda: not alive(child))


class Interrupted:
    """A pipe to a server whose answer an interrupt comes before."""

    def __init__(self, pipe, when):
        self.send_bytes, self.close, self.when = pipe.send_bytes, pipe.close, when

    def recv_bytes(self):
        self.when()
        raise KeyboardInterrupt


def test_an_interrupt_ends_the_job_and_leaves_no_answer_behind(mine):
    with Server() as one:
        assert one.run("mine:adds", (1,)).result == 1
        one._pipe = Interrupted(one._pipe, lambda: pids(mine / "pid"))
        with pytest.raises(KeyboardInterrupt):
            one.run("mine:pid", (str(mine / "pid"),))
        assert until(lambda: not any(map(alive, pids(mine / "pid"))))
        assert one.run("mine:adds", (5,)).result == 5  # of a new server


def test_a_server_that_is_killed_is_data_and_its_job_ends(mine):
    with Server() as one:
        outcome = one.run("mine:kills_the_server", ())
        assert outcome.status == "killed" and "the server" in outcome.error and "SIGKILL" in outcome.error
        assert one.run("mine:adds", (1,)).result == 1


def test_a_job_does_not_outlive_the_one_who_asked(mine):
    code = f"from workbench.probes.server import Server; Server().run('mine:pid', ({str(mine / 'pid')!r},))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(mine)])}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as asker:
        job, forker = pids(mine / "pid")
        assert alive(job) and alive(forker)
        asker.kill()
    assert until(lambda: not alive(job) and not alive(forker))


def test_the_environment_is_the_childs_and_the_server_has_no_threads(mine):
    with Server({"OMP_NUM_THREADS": "1"}) as one:  # for numpy's BLAS, whose own threads survive a fork
        assert one.run("os:getenv", ("OMP_NUM_THREADS",)).result == "1"
        assert one.run("mine:state", ()).result[-1] == 1
