"""Tensors in files, and the journal of a stream: what is in it has been written, whatever happened after."""

import hashlib
import math
import os
from pathlib import Path

import torch
from torch import Tensor

from workbench.distributed.shards import as_tensor
from workbench.harness import records
from workbench.patterns.checks import wholes
from workbench.streaming.calls import Positions

SAMPLED = 64  # rows of a tensor that tell it from another one


def memory_map(path, shape, dtype: torch.dtype, write: bool = False) -> Tensor:
    """A tensor whose memory is the file `path`: `shape` numbers of `dtype`, row by row.

    write: a file that is not there is made, with all of its space taken. ValueError where a file has another length;
    OSError where the disk has no room for it.
    """
    path, shape = Path(path), wholes("shape", shape, 1)
    nbytes = math.prod(shape) * dtype.itemsize
    if write and not path.exists():
        unfinished = path.with_name(path.name + ".new")
        with open(unfinished, "wb") as file:
            take = getattr(os, "posix_fallocate", lambda file, _, size: os.ftruncate(file, size))  # not on macOS
            take(file.fileno(), 0, nbytes)  # a full disk is an error here, not a signal later
        os.replace(unfinished, path)
    check_length(path, nbytes)
    found = torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype).view(shape)
    found.path = path
    return found


def check_length(path: Path, nbytes: int) -> None:
    has = f"has {path.stat().st_size:,} bytes" if path.is_file() else "is no file"
    if has != f"has {nbytes:,} bytes":
        raise ValueError(f"path={str(path)!r}: {has}, want one of {nbytes:,} bytes (truncated, or of another shape?)")


class Journal:
    """The finished ranges of a run, a line each in a file that a later run reads.

    A range is written here after its rows are on the disk (fsync of the results, then of the journal), so that a run
    that is killed leaves out at most what was not whole. ValueError for the journal of another run, whose tensors
    (some rows of them) or whatever else decides the result, `what`, differ.

    Rows to which ranges add are kept beside it until the range has finished: a run that goes on puts them back first.
    """

    def __init__(self, path, tensors: dict[str, Tensor], what: tuple, results: list[Tensor]):
        digest = hashlib.sha256(repr(what).encode())
        for name, x in tensors.items():
            rows = torch.linspace(0, len(x) - 1, min(SAMPLED, len(x))).long()
            digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode() + x[rows].view(torch.uint8).numpy().tobytes())
        run = {"run": digest.hexdigest()[:16]}
        self.path, self.results, self.kept = Path(path), results, []
        first, *lines = [*records.parse(self.path.read_bytes() if self.path.exists() else b"")] or [None]
        if first is None:
            records.append(self.path, run)
        elif first != run:
            raise ValueError(f"journal={str(path)!r}: of another run (rows, pattern or chunks differ): want a new file")
        self.done = {(line["start"], line["stop"]) for line in lines}
        while (path := self._beside(len(self.kept))).exists():
            self.kept.append(path)
        for path in reversed(self.kept if first else ()):
            (start, stop), result, where, rows = torch.load(path)
            if (start, stop) not in self.done:
                results[result][where] = rows
        self._settled()

    def _beside(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _settled(self, line: dict | None = None) -> None:
        for x in self.results:
            with open(x.path, "rb+") as file:
                os.fsync(file.fileno())
        if line:
            records.append(self.path, line)
        while self.kept:
            self.kept.pop().unlink()

    def changing(self, chunk: range, x: Tensor, where: Positions) -> None:
        """Keep the rows of a result to which a range will add; -1 is none."""
        path, where = self._beside(len(self.kept)), as_tensor(where)
        where = where[where >= 0]
        with open(unfinished := path.with_name(path.name + ".new"), "wb") as file:
            result = [y is x for y in self.results].index(True)
            torch.save(((chunk.start, chunk.stop), result, where, x[where]), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        self.kept.append(path)

    def finished(self, chunk: range) -> None:
        self._settled({"start": chunk.start, "stop": chunk.stop})
