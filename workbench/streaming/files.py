"""Tensors in files, and the journal of a stream: what is in it has been written, whatever happened after."""

import hashlib
import json
import math
import os
from pathlib import Path

import torch
from torch import Tensor

from workbench.patterns.checks import wholes

SAMPLED = 64  # rows of a source that tell it from another one


def memory_map(path, shape, dtype: torch.dtype, write: bool = False) -> Tensor:
    """A tensor whose memory is the file: `shape` numbers of `dtype`, row by row. `tensor.path` says which.

    write: the file is made where there is none, with all of its space taken; else it is read only by promise.
    ValueError where a file has another length; OSError where the disk has no room for it.
    """
    path, shape = Path(path), wholes("shape", shape, 0)
    nbytes = math.prod(shape) * dtype.itemsize
    if write and not path.exists():
        unfinished = path.with_name(path.name + ".new")
        with open(unfinished, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, nbytes))  # a full disk is an error here, not a signal later
            os.ftruncate(file.fileno(), nbytes)
        os.replace(unfinished, path)
    check_length(path, nbytes)
    found = torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype).view(shape)
    found.path = path
    return found


def check_length(path: Path, nbytes: int) -> None:
    if not path.is_file() or path.stat().st_size != nbytes:
        has = f"has {path.stat().st_size:,} bytes" if path.is_file() else "is no file"
        raise ValueError(f"path={str(path)!r}: {has}, want one of {nbytes:,} bytes (truncated, or of another shape?)")


def identity(tensors: dict[str, Tensor], *more) -> str:
    """Of a run: what it computes, from some rows of its tensors and whatever else decides the result."""
    digest = hashlib.sha256(repr(more).encode())
    for name, x in tensors.items():
        rows = torch.linspace(0, len(x) - 1, min(SAMPLED, len(x))).long()
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode() + x[rows].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class Journal:
    """The finished ranges of a run, a line of JSON each, in a file that a later run reads.

    A range is written here after its rows are on the disk (fsync of the results' files, then of the journal), so that
    a run that is killed leaves out at most what was not whole. ValueError for the journal of another run.
    """

    def __init__(self, path, run: str, files: list[Path]):
        self.path, self.files = Path(path), files
        lines = []
        for text in self.path.read_bytes().split(b"\n") if self.path.exists() else ():
            try:
                lines.append(json.loads(text))
            except ValueError:  # the half-written end of a killed run
                continue
        if lines and lines[0].get("run") != run:
            raise ValueError(f"journal={str(path)!r}: of another run (rows, pattern or chunks differ): want a new file")
        self.done = {(line["start"], line["stop"]) for line in lines[1:]}
        if not lines:
            self.path.write_bytes(b"")
            self.write({"run": run})

    def write(self, line: dict) -> None:
        with open(self.path, "ab") as file:
            file.write(b"\n" * (file.tell() > 0) + json.dumps(line).encode())  # apart from what a killed run left
            file.flush()
            os.fsync(file.fileno())

    def finished(self, chunk: range) -> None:
        for path in self.files:
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        self.write({"start": chunk.start, "stop": chunk.stop})
