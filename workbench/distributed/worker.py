"""One rank of a job: finds its peers by the usual environment variables, calls a function, reports the outcome.

    torchrun --nproc_per_node 2 -m workbench.distributed.worker module:function '{"n": 4096}'
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 -m workbench.distributed.worker ...
    MASTER_ADDR=HOST MASTER_PORT=29500 srun --kill-on-bad-exit=1 python -m workbench.distributed.worker ...
    TorchTrainer(lambda config: call("module:function", config), ...)  # Ray, whose workers already have a group

Each rank prints one line of JSON: rank, world, status (see `Outcome`) and the function's result or, if it failed, error
and lost_peer, whether another rank failed before. What the function itself prints goes to stderr, as does the stack of
an error, under a line with the rank. Exit code: 0 ok, 1 failed, 2 bad arguments.
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
BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}  # gloo too: ranks whose cards are out of memory can agree


def place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world, rank on this host) as set by torchrun or Ray, else by SLURM's srun; (0, 1, 0) if by none.

    ValueError if a variable is missing or makes no sense.
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
    if isinstance(arguments, dict):
        return found(**arguments)
    return found(*(arguments or ()))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workbench.distributed.worker",
        description="One rank of a job, as torchrun or srun starts it: prints its outcome as a line of JSON.",
    )
    parser.add_argument("function", nargs="?", metavar="MODULE:FUNCTION", help="what to call; it must be importable")
    parser.add_argument("arguments", nargs="?", default="{}", metavar="JSON", help="its arguments, an object or a list")
    parser.add_argument("--backend", choices=BACKENDS, help="(default: nccl where there is CUDA, else gloo)")
    parser.add_argument("--serve", type=int, metavar="PID", help="do jobs from stdin for that process, a Pool's")
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
        dist.barrier()  # rank 0 must not exit, and end the store that others still use, before all are done
        dist.destroy_process_group()
        return result

    _say_or_leave(out, who, work, stack=False)
    return 0


def serve(out: int, who: dict, backend: str | None) -> None:
    """Join, and do jobs until stdin ends: each is a line of JSON there, and gets an answer on `out`.

    A job without arguments asks whether the function can be imported: its result is why not, or None.
    """
    faulthandler.register(signal.SIGUSR1)  # by which a pool has a rank that does not answer write its stack
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
                gc.freeze()  # else each collection in a job would walk all objects of torch's modules


def _why_not(function: str) -> str | None:
    importlib.invalidate_caches()  # the module may have been written a moment ago
    try:
        imported(function)
    except Exception as error:  # a module may raise anything
        return sentence(error)
    return None


def _say_or_leave(out: int, who: dict, work, stack: bool = True) -> None:
    """Do the work and write its answer; if it fails, end this process, so that its peers do not wait for it.

    stack: whether the answer has the stack of an error, too, which stderr always gets
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
    """Whether this error, or one that led to it, is one of communication: then another rank has failed before."""
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
