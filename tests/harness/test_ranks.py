"""Every way in which a rank can fail, for real, while others wait for it; and the launchers beside the pool."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import workbench as wb
from tests import tools
from tests.tools import gone, until
from workbench.harness import ranks as worker
from workbench.harness.ranks import Pool

ROOT = Path(wb.__file__).parents[1]
LONGEST_S = 3600.0  # far above what any machine takes: it ends what hangs
WORKER = "workbench.harness.ranks"
HERE = """
import ctypes, os, subprocess, sys, time
import torch
import torch.distributed as dist

def whoami(scale=1.0):
    print("not an answer")
    total = torch.tensor([scale * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "world": dist.get_world_size(), "sum": total.item(), "pid": os.getpid(),
            "local": os.environ.get("LOCAL_RANK"), "threads": torch.get_num_threads()}

def leaves_a_child():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

def fails(culprit, how, code):
    if dist.get_rank() == culprit:
        if how != "raises_at_once":
            time.sleep(0.2)  # the others wait for it by now
        return eval(compile(code, "fault", "eval")) if how == "returns_a_function" else exec(code)
    if how == "raises_at_once":
        time.sleep(600)  # the others do not notice
    try:
        return whoami()
    except RuntimeError as lost:
        if how == "is_killed_and_missed":
            raise KeyError("said by another rank") from lost
        raise

def pid(folder):
    with open(os.path.join(folder, str(dist.get_rank())), "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
"""


MODULES = {"faults.py": HERE}


@pytest.fixture(scope="module")
def pair(folder):
    with Pool(2, "gloo") as pool:
        yield pool


def when_told(folder: Path) -> list[int]:
    """The process ids that two ranks have written into this folder."""
    files = [folder / str(rank) for rank in range(2)]
    assert until(lambda: all(file.exists() and file.read_text() for file in files)), "the ranks did not start"
    return [int(file.read_text()) for file in files]


def test_the_ranks_are_a_group_and_stay_for_the_next_job(pair):
    first = pair.run("faults:whoami", {"scale": 2})
    assert [x["rank"] for x in first] == [0, 1] and [x["local"] for x in first] == ["0", "1"]
    assert all((x["world"], x["sum"], x["threads"]) == (2, 6.0, 1) for x in first)
    again = pair.run("faults:whoami", [3])
    assert [x["pid"] for x in again] == [x["pid"] for x in first] and again[0]["sum"] == 9.0
    assert not {x["pid"] for x in again} & {os.getpid()}
    assert pair.attempt("faults:whoami").result[1]["sum"] == 3.0


LOST, KILLS = "raise LookupError('nothing\\nthere')", "os.kill(os.getpid(), 9)"
FAULTS = {  # what rank 1 does: status, what the error says, what the stack says
    "raises": (LOST, "killed", "LookupError: nothing", "in fails\n"),
    "raises_at_once": (LOST, "killed", "LookupError: nothing", "in fails\n"),
    "refuses": ("raise ValueError('n=-1: want a length')", "refused", "n=-1: want a length", "in fails\n"),
    "runs_out": ("torch.empty(1 << 60)", "oom", "memory", "in fails\n"),
    "is_killed": (KILLS, "killed", "ended by signal 9 (SIGKILL)", "without a word"),
    "is_killed_and_missed": (KILLS, "killed", "ended by signal 9 (SIGKILL)", "without a word"),
    "segfaults": ("ctypes.string_at(0)", "killed", "ended by signal 11 (SIGSEGV)", "in fails\n"),
    "exits": ("sys.exit(0)", "killed", "SystemExit: 0", "in fails\n"),
    "ends": ("print('going', file=sys.stderr, flush=True); os._exit(0)", "killed", "ended with exit code 0", "going"),
    "sleeps": ("time.sleep(600)", "timeout", "no answer within 1 s, nor from rank 0", "in fails\n"),
    "returns_a_function": ("lambda: 0", "refused", "the result cannot be sent", "lambda"),
}


@pytest.mark.parametrize("how", tools.tiers(FAULTS, ["raises", "runs_out", "is_killed", "sleeps"]))
def test_a_rank_that_fails_is_named_with_the_reason_and_the_stack_and_nothing_is_left(pair, how):
    code, status, reason, stack = FAULTS[how]
    before = [x["pid"] for x in pair.run("faults:whoami")]  # the next job after the fault before
    children = pair.run("faults:leaves_a_child")
    what = {"culprit": 1, "how": how, "code": code}
    outcome = pair.attempt("faults:fails", what, timeout_s=1 if how == "sleeps" else LONGEST_S)
    assert (outcome.status, outcome.rank, outcome.result) == (status, 1, None), outcome
    assert outcome.error.startswith("rank 1 of 2: ") and reason in outcome.error
    assert stack in outcome.stacks[1], outcome.stacks
    first, *beneath = str(outcome).splitlines()
    assert first == outcome.error and "\n".join(beneath) == outcome.stacks[1].rstrip() and "stacks" not in repr(outcome)
    if how != "returns_a_function":  # where rank 0 has what it waits for
        assert ("in fails\n" if how == "raises_at_once" else "all_reduce") in outcome.stacks[0]
    assert gone(*before, *children)


@pytest.mark.parametrize("function, reason", [
    (lambda: 0, "module of its own"), ("__main__:cell", "module of its own"), ("whoami", "want 'module:function'"),
    ("nowhere.to_be_found:fn", "cannot import it: .*No module named 'nowhere'"),
    ("faults:nothing", "has no function 'nothing'"), ("broken:fn", "cannot import it: ZeroDivisionError"),
])  # fmt: skip
def test_a_function_that_cannot_be_imported_is_refused_and_the_ranks_live(pair, folder, function, reason):
    before = pair.run("faults:whoami")
    (folder / "broken.py").write_text("1 / 0\n")
    tools.refused(reason, pair.run, function)
    assert [x["pid"] for x in pair.run("faults:whoami")] == [x["pid"] for x in before]


def test_what_makes_no_sense_is_refused():
    for arguments in ({1, 2}, [lambda: 0], "text", 3):
        tools.refused("arguments=", Pool(2, "gloo").run, "os:getpid", arguments)
    for nproc in (0, -1, 1.5, "2"):
        tools.refused("nproc=", Pool, nproc, "gloo")
    tools.refused("backend='mpi'", Pool, 2, "mpi")
    tools.refused("nproc=4096, backend='nccl': want at most the", Pool, 4096, "nccl")


def test_a_module_written_a_moment_ago_is_found(pair, folder, tmp_path, monkeypatch):
    tools.refused("No module named 'written_late'", pair.run, "written_late:fn")
    pair.run("faults:whoami")  # now the folder has been looked at by all
    looked_at = folder.stat()
    (folder / "written_late.py").write_text("def fn():\n    return [float('nan'), 'é']\n")
    os.utime(folder, ns=(looked_at.st_atime_ns, looked_at.st_mtime_ns))  # its clock may not have ticked since
    assert [x[1] for x in pair.run("written_late:fn")] == ["é", "é"]
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "elsewhere.py").write_text("def fn():\n    return 7\n")
    assert pair.run("elsewhere:fn") == [7, 7]


def test_large_arguments_and_results_pass(pair):
    text = "x" * 3_000_000
    assert pair.run("builtins:str", [text]) == [text, text]


def test_an_interrupt_ends_the_job(pair, tmp_path):
    found = []

    def interrupt():
        found.extend(when_told(tmp_path))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # which also ends a wait

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # behind nohup or & it is ignored
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pair.run("faults:pid", [str(tmp_path)])
    thread.join()
    signal.signal(signal.SIGINT, before)
    assert found and gone(*found)
    assert pair.run("faults:whoami")[0]["sum"] == 3.0  # by new ranks: no answer is left of the old ones


def test_ranks_that_died_between_jobs_are_replaced(pair):
    first = pair.run("faults:whoami")
    os.kill(first[1]["pid"], signal.SIGKILL)
    assert gone(first[1]["pid"])
    second = pair.run("faults:whoami")
    assert gone(first[0]["pid"]) and not {x["pid"] for x in first} & {x["pid"] for x in second}


def test_ranks_that_cannot_start_are_data(folder, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchcard")
    with Pool(2, "gloo") as pool:
        outcome = pool.attempt("faults:whoami")
    assert outcome.status == "killed" and "nosuchcard" in outcome.error and "in join" in outcome.stacks[outcome.rank]


def test_one_rank_is_a_group_of_one(folder):
    with Pool(1, "gloo") as pool:
        (only,) = pool.run("faults:whoami")
        assert (only["world"], only["sum"]) == (1, 1.0)
        pool.close()
        assert gone(only["pid"])


def launch(command: list[str], folder: Path, stderr=None, **environment: str) -> subprocess.Popen:
    launchers = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
    mine = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    env = mine | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"} | environment
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env)


def answers(text: str) -> list[dict]:
    return sorted(map(json.loads, text.splitlines()), key=lambda answer: answer["rank"])


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", WORKER]


def test_torchrun(folder):
    with launch([*torchrun("--nproc_per_node", "2"), "faults:whoami", '{"scale": 2}'], folder) as run:
        found = answers(run.communicate(timeout=LONGEST_S)[0])
    assert run.returncode == 0
    told = [(x["rank"], x["world"], x["status"], x["result"]["sum"]) for x in found]
    assert told == [(rank, 2, "ok", 6.0) for rank in range(2)]


@pytest.mark.slow
def test_ranks_of_another_launcher_meet_by_the_environment(folder):
    names = worker.LAUNCHERS[1]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [meet | dict(zip(names, own, strict=True)) for own in (("0", "2", "0"), ("1", "2", "1"))]
    tasks = [launch([sys.executable, "-m", WORKER, "faults:whoami"], folder, **place) for place in places]
    found = answers("".join(task.communicate(timeout=LONGEST_S)[0] for task in tasks))
    assert [(x["rank"], x["world"], x["result"]["sum"]) for x in found] == [(0, 2, 3.0), (1, 2, 3.0)]


def test_no_launcher_is_one_rank_and_a_failure_is_an_answer(folder):
    what = json.dumps([0, "raises", LOST])
    with launch([sys.executable, "-m", WORKER, "faults:fails", what], folder, subprocess.PIPE) as alone:
        out, err = alone.communicate(timeout=LONGEST_S)
    assert alone.returncode == 1
    failure = {"rank": 0, "world": 1, "status": "killed", "error": "LookupError: nothing", "lost_peer": False}
    assert answers(out) == [failure]  # and the stack is not in a line of its own
    assert "rank 0 of 1: LookupError: nothing\nTraceback" in err and "in fails\n" in err


def test_a_rank_is_placed_by_what_the_launcher_says():
    slurm = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}
    ours = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    assert worker.place({}) == (0, 1, 0)
    for names in worker.LAUNCHERS:
        assert worker.place(dict(zip(names, ("9", "16", "1"), strict=True))) == (9, 16, 1)
    assert worker.place(slurm | ours) == (2, 4, 0)
    for wrong in ({"RANK": "0"}, ours | {"WORLD_SIZE": "two"}, ours | {"RANK": "4"}, {"SLURM_PROCID": "0"}):
        tools.refused("RANK|SLURM_PROCID", worker.place, wrong)


def test_ranks_that_are_not_told_where_to_meet_refuse(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    tools.refused("MASTER_ADDR nor MASTER_PORT.*scontrol", worker.join, "gloo")


def test_a_pool_does_not_start_in_each_rank_of_a_launcher(monkeypatch):
    for name, value in zip(worker.LAUNCHERS[0], ("1", "2", "1"), strict=True):
        monkeypatch.setenv(name, value)
    tools.refused("RANK=1 of 2: each of these ranks would start 3", Pool, 3, "gloo")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
