"""What a stream reads and writes on the host, and how rows travel: through pinned memory, beside computation."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from workbench.distributed.shards import as_tensor
from workbench.patterns.checks import describe, on_host
from workbench.streaming.calls import Positions


class Projected(NamedTuple):
    """q, k and v as functions, each row's its own, of rows of x (N, C) on the host: each takes rows (M, C) on the card
    and gives (M, heads, head_dim), those of k and v with kv_heads (default: heads)."""

    x: Tensor
    q: Callable[[Tensor], Tensor]
    k: Callable[[Tensor], Tensor]
    v: Callable[[Tensor], Tensor]
    kv_heads: int | None = None


def tensors(source) -> dict[str, Tensor]:
    """The tensors of a source by name; ValueError where it is none."""
    if isinstance(source, Projected):
        found = {"x": source.x}
    elif isinstance(source, (tuple, list)) and len(source) == 3:
        found = dict(zip(("q", "k", "v"), source, strict=True))
    else:
        raise ValueError(f"source={describe(source)}: want (q, k, v), or Projected(x, q, k, v)")
    for name, x in found.items():
        if not isinstance(x, Tensor) or x.dim() < 2 or not len(x):
            raise ValueError(f"{name}={describe(x)}: want a tensor on the host, positions first, with at least one")
    return found


def pinned(x: Tensor) -> bool:
    with _disable_current_modes():  # of a card in software: to ask is no use of the tensor
        return x.is_pinned()


class Lane:
    """A stream of copies beside the card's computation; on a CPU all happens in the order in which it is written.

    device: "cuda", "cpu", or "rehearsal": a card that is not there, to which no row travels
    """

    def __init__(self, device: str):
        self.device = device
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        self.pinned: dict[object, Tensor] = {}

    def within(self):
        """The stream, current; and no card in software, which has no part in what the host does."""
        found = contextlib.ExitStack()
        if self.device != "rehearsal":
            found.enter_context(_disable_current_modes())
        if self.stream:
            found.enter_context(torch.cuda.stream(self.stream))
        return found

    def staged(self, key, rows: Tensor) -> Tensor:
        """Pinned memory for such rows, kept under a key. Whoever asks knows that the last copy from there is done."""
        if key not in self.pinned or len(self.pinned[key]) < len(rows):
            self.pinned[key] = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        return self.pinned[key][: len(rows)]

    def bring(self, host: Tensor, where: Positions, to: Tensor, key) -> None:
        """Copy the rows `where` of a tensor on the host to `to` on the card; rows of padding become 0."""
        direct = isinstance(where, range) and where.step == 1 and host.is_pinned()
        rows = self.staged(key, to) if self.device == "cuda" and not direct else to
        if isinstance(where, range):
            rows.copy_(host[where.start : where.stop : where.step], non_blocking=True)
        else:
            torch.index_select(host, 0, where.clamp(min=0), out=rows)
            rows[where < 0] = 0
        if rows is not to:
            to.copy_(rows, non_blocking=True)

    def put(self, rows: Tensor, host: Tensor, where: Positions, add: bool, key) -> Callable[[], object]:
        """Copy rows on the card to the rows `where` on the host, or add them to these; what is returned ends it, once
        the card has copied."""
        to = rows if add else host[where.start : where.stop]
        pinned = self.staged(key, rows) if self.device == "cuda" and (add or not host.is_pinned()) else to
        if pinned is not rows:
            pinned.copy_(rows, non_blocking=True)
        if not add:
            return lambda: pinned is to or to.copy_(pinned)

        @on_host()
        def end() -> None:
            at = as_tensor(where)
            at, some = at[at >= 0], pinned[at >= 0]
            host[at] = host[at] + some

        return end

    def mark(self):
        """An event at the end of what the current stream has to do; None where there is none."""
        event = torch.cuda.Event() if self.stream else None
        if event:
            event.record()
        return event
