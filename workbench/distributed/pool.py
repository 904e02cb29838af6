"""A pool of ranks on this host, for notebooks and the command line: it starts them, gives them jobs, and ends them.

Ranks are new Python processes, never forks, since the caller may have used CUDA; they run `worker`, as under torchrun.
If one fails, the caller is told which, why, and at which line it was; all ranks end, and the next job gets new ones.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from workbench.distributed.worker import BACKENDS
from workbench.probes.outcome import Outcome
from workbench.probes.server import kills

START_S = 180.0  # for the ranks to load torch and to form their group
GRACE_S = 2.0  # after one rank has failed, for the others to report
PAUSE_S = 0.05  # between two checks whether a rank is still alive
TOLD = 4000  # characters of a dead rank's stderr that are reported
# A rank whose innermost frame is in one of these folders waits for its peers; on a card in torch.cuda.synchronize.
COMMUNICATION = tuple(os.path.dirname(x) for x in (dist.__file__, torch.cuda.__file__, __file__))


@dataclass(frozen=True)
class JobOutcome(Outcome):
    """An `Outcome` whose `result` is the list of results by rank. If the job failed: `rank`, the first that did, and
    `stacks`, for each rank that did not finish its stack or, if it died without one, the end of its stderr."""

    rank: int | None = None
    stacks: dict[int, str] = field(default_factory=dict, repr=False)  # too long for a line

    def __str__(self):
        """How it failed, in a line, and below it the stack of the first rank that did."""
        return repr(self) if self.status == "ok" else f"{self.error}\n{self.stacks.get(self.rank, '')}".rstrip()


class RankError(RuntimeError):
    """A job failed. The message has the rank, the reason and its stack; `outcome` is the `JobOutcome`."""

    def __init__(self, outcome: JobOutcome):
        super().__init__(str(outcome))
        self.outcome = outcome


class Pool:
    """nproc ranks that run functions, one job at a time. They start with the first job, and end with `close`, with the
    block of `with Pool(2) as pool:`, or with this process, however it ends.

    backend: "gloo", or "nccl" with a card for each rank; by default "nccl" if there is CUDA.
    ValueError if nproc is not a positive integer, or there are fewer cards than "nccl" needs.
    """

    def __init__(self, nproc: int, backend: str | None = None):
        if not isinstance(nproc, int) or nproc < 1:
            raise ValueError(f"nproc={nproc!r}: want an integer of at least 1")
        cards = torch.cuda.device_count()  # asks the driver, without starting CUDA in this process
        if backend is None:
            backend = "nccl" if cards else "gloo"
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r}: want one of {', '.join(map(repr, BACKENDS))}, or None")
        if backend == "nccl" and nproc > cards:
            raise ValueError(f"nproc={nproc}, backend='nccl': want at most the {cards} cards here, or backend='gloo'")
        self.nproc, self.backend = nproc, backend
        self._ranks: list[_Rank] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def run(self, function: str, arguments: dict | list | None = None, timeout_s: float = 600.0) -> list:
        """Call "module:function" on every rank, in the default process group; returns the results by rank.

        arguments: by name (dict) or in order (list), the same on every rank; they and the results have to be JSON.
        timeout_s: for the call, once the ranks have started.
        Ranks keep the modules that they have imported: after editing one, `close()` first.
        ValueError if the function cannot be imported or the arguments are not JSON, before it runs on any rank.
        RankError if a rank raises, runs out of memory, dies, exits, or does not answer in time.
        """
        _check(function)
        path = [entry or os.getcwd() for entry in sys.path]
        question = {"function": function, "path": path}
        try:
            job = json.dumps({**question, "arguments": [] if arguments is None else arguments})
        except TypeError as error:
            raise ValueError(f"arguments={arguments!r}: {error}; want what fits into JSON") from None
        if not isinstance(arguments, (dict, list, tuple, type(None))):
            raise ValueError(f"arguments={arguments!r}: want a dict or a list")
        try:
            self._start(path)
            reasons = self._ask(json.dumps(question), timeout_s)
            results = None if any(reasons) else self._ask(job, timeout_s)
        except BaseException:  # also an interrupt: the job must stop, and its answers must not pass for the next job's
            self.close()
            raise
        if results is None:
            rank, why = next((rank, why) for rank, why in enumerate(reasons) if why)
            raise ValueError(f"{function!r}: rank {rank} cannot import it: {why}")
        return results

    def attempt(self, function: str, arguments: dict | list | None = None, timeout_s: float = 600.0) -> JobOutcome:
        """`run`, but a rank that fails is an outcome and not an exception: for sweeps, which go on."""
        try:
            return JobOutcome("ok", result=self.run(function, arguments, timeout_s))
        except RankError as error:
            return error.outcome

    def close(self) -> None:
        """End the ranks, and the processes that they have started."""
        for rank in self._ranks:
            rank.kill()
        while self._ranks:
            self._ranks.pop().process.wait()
        self._store = None

    def _start(self, path: list[str]) -> None:
        if self._ranks and all(rank.process.poll() is None for rank in self._ranks):
            return
        self.close()
        # As under torchrun, the store where ranks meet lives in this process: port 0 is one that is free.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "PYTHONPATH": os.pathsep.join(path),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(self.nproc),
            "LOCAL_WORLD_SIZE": str(self.nproc),
        }
        threads = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // self.nproc))}
        for rank in range(self.nproc):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._ranks.append(_Rank(rank, self.backend, threads | dict(os.environ) | common | own))
        self._collect(START_S)

    def _ask(self, line: str, timeout_s: float) -> list:
        for rank in self._ranks:
            rank.ask(line)
        return self._collect(timeout_s)

    def _collect(self, timeout_s: float) -> list:
        """Every rank's result. RankError if one fails, after GRACE_S for the others to report."""
        end = time.monotonic() + timeout_s
        answers: dict[_Rank, dict] = {}
        pending = self._ranks
        while pending and time.monotonic() < end:
            wait([rank.answers for rank in pending], PAUSE_S)
            for rank in pending:
                answer = rank.answer()
                if answer is None:
                    continue
                answers[rank] = answer
                if answer["status"] != "ok":
                    end = min(end, time.monotonic() + GRACE_S)
            pending = [rank for rank in self._ranks if rank not in answers]
        failures = {rank.rank: answer for rank, answer in answers.items() if answer["status"] != "ok"}
        if not failures and not pending:
            return [answers[rank]["result"] for rank in self._ranks]
        stacks = {rank: answer["stack"] for rank, answer in failures.items()} | _where(pending)
        if failures:
            # Failures are in the order of arrival, but a rank may report a lost peer before the peer's death is seen.
            first = min(failures, key=lambda rank: failures[rank]["lost_peer"])
            status, error = failures[first]["status"], failures[first]["error"]
        else:
            first = min(stacks, key=lambda rank: (_waits(stacks[rank]), rank))
            status, error = "timeout", f"no answer within {timeout_s:g} s"
            if len(stacks) > 1:
                error += f", nor from rank {', '.join(map(str, sorted(stacks.keys() - {first})))}"
        raise RankError(JobOutcome(status, f"rank {first} of {self.nproc}: {error}", rank=first, stacks=stacks))


