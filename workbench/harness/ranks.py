"""Ranks: processes that work together in a process group. `Pool` starts them on this host; launchers start them, too:

    torchrun --nproc_per_node 2 -m workbench.harness.ranks module:function '{"n": 4096}'
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 -m workbench.harness.ranks ...
    MASTER_ADDR=HOST MASTER_PORT=29500 srun --kill-on-bad-exit=1 python -m workbench.harness.ranks ...
    TorchTrainer(lambda config: call("module:function", config), ...)  # Ray, whose workers already have a group

So started, each rank prints a line of JSON: rank, world, status (see `Outcome`) and the function's result or, if it
failed, error and lost_peer: whether another rank failed before. What the function prints goes to stderr, as does the
stack of an error, under a line with the rank. Exit code: 0 ok, 1 failed, 2 bad arguments.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from workbench.harness.outcome import Outcome, sentence, status_of
from workbench.harness.processes import IMPORTABLE, Process, imported
from workbench.patterns import checks

BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}  # gloo too: ranks whose cards are out of memory can agree
LAUNCHERS = (  # the variables of the rank, of how many there are, and of the rank on this host
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun, Ray
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
START_S = 180.0  # for the ranks to form their group
TOLD = 4000  # characters of a dead rank's stderr that are reported
GRACE_S = 2.0  # after one rank has failed, for the others to report
STACK_S = 8.0  # for ranks that do not answer to write their stacks
PAUSE_S = 0.05  # between two looks at a rank that is to write its stack
# A rank whose innermost frame is in one of these folders waits for its peers; on a card in torch.cuda.synchronize.
COMMUNICATION = [str(Path(x).parent) for x in (dist.__file__, torch.cuda.__file__, __file__)]
COMMUNICATION += [str(Path(__file__).parents[1] / "distributed")]


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


class Pool(contextlib.AbstractContextManager):
    """nproc ranks on this host that run functions, one job at a time. They start with the first job, and end with
    `close`, with the block of `with Pool(2) as pool:`, or with this process, however it ends. A script has to start
    them behind `if __name__ == "__main__":` (see `processes`).

    backend: "gloo", or "nccl" with a card for each rank; by default "nccl" if there is CUDA.
    ValueError if nproc is not a positive integer, there are fewer cards than "nccl" needs, or this process is itself
    one of several ranks, of which each would start as many.
    """

    def __init__(self, nproc: int, backend: str | None = None):
        cards = torch.cuda.device_count()  # asks the driver, without starting CUDA in this process
        nproc = checks.whole("nproc", nproc, 1)
        backend = checks.choice("backend", backend or ("nccl" if cards else "gloo"), *BACKENDS)
        if backend == "nccl" and nproc > cards:
            raise ValueError(f"nproc={nproc}, backend='nccl': want at most the {cards} cards here, or backend='gloo'")
        rank, world, _ = place(os.environ) if "RANK" in os.environ else (0, 1, 0)  # a job of SLURM may hold us
        if world > 1:
            want = "want one process, without the launcher"
            raise ValueError(f"RANK={rank} of {world}: each of these ranks would start {nproc}; {want}")
        self.nproc, self.backend = nproc, backend
        self._ranks: list[Process] = []

    def __exit__(self, *_) -> None:
        self.close()

    def run(self, function: str, arguments: dict | list | None = None, timeout_s: float = 600.0) -> list:
        """Call "module:function" on every rank, in the default process group; returns the results by rank.

        arguments: by name (dict) or in order (list), the same on every rank; they and the results are pickled.
        timeout_s: for the call, once the ranks have started.
        Ranks keep the modules that they have imported: after editing one, `close()` first.
        ValueError if the function cannot be imported or the arguments cannot be sent, before it runs on any rank.
        RankError if a rank raises, runs out of memory, dies, exits, or does not answer in time.
        """
        if not isinstance(function, str) or function.startswith("__main__:"):
            raise ValueError(f"{function!r}: a rank can call what it can import; {IMPORTABLE}")
        imported(function)
        if not isinstance(arguments, (dict, list, tuple, type(None))):
            raise ValueError(f"arguments={arguments!r}: want a dict or a list")
        path = [entry or os.getcwd() for entry in sys.path]
        try:
            job = pickle.dumps((path, function, pickle.dumps([] if arguments is None else arguments)))
        except Exception as error:  # pickle raises many kinds
            raise ValueError(f"arguments={arguments!r}: {error}; want what can be pickled") from None
        try:
            self._start()
            return self._ask(job, timeout_s)
        except BaseException:  # also an interrupt: the job must stop, and its answers must not pass for the next job's
            self.close()
            raise

    def attempt(self, function: str, arguments: dict | list | None = None, timeout_s: float = 600.0) -> JobOutcome:
        """`run`, but a rank that fails is an outcome and not an exception: for sweeps, which go on."""
        try:
            return JobOutcome("ok", result=self.run(function, arguments, timeout_s))
        except RankError as error:
            return error.outcome

    def close(self) -> None:
        """End the ranks, and the processes that they have started."""
        while self._ranks:
            self._ranks.pop().kill()
        self._store = None

    def _start(self) -> None:
        if self._ranks and not any(rank.ended() or rank.pipe.poll() for rank in self._ranks):
            return  # nothing to read between jobs, not even the end of a pipe, which is how a death shows first
        self.close()
        # As under torchrun, the store where ranks meet lives in this process: port 0 is one that is free.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world, threads = str(self.nproc), str(max(1, torch.get_num_threads() // self.nproc))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "WORLD_SIZE": world,
                  "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": world,
                  "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}  # fmt: skip
        for rank in map(str, range(self.nproc)):
            self._ranks.append(Process(f"{__name__}:serve", common | {"RANK": rank, "LOCAL_RANK": rank}))
        self._ask(pickle.dumps(self.backend), START_S)

    def _ask(self, work: bytes, timeout_s: float) -> list:
        """Every rank's result. RankError if one fails, after GRACE_S for the others to report."""
        for rank in self._ranks:
            rank.ask(work)
        end = time.monotonic() + timeout_s
        answers: dict[int, dict] = {}
        pending = range(self.nproc)
        while pending and (now := time.monotonic()) < end:
            wait([sign for rank in pending for sign in self._ranks[rank].signs], end - now)
            found = {rank: x for rank in pending if (x := _answer(self._ranks[rank])) is not None}
            if any(x["status"] != "ok" for x in found.values()):
                end = min(end, time.monotonic() + GRACE_S)
            answers |= found
            pending = [rank for rank in pending if rank not in answers]
        failures = {rank: answer for rank, answer in sorted(answers.items()) if answer["status"] != "ok"}
        if not failures and not pending:
            return [answers[rank]["result"] for rank in range(self.nproc)]
        stacks = {rank: answer["stack"] for rank, answer in failures.items()}
        stacks |= _where({rank: self._ranks[rank] for rank in pending})
        if failures:  # a rank may report a lost peer before the peer's death is seen
            first = min(failures, key=lambda rank: failures[rank]["lost_peer"])
            status, error = failures[first]["status"], failures[first]["error"]
        else:
            first = min(stacks, key=lambda rank: (_waits(stacks[rank]), rank))
            status, error = "timeout", f"no answer within {timeout_s:g} s"
            if len(stacks) > 1:
                error += f", nor from rank {', '.join(map(str, sorted(stacks.keys() - {first})))}"
        raise RankError(JobOutcome(status, f"rank {first} of {self.nproc}: {error}", rank=first, stacks=stacks))


