"""Which pairs of partial blocks are visible, for any pattern that shows a pair once or not at all: a bit a pair.

`Pattern.count` is asked about every partial block, on the host, and of equal answers one is kept. Of a window there are
few, since they repeat along its diagonals; of a random predicate there is one for each block.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.engines.triton.block_lists import kind_of, sides
from workbench.patterns import Window
from workbench.patterns.base import TILE, Blocks

MOST = 1 << 30  # bytes of masks, beyond which a pattern is left to other backends


class Found(NamedTuple):
    """The blocks of each batch entry (or of all: one), and the masks of partial ones where `kind_of` says "bits".

    bits: int32 (masks x block of queries x words), a word for 32 keys, the first in its lowest bit. which: the mask of
    each partial block, in the order of `sides`.
    """

    each: list[Blocks]
    bits: Tensor | None = None
    which: Tensor | None = None


def find(pattern, n: int, heads: int, nq: int, block_size: tuple[int, int]) -> Found | None:
    """On the host, kept with the pattern where there are masks; None where these take more than MOST bytes."""
    if kind_of(pattern) == "bits":
        return pattern.kept("bits", (n, heads, nq), lambda: _masked(pattern, n, heads, nq, block_size))
    return Found([one.blocks(n, heads, nq, block_size) for one in pattern.each()])


def _masked(pattern, n: int, heads: int, nq: int, block_size: tuple[int, int]) -> Found | None:
    each = [one.blocks(n, heads, nq, block_size) for one in pattern.each()]
    (bq, bk), layouts = block_size, each[0].layouts
    layout, row, column, full = sides(each)
    layout, row, column = (x[~full] for x in (layout, row + each[0].first, column))
    begin = torch.stack([layout, row * bq, column * bk], 1)
    steady = isinstance(pattern, Window) and not pattern.sinks
    if steady:  # of blocks that are as far from the diagonal the same pairs are visible
        begin[:, 1] -= begin[:, 2].clone()
        begin[:, 2] = 0
        begin, of = begin.unique(dim=0, return_inverse=True)
    numbers, which = {}, []
    for part in begin.split(max(1, TILE // (bq * bk))):
        layout, i, j = (x.view(-1, 1, 1) for x in part.unbind(1))
        i, j = i + torch.arange(bq)[:, None], j + torch.arange(bk)
        if not steady:  # what is looked up has no other positions
            i, j = i.clamp(max=n - 1), j.clamp(max=n - 1)
        seen = torch.zeros(len(part), bq, -(-bk // 32) * 32, dtype=torch.bool)
        for batch, one in enumerate(pattern.each()):
            ours = layout.flatten() // layouts == batch
            seen[ours, :, :bk] = one.count(layout[ours] % layouts, i[ours], j[ours], n, heads)
        words = np.packbits(seen.numpy(), -1, bitorder="little")
        which += [numbers.setdefault(mask.tobytes(), len(numbers)) for mask in words]
        if len(numbers) * words[:1].nbytes > MOST:
            return None
    bits = torch.frombuffer(bytearray(b"".join(numbers) or bytes(4)), dtype=torch.int32)
    which = torch.tensor(which, dtype=torch.int64)
    return Found(each, bits, which[of] if steady else which)
