"""Orderings: in which order the cells of a grid become tokens.

An ordering visits every cell of a grid once. `curve[i]` is the row-major index of the i-th cell visited, `rank` its
inverse: `rank[cell]` is the place of a cell in the sequence. A good ordering keeps neighbours in the grid close in the
sequence, so that a local attention touches few blocks of the (query, key) matrix.

Shapes are (W,), (H, W) or (D, H, W); the last axis is the fastest in row-major order.
"""

from __future__ import annotations

import math
from copy import deepcopy
from functools import cached_property

import torch
from torch import Tensor

from workbench.patterns.checks import Value, axes, describe, on_host, several, unwritten, whole, wholes


class Ordering(Value):
    """The cells of a grid in the order in which they are tokens; `restrict` leaves some of them out.

    name: short, for tables and records, e.g. hilbert, tiles-8x16
    shape: the grid
    curve: int64 (N,), row-major index (in the whole grid) of token i's cell; each cell at most once. It is copied.
    source: the constructor call as JSON-able data; empty for an ordering made by hand
    """

    def __init__(self, name: str, shape, curve, source: dict | None = None):
        self.name, self.shape, self.source = name, shape_of(shape), deepcopy(source or {})
        curve = torch.as_tensor(curve)
        if curve.ndim != 1 or curve.is_floating_point() or curve.dtype == torch.bool or curve.is_meta:
            raise ValueError(f"curve={describe(curve)} on {curve.device}: want integers, one a token")
        with torch.inference_mode(False):
            self._curve = curve.detach().to("cpu", torch.int64, copy=True).data  # whose version is 0

    @property
    def curve(self) -> Tensor:
        return unwritten(f"curve of {self.name}", self._curve)

    @property
    def rank(self) -> Tensor:
        """int64 (cells,): the token of each cell of the grid, -1 where a cell is no token."""
        return unwritten(f"rank of {self.name}", self._inverse[0])

    @cached_property
    def _inverse(self) -> tuple[Tensor]:
        cells, curve = math.prod(self.shape), self.curve
        if len(self) and not 0 <= int(curve.min()) <= int(curve.max()) < cells:
            raise ValueError(f"curve of {self.name}: cells outside the grid {self.shape}: want 0 to {cells - 1}")
        with on_host():
            rank = torch.full((cells,), -1)
            rank[curve] = torch.arange(len(self))
            rank = rank.data  # whose version is 0
        if int((rank >= 0).sum()) != len(self):
            raise ValueError(f"curve of {self.name}: a cell is visited twice: want each at most once")
        return (rank,)

    def __len__(self) -> int:
        """Tokens: the cells of the grid, or the occupied ones where it was restricted."""
        return len(self.curve)

    @cached_property
    def coordinates(self) -> Tensor:
        """int64 (N, axes): the cell of each token, one column an axis of the grid (row, column)."""
        return torch.stack(torch.unravel_index(self.curve, self.shape), 1)

    @property
    def steps(self) -> Tensor:
        """int64 (N - 1,): how far each token is from the one before, summed over the axes: 1 is a unit step."""
        return self.coordinates.diff(dim=0).abs().sum(1)

    @property
    def jumps(self) -> int:
        """Steps that do not go to an adjacent cell (a diagonal one included): 0 for a continuous curve."""
        return int((self.steps > 1).sum())

    def restrict(self, mask: Tensor) -> Ordering:
        """The same order over the occupied cells alone: mask is bool, of the grid's shape, True where there is a token.

        curve[i] is then the index, in the whole grid, of the i-th occupied cell; rank stays as long as the grid and is
        -1 elsewhere, so that rank[curve] == arange holds here too.
        """
        mask = torch.as_tensor(mask)
        if mask.dtype != torch.bool or tuple(mask.shape) != self.shape:
            raise ValueError(f"mask={describe(mask)}: want torch.bool {self.shape}, one entry a cell")
        occupied = mask.flatten() & (self.rank >= 0)
        # as alternating run lengths, empty cells first: a region is a few runs a row
        runs = occupied.unique_consecutive(return_counts=True)[1].tolist()
        source = self.spec() | {"runs": [0] * bool(occupied[0]) + runs}
        return Ordering(self.name, self.shape, self.curve[occupied[self.curve]], source)

    def arrange(self, cells: Tensor, dim: int = 1) -> Tensor:
        """A tensor with the grid's cells along `dim`, row-major -> with the tokens along it, in this order."""
        if cells.shape[dim] != len(self.rank):
            want = f"want {len(self.rank)}, the grid's {self.shape}"
            raise ValueError(f"{cells.shape[dim]} cells along dim {dim}: {want}")
        return cells.index_select(dim, self.curve.to(cells.device))

    def restore(self, tokens: Tensor, dim: int = 1, fill: float = 0) -> Tensor:
        """The inverse of `arrange`; cells that are no token get `fill`."""
        if tokens.shape[dim] != len(self):
            raise ValueError(f"{tokens.shape[dim]} tokens along dim {dim}: want {len(self)}, those of this ordering")
        size = list(tokens.shape)
        size[dim] = len(self.rank)
        return tokens.new_full(size, fill).index_copy(dim, self.curve.to(tokens.device), tokens)

    def spec(self) -> dict:
        """The call that made this, as JSON-able data; `from_spec` is its inverse."""
        if self.source:
            return deepcopy(self.source)
        return {"ordering": self.name, "shape": list(self.shape), "curve": self.curve.tolist()}

    def __reduce__(self):  # copied as it is made: a tensor that pickle has filled counts as written to
        return Ordering, (self.name, self.shape, self.curve, self.source)

    def __repr__(self) -> str:
        """A call that makes it; of one made by hand or restricted, what it is in words."""
        if not self.source or "runs" in self.source:
            return f"<{self.name} of {len(self):,} tokens on {self.shape}>"
        arguments = [f"{k}={v!r}" for k, v in self.source.items() if k != "ordering"]
        return f"orderings.{self.source['ordering']}({', '.join(arguments)})"


