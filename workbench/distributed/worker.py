"""One rank of a job: finds its peers by the usual environment variables, calls a function, says what became of it.

    torchrun --nproc_per_node 2 -m workbench.distributed.worker module:function '{"n": 4096}'
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 -m workbench.distributed.worker ...
    MASTER_ADDR=HOST MASTER_PORT=29500 srun --kill-on-bad-exit=1 python -m workbench.distributed.worker ...
    TorchTrainer(lambda config: call("module:function", config), ...)  # Ray, in whose workers a group exists already

Each rank prints one line of JSON: rank, world, status (as `Outcome` has it) and the function's result, or error and
lost_peer, whether another rank failed before. What the function itself prints goes to stderr, as does the stack of an
error, under a line with the rank. Exit code: 0 ok, 1 failed, 2 not understood.
"""  # noqa: E501 (lines to copy)

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping

import torch
import torch.distributed as dist

from workbench.probes.case import imported
from workbench.probes.outcome import sentence, status_of
from workbench.probes.server import die_with, prefer_to_be_killed

LAUNCHERS = (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}  # ranks whose cards have no memory left can still talk


def place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world, rank on this host) that torchrun or Ray, else SLURM's srun, has set; (0, 1, 0) if none has.

    ValueError where a variable is missing or makes no sense.
    """
    for names in LAUNCHERS:
        if names[0] not in environment:
            continue
        try:
            rank, world, local = (int(environment[name]) for name in names)
        except (KeyError, ValueError):
            found = {name: environment.get(name) for name in names}
            raise ValueError(f"{found}: want an integer for each; a launcher sets all three") from None
        if not 0 <= rank < world or local < 0:
            raise ValueError(f"{names[0]}={rank}, {names[1]}={world}, {names[2]}={local}: want 0 <= rank < world")
        return rank, world, local
    return 0, 1, 0


def join(backend: str | None = None) -> None:
    """Make the default process group of all ranks, unless there is one. One rank gets one, too, for itself.

    backend: "gloo", or "nccl" (with gloo for what is on the CPU), whose ranks take a card each; by default "nccl" where
    there is CUDA. ValueError where the variables that say how to meet are missing.
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
    found = imported(function)  # first: nobody should wait for a rank that has nothing to do
    join(backend)
    if isinstance(arguments, dict):
        return found(**arguments)
    return found(*(arguments or ()))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workbench.distributed.worker",
        description="One rank of a job, as torchrun or srun starts it: prints what became of it as a line of JSON.",
    )
    parser.add_argument("function", nargs="?", metavar="MODULE:FUNCTION", help="what to call; it must be importable")
    parser.add_argument("arguments", nargs="?", default="{}", metavar="JSON", help="its arguments, an object or a list")
    parser.add_argument("--backend", choices=BACKENDS, help="(default: nccl where there is CUDA, else gloo)")
    parser.add_argument("--serve", type=int, metavar="PID", help="do jobs from stdin for that process: how a Pool asks")
    options = parser.parse_args()
    if (options.function is None) == (options.serve is None):
        parser.error("want MODULE:FUNCTION or --serve")
    try:
        arguments = json.loads(options.arguments)
        if not isinstance(arguments, (dict, list)):
            raise ValueError("want an object or a list")
        rank, world, _ = place(os.environ)
    except ValueError as error:
        parser.error(f"{options.arguments!r}, or this environment: {error}")
    who, out = {"rank": rank, "world": world}, os.dup(1)
    os.dup2(2, 1)  # what the work prints must not be mistaken for its answer
    faulthandler.enable()
    if options.serve is not None:
        die_with(options.serve)
        prefer_to_be_killed()
        serve(out, who, options.backend)
        return 0

    def work():
        result = call(options.function, arguments, options.backend)
        dist.barrier()  # nobody leaves, with the store that others still ask, before all are done
        dist.destroy_process_group()
        return result

    _say_or_leave(out, who, work, stack=False)
    return 0


def serve(out: int, who: dict, backend: str | None) -> None:
    """Join, and do jobs: a line of JSON on stdin, an answer on `out`; until stdin ends.

    A job without arguments is a question: its result is why the function cannot be imported, or None.
    """
    faulthandler.register(signal.SIGUSR1)  # a rank that does not answer is asked where it is
    jobs = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _say_or_leave(out, who, lambda: join(backend))
    for number, line in enumerate(jobs):
        job = json.loads(line)
        sys.path[:] = job["path"]
        if "arguments" in job:
            _say_or_leave(out, who, lambda job=job: call(job["function"], job["arguments"]))
        else:
            _say_or_leave(out, who, lambda job=job: _why_not(job["function"]))
            if number == 0:
                gc.freeze()  # modules stay: without this each collection in a job walks all of torch's


def _why_not(function: str) -> str | None:
    importlib.invalidate_caches()  # it may have been written a moment ago
    try:
        imported(function)
    except Exception as error:  # whatever a module raises
        return sentence(error)
    return None


def _say_or_leave(out: int, who: dict, work, stack: bool = True) -> None:
    """Do the work and write its answer; if it fails, end this process: its peers must not wait for it.

    stack: in the answer, too, and not on stderr alone, where people look.
    """
    try:
        answer = {**who, "status": "ok", "result": work()}
        try:
            line = json.dumps(answer)
        except TypeError as error:
            raise ValueError(f"the result cannot be sent: {error}; return numbers, strings, lists and dicts") from None
    except BaseException as error:  # SystemExit, too
        status, why, where = status_of(error), sentence(error), traceback.format_exc()
        print(f"rank {who['rank']} of {who['world']}: {why}\n{where}", file=sys.stderr, flush=True)
        failure = {"status": status, "error": why, "lost_peer": status != "oom" and lost_peer(error)}
        _write(out, json.dumps({**who, **failure, **({"stack": where} if stack else {})}))
        os._exit(1)
    _write(out, line)


def lost_peer(error: BaseException | None) -> bool:
    """Whether this error, or what led to it, is about communication: then another rank has failed before."""
    while error is not None:
        if isinstance(error, dist.DistError) or "gloo/" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _write(out: int, line: str) -> None:
    left = f"{line}\n".encode()
    while left:
        left = left[os.write(out, left) :]


if __name__ == "__main__":
    sys.exit(main())
