"""A pattern says which (head, query, key) pairs attend; everything else is derived from that one function.

Dimensions: B batch, N keys, Nq queries (the last Nq of the N positions), H heads; i and j are absolute positions of a
query and a key, h is a query head.
"""

from __future__ import annotations

import json
import operator
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from workbench.patterns import tables
from workbench.patterns.checks import LIVING, Value, axes, on_host, whole

T = TypeVar("T")
TILE = 1 << 22  # pairs in a tile of a generic count: 32 MB of int64


@dataclass(frozen=True)
class Blocks:
    """The blocks of the (query, key) grid that hold a visible pair, row by row (CSR).

    Block boundaries are absolute positions: query block a covers [a * bq, (a + 1) * bq), and `first` is the first block
    that holds a query. `layouts` is 1 where all heads share one layout, else the number of heads.

    starts: int64 (layouts * rows + 1), row x of layout g spans columns[starts[g * rows + x] : starts[g * rows + x + 1]]
    columns: int32, key blocks, ascending within a row
    full: bool, True only where every pair of the block that exists is visible exactly once (else ask `Pattern.count`)
    used: int64, ascending, the key blocks of all rows together; None where nobody asked for them
    """

    block_size: tuple[int, int]
    n: int
    nq: int
    layouts: int
    starts: Tensor
    columns: Tensor
    full: Tensor
    used: Tensor | None = None

    @property
    def first(self) -> int:
        return (self.n - self.nq) // self.block_size[0]

    @property
    def rows(self) -> int:
        return -(-self.n // self.block_size[0]) - self.first if self.nq else 0

    @property
    def cols(self) -> int:
        return -(-self.n // self.block_size[1])

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.starts, self.columns, self.full, self.used) if t is not None)

    @property
    def line(self) -> Tensor:
        """int64 (blocks,): the row of each block, counted on through the layouts."""
        return torch.arange(len(self.starts) - 1, device=self.starts.device).repeat_interleave(self.starts.diff())

    @property
    def place(self) -> tuple[Tensor, Tensor]:
        """int64 (blocks,): the layout of each block, and its row, counted from the first that holds a query."""
        line = self.line
        return line // max(1, self.rows), line % max(1, self.rows)

    def to(self, device) -> Blocks:
        moved = (t if t is None else t.to(device) for t in (self.starts, self.columns, self.full, self.used))
        return Blocks(self.block_size, self.n, self.nq, self.layouts, *moved)

    def row_counts(self) -> Tensor:
        """int64 (2, layouts, rows): how many blocks each row has, and how many of them are full.

        A last key block that is shorter than the others counts as not full.
        """
        full = self.full
        if self.n % self.block_size[1]:
            full = full & (self.columns < self.cols - 1)
        counts = torch.stack([self.starts.diff(), torch.bincount(self.line[full], minlength=len(self.starts) - 1)])
        return counts.view(2, self.layouts, self.rows)

    @classmethod
    def joined(cls, block_size, n, nq, layouts: int, parts) -> Blocks:
        """From (how many blocks each row has, their columns, full) of some rows after the other."""
        nothing = [torch.zeros(size, dtype=t) for size, t in ((1, torch.int64), (0, torch.int32), (0, torch.bool))]
        widths, columns, full = (torch.cat(each) for each in zip(nothing, *parts, strict=True))
        return cls(block_size, n, nq, layouts, widths.cumsum(0), columns, full)

    @classmethod
    def of(cls, block_size, n, nq, layouts: int, key: Tensor, full: Tensor):
        """From the blocks' keys, ascending: line * cols + column."""
        grid = cls.joined(block_size, n, nq, layouts, [])
        cols, lines = max(1, grid.cols), layouts * grid.rows
        widths = (key // cols).bincount(minlength=lines)
        return cls.joined(block_size, n, nq, layouts, [(widths, (key % cols).int(), full)])

    @property
    def key(self) -> Tensor:
        return self.line * self.cols + self.columns

    def coarser(self, block_size: tuple[int, int]) -> Blocks:
        """The same for blocks of multiples of these sizes."""
        up, across = (b // a for a, b in zip(self.block_size, block_size, strict=True))
        new = Blocks(block_size, self.n, self.nq, self.layouts, self.starts, self.columns, self.full)
        if up == across == 1 or not self.rows:
            return new
        layout, row = self.place
        row = row + self.first
        key = (layout * new.rows + row // up - new.first) * new.cols + self.columns // across
        key, place = key.unique(return_inverse=True)
        row, column = key // new.cols % new.rows + new.first, key % new.cols
        high = ((row + 1) * up).clamp(max=self.first + self.rows) - (row * up).clamp(min=self.first)
        wide = ((column + 1) * across).clamp(max=self.cols) - column * across
        full = place[self.full].bincount(minlength=len(key)) == high * wide
        return Blocks.of(block_size, self.n, self.nq, self.layouts, key, full)


def _answer(key: str, question: Callable[..., T], *args) -> T:
    return question(LIVING[key], *args)


def _key_of(spec: dict) -> str:
    return json.dumps(spec)


# What torch.compiler.assume_constant_result sets; calling it would import the compiler, which takes two seconds.
_answer._dynamo_marked_constant = _key_of._dynamo_marked_constant = True


def _constant(spec):
    """A spec whose numbers are constants of the compiled function, no lengths that torch.compile leaves open."""
    if isinstance(spec, dict):
        return {name: _constant(value) for name, value in spec.items()}
    if isinstance(spec, (list, tuple)):
        return [*map(_constant, spec)]
    return operator.index(spec) if type(spec) is int else spec


class Pattern(Value):
    """What attends to what. Subclasses define `count` and `_blocks`, and override what they have a closed form for.

    Every method takes `n` (keys), `heads` (query heads) and `nq` (queries: the last nq of the n positions; default n).
    A pattern does not change once it is made: tensors that it is made of are copied, and so is what a user's function
    reads (`patterns.frozen`).
    """

    causal = False
    same_heads = False  # whether all heads see the same, however many there are
    batch: int | None = None  # the batch size where the pattern differs by batch entry
    sees_itself = False  # whether every query sees its own key
    everywhere = False  # whether its blocks come from looking at all pairs
    by_value = False  # whether a few numbers say all of it, of this class itself: an equal one finds what was kept

    @property
    def by_spec(self) -> bool:
        """Whether its spec says all of it; not of a subclass, which may mean something else."""
        return "by_value" in vars(type(self)) and self.by_value

    def _finish(self, new=False):
        super()._finish()
        if new and "by_value" in vars(type(self)) and self.by_value:
            vars(self)["_kept"] = tables.of_equal((type(self), repr(self)), self._kept)

    def __getattr__(self, name):
        """What `_finish` sets, of a pattern made where torch.compile traces, which calls __init__ alone: in the graph
        its spec is the key of an equal one, made outside; what leaves the graph is finished when it is asked."""
        if name not in ("_kept", "key"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if not torch.compiler.is_compiling():
            self._finish(new=True)
            return vars(self)[name]
        if not self.by_spec:
            raise ValueError(f"{type(self).__name__} in a function that torch.compile compiles: make it outside of it")
        return _key_of(_constant(self.spec()))

    def kept(self, what: str, key: tuple, make: Callable[[], T]) -> T:
        """make(), kept with the pattern as `what` and by its key: of the sizes that were asked for last.

        Made `on_host`.
        """
        held = self._kept.setdefault(what, {})
        try:
            found = held.pop(key)
        except KeyError:
            tables.make_room(held)  # the last one goes before the next is made
            with on_host():
                found = make()
        held[key] = found
        return found

    def answer(self, question: Callable[..., T], *args) -> T:
        """question(self, *args), which torch.compile asks once, for this pattern, and takes as a constant."""
        return _answer(self.key, question, *args)

    def for_batch(self, b: int) -> Pattern:
        """The pattern of one batch entry: itself where all have the same."""
        return self

    def each(self) -> list[Pattern]:
        """The patterns of the batch entries, or the one that all have."""
        return [self] if self.batch is None else [self.for_batch(b) for b in range(self.batch)]

    def divisor(self, heads: int) -> int:
        """What the output of the softmax is divided by."""
        return 1

    def count(self, h: Tensor, i: Tensor, j: Tensor, n: int, heads: int) -> Tensor:
        """How often query i of head h sees key j, causality included: broadcastable int64 tensors -> bool or int."""
        raise NotImplementedError

    def check(self, n: int, heads: int, nq: int | None = None) -> tuple[int, int, int]:
        """(n, heads, nq) as ints; ValueError where the pattern does not apply to these sizes."""
        n, heads = whole("n", n, 0), whole("heads", heads, 0)
        nq = n if nq is None else whole("nq", nq, 0)
        if nq > n:
            raise ValueError(f"nq={nq} queries on n={n} keys: queries are the last nq positions, so 0 <= nq <= n")
        return n, heads, nq

    def _ask(self, answer: Callable[..., T], n, heads, nq, *more) -> T:
        sizes = self.check(n, heads, nq)
        with on_host():
            return answer(*sizes, *more)

    def multiplicity(self, n: int, heads: int, nq: int | None = None) -> Tensor:
        """int32 (heads, nq, n): how often each query sees each key. For small n: the picture, and the oracle's mask."""
        return self._ask(self._multiplicity, n, heads, nq)

    def pairs(self, n: int, heads: int, nq: int | None = None) -> int:
        """Attended (head, query, key) pairs, with multiplicity: what has to be computed."""
        return sum(self._ask(self._pairs, n, heads, nq))

    def distinct(self, n: int, heads: int, nq: int | None = None) -> int:
        """Visible (head, query, key) triples, each counted once."""
        return sum(self._ask(self._distinct, n, heads, nq))

    def uncovered(self, n: int, heads: int, nq: int | None = None) -> int:
        """How many (head, query) rows no key reaches."""
        return sum(self._ask(self._uncovered, n, heads, nq).tolist())

    def coverage(self, n: int, heads: int, nq: int | None = None) -> Tensor:
        """float64 (heads,): the fraction of rows with a visible key."""
        n, heads, nq = self.check(n, heads, nq)
        return 1 - self._ask(self._uncovered, n, heads, nq).double() / max(1, nq)

    def density(self, n: int, heads: int, nq: int | None = None) -> float:
        """Distinct visible pairs over all heads * nq * n, causal or not."""
        n, heads, nq = self.check(n, heads, nq)
        return self.distinct(n, heads, nq) / max(1, heads * nq * n)

    def block_density(self, n: int, heads: int, nq: int | None = None, block_size=None) -> float:
        """Blocks that hold a visible pair, over all blocks and heads. block_size: by default that of `blocks`."""
        blocks = self.blocks(n, heads, nq, block_size)
        return len(blocks.columns) / max(1, blocks.layouts * blocks.rows * blocks.cols)

    def blocks(self, n: int, heads: int, nq: int | None = None, block_size=None) -> Blocks:
        """The blocks that hold a visible pair; one layout where `count` does not depend on the head.

        block_size: an int or (query, key), by default 128 or the pattern's own.
        """
        return self._ask(self._blocks, n, heads, nq, self.block_of(block_size))

    def block_of(self, block_size=None) -> tuple[int, int]:
        """A block size as (query, key); where the pattern has one of its own, that or multiples of it."""
        own = getattr(self, "block_size", None)
        asked = axes("block_size", (own or 128) if block_size is None else block_size, 2, 1)
        if own and any(x % y for x, y in zip(asked, own, strict=True)):
            raise ValueError(f"block_size={block_size!r}: want {own}, the pattern's own, or multiples")
        return asked

    def _tiles(self, n, heads, nq):
        """Yield the count of some rows after the other, (heads, rows, n)."""
        h = torch.arange(heads).view(-1, 1, 1)
        j = torch.arange(n).view(1, 1, -1)
        step = max(1, TILE // max(1, n * heads))
        for start in watched(range(n - nq, n, step), self.name, -(-nq // step)):
            i = torch.arange(start, min(n, start + step)).view(1, -1, 1)
            yield self.count(h, i, j, n, heads).expand(heads, -1, n)

    def _multiplicity(self, n, heads, nq):
        nothing = torch.zeros(heads, 0, n, dtype=torch.int32)
        return torch.cat([nothing, *(count.int() for count in self._tiles(n, heads, nq))], 1)

    def _pairs(self, n, heads, nq) -> list[int]:
        """Of each head."""
        each = (count.sum((1, 2), dtype=torch.int64) for count in self._tiles(n, heads, nq))
        return sum(each, start=torch.zeros(heads, dtype=torch.int64)).tolist()

    def _distinct(self, n, heads, nq) -> list[int]:
        each = ((count > 0).sum((1, 2)) for count in self._tiles(n, heads, nq))
        return sum(each, start=torch.zeros(heads, dtype=torch.int64)).tolist()

    def _uncovered(self, n, heads, nq) -> Tensor:
        """int64 (heads,): rows that no key reaches."""
        if self.sees_itself:
            return torch.zeros(heads, dtype=torch.int64)
        rows = ((count <= 0).all(-1).sum(-1) for count in self._tiles(n, heads, nq))
        return sum(rows, start=torch.zeros(heads, dtype=torch.int64))

    def _blocks(self, n, heads, nq, block_size) -> Blocks:
        raise NotImplementedError

    def spec(self) -> dict:
        """The constructor call as JSON-able data: {"pattern": class name, ...arguments}; `from_spec` is its inverse."""
        raise NotImplementedError

    @property
    def short_name(self) -> str:
        """For records, one at every n, causal or not: e.g. dense, longnet-paper, random-0.90, neighborhood-16."""
        return type(self).__name__.lower()

    @property
    def name(self) -> str:
        """Different where patterns are, but for functions of one name and layouts to which a user gave one name."""
        return self.short_name + "-causal" * self.causal

    def __repr__(self) -> str:
        arguments = (f"{name}={value!r}" for name, value in self.spec().items() if name != "pattern")
        return f"{type(self).__name__}({', '.join(arguments)})"


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


def ranges(begin: Tensor, many: Tensor) -> Tensor:
    """begin[0], begin[0] + 1, ... (many[0] of them), begin[1], ..."""
    return torch.arange(int(many.sum())) - (many.cumsum(0) - many - begin).repeat_interleave(many)
