"""Rows that shift with the head, as one strided view: what several heads of a dilated branch keep.

Each head's rows begin one later than those of the head before. From one head to the next is then one stride, a head's
plus a row's, so that a single view holds them all.

Dimensions: B batch, L rows, H heads, C steps of a skew, R rows and h heads of each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor


class Skew(NamedTuple):
    """`count` steps, each of as many rows and heads as the first, `row_turn` rows and `head_turn` heads further on."""

    rows: slice
    heads: slice
    count: int = 1
    row_turn: int = 0
    head_turn: int = 0

    def of(self, x: Tensor) -> Tensor:
        """A view (B, R, C, h, ...) of x (B, L, H, ...)."""
        first = x[:, self.rows, self.heads]
        if self.count == 1:
            return first.unsqueeze(2)
        (b, r, h, *rest), (of_b, of_r, of_h, *strides) = first.shape, first.stride()
        turn = self.row_turn * x.stride(1) + self.head_turn * x.stride(2)
        return first.as_strided((b, r, self.count, h, *rest), (of_b, of_r, turn, of_h, *strides))

    def each(self) -> Iterator[tuple[slice, slice]]:
        """The rows and heads of each step."""
        for x in range(self.count):
            turns = x * self.row_turn, x * self.head_turn
            yield tuple(
                slice(y.start + by, y.stop + by, y.step) for y, by in zip((self.rows, self.heads), turns, strict=True)
            )

    def and_then(self, rows: slice, heads: slice) -> Skew | None:
        """This skew with these rows and heads as its next step, or None if they are not one."""
        if not (_alike(self.rows, rows) and _alike(self.heads, heads)):
            return None
        ahead = rows.start - self.rows.start, heads.start - self.heads.start
        turns = ahead if self.count == 1 else (self.row_turn, self.head_turn)
        if min(turns) < 0 or ahead != (self.count * turns[0], self.count * turns[1]):
            return None  # a stride cannot be negative
        return Skew(self.rows, self.heads, self.count + 1, *turns)


def skews(pairs: Iterable[tuple[slice, slice]]) -> list[Skew]:
    """(rows, heads) pairs, in their order, as few skews. The slices have to have starts and stops."""
    found: list[Skew] = []
    for rows, heads in pairs:
        longer = found[-1].and_then(rows, heads) if found else None
        if longer:
            found[-1] = longer
        else:
            found.append(Skew(rows, heads))
    return found


def _alike(x: slice, y: slice) -> bool:
    many = length(x)
    return many == length(y) and (many < 2 or (x.step or 1) == (y.step or 1))


def length(x: slice) -> int:
    return len(range(x.start, x.stop, x.step or 1))
