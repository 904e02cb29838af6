"""Fresh processes by the dozen: forked, each in milliseconds, from a server that has torch loaded and computes nothing.

A probe must start with nothing of an earlier one's memory, and whatever becomes of it, the search that asked for it
goes on. The server never touches a card (a child of a process that has cannot use it) nor torch's thread pools (which
do not survive a fork).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import psutil

from workbench.probes.case import imported
from workbench.probes.outcome import Outcome, attempt

# beside what this module imports; the last is what the first call of an operator of ours imports, in two seconds
PRELOAD = ("workbench.dispatch", "workbench.execution.torch_backend", "torch._dynamo")
LONGEST_PAUSE_S = 0.01  # between two looks at a job; memory grows by some 100 MB in that time


class Server:
    """Runs jobs in fresh processes, one at a time. It starts with its first job; `with Server() as server` ends it.

    The server and its job end when this process does, however that ends. environment: variables to add, from the start
    of the server, so that the C library sees them, too.
    """

    def __init__(self, environment: dict[str, str] | None = None):
        self._environment = environment or {}
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def run(
        self, function: str, arguments: tuple, timeout_s: float = 600.0, memory_bytes: int | None = None
    ) -> Outcome:
        """Call "module:function" with these arguments in a fresh process; see `Outcome` for what can become of it.

        Beyond `attempt`'s statuses: timeout after timeout_s seconds; killed where the process ends without an answer;
        oom where it is ended for its memory: by us, when its resident memory has grown by more than memory_bytes, or by
        the system. ValueError where the arguments cannot be sent: a function defined in a notebook, say.
        """
        try:
            work = pickle.dumps((function, arguments))
        except Exception as error:  # pickle raises many kinds
            raise ValueError(
                f"{error}: a fresh process can be given what it can import; write the function into a module of its "
                "own and name it 'module:function'"
            ) from None
        path = [entry or os.getcwd() for entry in sys.path]
        try:
            self._start(path)
            self._pipe.send_bytes(pickle.dumps((work, path, os.getcwd(), timeout_s, memory_bytes)))
            return pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            outcome = _ended(self._process.wait(), self._said, "the server of fresh processes ")
            self.close()
            return outcome
        except BaseException:  # an interrupt: the job ends, and its answer must not be taken for the next one's
            self.close()
            raise

    def close(self) -> None:
        """End the server and the job that it may be running."""
        if self._process is None:
            return
        self._pipe.close()  # which it sees
        self._said.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _start(self, path: list[str]) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._pipe, theirs = Pipe()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the server)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)} | self._environment,
                start_new_session=True,  # Ctrl-C is for the one who asked
            )


# --- the server ------------------------------------------------------------------------------------------------------


def main() -> None:
    asker = Connection(int(sys.argv[1]))
    for module in PRELOAD:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of all that lives here
    warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # numpy's threads, which numpy's BLAS takes care of
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            asker.send_bytes(_serve(asker, *pickle.loads(asker.recv_bytes())))


def _serve(asker: Connection, work: bytes, path, folder, timeout_s: float, memory_bytes: int | None) -> bytes:
    """Do a job in a child; its outcome, pickled."""
    before = kills()
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as said:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            _child(asker, work, path, folder, answer, said)
        try:
            outcome = _watch(asker, child, timeout_s, memory_bytes)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies
                os.killpg(child, signal.SIGKILL)  # with what it has started
        if isinstance(outcome, int):
            answer.seek(0)
            found = answer.read()
            if outcome == 0 and found:
                return found
            if outcome == -signal.SIGKILL and kills() > before:
                outcome = Outcome("oom", "killed by the system, which was out of memory")
            else:
                outcome = _ended(outcome, said)
    return pickle.dumps(outcome)


def _watch(asker: Connection, child: int, timeout_s: float, memory_bytes: int | None) -> int | Outcome:
    """Wait for a child: its exit code (a signal negative), or what it had to be ended for."""
    process, begin = psutil.Process(child), time.monotonic()
    most = None if memory_bytes is None else process.memory_info().rss + memory_bytes
    verdict = None
    while True:
        ended, code = os.waitpid(child, os.WNOHANG if verdict is None else 0)
        if ended:
            return os.waitstatus_to_exitcode(code) if verdict is None else verdict
        spent = time.monotonic() - begin
        gone = asker.poll(min(LONGEST_PAUSE_S, 1e-3 + spent / 10, max(0.0, timeout_s - spent)))
        if gone:  # the one who asks says nothing while a job runs, so it has ended
            verdict = Outcome("killed", "nobody waits for it")
        elif spent >= timeout_s:
            verdict = Outcome("timeout", f"no answer within {timeout_s:g} s")
        elif most is not None and _resident(process) > most:
            verdict = Outcome("oom", f"killed at its cap: its memory grew by more than {memory_bytes / 2**30:.2f} GiB")
        if verdict is not None:
            os.kill(child, signal.SIGKILL)


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:  # it has just ended
        return 0


def kills() -> int:
    """How many processes this system has killed for want of memory; 0 where it does not tell."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _ended(code: int, said, who: str = "") -> Outcome:
    """What to say of a process that ended without an answer; said: the file of its stderr."""
    if code < 0:
        return Outcome("killed", f"{who}ended by signal {-code} ({signal.Signals(-code).name})")
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines() or ["no message"]
    return Outcome("killed", f"{who}ended with exit code {code}: {lines[-1]}"[:400])


# --- the child -------------------------------------------------------------------------------------------------------


def _child(asker: Connection, work: bytes, path: list[str], folder: str, answer, said) -> None:
    """Do the job and end this process: it never returns."""
    try:
        os.setsid()  # a group of its own, which is killed with it
        die_with(os.getppid())
        prefer_to_be_killed()
        asker.close()  # else the one who asks would not see that the server has ended
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        os.chdir(folder)
        sys.path[:] = path
        outcome = attempt(lambda: _job(work))
        pickle.dump(outcome, answer)
        answer.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # the server's clean-up is not the child's


def _job(work: bytes):
    function, arguments = pickle.loads(work)
    return imported(function)(*arguments)


def die_with(parent: int) -> None:
    """Have the system kill this process when its parent ends, however that ends: it may hold a card."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that
            os._exit(1)


def prefer_to_be_killed() -> None:
    """If the system runs out of memory, let it take this process, before the notebook that asked for it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main()
