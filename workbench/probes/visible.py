"""Which pairs a pattern has, a row at a time: the keys that a query sees, and the queries that see a key.

Lists of a few positions, never N x N: what a check of sampled rows computes with.

Dimensions: N keys, H query heads; m rows and M keys of one head at a time. i and j are absolute positions of a query
and a key.
"""

from collections.abc import Callable, Iterator
from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.patterns import BlockSparse, Dense, Dilated, Neighborhood

CHUNK = 1 << 22  # scores, or elements of keys, held at once: 32 MB of float64


class Part(NamedTuple):
    """Some of the rows asked about (their places, int64 (m)) and keys that these may see: a range, or int64 (M).

    seen(i, j) says how often, for (m, 1) and (1, M); None: once each. The parts of a pattern together are the multiset
    of its pairs.
    """

    rows: Tensor
    keys: range | Tensor
    seen: Callable[[Tensor, Tensor], Tensor] | None = None


@singledispatch
def parts(pattern, h: int, i: Tensor, n: int, heads: int) -> Iterator[Part]:
    """The keys that rows i (m), int64 on the CPU, of head h see. Any pattern: all keys, counted."""
    yield Part(torch.arange(len(i)), range(n), _counted(pattern, h, n, heads))


@parts.register
def _(pattern: Dense, h, i, n, heads):
    last = int(i.max()) + 1
    yield Part(torch.arange(len(i)), range(last if pattern.causal else n), _before(pattern))


@parts.register
def _(pattern: Dilated, h, i, n, heads):
    for branch, (w, r) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)):
        o = pattern.offset(branch, h, heads)
        kept = torch.zeros(0, dtype=torch.int64) if o is None else (i % w % r == o).nonzero().squeeze(1)
        segments, which = (i[kept] // w).unique(return_inverse=True)
        for x, segment in enumerate(segments.tolist()):
            yield Part(kept[which == x], range(segment * w + o, min(n, segment * w + w), r), _before(pattern))


@parts.register
def _(pattern: BlockSparse, h, i, n, heads):
    a, c = pattern.block_size
    grid = -(-n // a), -(-n // c)
    seen = _before(pattern)
    blocks, which = (i // a).unique(return_inverse=True)
    for x, block in enumerate(blocks.tolist()):
        visible = pattern.layout.visible(torch.tensor(h), torch.tensor(block), torch.arange(grid[1]), grid)
        yield Part((which == x).nonzero().squeeze(1), _positions(visible.nonzero().squeeze(1), c, n), seen)


@parts.register
def _(pattern: Neighborhood, h, i, n, heads):
    if not pattern.plain:
        yield from parts.dispatch(object)(pattern, h, i, n, heads)
        return
    yield Part(torch.arange(len(i)), pattern.near(i), _counted(pattern, h, n, heads) if len(i) > 1 else None)


def queries(pattern, h: int, j: int, n: int, heads: int, nq: int, chunk: int) -> Iterator[Tensor]:
    """int64 (m), m at most `chunk`: the queries of head h that see key j, each as often as it does."""
    counted, among = not isinstance(pattern, (Dense, Dilated)), [range(n)]
    if isinstance(pattern, Dilated):  # a branch keeps the same positions for queries as for keys
        among = [part.keys for part in parts(pattern, h, torch.tensor([j]), n, heads)]
    for piece in (piece for some in among for piece in cut(some, chunk)):
        i = tensor(piece)
        i = i[(i >= n - nq) & ((i >= j) | (counted or not pattern.causal))]
        if counted and len(i):
            i = i.repeat_interleave(_counted(pattern, h, n, heads)(i, torch.tensor([j])).long())
        if len(i):
            yield i


def _positions(blocks: Tensor, size: int, n: int) -> Tensor:
    """The positions below n in blocks of a size."""
    found = (blocks[:, None] * size + torch.arange(min(size, n))).flatten()
    return found[found < n]


def _before(pattern):
    return (lambda i, j: j <= i) if pattern.causal else None


def _counted(pattern, h: int, n: int, heads: int):
    """The pattern's own count, on the CPU, where its tables are."""
    return lambda i, j: pattern.count(torch.tensor(h), i.cpu(), j.cpu(), n, heads)


def cut(positions: range | Tensor, size: int) -> Iterator[range | Tensor]:
    return (positions[x : x + size] for x in range(0, len(positions), size))


def tensor(positions: range | Tensor) -> Tensor:
    if isinstance(positions, Tensor):
        return positions
    return torch.arange(positions.start, positions.stop, positions.step)
