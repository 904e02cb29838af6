"""Tile order: tokens sorted so that each branch of a dilated pattern is made of whole tiles of 128 tokens.

With segments of W positions and R the least common multiple of the rates, position W s + R j + t (t < R) is stored at
(s, t, j). All that a head keeps in a branch is then whole residues t, and each residue of a segment is W / R places in
a row: with W / R a multiple of 128, whole tiles. The order is the same for all heads, branches and layers. In it a
dilated pattern is a block-sparse one, in which a pair of tiles counts as often as branches show it.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.patterns.base import Pattern, ranges
from workbench.patterns.checks import whole
from workbench.patterns.dilated import Dilated

TILE = 128
CAUSAL_RATE = 4  # measured on an H200: see `together`
PERIOD = 1 << 20  # places: to find the pairs of longer periods takes more than seconds


class TileOrder(NamedTuple):
    """The order of `n` tokens in segments of `segment` positions, sorted by their residue modulo `rate`.

    A last segment that is shorter is padded at the end of each residue: `padded` places in all.
    """

    n: int
    segment: int
    rate: int

    @property
    def run(self) -> int:
        """Places of a residue in a segment."""
        return self.segment // self.rate

    @property
    def padded(self) -> int:
        return -(-self.n // self.segment) * self.segment

    def position(self, place: Tensor) -> Tensor:
        """The position of the token at a place; from n on where the place is padding."""
        inside = place % self.segment
        return place - inside + inside % self.run * self.rate + inside // self.run

    def place(self, position: Tensor) -> Tensor:
        """The place of the token at a position: the inverse of `position`."""
        inside = position % self.segment
        return position - inside + inside % self.rate * self.run + inside // self.rate

    def permutation(self) -> Tensor:
        """int64 (n,): the position of each token of the order, without the padding."""
        found = self.position(torch.arange(self.padded, device="cpu"))
        return found[found < self.n]


def of(pattern: Pattern, n: int) -> TileOrder | None:
    """The tile order of a pattern at n tokens; None where its branches are not whole tiles in any."""
    if not isinstance(pattern, Dilated) or n == 0:
        return None
    rate = math.lcm(*pattern.dilation_rates)
    shorter = [w for w in pattern.segment_lengths if w < n]  # the others are one segment
    segment = math.gcd(*shorter) if shorter else -(-n // (rate * TILE)) * rate * TILE
    return TileOrder(n, segment, rate) if segment % (rate * TILE) == 0 else None


def tile_order(pattern: Pattern, n: int) -> Tensor:
    """int64 (n,), the position of each token in the tile order of the pattern: `x[:, tile_order(pattern, n)]` is in it.

    `attention(..., tokens="tile order")` takes and returns tokens in this order. Its inverse is `order.argsort()`.
    ValueError where the pattern has no tile order.
    """
    found = of(pattern, n := whole("n", n, 0))
    if found is None and not n and isinstance(pattern, Dilated):
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    if found is None:
        least = TILE * math.lcm(*getattr(pattern, "dilation_rates", [1]))
        raise ValueError(
            f"{pattern!r} has no tile order at n={n}: want a dilated pattern whose segment lengths below n are "
            f"multiples of {least:,}, 128 times the least common multiple of its rates"
        )
    return found.permutation()


def together(pattern: Dilated, n: int) -> tuple[Dilated | None, Dilated | None]:
    """(the branches that have one tile order, the others): the first ones are kept, as many as go together.

    The larger the rate, the longer the stretch of positions whose later half a causal tile computes in vain: causal
    branches of large rates, which have few pairs, are left to kernels of a branch each.
    """
    return pattern.kept("together", (n,), lambda: _together(pattern, n))


def _together(pattern: Dilated, n: int) -> tuple[Dilated | None, Dilated | None]:
    every = range(len(pattern.segment_lengths))
    if pattern.heads == "partition":  # the heads of a branch depend on all branches
        same = pattern.of_branches(list(every))  # not the pattern itself, with which this is kept
        return (same, None) if of(pattern, n) else (None, same)
    chosen = []
    for branch in every:
        found = of(pattern.of_branches([*chosen, branch]), n)
        if found and (not pattern.causal or found.rate <= CAUSAL_RATE):
            chosen.append(branch)
    left = [branch for branch in every if branch not in chosen]
    return (pattern.of_branches(chosen) if chosen else None), (pattern.of_branches(left) if left else None)


def period_of(pattern: Dilated, order: TileOrder) -> int:
    """Places after which all repeats itself, at most those of the order."""
    longest = max(pattern.segment_lengths)
    return order.padded if longest >= order.n else min(order.padded, math.lcm(*pattern.segment_lengths))


class Pairs(NamedTuple):
    """Pairs of tiles that see each other: int64 (pairs,), in no order.

    Heads whose offsets differ by the same number in all branches see the same, so many residues further: pairs are
    those of a few `base`s, and each of the sets that heads have is a base, turned (`turn`) by its number of tiles.

    times: how many branches show the pair. partial: some of its (query, key) are hidden, by causality or as padding.
    """

    which: Tensor  # int64 (heads,): the set of each head
    sets: list[tuple[int, int]]  # (its base, tiles by which it is turned)
    segment: int  # tiles of a segment, inside which they turn
    tiles: tuple[int, int]  # of queries and of keys
    base: Tensor
    row: Tensor
    col: Tensor
    times: Tensor
    partial: Tensor


def turn(tile: Tensor, by: int, segment: int) -> Tensor:
    """Tiles `by` tiles further in their segments of so many tiles, the last ones at the beginning."""
    inside = tile % segment
    return tile - inside + (inside + by) % segment


def _bases(offsets: Tensor, pattern: Dilated, order: TileOrder) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """(offsets that are not others turned, of each line of `offsets` the base and the tiles by which it is turned)."""
    rates, bases, sets = pattern.dilation_rates, [], []
    for offset in offsets.tolist():
        for base, by in itertools.product(range(len(bases)), range(order.rate)):
            if offset == [-1 if o < 0 else (o + by) % r for o, r in zip(bases[base], rates, strict=True)]:
                break
        else:
            base, by = len(bases), 0
            bases.append(offset)
        sets.append((base, by * order.run // TILE))
    return bases, sets


def pairs(pattern: Dilated, order: TileOrder, heads: int, nq: int) -> Pairs:
    """Which tiles of queries see which tiles of keys, in the tile order.

    The queries are the last nq positions; where these begin inside a segment, the queries of all of that segment.
    """
    tiles, first = order.padded // TILE, (order.n - nq) // order.segment * order.segment // TILE
    lengths = [w if w < order.n else order.padded for w in pattern.segment_lengths]
    period = period_of(pattern, order) // TILE
    offsets, which = pattern._offsets(heads).unique(dim=0, return_inverse=True)
    bases, sets = _bases(offsets, pattern, order)
    place = torch.arange(period) * TILE
    residue, start = place % order.segment // order.run, place // order.segment * order.segment
    begin = start + place % order.run * order.rate  # a later tile of any residue begins after all of an earlier one
    found = []
    for one, offset in enumerate(bases):
        shown = [torch.zeros(0, dtype=torch.int64)]
        for w, r, o in zip(lengths, pattern.dilation_rates, offset, strict=True):
            kept = (residue % r == o).nonzero()[:, 0]  # none where the head is not in the branch: its offset is -1
            # Each kept tile with all kept tiles of its segment: `many` of a segment, `at` the segment of each.
            many, at = torch.unique_consecutive(start[kept] // w, return_inverse=True, return_counts=True)[:0:-1]
            col = kept[ranges((many.cumsum(0) - many)[at], many[at])]
            shown.append(kept.repeat_interleave(many[at]) * period + col)
        pair, times = torch.cat(shown).unique(return_counts=True)
        row, col = pair // period, pair % period
        seen = begin[row] >= begin[col] if pattern.causal else torch.ones_like(row, dtype=torch.bool)
        found.append(torch.stack([torch.full_like(row, one), row, col, times])[:, seen])
    one, row, col, times = torch.cat(found, 1)
    if turns := -(-tiles // period) - 1:  # the last of them may be cut short
        shift = torch.arange(turns + 1)[:, None] * period
        one, times = one.repeat(turns + 1), times.repeat(turns + 1)
        row, col = (row + shift).flatten(), (col + shift).flatten()
    inside = ((row >= first) & (row < tiles) & (col < tiles)).nonzero()[:, 0]
    one, row, col, times = one[inside], row[inside], col[inside], times[inside]
    each = order.segment // TILE  # tiles of a segment
    if pattern.causal:
        partial = (row // each == col // each) & (row % (order.run // TILE) == col % (order.run // TILE))
    else:
        partial = col // each == order.n // order.segment
    return Pairs(which, sets, each, (tiles - first, tiles), one, row - first, col, times, partial)
