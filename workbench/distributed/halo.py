"""The halo of a rank: which keys of other ranks its queries see. Found by arithmetic, without communication.

Example: causal dense attention, 8 positions on 2 ranks. Rank 1 holds 4 to 7 and its halo is 0 to 3; that of rank 0 is
empty. A halo is a list of `HeadRows`: positions in the whole sequence, and the key heads for which they are needed. A
key head needs a position if one of the query heads that share it has a query on this rank that sees the position.

A rank's queries are those of its positions that are among the last nq of the sequence's n. Each kind of pattern has its
rule for the rank that holds the positions `own`: `dense`, `DilatedHalo`, `window`, `Neighborhood.near`, and for all
others `listed`, which goes by the pattern's lists of blocks. `Plan.halo` asks the right one, where there are queries.
"""

import itertools
import math
from collections import Counter
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.distributed.shards import Rows, Shards, as_tensor, clip
from workbench.patterns import Dilated, Pattern, Window
from workbench.patterns.base import Blocks
from workbench.patterns.checks import on_host


class HeadRows(NamedTuple):
    """Some key heads, and the positions, ascending, whose rows of k and v are needed for each of them."""

    heads: tuple[int, ...]
    rows: Rows


def queries_of(own: range, n: int, nq: int) -> range:
    """Those of a rank's positions that are queries: among the last nq of n."""
    return range(max(own.start, n - nq), max(own.stop, n - nq)) if own.stop > n - nq else range(0)


def dense(causal: bool, n: int, own: range, work: list[range]) -> Rows:
    """Everything but `own` or, if causal, what of it comes before the last query.

    work: the queries that the rank computes, in ranges, some not empty; other ranks may hold them (`Plan.work`)
    """
    stop = max(x.stop for x in work if x) if causal else n
    return Rows.of([range(stop)]).without(own)


PERIOD = 1 << 22  # of residues that are tabulated; of a longer one, positions are listed to be counted


