"""Local attention on a grid whose cells are tokens in any order."""

import math
from functools import cached_property

import torch
from torch import Tensor

from workbench.patterns import orderings
from workbench.patterns.base import Blocks, Pattern, ranges
from workbench.patterns.checks import axes, choice, flag, on_host, several
from workbench.patterns.window import Window

CHUNK = 1 << 22  # cells of windows held at once: a few hundred MB at most
MOST = 1 << 53  # of a window: sums with positions stay within 64 bits


class Neighborhood(Pattern):
    """visible(h, i, j) = |x(i) - x(j)| <= radius on every axis, x(i) being the grid cell of token i.

    Clipped at the border. shape: one to any number of axes, the last one fastest. radius: an int, or one an axis.
    ordering: of `workbench.orderings`, token i is the cell ordering.curve[i]; None is row-major. Where the ordering
    leaves cells out, those are no tokens. N is the number of tokens. On a line this is `Window(2 * radius)`, which has
    no N of its own.

    The options of NATTEN (arXiv 2504.16922), each one value or one an axis, act on every axis for itself. Its
    kernel_size is 2 * radius + 1, so that a radius of 3.5 means windows of 8, with 4 cells before and 3 behind.
    causal: of the window only the cells up to the query's own: NATTEN's kernel_size is radius + 1 there.
    dilation: only cells whose distance is a multiple of it, up to `radius` such steps.
    stride, at most the window: so many cells in a row share the window of the one in their middle (of the last where
    causal), which with stride = window makes blocks. offset: the first such row has only so many cells.
    border: "clip", or "shift", as NATTEN does it: windows that would leave the grid are moved back, so that all have
    the same size; that of a row of cells which is cut short is the last cell's.
    """

    same_heads = sees_itself = True

    def __init__(
        self, shape, radius, ordering=None, causal=False, dilation=1, stride=1, offset=0, border="clip"
    ):  # fmt: skip
        self.shape = orderings.shape_of(shape)
        many = len(self.shape)
        self.radius = _radius(radius, many)
        if ordering is not None and not isinstance(ordering, orderings.Ordering):
            raise ValueError(f"ordering={ordering!r}: want an ordering, e.g. orderings.hilbert({self.shape}), or None")
        if ordering is not None and ordering.shape != self.shape:
            raise ValueError(f"ordering={ordering.name} of shape {ordering.shape}: want the shape {self.shape}")
        self.ordering = ordering
        flags = [flag("causal", x) for x in causal] if several(causal) else [flag("causal", causal)] * many
        if len(flags) != many:
            raise ValueError(f"causal={causal!r}: want True or False, or {many} of them")
        self.causal_axes = tuple(flags)
        self.dilation, self.stride = axes("dilation", dilation, many, 1), axes("stride", stride, many, 1)
        self.offset, self.border = axes("offset", offset, many, 0), choice("border", border, "clip", "shift")
        self.causal = ordering is None and all(self.causal_axes)
        self._check_windows()
        defaults = {"causal": False, "dilation": 1, "stride": 1, "offset": 0}
        given = {"causal": self.causal_axes} | {x: getattr(self, x) for x in ("dilation", "stride", "offset")}
        self.options = {x: list(value) for x, value in given.items() if set(value) != {defaults[x]}}
        self.options |= {"border": border} if border != "clip" else {}

    def _check_windows(self):
        for axis, (side, r, causal) in enumerate(zip(self.shape, self.radius, self.causal_axes, strict=True)):
            stride, offset, window = self.stride[axis], self.offset[axis], int(min(r, MOST) * (2 - causal)) + 1
            if causal and r % 1:
                raise ValueError(f"radius={self.radius}: want an int on axis {axis}, which is causal")
            if stride > window or offset >= stride:
                want = f"want at most the window of {window} and an offset below the stride"
                raise ValueError(f"stride={self.stride}, offset={self.offset}: on axis {axis} {want}")
            if self.border == "shift" and not causal and window * self.dilation[axis] > side:
                words = f"windows of {window} cells with dilation {self.dilation[axis]} do not fit"
                raise ValueError(f"border='shift': on axis {axis} of {side} {words}: want a smaller radius, or 'clip'")

    @property
    def by_value(self) -> bool:
        return self.ordering is None

    @property
    def plain(self) -> bool:
        """Whether the window of every cell is what is within an int's radius, clipped at the border: no options."""
        return not self.options and all(isinstance(r, int) for r in self.radius)

    @cached_property
    def line(self) -> Window | None:
        """The window with the same pairs, where the grid is a line in its own order and there are no options."""
        there = len(self.shape) == 1 and self.ordering is None and self.plain
        return Window(max(1, 2 * self.radius[0])) if there else None

    @cached_property
    def windows(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each axis (place, low, high), int64 (side,): where cells are when those that a dilation connects lie
        together, and, of the cell at each place, its window: from which place to which. Every cell is in its own."""
        sizes = self.shape, self.radius, self.causal_axes, self.dilation, self.stride, self.offset
        return [_windows(*axis, self.border == "shift") for axis in zip(*sizes, strict=True)]

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
        seen, places = torch.ones((), dtype=torch.bool, device=i.device), (self.coordinates(i), self.coordinates(j))
        if self.plain:
            for x, y, radius in zip(*places, self.radius, strict=True):
                seen = seen & ((x.int() - y.int()).abs() <= min(radius, 2**31 - 1))  # int32: half the traffic
            return seen
        for x, y, window in zip(*places, self.windows, strict=True):
            place, low, high = (table.to(i.device) for table in window)
            seen = seen & (place[y] >= low[place[x]]) & (place[y] <= high[place[x]])
        return seen

    def _pairs(self, n, heads, nq):
        if self.ordering is None and nq == n:  # windows are boxes: one axis times the other
            return [math.prod(int((high - low + 1).sum()) for _, low, high in self.windows)] * heads
        return [int(self.keys()[n - nq :].sum())] * heads

    def keys(self) -> Tensor:
        """int64 (N,): how many keys each token sees."""

        def make():
            cells = self._laid(self.rank >= 0).long().view(self.shape)
            for axis, (place, low, high) in enumerate(self.windows):  # the sums over the windows, axis by axis
                below = torch.cat([torch.zeros_like(cells.narrow(axis, 0, 1)), cells.cumsum(axis)], axis)
                cells = below.index_select(axis, high[place] + 1) - below.index_select(axis, low[place])
            return cells.flatten()[self.curve]

        return self.kept("keys", (), make)

    def _laid(self, cells: Tensor) -> Tensor:
        """What the cells of the grid have, at their places."""
        cells = cells.view(self.shape)
        for axis, (place, _, _) in enumerate(self.windows):
            cells = cells.index_select(axis, place.argsort())
        return cells.flatten()

    _distinct = _pairs

    def _blocks(self, n, heads, nq, block_size):
        """Exact, in time that grows with the cells in the windows of each block of queries, not with the pairs."""
        if self.line:
            return self.line._blocks(n, heads, nq, block_size)
        bq, bk = block_size
        first, cols = (n - nq) // bq, -(-n // bk)
        rows = -(-n // bq) - first if nq else 0
        token, queries = self._laid(self.rank), torch.arange(n - nq, n)
        cell, key_block = token.argsort()[len(token) - nq :], torch.where(token >= 0, token // bk, cols)
        inside, boxes = self._bounds(queries, bq, first, rows, False), self._bounds(torch.arange(n), bk, 0, cols, True)
        reach = math.prod(int((high - low).max()) + 1 for _, low, high in self.windows)
        step = max(1, CHUNK // max(1, cols, min(math.prod(self.shape), bq * reach)))
        parts = []
        for a in range(0, rows, step):
            some = slice(max(0, (first + a) * bq - (n - nq)), max(0, (first + a + step) * bq - (n - nq)))
            seen = self._widen((queries[some] // bq - first - a) * len(token) + cell[some])
            block = seen // len(token)
            visible = torch.zeros(min(step, rows - a), cols + 1, dtype=torch.bool)  # the last of cells without a token
            visible[block, key_block[seen - block * len(token)]] = True
            x, y = visible[:, :cols].nonzero(as_tuple=True)
            parts.append((x.bincount(minlength=len(visible)), y.int(), _within(inside[:, :, x + a], boxes[:, :, y])))
        return Blocks.joined(block_size, n, nq, 1, parts)

    def _widen(self, cell: Tensor) -> Tensor:
        """The cells in the windows of cells, each once; of several grids, through which cells are counted on. Axis by
        axis, from the cells of a line in order, each of which adds what the one before has not: windows begin and end
        no earlier than that one's."""
        stride = 1
        for side, (_, low, high) in zip(self.shape[::-1], self.windows[::-1], strict=True):
            x = cell // stride % side
            key = ((cell - x * stride) * side + x).sort().values
            line, x = key // side, key % side
            begin, after = low[x], torch.where(line[1:] == line[:-1], high[x[:-1]] + 1, 0)
            begin[1:] = begin[1:].maximum(after)
            many = (high[x] - begin + 1).clamp(min=0)
            cell = line.repeat_interleave(many) + ranges(begin, many) * stride
            stride *= side
        return cell

    @on_host()
    def near(self, token: Tensor) -> Tensor:
        """int64, ascending: the tokens that some tokens (M,) see, which are those that see one of them. There are no
        options (`plain`)."""
        found = self.rank[self._widen(self.curve[token])]
        return found[found >= 0].sort().values

    def _bounds(self, token: Tensor, size: int, first: int, blocks: int, keys: bool) -> Tensor:
        """int64 (axes, 2, blocks): of each block, from which place to which its tokens are (keys), or what is in the
        windows of all of them (queries)."""
        group = token // size - first
        bounds = torch.empty(len(self.shape), 2, blocks, dtype=torch.int64)
        for axis, (x, (place, low, high)) in enumerate(zip(self.coordinates(token), self.windows, strict=True)):
            x = place[x]
            ends, least = ((x, x), ("amin", "amax")) if keys else ((low[x], high[x]), ("amax", "amin"))
            for side in (0, 1):
                bounds[axis, side].scatter_reduce_(0, group, ends[side], least[side], include_self=False)
        return bounds

    def spec(self):
        ordering = None if self.ordering is None else self.ordering.spec()
        spec = {"pattern": "Neighborhood", "shape": list(self.shape), "radius": list(self.radius), "ordering": ordering}
        return spec | self.options

    @classmethod
    def from_spec(cls, ordering=None, **rest):
        return cls(ordering=None if ordering is None else orderings.from_spec(ordering), **rest)

    @property
    def short_name(self):
        radius = self.radius[:1] if len(set(self.radius)) == 1 else self.radius
        if self.line:
            return f"window-{2 * radius[0]}"  # as `Window` calls it
        parts = ["neighborhood", "x".join(map(str, radius))] + ([] if self.ordering is None else [self.ordering.name])
        for name, value in self.options.items():
            each = [int(x) for x in value] if isinstance(value, list) else [value]
            each = each[:1] if len({*each}) == 1 else each
            parts += [] if name == "causal" and self.causal else [name, "x".join(map(str, each))]
        return "-".join(parts)

    @property
    def name(self):
        return super().name + ("-of-" + "x".join(map(str, self.shape)) if len(self.shape) > 1 else "")

    def __repr__(self):
        ordering = "" if self.ordering is None else f", ordering={self.ordering!r}"
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"Neighborhood({self.shape}, radius={self.radius}{ordering}{options})"


def swin(shape, window, shift=0, ordering=None) -> Neighborhood:
    """Windows that do not overlap (Swin, arXiv 2103.14030): a token sees those of its own window of the grid.

    shape, ordering: the grid and the order of its cells, as of `Neighborhood`. window, shift (below the window): an
    int, or one an axis. The windows begin `shift` cells behind the border, so that those at the border are smaller:
    what Swin's cyclic shift and its masks amount to.
    """
    window = axes("window", window, len(orderings.shape_of(shape)), 1)
    radius = [w // 2 if w % 2 else (w - 1) / 2 for w in window]
    return Neighborhood(shape, radius, ordering, stride=window, offset=shift)


def _radius(value, many: int) -> tuple[int | float, ...]:
    """An int or a half for each of `many` axes."""
    given = value if several(value) else [value] * many
    halves = [0.5 if isinstance(x, float) and x > 0 and x % 1 == 0.5 else 0 for x in given]
    if not any(halves):
        return axes("radius", value, many, 0)
    floors = [int(x) if half else x for x, half in zip(given, halves, strict=True)]
    return tuple(x + half for x, half in zip(axes("radius", floors, many, 0), halves, strict=True))


def _windows(side: int, radius, causal: bool, dilation: int, stride: int, offset: int, shift: bool):
    """`Neighborhood.windows` of one axis."""
    cell, step, radius = torch.arange(side), min(dilation, side), min(radius, MOST)
    residue, x = cell % step, cell // step
    start, many = residue * (side // step) + residue.clamp(max=side % step), (side - 1 - residue) // step + 1
    leader = (x - offset).div(stride, rounding_mode="floor") * stride + offset + (stride - 1 if causal else stride // 2)
    leader = leader.minimum(many - 1) if shift else leader
    back, ahead = (radius, 0) if causal else (math.ceil(radius), math.floor(radius))
    low = (leader - back).clamp(min=0)
    low = low.minimum(many - (back + ahead + 1)) if shift and not causal else low
    high = x if causal else (low if shift else leader - back) + back + ahead
    order = (start + x).argsort()
    return start + x, (start + low)[order], (start + high.minimum(many - 1))[order]


def _within(inner: Tensor, outer: Tensor) -> Tensor:
    """bool (blocks,): the blocks whose pairs are all visible: on every axis, what all queries see has all keys."""
    return ((inner[:, 0] <= outer[:, 0]) & (inner[:, 1] >= outer[:, 1])).all(0)
