"""What became of a piece of work: its result, or a status and a sentence. A failure is data, never a lost run."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory",
             "bad_alloc")  # fmt: skip
NO_KERNEL = (
    "no available kernel",
    "no viable backend",
    "not implemented for",
    "is not supported",
    "not compiled with",
    "without aten_cuda",
    "no cuda gpus",
    "no nvidia driver",
)


@dataclass(frozen=True)
class Outcome:
    """status: ok, oom, refused (asked for what is not offered), unsupported (not on this machine) or killed (raised
    something else, or died); `error`: why, in a sentence; `result`: of the work, where it is ok."""

    status: str
    error: str | None = None
    result: Any = None


def attempt(work: Callable[[], Any]) -> Outcome:
    """Do the work; whatever it raises becomes a status, and nothing that it had allocated stays alive.

    An exception's traceback holds the frames, and those the tensors, of all that was running: they are cleared, and the
    memory that the allocator keeps for later is given back, so that the next probe starts clean.
    """
    try:
        return Outcome("ok", result=work())
    except (Exception, SystemExit) as error:
        outcome = Outcome(status_of(error), sentence(error))
        _forget(error)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return outcome


def status_of(error: BaseException) -> str:
    text = str(error).lower()
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(x in text for x in NO_MEMORY):
        return "oom"
    if isinstance(error, ValueError):
        return "refused"
    if isinstance(error, NotImplementedError) or any(x in text for x in NO_KERNEL):
        return "unsupported"
    return "killed"


def sentence(error: BaseException) -> str:
    """The first line of the message, with the kind of error unless it is one that is worded by us."""
    lines = str(error).strip().splitlines() or [""]
    return (
        lines[0][:400]
        if type(error) in (ValueError, NotImplementedError)
        else f"{type(error).__name__}: {lines[0]}"[:400]
    )


def _forget(error: BaseException | None) -> None:
    while error is not None:
        if error.__traceback__:
            traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
