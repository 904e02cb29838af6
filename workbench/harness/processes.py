"""Fresh processes in milliseconds, forked from multiprocessing's server, which loads torch, and takes seconds, once.

    outcome = run("module:function", (1, 2), timeout_s=60, memory_bytes=1 << 30)

The server computes nothing: it never touches a card, since a child of a process that has cannot use it, and never
starts torch's threads, which do not survive a fork. `ranks` has its ranks from the same server. As everywhere with
multiprocessing, a script that starts processes has to do so behind `if __name__ == "__main__":`.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import psutil

from workbench.harness.outcome import Outcome, attempt, sentence

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([  # what children are likely to import, the first as an optimizer steps, in seconds
    "torch._dynamo", "torch.distributed.device_mesh", "pandas", "workbench.engines.torch_backend",
])  # fmt: skip
IMPORTABLE = "write the function into a module of its own and name it 'module:function'"
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


def run(function: str, arguments: tuple, timeout_s: float = 600.0, memory_bytes: int | None = None) -> Outcome:
    """Call "module:function" with these arguments in a fresh process; see `Outcome` for what can become of it.

    Beyond `attempt`'s statuses: timeout after timeout_s seconds; killed if the process ends without an answer; oom if
    it is ended for its memory: by us, when its resident memory has grown by more than memory_bytes, or by the system.
    ValueError if the arguments cannot be sent: a function defined in a notebook, say.
    """
    try:
        work = pickle.dumps((function, arguments))
    except Exception as error:  # pickle raises many kinds
        raise ValueError(f"{error}: a fresh process can be given what it can import; {IMPORTABLE}") from None
    with Process(f"{__name__}:_call_once") as process:
        process.ask(work)
        return process.outcome(timeout_s, memory_bytes)


class Process(contextlib.AbstractContextManager):
    """A fresh process that calls "module:function"(pipe): what it answers, what it says and how it has ended.

    pipe is the other end of `pipe`. environment: variables that it has beside those of this process. The end of the
    `with`, or of this process however that comes, ends it and what it has started.
    """

    def __init__(self, main: str, environment: dict[str, str] | None = None):
        self.pipe, theirs = Pipe()
        self._said = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed with the process)
        self._mark, self._kills = 0, kills()  # at the last question: the size of `_said`, the system's OOM kills
        given = main, theirs, self._said.name, os.environ | (environment or {})
        self._process = SERVER.Process(target=_child, args=given)
        with theirs:
            self._process.start()
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _kill, self.pid)  # also when this process exits
        self.signs = [self.pipe, self._process.sentinel]  # of an answer, and of the end: for `connection.wait`

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
        code = self._process.exitcode
        if code == -signal.SIGKILL and kills() > self._kills:
            return Outcome("oom", "killed by the system, which was out of memory")
        return None if code is None else Outcome("killed", self._how_ended(code))

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

    def said(self, start: int | None = None) -> str:
        """What it has written since the last question, or from byte `start` on."""
        since = self._mark if start is None else start
        return os.pread(self._said.fileno(), 1 << 20, since).decode(errors="replace").strip()

    def dump(self) -> None:
        """Have a rank write its stack to stderr, which `said` returns a moment later."""
        self._mark = self._size()
        if self.ended() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End it, and what it has started."""
        self._process.kill()
        self._end()
        self._process.join(10)
        for file in (self.pipe, self._said):
            file.close()

    def _how_ended(self, code: int) -> str:
        """Words about its end. code: negative for a signal."""
        if code < 0:
            return f"ended by signal {-code} ({signal.Signals(-code).name})"
        return f"ended with exit code {code}: {(self.said(0).splitlines() or ['no message'])[-1]}"[:400]

    def _resident(self) -> int:
        with contextlib.suppress(psutil.Error):  # it has just ended
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


def _child(main: str, asker: Connection, said: str, environment: dict[str, str]) -> None:
    """What a `Process` does: it becomes one of its own, and calls `main`."""
    os.setpgid(0, 0)  # a group of its own, which is killed with it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(OSError):  # if memory runs out, this goes before the notebook that asked for it
        Path("/proc/self/oom_score_adj").write_text("1000")
    file = os.open(said, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    gc.freeze()  # a collection would copy the pages of all that the server has loaded
    os.environ.clear()
    os.environ.update(environment)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all children would draw the same numbers
    imported(main)(asker)


def _end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    _kill(os.getpid())


def _call_once(asker: Connection) -> None:
    """`run` in the process: one call, its `Outcome` the answer."""
    function, arguments = pickle.loads(asker.recv_bytes())
    asker.send_bytes(pickle.dumps(attempt(lambda: imported(function)(*arguments))))
