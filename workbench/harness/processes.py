"""Fresh processes in milliseconds: they are forked from a server that has loaded torch, which takes seconds, just once.

    outcome = shared().run("module:function", (1, 2), timeout_s=60, memory_bytes=1 << 30)

The server computes nothing. It never touches a card, since a child of a process that has cannot use it, and never
starts torch's threads, which do not survive a fork. `ranks` forks its ranks from the same server.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import psutil
import torch

from workbench.harness.outcome import Outcome, attempt, sentence

# What children are likely to import. The third is what the first call of an operator of ours imports, in two seconds.
PRELOAD = ("workbench.engines.dispatch", "workbench.engines.torch_backend", "torch._dynamo",
           "torch.distributed.device_mesh")  # fmt: skip
PAUSE_S = 0.01  # between two looks at a process with a limit of memory, which grows by 100 MB in that time


def imported(name: str) -> Callable:
    """The function that "module:function" names; ValueError where there is none, or its module cannot be imported."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"{name!r}: want 'module:function'")
    importlib.invalidate_caches()  # the module may have been written a moment ago
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as error:  # a module may raise anything
        raise ValueError(f"{name!r}: cannot import it: {sentence(error)}") from None
    if not callable(found):
        raise ValueError(f"{name!r}: module {module} has no function {function!r}")
    return found


@functools.cache
def shared(**environment: str) -> Server:
    """The server of this process whose environment has these variables, too. It ends when this process does."""
    return Server(environment)


class Server(contextlib.AbstractContextManager):
    """Starts processes. It starts itself with the first, and again if it has died; `with Server() as server` ends it.

    environment: variables that the server and all processes get beside those of this process, so early that the C
    library sees them. The server and its processes end when this process does, however that ends.
    """

    def __init__(self, environment: dict[str, str] | None = None):
        self._environment = environment or {}
        self._process: subprocess.Popen | None = None

    def __exit__(self, *_) -> None:
        self.close()

    def run(
        self, function: str, arguments: tuple, timeout_s: float = 600.0, memory_bytes: int | None = None
    ) -> Outcome:
        """Call "module:function" with these arguments in a fresh process; see `Outcome` for what can become of it.

        Beyond `attempt`'s statuses: timeout after timeout_s seconds; killed if the process ends without an answer; oom
        if it is ended for its memory: by us, when its resident memory has grown by more than memory_bytes, or by the
        system. ValueError if the arguments cannot be sent: a function defined in a notebook, say.
        """
        try:
            work = pickle.dumps((function, arguments))
        except Exception as error:  # pickle raises many kinds
            raise ValueError(
                f"{error}: a fresh process can be given what it can import; write the function into a module of its "
                "own and name it 'module:function'"
            ) from None
        with self.start(f"{__name__}:_call_once") as process:
            process.ask(work)
            return process.outcome(timeout_s, memory_bytes)

    def start(self, main: str, environment: dict[str, str] | None = None) -> Process:
        """Fork a process that calls "module:function"(pipe), pipe being the other end of `Process.pipe`."""
        path = [entry or os.getcwd() for entry in sys.path]
        self._open(path)
        ours, theirs = Pipe()
        fate, told = Pipe(duplex=False)
        said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        environment = dict(os.environ) | self._environment | (environment or {})
        request = pickle.dumps((main, path, os.getcwd(), environment))
        with theirs, told, contextlib.suppress(ConnectionError):  # a server that has died is told by `Process`
            files = [x.fileno() for x in (theirs, told, said)]
            socket.send_fds(self._socket, [len(request).to_bytes(4, "big")], files)
            self._socket.sendall(request)
        return Process(ours, fate, said, self._process, self._said)

    def close(self) -> None:
        """End the server, and the processes that it has started."""
        if self._process is None:
            return
        self._socket.close()  # which it sees, unless it is still loading torch
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        self._said.close()
        self._process = None

    def _open(self, path: list[str]) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._socket, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the server)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)} | self._environment
            self._process = subprocess.Popen(  # in a session of its own: Ctrl-C is for the one who asked
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said,
                env=environment, start_new_session=True,
            )  # fmt: skip


