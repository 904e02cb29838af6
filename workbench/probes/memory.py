"""Memory of a call: what torch allocates for it, at once and when it is over."""

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from workbench.patterns import checks


@dataclass(frozen=True)
class Memory:
    """Bytes that were allocated before a call, are after it, its result kept, and were at its peak.

    On CUDA from torch's caching allocator, with all that was allocated before. On a CPU torch's own tensors and
    scratch, by its profiler, exactly, from the start of the call; what a library takes by malloc is not in them.
    """

    allocated_before_bytes: int
    allocated_after_bytes: int
    peak_allocated_bytes: int

    @property
    def extra_bytes(self) -> int:
        """The peak above what was allocated before the call, which is the inputs."""
        return self.peak_allocated_bytes - self.allocated_before_bytes


def measure(fn: Callable[[], object], device: str = "cpu") -> Memory:
    """The memory of one call of fn() in this process, its result kept until it is read.

    device: "cpu", or a CUDA card of this machine, whose allocator is read. What fn raises is raised.
    """
    checks.callable_("fn", fn)
    device = checks.device(device, here=True)
    if device == "cpu":
        return Memory(0, *_allocations(fn)[1:])
    device = torch.device(device)
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = fn()
    torch.cuda.synchronize(device)
    found = Memory(before, torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    del result
    return found


def _allocations(fn) -> tuple[object, int, int]:
    """(fn's result, bytes allocated by torch and alive after it, their peak), from the start of the call."""
    profile = torch.autograd.profiler.profile(profile_memory=True)
    with _quiet():
        profile.__enter__()
    try:
        result = fn()
    finally:
        with _quiet():
            profile.__exit__(None, None, None)
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return result, alive, peak


class _quiet:
    """The profiler's own log lines, which it writes to file descriptor 2 as it starts and stops, go nowhere."""

    def __enter__(self):
        sys.stderr.flush()
        self.kept = os.dup(2)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)

    def __exit__(self, *_):
        os.dup2(self.kept, 2)
        os.close(self.kept)
