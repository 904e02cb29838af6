"""Agreeing before data moves: every rank tells what it is about to do; an error on one is raised on all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.distributed import streams

TEXT = 400  # bytes of an error's message that travel
KINDS = (ValueError, torch.OutOfMemoryError, RuntimeError)


def agree(group, device, error: Exception | None, numbers: list[int]) -> Tensor:
    """int64 (world, len(numbers)): what every rank gave. One small all-gather.

    Where a rank comes with an error, all raise: that rank its own, the others one of the same kind (ValueError, out of
    memory, or RuntimeError) that names the rank and the reason. The group can be used on.
    """
    return ask(group, device, error, numbers)()


def ask(group, device, error: Exception | None, numbers: list[int]) -> Callable[[], Tensor]:
    """Begin to `agree`; what is returned waits for the answers, for nothing else that a card has to do."""
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
                error = None  # its traceback has this frame: else all that was made before it waits for the collector
        first = failed[0]
        why = bytes(messages[first].tolist()).rstrip(b"\0").decode(errors="replace")
        raise KINDS[int(told[first, 0]) - 1](f"rank {first}: {why}")

    return agreed


def _kind(error: Exception) -> int:
    if isinstance(error, MemoryError):
        return KINDS.index(torch.OutOfMemoryError)
    return next((x for x, kind in enumerate(KINDS) if isinstance(error, kind)), len(KINDS) - 1)


def _gather(row: list[int], dtype, group, device) -> Callable[[], Tensor]:
    """Begin to gather; what waits for it gives (world, len(row)) on the CPU: the row of every rank."""
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
    """ValueError, on all ranks alike, that names what differs between ranks: told (world, len(names))."""
    for x, name in enumerate(names) if bool((told != told[0]).any()) else ():
        other = (told[:, x] != told[0, x]).nonzero().flatten().tolist()
        if other:
            raise ValueError(f"{name} of rank {other[0]} is not that of rank 0: want one {name} on all ranks")