class Residues:
    """A periodic set of positions: all t with t mod r = o for at least one (o, r) of `classes`, where 0 <= o < r.

    Example: {(0, 4), (1, 2)} are the positions 0, 1, 3, 4, 5, 7, 8, ... `below` counts them without listing them.
    """

    def __init__(self, classes: frozenset[tuple[int, int]]):
        # a class inside another adds nothing, as (o, 2r) inside (o, r)
        held = {(o, r) for o, r in classes for a, s in classes if (a, s) != (o, r) and r % s == 0 and o % s == a}
        self.classes = sorted(classes - held)

    @cached_property
    def table(self) -> np.ndarray:
        """int64 (period + 1,): [x] is how many of the positions 0 ... x - 1 are in the set."""
        period = math.lcm(*(r for _, r in self.classes))
        kept = np.zeros(period + 1, dtype=np.int64)
        for o, r in self.classes:
            kept[1 + o :: r] = 1
        return kept.cumsum()

    def below(self, x: np.ndarray) -> np.ndarray:
        """How many positions of the set are in [0, x), for each x; ints of any shape -> int64 of that shape."""
        x = np.asarray(x, dtype=np.int64)
        if len(self.classes) == 1:
            o, r = self.classes[0]
            return np.maximum(0, (x - o + r - 1) // r)
        if math.lcm(*(r for _, r in self.classes)) > PERIOD:
            return np.searchsorted(self.rows(0, int(x.max(initial=0))).numpy(), x)
        whole, rest = np.divmod(x, len(self.table) - 1)
        return whole * self.table[-1] + self.table[rest]

    def rows(self, start: int, stop: int) -> range | Tensor:
        """The positions of the set in [start, stop), ascending: a range of one class, else int64."""
        pieces = [clip(range(o, stop, r), start, stop) for o, r in self.classes]
        return pieces[0] if len(pieces) == 1 else torch.cat([*map(as_tensor, pieces)]).unique()


def segments(w: int, own: range, queries: range, n: int, causal: bool) -> tuple[range, range, range]:
    """(the segment of w positions that begins before the shard, the run of segments inside it, the segment that ends
    behind it), each empty where there is none. If causal, keys behind the shard do not count: none ends behind it.

    own: the shard; queries: those of its positions that are queries, one at least
    """
    start = queries.start // w * w
    head = range(0)
    if start < own.start:
        head = range(start, min(start + w, n))
        start = head.stop
    stop, tail = own.stop, range(0)
    if not causal and stop % w and stop < n:
        stop = max(start, stop // w * w)
        if stop < own.stop:
            tail = range(stop, min(stop + w, n))
    return head, range(start, stop) if start < stop else range(0), tail


PIECE = 1 << 20  # rows of a run, unless a segment is longer


def runs(pattern: Dilated, own: range, queries: range, n: int, heads: int) -> tuple[dict, dict]:
    """({run of rows of the shard: the branches whose segments inside it are a call}, {branch: [its shorter segment]}).

    Where all branches have one run that holds all queries, that is a call. Else runs are cut where a branch begins or
    ends, so that most rows are in one call for all their branches, and every PIECE rows, since calls of one length
    share lists of blocks. A shorter segment at an end is apart: a kernel that walks these lists would copy the run to
    pad it, and list its blocks twice.
    """
    found, together, lengths = {}, {}, pattern.segment_lengths
    for b, w in enumerate(lengths):
        _, run, _ = segments(w, own, queries, n, pattern.causal)
        if clip(queries, run.start, run.stop) and pattern.head_range(b, heads):
            found[b] = run
    if len({*found.values()}) == 1 and clip(queries, found[min(found)].start, found[min(found)].stop) == queries:
        return {found[min(found)]: [*found]}, {}
    ends = {b: [range(x.stop // lengths[b] * lengths[b], x.stop)] for b, x in found.items()}
    found = {b: range(x.start, ends[b][0].start) for b, x in found.items()}
    step = max([1, *(-(-PIECE // lengths[b]) * lengths[b] for b, x in found.items() if x)])
    borders = {y for x in found.values() for y in (x.start, x.stop, *range(-(-x.start // step) * step, x.stop, step))}
    for b, run in found.items():
        cuts = sorted(x for x in borders if run.start < x < run.stop and x % lengths[b] == 0)
        for piece in itertools.pairwise([run.start, *cuts, run.stop]):
            together.setdefault(range(*piece), []).append(b)
    return together, ends


class Interval(NamedTuple):
    """Positions [start, stop) of other ranks, and by key head the set of those that it needs (None: none of them)."""

    start: int
    stop: int
    residues: tuple[Residues | None, ...]


class DilatedHalo:
    """What dilated attention needs of other ranks, all of it in the segments that cross a border of the shard.

    A branch of segment length w and rate r keeps, in each segment, every r-th position from an offset on, which depends
    on the head. If a head keeps one of the rank's queries in such a segment, it needs all the keys that it keeps there.
    branches: (w, r); offsets: [key head][branch], the different offsets of the query heads that share the key head
    """

    def __init__(self, pattern: Dilated, n: int, nq: int, heads: int, key_heads: int):
        self.pattern, self.n, self.nq, self.key_heads = pattern, n, nq, key_heads
        self.branches = list(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True))
        group = heads // max(1, key_heads)
        table = pattern._offsets(heads).view(key_heads, group, len(self.branches)) if heads else None
        self.offsets = [
            tuple(tuple(sorted({o for o in table[g, :, b].tolist() if o >= 0})) for b in range(len(self.branches)))
            for g in range(key_heads)
        ]
        self._unions: dict[frozenset, Residues] = {}
        self._needed: dict[tuple, tuple[Residues | None, ...]] = {}

    def intervals(self, own: range) -> list[Interval]:
        """Left of the shard and, unless causal, right of it, ascending and disjoint. In each, the same segments lie."""
        queries = queries_of(own, self.n, self.nq)
        if not queries:
            return []
        sides = [(0, own.start)] if self.pattern.causal else [(0, own.start), (own.stop, self.n)]
        outside = []  # (what a segment has on one side of the shard, branch, the segment's start, the queries in it)
        for b, (w, _) in enumerate(self.branches):
            head, _, tail = segments(w, own, queries, self.n, self.pattern.causal)
            for x, side in itertools.product((head, tail), sides):
                if part := clip(x, *side):
                    outside.append((part, b, x.start, clip(queries, x.start, x.stop)))
        found, edges = [], sorted({x for part, *_ in outside for x in (part.start, part.stop)})
        for start, stop in itertools.pairwise(edges):
            active = [of for part, *of in outside if part.start <= start and stop <= part.stop]
            if active:  # not between the two sides
                found.append(Interval(start, stop, self._needs(active)))
        return found

    def _needs(self, active: list[tuple[int, int, range]]) -> tuple[Residues | None, ...]:
        """For each key head, which positions of an interval that lies in all active segments it needs.

        active: (branch, start of its segment, the rank's queries in it). Only residues of these count, so that many
        ranks share the result.
        """
        key = []
        for b, start, queries in active:
            r = self.branches[b][1]
            here = (0, r) if len(queries) >= r else ((queries.start - start) % r, len(queries))
            key.append((b, r, start % r, *here))
        key = tuple(key)
        if key not in self._needed:
            by_offsets = {offsets: self._union(key, offsets) for offsets in set(self.offsets)}
            self._needed[key] = tuple(by_offsets[offsets] for offsets in self.offsets)
        return self._needed[key]

    def _union(self, active, offsets) -> Residues | None:
        """The positions that a branch keeps for one of these offsets, if it also keeps a query of the rank for it.

        active: (branch, its rate r, its segment's start mod r, the first query's place in the segment mod r, how many
        queries). r queries in a row have every offset.
        """
        kept = ((o, r, start) for b, r, start, first, count in active for o in offsets[b] if (o - first) % r < count)
        classes = frozenset(((start + o) % r, r) for o, r, start in kept)
        return self._unions.setdefault(classes, Residues(classes)) if classes else None

    def halo(self, own: range) -> list[HeadRows]:
        intervals = self.intervals(own)
        alike: dict[tuple, list[int]] = {}  # key heads that need the same
        for g in range(self.key_heads):
            alike.setdefault(tuple(id(z.residues[g]) for z in intervals), []).append(g)
        rows = [
            Rows.of(needed.rows(z.start, z.stop) for z in intervals if (needed := z.residues[x[0]]))
            for x in alike.values()
        ]
        return [HeadRows(tuple(heads), x) for heads, x in zip(alike.values(), rows, strict=True) if len(x)]

    def units(self, shards: Shards) -> Tensor:
        """int64 (world, world): how many (row, key head) rank [p, .] needs of rank [., s], without listing them.

        Intervals that need the same residues share one count of these before the borders of the shards. Clipped to what
        is before an interval's start and its stop, that counts what the interval has before each border.
        """
        total, bounds = np.zeros((shards.world, shards.world), dtype=np.int64), shards.bounds.numpy()
        alike: dict[tuple, list[tuple[int, int, int]]] = {}
        for p in range(shards.world):
            for z in self.intervals(shards[p]):
                alike.setdefault(z.residues, []).append((p, z.start, z.stop))
        for residues, intervals in alike.items():
            times, ranks = Counter(one for one in residues if one), [p for p, *_ in intervals]
            below, *ends = (
                sum(many * one.below(x) for one, many in times.items()) + np.zeros(len(x), dtype=np.int64)
                for x in (bounds, *np.array(intervals).T[1:])
            )
            for p, start, stop in zip(ranks, *ends, strict=True):
                total[p] += np.diff(below.clip(start, stop))
        return torch.from_numpy(total)


def lists(pattern: Pattern, n: int, heads: int) -> list[Blocks]:
    """The blocks of each entry of the batch, or of all, kept with the pattern. Those of a user's function take N^2
    evaluations, on every rank: each knows the whole plan without being told."""
    heads = min(heads, 1) if pattern.same_heads else heads
    return pattern.kept("halo", (n, heads), lambda: [one.blocks(n, heads) for one in pattern.each()])


@on_host()
def visible_blocks(pattern: Pattern, n: int, heads: int, key_heads: int, queries: range) -> tuple[Tensor, Tensor]:
    """(last, pairs) of some queries, one at least.

    last: int64 (sets, key blocks), where a set is a key head, or all if heads share the layout: the position of the
        last query of the query blocks that see a key block (0 if the pattern is not causal); -1 if none does
    pairs: int64 scalar, how many (head, query, key) their visible blocks have, summed over the entries of the batch
        where each has a layout of its own
    """
    each = lists(pattern, n, heads)
    (bq, bk), layouts = each[0].block_size, each[0].layouts
    first, end = queries.start // bq, -(-queries.stop // bq)
    sets = key_heads if layouts > 1 else 1
    last, pairs = torch.full((sets, -(-n // bk)), -1), torch.zeros((), dtype=torch.int64)
    low, high = ((torch.arange(first, end) + x) * bq for x in (0, 1))
    low, high = low.clamp(min=queries.start), high.clamp(max=queries.stop)
    latest = high - 1 if pattern.causal else torch.zeros_like(high)
    for blocks, layout in itertools.product(each, range(layouts)):
        starts = blocks.starts[layout * blocks.rows + first : layout * blocks.rows + end + 1]
        column = blocks.columns[starts[0] : starts[-1]].long()
        row = torch.arange(end - first).repeat_interleave(starts.diff())
        last[layout * sets // layouts].scatter_reduce_(0, column, latest[row], "amax")
        pairs = pairs + ((n - column * bk).clamp(max=bk) * (high - low)[row]).sum() * (heads // layouts)
    return last, pairs


def listed(pattern: Pattern, n: int, heads: int, key_heads: int, own: range, queries: range) -> list[Rows]:
    """By key head, or once if all heads share the layout, the rows of the key blocks that one of the query blocks sees;
    if causal, up to the last query that does. What one entry of the batch needs is needed for all."""
    bk, found = min(n, lists(pattern, n, heads)[0].block_size[1]), []
    for last in visible_blocks(pattern, n, heads, key_heads, queries)[0]:
        block = (last >= 0).nonzero().flatten()
        position = (block[:, None] * bk + torch.arange(bk)).flatten()
        keep = position < n
        if pattern.causal:
            keep &= position <= last[block].repeat_interleave(bk)
        found.append(Rows.of([position[keep]]).without(own))
    return found


def window(pattern: Window, n: int, queries: range) -> list[range]:
    """Two ranges that hold every position which some queries, one at least, see: of the sinks, and of the window."""
    back, ahead, step, sinks = pattern.reach(n)
    stop = min(n, queries.stop + ahead * step)
    sinks = min(sinks, stop) if pattern.causal else sinks
    return [range(sinks), range(max(sinks, queries.start - back * step), max(sinks, stop))]
