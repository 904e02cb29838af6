"""The CUDA stream for communication, beside the one on which attention runs."""

from __future__ import annotations

import contextlib
import functools

import torch


@functools.cache
def beside(device: torch.device) -> torch.cuda.Stream:
    """The device's one such stream, since the allocator keeps freed memory for its stream. High priority: its kernels
    run before queued ones of other streams."""
    return torch.cuda.Stream(device, priority=-1)


@contextlib.contextmanager
def joined(device: torch.device):
    """However the block ends, the current stream then waits for `beside`: memory that it gets back is used there."""
    try:
        yield
    finally:
        done = torch.cuda.Event()
        with torch.cuda.stream(beside(device)):
            done.record()
        done.wait()
