"""Copies of rows between tensors (B, rows, heads, ...), as few as their places allow.

Dimensions: B batch, L rows of a tensor, D head_dim; of a strided view, C steps of R rows and h heads each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor


class StridedView(NamedTuple):
    """Rows that shift with the head, as one view of a tensor: what several heads of a dilated branch keep.

    It has `count` steps. The first has these rows and heads; each further one has equally many, `row_shift` rows and
    `head_shift` heads further on. From one step to the next is then one stride in memory. Slices have starts and stops.
    rows may also be int64, in one step: then what `of` gives is a copy.
    """

    rows: slice | Tensor
    heads: slice
    count: int = 1
    row_shift: int = 0
    head_shift: int = 0

    def of(self, x: Tensor) -> Tensor:
        """(B, R, C, h, ...) of x (B, L, heads, ...)."""
        if isinstance(self.rows, Tensor):
            return x[:, :, self.heads].index_select(1, self.rows).unsqueeze(2)
        first = x[:, self.rows, self.heads]
        if self.count == 1:
            return first.unsqueeze(2)
        (b, r, h, *rest), (of_b, of_r, of_h, *strides) = first.shape, first.stride()
        shift = self.row_shift * x.stride(1) + self.head_shift * x.stride(2)
        return first.as_strided((b, r, self.count, h, *rest), (of_b, of_r, shift, of_h, *strides))

    def put(self, x: Tensor, part: Tensor) -> None:
        """Copy part, as `of` gives it, to these rows of x (B, L, heads, ...)."""
        if isinstance(self.rows, Tensor):
            x[:, :, self.heads].index_copy_(1, self.rows, part.squeeze(2).to(x.dtype))
        else:
            self.of(x).copy_(part)

    def add(self, x: Tensor, part: Tensor) -> None:
        """Add part, as `of` gives it, to these rows of x (B, L, heads, ...)."""
        if isinstance(self.rows, Tensor):
            x[:, :, self.heads].index_add_(1, self.rows, part.squeeze(2).to(x.dtype))
        else:
            self.of(x).add_(part)

    def each(self) -> Iterator[tuple[slice | Tensor, slice]]:
        """The rows and heads of each step."""
        yield self.rows, self.heads
        for x in range(1, self.count):
            yield _shifted(self.rows, x * self.row_shift), _shifted(self.heads, x * self.head_shift)

    @property
    def size(self) -> int:
        """How many (row, head) it has."""
        return length(self.rows) * length(self.heads) * self.count

    def extended(self, other: StridedView) -> StridedView | None:
        """This view with one more step, another of one step, or None if that does not lie where a next step has to."""
        if isinstance(self.rows, Tensor) or isinstance(other.rows, Tensor):
            return None
        for x, y in ((self.rows, other.rows), (self.heads, other.heads)):
            if length(x) != length(y) or length(x) > 1 and (x.step or 1) != (y.step or 1):
                return None
        ahead = other.rows.start - self.rows.start, other.heads.start - self.heads.start
        shifts = ahead if self.count == 1 else (self.row_shift, self.head_shift)
        if min(shifts) < 0 or not any(shifts) or ahead != (self.count * shifts[0], self.count * shifts[1]):
            return None  # a stride cannot be negative, and steps in one place could not be added to
        return StridedView(self.rows, self.heads, self.count + 1, *shifts)

    def to(self, device) -> StridedView:
        """With the index of its rows, if it has one, on the device."""
        return self._replace(rows=self.rows.to(device)) if isinstance(self.rows, Tensor) else self


class Block(NamedTuple):
    """Rows in a buffer, (rows, 2, B, width, D) from element `start` on, 2 for keys and values."""

    start: int
    rows: int
    width: int


class Copy(NamedTuple):
    """Rows of this rank's own tensors, or of a block of a buffer, and the rows of another tensor to which they belong.

    block: where the first are (None: among the rank's own rows); source: which of them; target: where they belong
    """

    block: Block | None
    source: StridedView
    target: StridedView

    def to(self, device) -> Copy:
        return self._replace(source=self.source.to(device), target=self.target.to(device))


def joined(copies: Iterable[Copy]) -> list[Copy]:
    """The copies, in their order, as few as possible: those that follow each other at one stride are one."""
    found: list[Copy] = []
    for copy in copies:
        last = found[-1] if found and found[-1].block == copy.block else None
        longer = [getattr(last, x).extended(getattr(copy, x)) for x in ("source", "target")] if last else [None]
        found[-1:] = [last._replace(source=longer[0], target=longer[1])] if all(longer) else [*found[-1:], copy]
    return found


def strided_views(views: Iterable[StridedView]) -> list[StridedView]:
    """Views of one step each, in their order, as few as possible."""
    return [copy.source for copy in joined(Copy(None, view, view) for view in views)]


def evenly(pairs: list[tuple[int, int]]) -> list[tuple[slice, slice]]:
    """Pairs of heads as pairs of slices: one pair if both sides are evenly spaced, else one for each pair."""
    sides = list(zip(*pairs, strict=True))
    steps = [{b - a for a, b in zip(x, x[1:], strict=False)} or {1} for x in sides]
    if all(len(x) == 1 and min(x) > 0 for x in steps):
        return [tuple(slice(x[0], x[-1] + 1, min(step)) for x, step in zip(sides, steps, strict=True))]
    return [(slice(a, a + 1), slice(b, b + 1)) for a, b in pairs]


def length(x: slice | Tensor) -> int:
    return len(x) if isinstance(x, Tensor) else len(range(x.start, x.stop, x.step or 1))


def _shifted(x: slice, by: int) -> slice:
    return slice(x.start + by, x.stop + by, x.step)
