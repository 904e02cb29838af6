"""Ranks for tests: processes that stay, joined by gloo, in which functions run. A rank that raises does not end."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch.multiprocessing as mp

DEADLINE = 60  # seconds for one function
START = 240  # seconds for all ranks to load torch, which takes long on a busy machine


class Ranks:
    """`world` spawned processes. run(function, ...) -> what function(rank, world, ...) returned on each."""

    def __init__(self, world: int):
        self.world = world
        self.folder = tempfile.TemporaryDirectory()
        context, store = mp.get_context("spawn"), str(Path(self.folder.name) / "store")
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, store, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(START):
                self.close()
                raise AssertionError(f"rank {rank} did not start within {START} s")
            pipe.recv_bytes()
        for pipe in self.pipes:  # now they can meet in time
            pipe.send_bytes(b"meet")

    def run(self, function, *args, **options) -> list:
        """AssertionError with the traces of all ranks that raised, or that gave no answer in time."""
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, args, options)))
        results, errors = [], []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(DEADLINE):
                self.close()
                raise AssertionError(f"rank {rank} gave no answer within {DEADLINE} s")
            result, error = pickle.loads(pipe.recv_bytes())
            results.append(result)
            errors += [f"rank {rank} of {self.world}:\n{error}"] if error else []
        assert not errors, "\n".join(errors)
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(rank: int, world: int, store: str, pipe) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from workbench.distributed import partials, plans

    torch.set_num_threads(1)
    plans.LEAST = plans.PAIRS = partials.FIRST = 1  # many stages and calls, however few rows
    pipe.send_bytes(b"loaded")
    pipe.recv_bytes()
    # a rank that waits for a peer in vain gives up before the test does
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=DEADLINE // 2)
    )
    while True:
        try:
            function, args, options = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = function(rank, world, *args, **options), None
        except Exception:
            answer = None, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))