def _answer(rank: Process) -> dict | None:
    """A rank's answer, or how it has ended; None if neither so far."""
    answer = rank.answer()
    if not isinstance(answer, Outcome):
        return answer
    last = rank.said()[-TOLD:] or "no stack: it died without a word"
    return {"status": answer.status, "error": answer.error, "stack": last, "lost_peer": False}


def _where(ranks: dict[int, Process]) -> dict[int, str]:
    """The stacks of ranks that do not answer."""
    for rank in ranks.values():
        rank.dump()
    end, said, before = time.monotonic() + STACK_S, {}, None
    while time.monotonic() < end and not (said == before and all(said.values())):  # until nothing more is written
        time.sleep(PAUSE_S)
        before, said = said, {number: rank.said() for number, rank in ranks.items()}
    return {number: stack or "no stack: it takes no signal" for number, stack in said.items()}


def _waits(stack: str) -> bool:
    """Whether the rank with this stack waits for its peers."""
    inner = next((line for line in stack.splitlines() if line.lstrip().startswith("File")), "")
    return any(folder in inner for folder in COMMUNICATION)


def place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world, rank on this host) as set by the launcher: see LAUNCHERS; (0, 1, 0) if by none.

    ValueError if a variable is missing or makes no sense.
    """
    names = next((names for names in LAUNCHERS if names[0] in environment), None)
    if names is None:
        return 0, 1, 0
    try:
        rank, world, local = (int(environment[name]) for name in names)
    except (KeyError, ValueError):
        found = {name: environment.get(name) for name in names}
        raise ValueError(f"{found}: want an integer for each; a launcher sets all three") from None
    if not 0 <= rank < world or local < 0:
        raise ValueError(f"{names[0]}={rank}, {names[1]}={world}, {names[2]}={local}: want 0 <= rank < world")
    return rank, world, local


def join(backend: str | None = None) -> None:
    """Make the default process group of all ranks, unless there is one. A single rank gets a group of its own, too.

    backend: "gloo", or "nccl" (with gloo for CPU tensors), whose ranks take a card each; by default "nccl" if there is
    CUDA. ValueError if MASTER_ADDR or MASTER_PORT, by which several ranks meet, is missing.
    """
    if dist.is_initialized():
        return
    rank, world, local = place(os.environ)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(local % torch.cuda.device_count())  # srun may show each rank nothing but its own card
    if world == 1:
        dist.init_process_group(BACKENDS[backend], store=dist.HashStore(), rank=0, world_size=1)
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"{world} ranks, but no {' nor '.join(missing)}: want a host that all reach and a free port on it, e.g. "
            "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500"
        )
    dist.init_process_group(BACKENDS[backend], init_method="env://", rank=rank, world_size=world)


def call(function: str, arguments: dict | list | None = None, backend: str | None = None):
    """Join the other ranks and call "module:function" with these arguments, by name (dict) or in order (list)."""
    found = imported(function)  # before joining: nobody should wait for a rank that cannot import it
    join(backend)
    return found(**arguments) if isinstance(arguments, dict) else found(*(arguments or ()))


def serve(asker: Connection) -> None:
    """A rank of a `Pool`: join, and do jobs until the other end of the pipe is closed."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # by which a pool has a rank that is late write its stack
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
    backend = pickle.loads(asker.recv_bytes())
    _send_or_leave(asker.send_bytes, pickle.dumps, lambda: join(backend))
    with contextlib.suppress(EOFError):
        while True:
            sys.path[:], *job = pickle.loads(asker.recv_bytes())
            _send_or_leave(asker.send_bytes, pickle.dumps, lambda: call(job[0], pickle.loads(job[1])))  # noqa: B023


