"""Memory of a call: four numbers with four names, which differ and answer different questions.

Allocated after the call is what its result keeps; peak allocated, what it needed at once; reserved, what was taken from
the system for that; device used, what is gone from the device, with all else that is on it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from workbench.harness.processes import imported, shared
from workbench.probes.case import Case
from workbench.probes.outcome import Outcome, attempt

STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Memory:
    """Bytes. None where the machine does not tell.

    On CUDA, from torch's caching allocator and the driver: counted from zero, so what was allocated before is in all of
    them. device_used is read after the call, when the allocator still holds what it reserved; it has the CUDA context
    and any other process's share in it.

    On a CPU, allocated numbers are torch's own tensors and scratch, by its profiler, exactly; memory that a library
    takes by malloc is not in them. Within this process (`measure` of a function) they count from the start of the call,
    reserved is None, and device_used is the peak resident memory of the process. In a fresh process reserved
    is what was allocated before plus the growth of resident memory during the call: with malloc, without pages that
    were allocated and never touched.

    source: "cuda allocator", "torch profiler", or "torch profiler, resident memory of a fresh process".
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


def measure(fn: Callable[[], object] | str, device: str = "cpu", timeout_s: float = 600.0) -> Memory:
    """The memory of one call of fn(), its result kept until it is read.

    fn: a function without arguments, measured in this process; or "module:function", measured in a fresh one.
    RuntimeError where the fresh process fails, with its status; what fn raises here is raised.
    """
    if isinstance(fn, str):
        outcome = _fresh("_alone", (fn, str(device)), timeout_s)
        if outcome.status != "ok":
            raise RuntimeError(f"{fn}: {outcome.status}: {outcome.error}")
        return outcome.result
    return _on_cuda(fn, torch.device(device)) if str(device).startswith("cuda") else _on_cpu(fn)


def measure_attention(
    pattern, *, n, heads, head_dim, dtype=torch.float32, backend="auto", mode="fwd", device="cpu", batch=1,
    kv_heads=None, nq=None, seed=0, in_process=False, timeout_s=600.0,
) -> dict:  # fmt: skip
    """The memory of one attention call on random inputs: a record's row, whatever becomes of it (see `Case`).

    Runs in a fresh process, as it must be for a number to be published, under a time limit; or in this one,
    which is quick and the same but for reserved and device used. peak_bytes is the peak allocated, inputs included,
    extra_bytes what is above them.
    """
    case = Case(pattern, n, heads, head_dim, dtype, backend, mode, device, batch, kv_heads, nq, seed)
    here = partial(_of_case, case, resident=False)
    outcome = attempt(here) if in_process else _fresh("_of_case", (case,), timeout_s)
    row = {"probe": "memory"} | case.fields() | {"status": outcome.status, "error": outcome.error, "measured": True}
    row |= {"pairs": None, "peak_bytes": None, "extra_bytes": None}
    if outcome.status == "ok":
        row["pairs"], row["backend"], memory = outcome.result
        row |= {"peak_bytes": memory.peak_allocated_bytes, "extra_bytes": memory.extra_bytes} | asdict(memory)
    return row


def _fresh(function: str, arguments: tuple, timeout_s: float) -> Outcome:
    return shared(**MALLOC).run(f"{__name__}:{function}", arguments, timeout_s)


def _of_case(case: Case, resident: bool = True) -> tuple[int, str, Memory]:
    """(attended pairs, backend, memory) of a case, its inputs being what is allocated before."""
    pairs = case.pattern.pairs(case.n, case.heads, case.nq)
    if case.device.startswith("cuda"):
        call, name = case.prepare()
        return pairs, name, _on_cuda(call, torch.device(case.device))
    (call, name), before, _ = _allocations(case.prepare)
    return pairs, name, _on_cpu(call, before, resident)


def _alone(name: str, device: str) -> Memory:
    """In a fresh process: a user's function without arguments."""
    fn = imported(name)
    return measure(fn, device) if device.startswith("cuda") else _on_cpu(fn, resident=True)


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

# glibc keeps freed memory and grows its threshold for mmap: with these, resident memory follows what is allocated
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}


def _on_cpu(fn, before: int = 0, resident: bool = False) -> Memory:
    _reset_peak_resident()
    result, after, peak = _allocations(fn)
    del result
    source, reserved = "torch profiler", None
    if resident:  # a second call, as warm as a call can be and without the profiler's own memory
        source += ", resident memory of a fresh process"
        gc.collect()
        _trim()
        baseline = _resident("VmRSS") if _reset_peak_resident() else None
        fn()
        reserved = None if baseline is None else before + _resident("VmHWM") - baseline
    return Memory(before, before + after, before + peak, reserved, _resident("VmHWM"), source)


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


def _resident(field: str) -> int | None:
    """VmRSS (resident now) or VmHWM (its peak) of this process; None but on Linux."""
    try:
        return 1024 * int(re.search(rf"^{field}:\s*(\d+) kB", STATUS.read_text(), re.MULTILINE)[1])
    except OSError:
        return None


def _reset_peak_resident() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _trim() -> None:
    """Give freed memory back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
