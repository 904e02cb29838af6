"""Memory of a call: four numbers with four names, which differ and answer different questions.

Allocated after the call is what its result keeps; peak allocated, what it needed at once; reserved, what was taken from
the system for that; device used, what is gone from the device, with all else that is on it.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from workbench.harness.outcome import attempt
from workbench.harness.processes import shared
from workbench.patterns import checks
from workbench.probes.case import Case, case_of


@dataclass(frozen=True)
class Memory:
    """Bytes. None where the machine does not tell.

    On CUDA, from torch's caching allocator and the driver: counted from zero, so what was allocated before is in all of
    them. device_used is read after the call, when the allocator still holds what it reserved; it has the CUDA context
    and any other process's share in it.

    On a CPU, allocated numbers are torch's own tensors and scratch, by its profiler, exactly, from the start of the
    call; memory that a library takes by malloc is not in them. reserved is None, and device_used is the peak resident
    memory of the process.

    source: "cuda allocator" or "torch profiler".
    """

    allocated_before_bytes: int
    allocated_after_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int | None
    device_used_bytes: int | None
    source: str

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
    return _on_cpu(fn) if device == "cpu" else _on_cuda(fn, torch.device(device))


def peak(case: Case, *, in_process: bool = False, timeout_s: float = 600.0) -> dict:
    """The memory of one attention call on random inputs: a record's row, whatever becomes of it (see `Case`).

    Runs in a fresh process, as it must be for a number to be published, under a time limit; or in this one, which is
    quick and the same but for device used. peak_bytes is the peak allocated, inputs included, extra_bytes what is above
    them. ValueError for what no process can be given.
    """
    fields = case_of(case).fields()
    if in_process:
        outcome = attempt(lambda: _of_case(case))
    else:
        timeout_s = checks.number("timeout_s", timeout_s)
        outcome = shared().run(f"{__name__}:_of_case", (case,), timeout_s)
    row = {"probe": "memory"} | fields | {"status": outcome.status, "error": outcome.error, "measured": True}
    row |= {"pairs": None, "peak_bytes": None, "extra_bytes": None}
    if outcome.status == "ok":
        row["pairs"], row["backend"], memory = outcome.result
        row |= {"peak_bytes": memory.peak_allocated_bytes, "extra_bytes": memory.extra_bytes} | asdict(memory)
    return row


def _of_case(case: Case) -> tuple[int, str, Memory]:
    """(attended pairs, backend, memory) of a case, its inputs being what is allocated before."""
    pairs = case.pattern.pairs(case.n, case.heads, case.nq)
    if case.device.startswith("cuda"):
        call, name = case.prepare()
        return pairs, name, _on_cuda(call, torch.device(case.device))
    (call, name), before, _ = _allocations(case.prepare)
    return pairs, name, _on_cpu(call, before)


# --- CUDA ------------------------------------------------------------------------------------------------------------


def _on_cuda(fn, device: torch.device) -> Memory:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = fn()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    memory = Memory(
        allocated_before_bytes=before,
        allocated_after_bytes=torch.cuda.memory_allocated(device),
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        device_used_bytes=total - free,
        source="cuda allocator",
    )
    del result
    return memory


# --- CPU -------------------------------------------------------------------------------------------------------------


def _on_cpu(fn, before: int = 0) -> Memory:
    _, after, peak = _allocations(fn)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Memory(before, before + after, before + peak, None, resident, "torch profiler")


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
