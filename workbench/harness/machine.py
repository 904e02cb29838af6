"""What this machine is, in words that can be published: no host name, no path."""

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch


def describe() -> dict:
    """device, n_devices, driver, clock_mhz and power_w (the first card's limits), cuda, torch, triton, fa4 (the version
    of flash-attn-4), python, threads, processors, load and kind; None where there is no such thing.

    On a CPU `device` is its model and `n_devices` is 1; `threads` is how many torch uses; `load`: how many processes
    were running or waiting for one of the `processors`, in the mean of the last minute.
    """
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name(0) if cuda else _processor(),
        "n_devices": torch.cuda.device_count() if cuda else 1,
        **(_limits() if cuda else {"driver": None, "clock_mhz": None, "power_w": None}),
        "cuda": torch.version.cuda if cuda else None,
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "fa4": _version("flash-attn-4"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "kind": kind(),
    }


def kind() -> str:
    """The machine kind that records are filed under: cpu, h100x1, h100x2, gtx1080x2 ..."""
    if not torch.cuda.is_available():
        return "cpu"
    return f"{short_name(torch.cuda.get_device_name(0))}x{torch.cuda.device_count()}"


def short_name(device: str) -> str:
    """A card's short name: "NVIDIA H100 80GB HBM3" -> h100, "NVIDIA GeForce RTX 4090" -> rtx4090, "Tesla T4" -> t4."""
    words = re.sub(r"\b(NVIDIA|AMD|GeForce|Tesla|Quadro|Instinct)\b", "", device).split()
    name = words[0].split("-")[0] if words else device
    if name.upper() in ("RTX", "GTX", "TITAN", "RADEON"):  # the number is a word of its own
        name = "".join(words[:3] if words[2:3] in (["Ti"], ["SUPER"]) else words[:2])
    return re.sub(r"\W", "", name).lower()


def _processor() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


def _limits() -> dict:
    """Of the first card: its driver, and how high its clock and its power may go."""
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader,nounits"]
    said = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.partition("\n")[0]
    known = [x if x[:1].isdigit() else None for x in [*said.split(", "), "", ""]]  # not "[N/A]", nor an error
    clock_mhz, power_w = (x and round(float(x)) for x in known[1:3])
    return {"driver": known[0], "clock_mhz": clock_mhz, "power_w": power_w}


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