@on_host()
def row_major(shape) -> Ordering:
    """Row by row, as tensors are flattened."""
    shape = shape_of(shape)
    return _ordering("row_major", shape, torch.arange(math.prod(shape)))


@on_host()
def snake(shape) -> Ordering:
    """Row by row, every other row backwards (and every other plane of a box): each step is to an adjacent cell."""
    shape, curve = shape_of(shape), torch.zeros(1, dtype=torch.int64)
    for side in reversed(shape):
        lines = torch.arange(side)[:, None] * len(curve) + curve  # (side, cells of the inner axes)
        lines[1::2] = lines[1::2].flip(1)
        curve = lines.flatten()
    return _ordering("snake", shape, curve)


@on_host()
def tiles(shape, tile) -> Ordering:
    """Tile by tile in row-major order, row-major within a tile; tiles at the far borders may be smaller.

    tile: an int, or one an axis.
    """
    shape = shape_of(shape)
    tile = axes("tile", tile, len(shape), 1)
    name = "tiles-" + "x".join(map(str, tile))
    sizes = [min(t, s) for t, s in zip(tile, shape, strict=True)]
    counts = [-(-s // t) for s, t in zip(shape, sizes, strict=True)]
    padded = torch.full([c * t for c, t in zip(counts, sizes, strict=True)], -1)
    padded[tuple(slice(s) for s in shape)] = torch.arange(math.prod(shape)).view(shape)
    split = padded.view([side for pair in zip(counts, sizes, strict=True) for side in pair])  # (count, size) an axis
    counted = range(0, 2 * len(shape), 2)
    curve = split.permute(*counted, *(place + 1 for place in counted)).flatten()
    return _ordering("tiles", shape, curve[curve >= 0], name=name, tile=list(tile))


@on_host()
def morton(shape) -> Ordering:
    """Z-order: by the interleaved bits of the coordinates (the column's lowest), cells outside the grid left out.

    Any shape: the curve of the bounding box of powers of two, at most 2 ** axes times as large. Source: G. M. Morton, A
    computer oriented geodetic data base and a new technique in file sequencing, IBM, 1966.
    """
    shape = shape_of(shape)
    bits = [(s - 1).bit_length() for s in shape]
    shifts = [sum(bits[axis + 1 :]) for axis in range(len(shape))]  # of each axis in a row-major index of the box
    box = torch.zeros(1, dtype=torch.int64)
    for bit in range(max(bits)):
        for axis in reversed(range(len(shape))):
            if bit < bits[axis]:
                box = torch.cat([box, box + (1 << (shifts[axis] + bit))])
    if len(box) == math.prod(shape):
        return _ordering("morton", shape, box)
    curve, inside = torch.zeros_like(box), torch.ones_like(box, dtype=torch.bool)
    for size, shift, b in zip(shape, shifts, bits, strict=True):
        coordinate = (box >> shift) & ((1 << b) - 1)
        inside &= coordinate < size
        curve.mul_(size).add_(coordinate)
    return _ordering("morton", shape, curve[inside])


@on_host()
def hilbert(shape) -> Ordering:
    """A Hilbert curve over any rectangle or box.

    (H, W): every step is to an adjacent cell, except for at most one diagonal where the longer side is odd and the
    shorter even. On squares of side 2^p it is the classic curve, from (0, 0) to (0, W - 1). (D, H, W): unit steps where
    all sides are even; else `jumps` tells how many are not.

    Sources: D. Hilbert, Ueber die stetige Abbildung einer Linie auf ein Flaechenstueck, Math. Annalen 38, 1891; the
    generalisation to any side by splitting at even sizes, and its form in three dimensions: J. Cerveny, gilbert
    (github.com/jakubcerveny/gilbert), after L. Tautenhahn, Draw a space-filling curve of arbitrary size, 2003.
    """
    shape = shape_of(shape)
    if len(shape) > 3:
        raise ValueError(f"shape={shape}: a Hilbert curve is made for one, two or three axes")
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # longest first, then fastest
    sides = sorted(zip(shape, strides, strict=True), key=lambda side: (-side[0], side[1]))
    sides += [(1, 0)] * (3 - len(sides))
    curve = torch.empty(math.prod(shape), dtype=torch.int64)
    _fill_hilbert(curve, 0, tuple(s for s, _ in sides), tuple(t for _, t in sides), {})
    return _ordering("hilbert", shape, curve)


@on_host()
def random(shape, seed: int = 0) -> Ordering:
    """A random order of the cells: no locality at all, the other end of the scale."""
    shape, seed = shape_of(shape), whole("seed", seed, 0)
    curve = torch.randperm(math.prod(shape), generator=torch.Generator().manual_seed(seed))
    return _ordering("random", shape, curve, name=f"random-{seed}", seed=seed)


@on_host()
def from_spec(spec: dict) -> Ordering:
    """The ordering that `Ordering.spec` describes."""
    makers = {f.__name__: f for f in (row_major, snake, tiles, morton, hilbert, random)}
    spec = dict(spec)
    name, runs, curve = spec.pop("ordering"), spec.pop("runs", None), spec.pop("curve", None)
    if curve is None and name not in makers:
        raise ValueError(f"ordering={name!r}: want one of {', '.join(makers)}, or a curve")
    ordering = makers[name](**spec) if curve is None else Ordering(name, curve=torch.tensor(curve), **spec)
    if runs is not None:
        occupied = torch.arange(len(runs)).remainder(2).bool().repeat_interleave(torch.tensor(runs))
        ordering = ordering.restrict(occupied.view(ordering.shape))
    return ordering


def shape_of(shape) -> tuple[int, ...]:
    """A grid's shape as a tuple of positive ints, one an axis (an int is one axis)."""
    return wholes("shape", shape, 1) if several(shape) else (whole("shape", shape, 1),)


def _ordering(maker: str, shape, curve, name: str | None = None, **arguments) -> Ordering:
    return Ordering(name or maker, shape, curve, {"ordering": maker, "shape": list(shape), **arguments})


def _fill_hilbert(out: Tensor, start: int, sides, strides, done: dict) -> None:
    """Write the curve over a box into `out`: from its first corner, index `start`, to the far end of its first side.

    sides (a, b, c) and strides (signed: the direction in which each side is walked). There are few distinct (sides,
    strides), so each is laid out once and copied, shifted, wherever it recurs: one pass over memory in all.
    """
    key = sides, strides
    if key in done:
        known, known_start = done[key]
        torch.add(known, start - known_start, out=out)
        return
    done[key] = out, start
    long = [axis for axis in range(3) if sides[axis] > 1]
    if len(long) <= 1:
        step = strides[long[0]] if long else 0
        torch.add(start, torch.arange(len(out)), alpha=step, out=out)
        return
    at = 0
    for corner, part in _parts(sides, [stride < 0 for stride in strides]):
        axes = [abs(axis) - 1 for axis, _ in part]
        size = tuple(size for _, size in part)
        stride = tuple(strides[a] if axis > 0 else -strides[a] for a, (axis, _) in zip(axes, part, strict=True))
        first = start + sum(c * s for c, s in zip(corner, strides, strict=True))
        _fill_hilbert(out[at : at + math.prod(size)], first, size, stride, done)
        at += math.prod(size)


def _parts(sides, backwards):
    """The boxes, in the order visited, that a box with these sides is cut into.

    Each is (its first corner, its three sides as (axis, size)), the first of the sides being the one along which it
    begins and ends; axes are A, B, C, negative where walked backwards. Consecutive boxes touch: one ends where the next
    begins. Halves are even where they can be, as only an odd side makes a diagonal step; else the smaller half of
    a side is the one nearer to cell 0.
    """
    A, B, C = 1, 2, 3
    a, b, c = sides
    halves = [(side + back) // 2 for side, back in zip(sides, backwards, strict=True)]
    p, q, r = (half + (half % 2 if side > 2 else 0) for half, side in zip(halves, sides, strict=True))
    if a == 1:  # begins and ends on one corner, which no curve over a plane does: leave along the longer side
        whole = [(B, b), (C, c), (A, a)] if b >= c else [(C, c), (B, b), (A, a)]
        return [((0, 0, 0), whole)]
    if 2 * a > 3 * b and 2 * a > 3 * c:  # long: two boxes, end to end
        return [((0, 0, 0), [(A, p), (B, b), (C, c)]), ((p, 0, 0), [(A, a - p), (B, b), (C, c)])]
    if b == 1 or c == 1:
        p = halves[0]  # in a plane, the side walked across may be halved anywhere
    if 3 * b > 4 * c:  # flat: out along b, across along a, back along b
        return [
            ((0, 0, 0), [(B, q), (C, c), (A, p)]),
            ((0, q, 0), [(A, a), (B, b - q), (C, c)]),
            ((a - 1, q - 1, 0), [(-B, q), (C, c), (-A, a - p)]),
        ]
    if 3 * c > 4 * b:  # the same along c
        return [
            ((0, 0, 0), [(C, r), (A, p), (B, b)]),
            ((0, 0, r), [(A, a), (B, b), (C, c - r)]),
            ((a - 1, 0, r - 1), [(-C, r), (-A, a - p), (B, b)]),
        ]
    return [  # a cube, or nearly one
        ((0, 0, 0), [(B, q), (C, r), (A, p)]),
        ((0, q, 0), [(C, c), (A, p), (B, b - q)]),
        ((0, q - 1, c - 1), [(A, a), (-B, q), (-C, c - r)]),
        ((a - 1, q, c - 1), [(-C, c), (-A, a - p), (B, b - q)]),
        ((a - 1, q - 1, 0), [(-B, q), (C, r), (-A, a - p)]),
    ]
