"""A pattern written by its user, as a function of (head, query, key)."""

from __future__ import annotations

import inspect
import sys
import textwrap
import time

import torch
from torch import Tensor

from workbench.patterns.arguments import flag
from workbench.patterns.base import TILE, Blocks, Pattern, pair_of


class Predicate(Pattern):
    """visible(h, i, j) = fn(h, i, j), and j <= i if causal.

    fn takes broadcastable int64 tensors (head, query, key: absolute positions) and returns a bool tensor that
    broadcasts with them. It is evaluated in tiles: N^2 work, bounded memory, progress on stderr where it takes long.
    """

    def __init__(self, fn, causal: bool = False):
        if not callable(fn):
            raise ValueError(f"fn={fn!r}: want a function of (h, i, j)")
        self.fn = fn
        self.causal = flag("causal", causal)

    def count(self, h, i, j, n, heads):
        seen = evaluate(self.fn, h, i, j)
        return seen & (j <= i) if self.causal else seen

    def tiles(self, n, heads, nq):
        rows = max(1, TILE // max(1, n * heads))
        return watched(super().tiles(n, heads, nq), self.name, -(-nq // rows))

    def blocks(self, n, heads, nq=None, block_size=128):
        """Exact, by evaluating fn on every pair; one layout where its result does not depend on h."""
        nq = self.check(n, heads, nq)
        bq, bk = block_size = pair_of(block_size)
        cols, first = -(-n // bk), (n - nq) // bq
        rows = -(-n // bq) - first if nq and heads else 0
        wide = min(cols, max(1, TILE // max(1, heads * bq * bk)))  # a tile is high x wide blocks
        high = max(1, TILE // max(1, heads * bq * bk * wide))
        parts = []
        for a in watched(range(first, first + rows, high), self.name, -(-rows // high)):
            end = min(a + high, first + rows)
            tiles = [self._tile(a, end, b, min(cols, b + wide), n, heads, nq, block_size) for b in range(0, cols, wide)]
            parts.append([torch.cat(x, -1) for x in zip(*tiles, strict=True)])
        nothing = torch.zeros(min(1, heads), 0, cols, dtype=torch.bool)
        visible, full = (torch.cat(x, 1) for x in zip(*parts, strict=True)) if parts else (nothing, nothing)
        return Blocks.from_dense(block_size, n, nq, visible, full)

    def _tile(self, a, a_end, b, b_end, n, heads, nq, block_size):
        """bool (layouts, rows, cols) twice, for blocks [a, a_end) x [b, b_end): some pair is visible, every pair is."""
        bq, bk = block_size
        h = torch.arange(heads).view(-1, 1, 1)
        i = torch.arange(max(a * bq, n - nq), min(a_end * bq, n)).view(1, -1, 1)
        j = torch.arange(b * bk, min(b_end * bk, n)).view(1, 1, -1)
        seen = self.count(h, i, j, n, heads)  # (layouts, i, j)
        some = any_of(any_of(seen, 2, j[0, 0] // bk - b, b_end - b), 1, i[0, :, 0] // bq - a, a_end - a)
        none = any_of(any_of(~seen, 2, j[0, 0] // bk - b, b_end - b), 1, i[0, :, 0] // bq - a, a_end - a)
        return some, ~none

    def spec(self):
        return {"pattern": "Predicate", "fn": source_of(self.fn), "causal": self.causal}

    @classmethod
    def from_spec(cls, **spec):
        raise ValueError("a Predicate cannot be made from its spec: fn is Python code, call Predicate(fn) with it")

    @property
    def name(self):
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return "predicate" if name == "<lambda>" else f"predicate-{name}"

    def __repr__(self):
        return f"Predicate({getattr(self.fn, '__name__', self.fn)}{', causal=True' * self.causal})"


def evaluate(fn, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """fn(h, i, j), checked: bool, of the broadcast shape of i, j and, where the result depends on it, h."""
    want = torch.broadcast_shapes(h.shape, i.shape, j.shape)
    returned = fn(h.clone(), i.clone(), j.clone())  # its own: it may compute in place
    try:
        seen = torch.as_tensor(returned, device=i.device)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"predicate returned {returned!r}: want a bool tensor, e.g. (i - j).abs() < 5") from None
    if seen.dtype != torch.bool:
        raise ValueError(f"predicate returned {seen.dtype}: want a bool tensor, e.g. (i - j).abs() < 5")
    try:
        shape = torch.broadcast_shapes(seen.shape, i.shape, j.shape)
        fits = torch.broadcast_shapes(shape, want) == want
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"predicate returned shape {tuple(seen.shape)}: want one that broadcasts with {tuple(want)}")
    return seen.expand(shape)


def any_of(seen: Tensor, dim: int, group: Tensor, groups: int) -> Tensor:
    """bool: whether any of each group of indices along dim is True."""
    shape = list(seen.shape)
    shape[dim] = groups
    total = torch.zeros(shape, dtype=torch.int32).index_add_(dim, group, seen.to(torch.int32))
    return total > 0


def source_of(fn) -> str:
    """A function's source text, or its name where there is none (typed at a prompt, built in)."""
    try:
        return textwrap.dedent(inspect.getsource(fn)).strip()
    except (OSError, TypeError):
        return getattr(fn, "__qualname__", repr(fn))


def watched(steps, what: str, total: int):
    """The steps, with a line of progress on stderr from two seconds on until they are done, when it is erased."""
    began, line = time.monotonic(), ""
    for done, step in enumerate(steps, 1):
        yield step
        if time.monotonic() - began > 2:
            line = f"{what}: {done:,} of {total:,} tiles"
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
    if line:
        print(f"\r{' ' * len(line)}\r", end="", file=sys.stderr, flush=True)
