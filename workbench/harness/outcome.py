"""What became of a piece of work: its result, or a status and a sentence. A failure is data, never a lost run."""

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory",
             "bad_alloc")  # fmt: skip
NO_KERNEL = ("no available kernel", "no viable backend", "not implemented for", "is not supported", "not compiled with",
             "without aten_cuda", "no cuda gpus", "no nvidia driver", "driver version is insufficient")  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of the work.

    status: ok, oom, refused (the arguments are not allowed), unsupported (not on this machine) or killed (any other
        exception, or the process died)
    error: the reason, a sentence; None where it is ok. result: what the work returned.
    """

    status: str
    error: str | None = None
    result: Any = None


def attempt(work: Callable[[], Any]) -> Outcome:
    """Do the work; an exception becomes a status, and nothing that the work had allocated stays alive.

    An exception's traceback holds the frames that were running, and they hold tensors: the frames are cleared, and the
    allocator's cache is emptied, so that the next probe starts clean.
    """
    try:
        return Outcome("ok", result=work())
    except (Exception, SystemExit) as error:
        outcome = Outcome(status_of(error), sentence(error))
        _forget(error)
    if outcome.status != "refused":  # which is said before anything is allocated; a collection takes half a second
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
    """The first line of the message, after the kind of error unless that is one of the kinds that we raise."""
    first = (str(error).strip().splitlines() or [""])[0]
    ours = type(error) in (ValueError, NotImplementedError)
    return (first if ours else f"{type(error).__name__}: {first}")[:400]


def _forget(error: BaseException | None) -> None:
    while error is not None:
        if error.__traceback__:
            traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
