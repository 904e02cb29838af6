"""Agreement before data moves: every rank tells the others what it is about to do; an error on one is raised on all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.distributed import streams

TEXT = 400  # bytes of an error's message that the other ranks get
KINDS = (ValueError, torch.OutOfMemoryError, RuntimeError)


def ask(group, device, error: Exception | None, numbers: list[int]) -> Callable[[], Tensor]:
    """Tell all ranks these numbers, or this error, by one small all-gather; what it returns waits for theirs.

    That gives int64 (world, len(numbers)), or raises on all ranks where one told an error: on that rank its own error,
    on the others one of the same kind (ValueError, OutOfMemoryError, else RuntimeError) that names the rank and the
    reason. The group stays usable. A caller lets go of its error when this raises it: the traceback holds its frame.
    On a card the wait is on the stream beside the attention's, so that it does not wait for the attention.
    """
    state = 0 if error is None else 1 + _kind(error)
    answers = _gather([state, *numbers], torch.int64, group, device)

    def agreed() -> Tensor:
        nonlocal error
        told = answers()
        failed = told[:, 0].nonzero().flatten().tolist()
        if not failed:
            return told[:, 1:]
        text = list(str(error or "").encode()[:TEXT].ljust(TEXT, b"\0"))
        messages = _gather(text, torch.uint8, group, device)()
        if error is not None:
            try:
                raise error
            finally:
                error = None  # its traceback holds this frame: a cycle would keep all tensors in it until a collection
        first = failed[0]
        why = bytes(messages[first].tolist()).rstrip(b"\0").decode(errors="replace")
        raise KINDS[int(told[first, 0]) - 1](f"rank {first}: {why}")

    return agreed


def _kind(error: Exception) -> int:
    if isinstance(error, MemoryError):
        return KINDS.index(torch.OutOfMemoryError)
    return next((x for x, kind in enumerate(KINDS) if isinstance(error, kind)), len(KINDS) - 1)


def _gather(row: list[int], dtype, group, device) -> Callable[[], Tensor]:
    """Start an all-gather of a row; what it returns waits for it and gives (world, len(row)) on the CPU."""
    mine = torch.tensor(row, dtype=dtype, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(rows, mine, group=group, async_op=True)

    def answers() -> Tensor:
        cuda = device.type == "cuda"
        with torch.cuda.stream(streams.beside(device)) if cuda else contextlib.nullcontext():
            work.wait()
            return torch.stack(rows).cpu()

    return answers


def same(told: Tensor, names: tuple[str, ...]) -> None:
    """ValueError, the same on all ranks, where ranks differ in a column of told (world, len(names)); it names it."""
    for x, name in enumerate(names) if bool((told != told[0]).any()) else ():
        other = (told[:, x] != told[0, x]).nonzero().flatten().tolist()
        if other:
            raise ValueError(f"{name} of rank {other[0]} is not that of rank 0: want one {name} on all ranks")