def _send_or_leave(send: Callable, encode: Callable, work: Callable) -> None:
    """Do the work and send its answer; if it fails, end this process, so that its peers do not wait for it."""
    try:
        answer = {"status": "ok", "result": work()}
        try:
            line = encode(answer)
        except Exception as error:  # pickle raises many kinds
            raise ValueError(f"the result cannot be sent: {error}; return numbers, strings, lists and dicts") from None
    except BaseException as error:  # SystemExit, too
        rank, world, _ = place(os.environ)
        status, why, where = status_of(error), sentence(error), traceback.format_exc()
        print(f"rank {rank} of {world}: {why}\n{where}", file=sys.stderr, flush=True)
        failure = {"status": status, "error": why, "lost_peer": status != "oom" and lost_peer(error)}
        send(encode(failure | {"stack": where}))
        os._exit(1)
    send(line)


def lost_peer(error: BaseException | None) -> bool:
    """Whether this error, or one that led to it, is one of communication: then another rank has failed before."""
    while error is not None:
        if isinstance(error, dist.DistError) or "gloo/" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def main() -> None:
    about = "One rank of a job, as a launcher starts it: prints its outcome as a line of JSON."
    parser = argparse.ArgumentParser(prog="python -m workbench.harness.ranks", description=about)
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="what to call; it must be importable")
    parser.add_argument("arguments", nargs="?", default="{}", metavar="JSON", help="its arguments, an object or a list")
    parser.add_argument("--backend", choices=BACKENDS, help="(default: nccl where there is CUDA, else gloo)")
    options = parser.parse_args()
    try:
        arguments = json.loads(options.arguments)
        if not isinstance(arguments, (dict, list)):
            raise ValueError("want an object or a list")
        rank, world, _ = place(os.environ)
    except ValueError as error:
        parser.error(f"{options.arguments!r}, or this environment: {error}")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the work prints must not be mistaken for its answer
    faulthandler.enable()

    def encode(answer: dict) -> str:  # the stack is on stderr
        return json.dumps({"rank": rank, "world": world} | {x: y for x, y in answer.items() if x != "stack"})

    def work():
        result = call(options.function, arguments, options.backend)
        dist.barrier()  # rank 0 must not exit, and end the store that others still use, before all are done
        dist.destroy_process_group()
        return result

    _send_or_leave(lambda line: print(line, file=out, flush=True), encode, work)


if __name__ == "__main__":
    main()
