"""Local attention on a grid whose cells are tokens in any order."""

import itertools
import math
from functools import cached_property

import torch
from torch import Tensor

from workbench.patterns import orderings
from workbench.patterns.base import Blocks, Pattern, ranges
from workbench.patterns.checks import axes

CHUNK = 1 << 22  # cells of windows held at once: a few hundred MB at most


class Neighborhood(Pattern):
    """visible(h, i, j) = |x(i) - x(j)| <= radius on every axis, x(i) being the grid cell of token i.

    Clipped at the border. shape: one to any number of axes, the last one fastest. radius: an int, or one an axis.
    ordering: of `workbench.orderings`, token i is the cell ordering.curve[i]; None is row-major. Where the ordering
    leaves cells out, those are no tokens. N is the number of tokens. On a line this is `Window(2 * radius)`, which has
    no N of its own.
    """

    same_heads = True

    def __init__(self, shape, radius, ordering=None):
        self.shape = orderings.shape_of(shape)
        self.radius = axes("radius", radius, len(self.shape), 0)
        if ordering is not None and not isinstance(ordering, orderings.Ordering):
            raise ValueError(f"ordering={ordering!r}: want an ordering, e.g. orderings.hilbert({self.shape}), or None")
        if ordering is not None and ordering.shape != self.shape:
            raise ValueError(f"ordering={ordering.name} of shape {ordering.shape}: want the shape {self.shape}")
        self.ordering = ordering

    @cached_property
    def _order(self):
        return orderings.row_major(self.shape) if self.ordering is None else self.ordering

    @property
    def curve(self) -> Tensor:
        """int64 (N,): the row-major index of each token's cell."""
        self._order.rank  # noqa: B018  refuses a curve that leaves the grid or visits a cell twice
        return self._order.curve

    @property
    def rank(self) -> Tensor:
        """int64 (cells,): the token of each cell, -1 where there is none."""
        return self._order.rank

    def coordinates(self, token: Tensor) -> list[Tensor]:
        """The place of tokens on each axis: int64 tensors of `token`'s shape."""
        return list(torch.unravel_index(self.curve.to(token.device)[token], self.shape))

    def check(self, n, heads, nq=None):
        n, heads, nq = super().check(n, heads, nq)
        tokens = math.prod(self.shape) if self.ordering is None else len(self.ordering)
        if n != tokens:
            raise ValueError(f"n={n} on a neighborhood of shape {self.shape}: want n={tokens}, one token a cell")
        return n, heads, nq

    def count(self, h, i, j, n, heads):
        seen = torch.ones((), dtype=torch.bool, device=i.device)
        for x, y, radius in zip(self.coordinates(i), self.coordinates(j), self.radius, strict=True):
            seen = seen & ((x.int() - y.int()).abs() <= min(radius, 2**31 - 1))  # int32: half the traffic
        return seen

    def _pairs(self, n, heads, nq):
        if self.ordering is None and nq == n:  # windows are boxes: one axis times the other
            reaches = [(side, min(r, side - 1)) for side, r in zip(self.shape, self.radius, strict=True)]
            return heads * math.prod(side * (2 * r + 1) - r * (r + 1) for side, r in reaches)
        return heads * int(self.keys()[n - nq :].sum())

    def pairs_before(self, x, n: int, heads: int):
        """How many (head, query, key) have a query before each of the positions x, an array of Python ints."""
        total = torch.cat([torch.zeros(1, dtype=torch.int64), self.keys().cumsum(0)])
        return heads * total[x.tolist()].numpy().astype(object)

    def keys(self) -> Tensor:
        """int64 (N,): how many keys each token sees."""
        return box_sums((self.rank >= 0).long().view(self.shape), self.radius).flatten()[self.curve]

    _distinct = _pairs

    def _uncovered(self, n, heads, nq):
        return torch.zeros(heads, dtype=torch.int64)  # every token sees itself

    def _blocks(self, n, heads, nq, block_size):
        """Exact, in time that grows with the runs of cells, not with the pairs.

        The tokens of a query block are runs of cells along the last axis. Each run is widened by the radius and
        intersected, on each line within reach, with the runs of cells that share a key block.
        """
        bq, bk = block_size
        first, cols = (n - nq) // bq, -(-n // bk)
        rows = -(-n // bq) - first if nq else 0
        token = self.rank
        query_block = torch.where(token >= n - nq, token // bq - first, -1)
        key_block = torch.where(token >= 0, token // bk, -1)
        run_block, _, run_of_cell = self._runs(key_block)
        row, stop, _ = self._runs(query_block)
        start = torch.cat([stop.new_zeros(1), stop[:-1] + 1])
        by_row = row.argsort()[int((row < 0).sum()) :]
        runs = row[by_row], start[by_row], stop[by_row]
        boxes = self._boxes(torch.arange(n - nq, n), bq, first, rows), self._boxes(torch.arange(n), bk, 0, cols)

        reach = math.prod(min(side, 2 * r + 1) for side, r in zip(self.shape, self.radius, strict=True))
        step = max(1, CHUNK // max(1, cols, min(math.prod(self.shape), bq * reach)))
        parts = []
        for a in range(0, rows, step):
            end = min(rows, a + step)
            visible = torch.zeros(end - a, cols, dtype=torch.bool)
            low, high = torch.searchsorted(runs[0], torch.tensor([a, end])).tolist()
            row, start, stop = self._widen(*(x[low:high] for x in runs))
            begin = run_of_cell[start]
            many = run_of_cell[stop] - begin + 1
            seen = run_block[ranges(begin, many)]
            visible[(row - a).repeat_interleave(many)[seen >= 0], seen[seen >= 0]] = True
            x, y = visible.nonzero(as_tuple=True)
            parts.append((visible.sum(1), y.int(), self._within(boxes[0], x + a, boxes[1], y)))
        return Blocks.joined(block_size, n, nq, 1, parts)

    def _runs(self, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Runs of cells of one label >= -1 along the last axis: each run's label and last cell, and each cell's run."""
        line, labels = torch.arange(len(label)) // self.shape[-1], int(label.max()) + 2
        found, run, many = (line * labels + label + 1).unique_consecutive(return_inverse=True, return_counts=True)
        return found % labels - 1, many.cumsum(0) - 1, run

    def _widen(self, block: Tensor, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The windows of runs of cells, as disjoint runs: (block, first cell, last cell)."""
        side, radius = self.shape[-1], min(self.radius[-1], self.shape[-1])
        left = (start % side - radius).clamp(min=0)
        right = (stop % side + radius).clamp(max=side - 1)
        line, inside = torch.zeros(1, len(start), dtype=torch.int64), torch.ones(1, len(start), dtype=torch.bool)
        place = torch.unravel_index(start // side, self.shape[:-1]) if len(self.shape) > 1 else ()
        reaches = [range(-min(r, s - 1), min(r, s - 1) + 1) for r, s in zip(self.radius, self.shape[:-1], strict=False)]
        shifts = torch.tensor(list(itertools.product(*reaches)), dtype=torch.int64)  # (lines in reach, axes but one)
        for axis, x in enumerate(place):
            moved = x + shifts[:, axis, None]
            inside = inside & (moved >= 0) & (moved < self.shape[axis])
            line = line * self.shape[axis] + moved
        origin, cells = (block * (math.prod(self.shape) // side) + line) * side, math.prod(self.shape)
        begin, end = (origin + left)[inside], (origin + right)[inside]
        order = begin.argsort()
        begin, end = begin[order], end[order].cummax(0).values if len(order) else end
        apart, edge = begin[1:] > end[:-1], begin.new_ones(min(1, len(begin))).bool()
        begin, end = begin[torch.cat([edge, apart])], end[torch.cat([apart, edge])]
        return begin // cells, begin % cells, end % cells

    def _boxes(self, token: Tensor, size: int, first: int, blocks: int) -> Tensor:
        """int64 (axes, 2, blocks): the bounding box of each block's tokens."""
        group = token // size - first
        boxes = torch.empty(len(self.shape), 2, blocks, dtype=torch.int64)
        for axis, x in enumerate(self.coordinates(token)):
            boxes[axis, 0].fill_(self.shape[axis]).scatter_reduce_(0, group, x, "amin")
            boxes[axis, 1].fill_(-1).scatter_reduce_(0, group, x, "amax")
        return boxes

    def _within(self, query: Tensor, a: Tensor, key: Tensor, b: Tensor) -> Tensor:
        """bool: the blocks whose pairs are all visible: no two tokens differ by more than the radius on any axis."""
        full = torch.ones(len(a), dtype=torch.bool)
        radii = map(min, self.radius, self.shape)  # a radius may be any number
        for (q_low, q_high), (k_low, k_high), radius in zip(query, key, radii, strict=True):
            full &= (q_high[a] - k_low[b] <= radius) & (k_high[b] - q_low[a] <= radius)
        return full

    def spec(self):
        ordering = None if self.ordering is None else self.ordering.spec()
        return {"pattern": "Neighborhood", "shape": list(self.shape), "radius": list(self.radius), "ordering": ordering}

    @classmethod
    def from_spec(cls, ordering=None, **rest):
        return cls(ordering=None if ordering is None else orderings.from_spec(ordering), **rest)

    @property
    def short_name(self):
        radius = self.radius[:1] if len(set(self.radius)) == 1 else self.radius
        kind = "window" if len(self.shape) == 1 and self.ordering is None else "neighborhood"
        parts = [kind, "x".join(map(str, radius))] + ([] if self.ordering is None else [self.ordering.name])
        return "-".join(parts)

    @property
    def name(self):
        return self.short_name + ("-of-" + "x".join(map(str, self.shape)) if len(self.shape) > 1 else "")

    def __repr__(self):
        ordering = "" if self.ordering is None else f", ordering={self.ordering!r}"
        return f"Neighborhood({self.shape}, radius={self.radius}{ordering})"


def box_sums(cells: Tensor, radius: tuple[int, ...]) -> Tensor:
    """For each cell of a grid the sum of `cells` within the radius, clipped at the border; of the dtype of `cells`."""
    for axis, (side, r) in enumerate(zip(cells.shape, radius, strict=True)):
        below = torch.cat([torch.zeros_like(cells.narrow(axis, 0, 1)), cells.cumsum(axis, dtype=cells.dtype)], axis)
        x, r = torch.arange(side), min(r, side)
        upto, since = (x + r + 1).clamp(max=side), (x - r).clamp(min=0)
        cells = below.index_select(axis, upto) - below.index_select(axis, since)
    return cells
