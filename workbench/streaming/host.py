"""What a stream reads and writes in the host's memory, and how rows travel: through pinned memory, beside computation.

Dimensions: N positions, M rows that travel together, C channels of x, H query heads, G key heads, D head_dim.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from workbench.patterns.checks import describe
from workbench.streaming.calls import Call, Positions


class Projected(NamedTuple):
    """q, k and v as functions of rows of x (N, C) in the host's memory: each takes rows (M, C) on the card and gives
    (M, H, D), or (M, G, D) of k and v with G = kv_heads (default H). They have to treat each row alone."""

    x: Tensor
    q: Callable[[Tensor], Tensor]
    k: Callable[[Tensor], Tensor]
    v: Callable[[Tensor], Tensor]
    kv_heads: int | None = None


def tensors(source) -> dict[str, Tensor]:
    """The tensors of a source by name. ValueError where it is none."""
    if isinstance(source, Projected):
        found = {"x": source.x}
    elif isinstance(source, (tuple, list)) and len(source) == 3:
        found = dict(zip(("q", "k", "v"), source, strict=True))
    else:
        raise ValueError(f"source={describe(source)}: want (q, k, v), or Projected(x, q, k, v)")
    for name, x in found.items():
        if not isinstance(x, Tensor) or x.device.type not in ("cpu", "meta") or x.dim() < 2:
            raise ValueError(f"{name}={describe(x)}: want a tensor in the host's memory, positions first")
        if len(x) != len(next(iter(found.values()))):
            raise ValueError(f"{name} has {len(x):,} positions: want as many as the other tensors of the source have")
    return found


def key_heads(source, heads: int) -> int:
    return (source.kv_heads or heads) if isinstance(source, Projected) else source[1].shape[1]


def wanted(source, call: Call) -> dict[str, tuple[str, Positions]]:
    """{what a call needs: (the tensor, its rows)}."""
    if not isinstance(source, Projected):
        return {"q": ("q", call.queries), "k": ("k", call.keys), "v": ("v", call.keys)}
    same = call.queries is call.keys or isinstance(call.queries, range) and call.queries == call.keys
    return {"x": ("x", call.queries)} | ({} if same else {"context": ("x", call.keys)})


def inputs(source, loaded: dict[str, Tensor]) -> list[Tensor]:
    """q (1, L, H, D), k and v (1, M, G, D) from what `wanted` names."""
    if isinstance(source, Projected):
        keys = loaded.get("context", loaded["x"])
        return [f(x)[None] for f, x in ((source.q, loaded["x"]), (source.k, keys), (source.v, keys))]
    return [loaded[name][None] for name in ("q", "k", "v")]


class Lane:
    """A stream of copies beside the card's computation; on a CPU all happens in the order in which it is written.

    device: "cuda", "cpu", or "rehearsal": a card that is not there, to which no row travels
    """

    def __init__(self, device: str):
        self.device = device
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        self.pinned: dict[object, Tensor] = {}

    def within(self):
        return torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()

    def staged(self, key, rows: Tensor) -> Tensor:
        """Pinned memory for such rows, kept under a key. Whoever asks knows that the last copy from there is done."""
        found = self.pinned.get(key)
        if found is None or found.shape[1:] != rows.shape[1:] or len(found) < len(rows):
            found = self.pinned[key] = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        return found[: len(rows)]

    def bring(self, host: Tensor, where: Positions, to: Tensor, key) -> None:
        """Copy the rows `where` of a tensor on the host to `to` on the card; rows of padding become 0."""
        if self.device == "rehearsal":
            return
        with _disable_current_modes():  # of a card in software: it has no part in what the host does
            if self.device == "cpu":
                _take(host, where, to)
            elif isinstance(where, range) and where.step == 1 and host.is_pinned():
                to.copy_(host[where.start : where.stop], non_blocking=True)
            else:
                rows = self.staged(key, to)
                _take(host, where, rows)
                to.copy_(rows, non_blocking=True)

    def put(self, rows: Tensor, host: Tensor, where: range, key) -> Callable[[], None]:
        """Copy rows on the card to the rows `where` on the host; what is returned ends it, once the card has copied."""
        if self.device == "rehearsal":
            return lambda: None
        with _disable_current_modes():
            to = host[where.start : where.stop]
            if self.device == "cuda" and not host.is_pinned():
                pinned = self.staged(key, rows)
                pinned.copy_(rows, non_blocking=True)
                return lambda: to.copy_(pinned)
            to.copy_(rows, non_blocking=True)
        return lambda: None


def mark(device: str):
    """An event at the end of what the current stream of a card has to do; None elsewhere."""
    if device != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _take(host: Tensor, where: Positions, to: Tensor) -> None:
    if isinstance(where, range):
        to.copy_(host[where.start : where.stop : where.step])
        return
    torch.index_select(host, 0, where.clamp(min=0), out=to)
    to[where < 0] = 0