class _Rank:
    """A rank's process, seen from the pool."""

    def __init__(self, rank: int, backend: str, environment: dict[str, str]):
        self.rank = rank
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the rank)
        self._mark, self._kills = 0, kills()  # at the start of the job: the size of `_said`, the system's OOM kills
        self._read = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "workbench.distributed.worker", "--serve", str(os.getpid()), "--backend", backend],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment,
            start_new_session=True,  # Ctrl-C does not reach the rank; and `kill` ends what the rank has started
        )
        self.answers = self.process.stdout
        os.set_blocking(self.answers.fileno(), False)

    def ask(self, line: str) -> None:
        self._mark, self._kills = self._size(), kills()
        with contextlib.suppress(BrokenPipeError):  # it has just ended, which `answer` will tell
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def answer(self) -> dict | None:
        """Its answer, or how it has ended; None if neither so far."""
        ended = self.process.poll() is not None  # checked first, so that all it has written is read below
        with contextlib.suppress(BlockingIOError):
            read = os.read(self.answers.fileno(), 1 << 20)
            self._read += read
            ended = ended or not read
            if self._read.endswith(b"\n"):
                line, self._read = self._read, b""
                return json.loads(line)
            if read:
                return None
        if not ended:
            return None
        code, status = self.process.wait(), "killed"
        how = f"ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL and kills() > self._kills:
            status, how = "oom", "killed by the system, which was out of memory"
        last = self.said()[-TOLD:] or "no stack: it died without a word"
        return {"status": status, "error": how, "stack": last, "lost_peer": False}

    def said(self) -> str:
        """What it has written to stderr in this job, or since `dump`."""
        return os.pread(self._said.fileno(), self._size() - self._mark, self._mark).decode(errors="replace").strip()

    def dump(self) -> None:
        """Have it write its stack to stderr, which `said` returns a moment later."""
        self._mark = self._size()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter on macOS, for a group of zombies
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.answers, self._said):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _size(self) -> int:
        return os.fstat(self._said.fileno()).st_size


def _where(ranks: list[_Rank]) -> dict[int, str]:
    """The stacks of ranks that do not answer."""
    for rank in ranks:
        rank.dump()
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end and not all(rank.said() for rank in ranks):
        time.sleep(PAUSE_S)
    time.sleep(PAUSE_S)  # for the rest of a stack that is being written
    return {rank.rank: rank.said() or "no stack: it takes no signal" for rank in ranks}


def _waits(stack: str) -> bool:
    """Whether the rank with this stack waits for its peers."""
    inner = next((line for line in stack.splitlines() if line.lstrip().startswith("File")), "")
    return any(folder in inner for folder in COMMUNICATION)


def _check(function: str) -> None:
    """ValueError unless this names a module that can be found."""
    if not isinstance(function, str) or function.startswith("__main__:") or not all(function.partition(":")):
        raise ValueError(
            f"{function!r}: a rank can call what it can import; write the function into a module of its own and name "
            "it 'module:function'"
        )
    module = function.partition(":")[0]
    importlib.invalidate_caches()  # it may have been written a moment ago
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{function!r}: {error}") from None
    if found is None:
        raise ValueError(f"{function!r}: no module {module!r} on the path of this process")
