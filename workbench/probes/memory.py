"""Memory of a call: the most that torch allocates for it at one time."""

import contextlib
import gc
import os
import sys
from collections.abc import Callable

import torch

from workbench.patterns import checks


def measure(fn: Callable[[], object], device: str = "cpu") -> int:
    """Bytes at the peak of one call of fn() in this process, above what was allocated before.

    device: "cpu", or a CUDA card of this machine, whose caching allocator is read. On a CPU torch's own tensors and
    scratch, by its profiler, exactly; what a library takes by malloc is not in them. What fn raises is raised.
    """
    checks.callable_("fn", fn)
    if checks.device(device, here=True) == "cpu":
        return _allocations(fn)[2]
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fn()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


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


@contextlib.contextmanager
def _quiet():
    """The profiler's own log lines, which it writes to file descriptor 2 as it starts and stops, go nowhere."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    yield
    os.dup2(kept, 2)
    os.close(kept)