class Process(contextlib.AbstractContextManager):
    """A process that a `Server` has forked: what it answers, what it says and how it has ended. `with` kills it."""

    def __init__(self, pipe: Connection, fate: Connection, said, server: subprocess.Popen, server_said):
        self.pipe, self._fate, self._said, self._server = pipe, fate, said, (server, server_said)
        self._mark, self._kills = 0, kills()  # at the last question: the size of `said`, the system's OOM kills
        self.signs = [pipe, fate]  # of an answer, and of the end: for `multiprocessing.connection.wait`
        self._ended: Outcome | None = None
        try:
            self.pid: int | None = fate.recv()  # waits until the server has loaded torch
        except (EOFError, ConnectionError):
            self.pid, self._ended = None, self._server_died()

    def __exit__(self, *_) -> None:
        self.kill()

    def ask(self, work: bytes) -> None:
        self._mark, self._kills = self._size(), kills()
        with contextlib.suppress(ConnectionError):  # it has just ended, which `answer` will tell
            self.pipe.send_bytes(work)

    def answer(self) -> Any:
        """What it has answered; an `Outcome` where it has ended without an answer; None where it still computes."""
        ended = self.ended()  # looked at first, so that all it has answered is read here
        with contextlib.suppress(EOFError, ConnectionError):
            if self.pipe.poll():
                return pickle.loads(self.pipe.recv_bytes())
        return ended

    def ended(self) -> Outcome | None:
        """How it has ended, None if it has not. What it may have answered before is still to be read."""
        if self._ended is None and self._fate.poll():
            try:
                code = self._fate.recv()
            except (EOFError, ConnectionError):
                _kill(self.pid)  # where the system does not end a process with its server
                self._ended = self._server_died()
            else:
                self._ended = Outcome("killed", how_ended(code, self._said))
                if code == -signal.SIGKILL and kills() > self._kills:
                    self._ended = Outcome("oom", "killed by the system, which was out of memory")
        return self._ended

    def outcome(self, timeout_s: float, memory_bytes: int | None = None) -> Outcome:
        """Its answer, an `Outcome`; or what it has ended of, or has to be ended for."""
        end = time.monotonic() + timeout_s
        most = None if memory_bytes is None else self._resident() + memory_bytes
        while True:
            left = max(0.0, end - time.monotonic())
            wait(self.signs, left if most is None else min(PAUSE_S, left))
            if (answer := self.answer()) is not None:
                return answer
            if not left:
                return Outcome("timeout", f"no answer within {timeout_s:g} s")
            if most is not None and self._resident() > most:
                return Outcome("oom", f"killed at its cap: its memory grew by more than {memory_bytes / 2**30:.2f} GiB")

    def said(self) -> str:
        """What it has written since the last question, or since `dump`."""
        return os.pread(self._said.fileno(), 1 << 20, self._mark).decode(errors="replace").strip()

    def dump(self) -> None:
        """Have a rank write its stack to stderr, which `said` returns a moment later."""
        self._mark = self._size()
        if self.ended() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End it, and what it has started."""
        if self.ended() is None:
            _kill(self.pid)
            wait([self._fate], 10)
        for file in (self.pipe, self._fate, self._said):
            file.close()

    def _server_died(self) -> Outcome:
        process, said = self._server
        return Outcome("killed", f"the server of fresh processes {how_ended(process.wait(), said)}")

    def _resident(self) -> int:
        with contextlib.suppress(psutil.Error, TypeError):  # it has just ended, or has never been
            return psutil.Process(self.pid).memory_info().rss
        return 0

    def _size(self) -> int:
        return os.fstat(self._said.fileno()).st_size


def _kill(pid: int) -> None:
    """End a process and what it has started, which is in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies
        os.killpg(pid, signal.SIGKILL)


def kills() -> int:
    """How many processes this system has killed for want of memory; 0 where it does not tell."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


def how_ended(code: int, said) -> str:
    """Words about a process that has ended; code: negative for a signal; said: the file of its stderr."""
    if code < 0:
        return f"ended by signal {-code} ({signal.Signals(-code).name})"
    lines = [] if said.closed else os.pread(said.fileno(), 1 << 20, 0).decode(errors="replace").strip().splitlines()
    return f"ended with exit code {code}: {(lines or ['no message'])[-1]}"[:400]


def main() -> None:
    asker = socket.socket(fileno=int(sys.argv[1]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that nothing that is imported starts threads
    for module in PRELOAD:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of all that lives here
    warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # numpy's threads, which numpy's BLAS takes care of
    woken, bell = socket.socketpair()  # by which a child that ends wakes `wait`
    bell.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
    children: dict[int, Connection] = {}
    with contextlib.suppress(ConnectionError):
        while True:
            ready = wait([asker, woken])
            if woken in ready:
                woken.recv(4096)
                _bury(children)
            if asker in ready:
                size, files, *_ = socket.recv_fds(asker, 4, 3)
                if not size:
                    break  # the one who asks has gone
                request = asker.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
                _fork(pickle.loads(request), files, children, (asker, woken, bell), threads)
    for pid in children:
        _kill(pid)


def _bury(children: dict[int, Connection]) -> None:
    """Tell how each child that has ended did, and end what it has left."""
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _kill(pid)  # its group: what it has started
            with children.pop(pid) as told, contextlib.suppress(ConnectionError):
                told.send(os.waitstatus_to_exitcode(status))


def _fork(request: tuple, files: list[int], children: dict[int, Connection], ours: tuple, threads: int) -> None:
    pipe, told, said = files
    fate = Connection(told, readable=False)
    server, child = os.getpid(), os.fork()
    if not child:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in (*ours, fate, *children.values()):
            one.close()  # else others would not see that the server has ended
        _child(*request, pipe, said, server, threads)
    with contextlib.suppress(OSError):  # the child does it, too: whichever comes first
        os.setpgid(child, child)
    os.close(pipe)
    os.close(said)
    children[child] = fate
    with contextlib.suppress(ConnectionError):
        fate.send(child)


def _child(main: str, path, folder, environment, pipe: int, said: int, server: int, threads: int) -> None:
    """Do what is asked, and end this process: it never returns."""
    code = 1
    try:
        os.setpgid(0, 0)  # a group of its own, which is killed with it
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: when the server ends, however that is
            if os.getppid() != server:  # it ended before that
                return
        with contextlib.suppress(OSError):  # if memory runs out, this goes before the notebook that asked for it
            Path("/proc/self/oom_score_adj").write_text("1000")
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.chdir(folder)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(threads)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # else all children would draw the same numbers
        with Connection(pipe) as asker:
            imported(main)(asker)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # the server's clean-up is not the child's


def _call_once(asker: Connection) -> None:
    """`Server.run` in the process: one call, its `Outcome` the answer."""
    function, arguments = pickle.loads(asker.recv_bytes())
    asker.send_bytes(pickle.dumps(attempt(lambda: imported(function)(*arguments))))


if __name__ == "__main__":
    main()
