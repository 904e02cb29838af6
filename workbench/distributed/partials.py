"""A rank's share of the attention as calls of single-device attention ("jobs"), and which keys each of them gathers.

A job's queries are rows of the rank. Its keys are the rank's own rows, or own and received rows gathered side by side.
The results of jobs on the same queries are merged by log-sum-exp, so that together they are one softmax; or those of
one job replace those of another (`Job.replaced`).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.distributed import views
from workbench.distributed.plans import Plan, Stage
from workbench.distributed.shards import Rows, Shards, as_index, clip
from workbench.execution.dilated import offset_slices, share_heads
from workbench.patterns import Dense, Dilated, Neighborhood, Pattern

FIRST = 2 << 30  # pairs that keep a card busy for a millisecond, while ranks agree
PART = 2 << 20  # (row, head) of a call whose result needs memory beside out: 256 MB at head_dim 64 in 16 bits


class Strand(NamedTuple):
    """Some heads of a job: their queries and keys, as positions. A key of -1 is padding, which no query sees.

    Keys that are several ranges, in any order, have at most one range on each rank. Queries that are a tensor, int64
    ascending, are those of the whole job that another job has `replaced`.
    """

    queries: range | Tensor
    heads: slice
    keys: range | Rows | Tensor
    key_heads: slice


@dataclass(frozen=True, eq=False)
class Job:
    """One call. Its strands lie side by side along the heads; all have as many queries, and as many keys.

    spare: rows of padding to be added behind the queries, whose results are dropped
    batch: the one entry of the batch that this is for, or None for all
    replaced: int64 or None, queries whose results are those of another job, which runs later; they give no gradients
    """

    pattern: Pattern
    strands: tuple[Strand, ...]
    spare: int = 0
    batch: int | None = None
    replaced: Tensor | None = None


class Local(NamedTuple):
    """The jobs that need no row of another rank, by when they run.

    first: while ranks agree; second: while the rows of the first stage travel; before: when those of a stage have
    arrived, before the jobs that need them
    """

    first: list[Job]
    second: list[Job]
    before: dict[Stage, list[Job]]


def local(plan: Plan, rank: int) -> Local:
    """Attention to a rank's own rows: dense, whole segments of dilated branches, or what `Plan.apart` is about.

    A kernel that fills the card leaves no room for an exchange until it ends. So dense attention begins with only as
    many heads as take the time of agreeing, and the first rows travel while the other heads are computed. These are cut
    as the stages are, since the result of a call needs memory beside out. Where queries move too, those that stay on
    their rank come first.
    """
    own, every = plan.shards[rank], range(plan.kv_heads)
    if not any(plan.work(rank)) or not plan.heads:
        return Local([], [], {})
    if plan.apart:
        cells = isinstance(plan.pattern, Neighborhood)
        return Local([_own_cells(plan, rank)] if cells else _own_blocks(plan, rank), [], {})
    if not isinstance(plan.pattern, Dense):
        return Local(_whole_segments(plan, rank) if isinstance(plan.pattern, Dilated) else [], [], {})
    here, moved = plan.work(rank), []
    if plan.zigzag:
        held = plan.queries(rank)
        stay = [held.start <= x.start and x.stop <= held.stop for x in plan.work(rank)]
        here, moved = ([x for x, its in zip(plan.work(rank), stay, strict=True) if its == y] for y in (True, False))
    pairs = sum(_pairs(x, own, plan.pattern.causal) for x in here) * plan.heads // plan.kv_heads  # for each key head
    few = next((x for x in every if x * pairs >= FIRST), plan.kv_heads)
    rest = [range(max(few, x.heads.start), x.heads.stop) for x in plan.stages if x.piece == 0 and x.heads.stop > few]
    return Local(
        _dense(plan, every[:few], [own], here),
        [job for heads in rest for job in _dense(plan, heads, [own], here)],
        {x: _dense(plan, x.heads, [own], moved) for x in plan.stages if moved and x.piece == 0},
    )


def _pairs(queries: range, keys: range, causal: bool) -> int:
    """How many (query, key) pairs; causal queries have to be among the keys or behind them."""
    if not causal or queries.start >= keys.stop:
        return len(queries) * len(keys)
    return len(queries) * (queries.start + queries.stop + 1 - 2 * keys.start) // 2


def remote(plan: Plan, rank: int, stage: Stage) -> list[Job]:
    """The jobs that need the rows of a stage of the exchange."""
    if not any(plan.work(rank)) or not plan.heads:
        return []
    if isinstance(plan.pattern, Dense):
        others = [stage.of(plan.shards[x]) for x in range(plan.world) if x != rank]
        return _dense(plan, stage.heads, others, plan.work(rank))
    if isinstance(plan.pattern, Dilated):
        return _dilated(plan, rank, stage)
    if plan.apart:
        cells = isinstance(plan.pattern, Neighborhood)
        return _border_cells(plan, rank, stage) if cells else _other_blocks(plan, rank, stage)
    return _gathered(plan, rank, stage)


def _heads_of(plan: Plan, key_heads: range) -> range:
    group = plan.heads // plan.kv_heads
    return range(key_heads.start * group, key_heads.stop * group)


# --- dense ------------------------------------------------------------------------------------------------------------


def _dense(plan: Plan, key_heads: range, pieces: list[range], queries: list[range]) -> list[Job]:
    """Attention to pieces of the sequence, in ascending order: one call to all pieces that the queries see whole."""
    heads, causal = _heads_of(plan, key_heads), plan.pattern.causal
    places = slice(heads.start, heads.stop), slice(key_heads.start, key_heads.stop)
    return [
        Job(Dense(triangle), (Strand(some, places[0], keys, places[1]),))
        for part in queries
        for some, keys, triangle in _calls(part, [x for x in pieces if x], causal)
    ]


def _calls(queries: range, pieces: list[range], causal: bool) -> Iterator[tuple[range, range | Rows, bool]]:
    """(queries, keys, causal) of each call; causal queries are the last of the keys' positions."""
    if not queries:
        return
    whole = [x for x in pieces if not causal or x.stop <= queries.start]
    if whole:
        yield queries, whole[0] if len(whole) == 1 else Rows(tuple(whole)), False
    for keys in pieces[len(whole) :]:
        among = range(max(queries.start, keys.start), min(queries.stop, keys.stop))
        if among:
            yield among, range(keys.start, among.stop), True
        if len(after := range(max(queries.start, keys.stop), queries.stop)):
            yield after, keys, False


# --- dilated ----------------------------------------------------------------------------------------------------------


def _whole_segments(plan: Plan, rank: int) -> list[Job]:
    own, queries = plan.shards[rank], plan.queries(rank)
    runs: dict[tuple[range, range], list[int]] = {}
    for branch in range(len(plan.pattern.segment_lengths)):
        head, run, _ = _segments(plan, own, queries, branch)
        some = clip(queries, run.start, run.stop)
        if run and some and plan.pattern.head_range(branch, plan.heads):
            runs.setdefault((some, run), []).append(branch)
    alone = len(runs) == 1 and next(iter(runs))[0] == queries  # its result becomes out, into which others are merged
    parts = [range(plan.kv_heads)] if alone else _parts(plan, len(queries))
    return [
        Job(part, (Strand(some, slice(heads.start, heads.stop), run, slice(keys.start, keys.stop)),))
        for keys in parts
        for heads in [_heads_of(plan, keys)]
        for (some, run), which in runs.items()
        if (part := views.Branches(plan.pattern, tuple(which), heads.start, plan.heads)).any(len(heads))
    ]


def _parts(plan: Plan, rows: int) -> list[range]:
    """Key heads of calls, so few each that a result needs little memory beside out, if the pattern can be cut so."""
    shards = Shards.even(plan.kv_heads, max(1, min(plan.kv_heads, rows * plan.heads // PART)))
    parts = [shards[x] for x in range(shards.world)]
    try:
        for keys in parts:
            heads = _heads_of(plan, keys)
            views.some_heads(plan.pattern, heads.start, len(heads), plan.heads)
    except ValueError:
        return [range(plan.kv_heads)]
    return parts


def _segments(plan: Plan, own: range, queries: range, branch: int) -> tuple[range, range, range]:
    """(the segment that begins before the shard, the run of segments inside it, the segment that ends behind it), each
    as positions and empty where there is none. If causal, keys behind the shard do not count: none ends behind it."""
    w, causal = plan.pattern.segment_lengths[branch], plan.pattern.causal
    start = queries.start // w * w
    head = range(0)
    if start < own.start:
        head = range(start, min(start + w, plan.n))
        start = head.stop
    stop, tail = own.stop, range(0)
    if not causal and stop % w and stop < plan.n:
        stop = max(start, stop // w * w)
        if stop < own.stop:
            tail = range(stop, min(stop + w, plan.n))
    return head, range(start, stop) if start < stop else range(0), tail


def _dilated(plan: Plan, rank: int, stage: Stage) -> list[Job]:
    """Segments that cross the shard's borders: a head's kept queries here attend to all kept keys of the segment, which
    is dense attention."""
    own, queries, pattern = plan.shards[rank], plan.queries(rank), plan.pattern
    group, heads = plan.heads // plan.kv_heads, _heads_of(plan, stage.heads)
    together: dict[tuple, list[Strand]] = {}
    for branch, r in enumerate(pattern.dilation_rates):
        head, _, tail = _segments(plan, own, queries, branch)
        for segment in (head, tail):
            here = clip(queries, segment.start, segment.stop)
            for offset, members in offset_slices(pattern, branch, plan.heads):
                members = clip(range(members.start, members.stop, members.step), heads.start, heads.stop)
                kept = range(segment.start + offset, segment.stop, r)
                q = clip(kept, here.start, here.stop)
                if not q or not members:
                    continue
                if pattern.causal:
                    k = clip(kept, segment.start, here.stop)
                else:  # what arrives and behind it the rank's own rows, the order in which they lie in a buffer
                    k = Rows.of(clip(kept, *x) for x in ((0, own.start), (own.stop, plan.n), (own.start, own.stop)))
                for q_heads, k_heads in share_heads(slice(members.start, members.stop, members.step), group):
                    many = len(range(plan.heads)[q_heads]) // len(range(plan.kv_heads)[k_heads])
                    key = (branch, segment.start, len(q), len(k), many)
                    together.setdefault(key, []).append(Strand(q, q_heads, k, k_heads))
    return [Job(Dense(pattern.causal), tuple(strands)) for strands in together.values()]


# --- block-sparse and neighborhood ------------------------------------------------------------------------------------


def _needed(plan: Plan, rank: int, stage: Stage) -> Tensor:
    """int64, ascending: the rows of other ranks that some head of the stage needs."""
    rows = [need.rows.positions for need in plan.needs(rank) if set(need.heads) & set(stage.heads)]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *rows]).unique()


def _kept(plan: Plan, rank: int, stage: Stage) -> dict:
    """What is kept with the plan for the stage, by batch entry. Stages whose heads see the same share it, since
    executions keep their lists of blocks with the patterns in it."""
    heads = None if plan.pattern.same_heads else _heads_of(plan, stage.heads)
    return plan.views.setdefault((rank, heads), {})


def _by_batch(pattern: Pattern) -> list[tuple[int | None, Pattern]]:
    """(batch entry, its pattern); one pair with None if all entries have the same."""
    return [(None, pattern)] if pattern.batch is None else list(enumerate(pattern.each()))


def _own_blocks(plan: Plan, rank: int) -> list[Job]:
    own = plan.shards[rank]
    strand = Strand(plan.queries(rank), slice(0, plan.heads), own, slice(0, plan.kv_heads))
    return [Job(views.own_blocks(one, own, plan.n), (strand,), batch=b) for b, one in _by_batch(plan.pattern)]


def _other_blocks(plan: Plan, rank: int, stage: Stage) -> list[Job]:
    """Attention to the key blocks that a stage brings, for the queries that see some of them."""
    columns = (_needed(plan, rank, stage) // plan.pattern.block_size[1]).unique()
    queries, heads, kept = plan.queries(rank), _heads_of(plan, stage.heads), _kept(plan, rank, stage)
    spot = slice(heads.start, heads.stop), slice(stage.heads.start, stage.heads.stop)
    sizes = columns, plan.n, heads.start, len(heads), plan.heads
    found = []
    for batch, one in _by_batch(plan.pattern) if len(columns) else ():
        if batch not in kept:
            runs = _runs(views.other_blocks(one, queries, *sizes), queries, len(heads))
            kept[batch] = [(run, views.other_blocks(one, run, *sizes)) for run in runs]
        for run, view in kept[batch]:
            found.append(Job(view.pattern, (Strand(run, spot[0], view.position, spot[1]),), batch=batch))
    return found


def _runs(view: views.Gathered, queries: range, heads: int) -> list[range]:
    """The queries that see some key: one range of whole blocks, or two if most of the queries lie between them."""
    bq = view.pattern.block_size[0]
    seen = view.pattern.row_counts(len(view.position), heads, len(queries))[0].any(0).nonzero().flatten()
    if not len(seen):
        return []
    ends, gaps = [int(seen[0]), int(seen[-1]) + 1], seen.diff()
    if len(gaps) and 2 * int(gaps.max()) * bq > len(queries):
        before = int(gaps.argmax())
        ends[1:1] = [int(seen[before]) + 1, int(seen[before + 1])]
    first = queries.start // bq
    pairs = zip(ends[::2], ends[1::2], strict=True)
    return [clip(queries, (first + start) * bq, (first + stop) * bq) for start, stop in pairs]


def _border(plan: Plan, rank: int) -> views.Gathered:
    """A call of the queries that see rows of other ranks, kept with the plan.

    Its keys are those rows, then the own ones that the queries see, at the end the queries themselves.
    """
    kept = plan.views.setdefault((rank, "border"), {})
    if not kept:
        near, own, queries = plan.finder.near, plan.shards[rank], plan.queries(rank)
        needed = _needed(plan, rank, plan.stages[0])
        border = Rows.of([near(needed)]).within(queries.start, queries.stop).positions
        beside = Rows.of([near(border)]).within(own.start, own.stop).positions
        beside = beside[~torch.isin(beside, border)]
        kept[None] = views.neighborhood(plan.pattern, torch.cat([needed, beside, border]), len(border))
    return kept[None]


def _own_cells(plan: Plan, rank: int) -> Job:
    own, border = plan.shards[rank], _border(plan, rank)
    strand = Strand(plan.queries(rank), slice(0, plan.heads), own, slice(0, plan.kv_heads))
    replaced = border.position[len(border.position) - border.queries :]
    return Job(views.own_cells(plan.pattern, own), (strand,), replaced=replaced if len(replaced) else None)


def _border_cells(plan: Plan, rank: int, stage: Stage) -> list[Job]:
    """Attention of the queries that see what arrives: to that, and to what they see of the rank's own rows."""
    heads, border = _heads_of(plan, stage.heads), _border(plan, rank)
    spot = slice(heads.start, heads.stop), slice(stage.heads.start, stage.heads.stop)
    queries = border.position[len(border.position) - border.queries :]
    return [Job(border.pattern, (Strand(queries, spot[0], border.position, spot[1]),))] if len(queries) else []


def _gathered(plan: Plan, rank: int, stage: Stage) -> list[Job]:
    own, queries, pattern = plan.shards[rank], plan.queries(rank), plan.pattern
    heads, needed, kept = _heads_of(plan, stage.heads), _needed(plan, rank, stage), _kept(plan, rank, stage)
    spot = slice(heads.start, heads.stop), slice(stage.heads.start, stage.heads.stop)

    def job(batch: int | None, one: Pattern) -> Job:
        if batch not in kept:
            if isinstance(pattern, Neighborhood):
                position = torch.cat([needed, torch.arange(own.start, own.stop)])
                kept[batch] = views.neighborhood(one, position, len(queries))
            else:
                sizes = (plan.n, heads.start, len(heads), plan.heads)
                kept[batch] = views.block_sparse(one, queries, own, needed, *sizes)
        gathered = kept[batch]
        strand = Strand(queries, spot[0], gathered.position, spot[1])
        return Job(gathered.pattern, (strand,), gathered.spare, batch)

    return [job(b, one) for b, one in _by_batch(pattern)]


# --- what a job gathers -----------------------------------------------------------------------------------------------


class Fill(NamedTuple):
    """Rows of a job's keys, for some of its key heads, and where they come from.

    to, to_heads: where among the job's keys; source, parcel: the rank that holds them, and the index of its parcel
    (None: this rank's own rows); rows, heads: where in the parcel, or among the own rows
    """

    to: slice | Tensor
    to_heads: slice
    source: int
    parcel: int | None
    rows: slice | Tensor
    heads: slice


def fills(plan: Plan, rank: int, stage: Stage | None, job: Job) -> list[Fill]:
    """The fills of all of the job's keys but padding; with stage None, from the rank's own rows alone."""
    found, first = [], 0
    for strand in job.strands:
        heads = range(plan.kv_heads)[strand.key_heads]
        at = {h: first + x for x, h in enumerate(heads)}
        place = _places(strand.keys)
        own = plan.shards[rank]
        to, rows = place(own.start, own.stop)
        if len(rows):
            if isinstance(rows, range):
                ours = slice(rows[0] - own.start, rows[-1] - own.start + 1, rows.step)
            else:
                ours = as_index(rows - own.start)
            found.append(Fill(to, slice(first, first + len(heads)), rank, None, ours, strand.key_heads))
        for source in range(plan.world) if stage is not None else ():
            for x, parcel in enumerate(plan.parcels(source, rank, stage)):
                pairs = [(at[h], y) for y, h in enumerate(parcel.heads) if h in at]
                to, rows = place(plan.shards[source].start, plan.shards[source].stop, parcel)
                if pairs and len(rows):
                    where = parcel.rows.find(rows) if isinstance(rows, range) else slice(0, len(rows))
                    for to_heads, from_heads in _even(pairs):
                        found.append(Fill(to, to_heads, source, x, where, from_heads))
        first += len(heads)
    return found


def _places(keys: range | Rows | Tensor):
    """place(start, stop, parcel) -> (indices among the keys, positions) of the keys in [start, stop), a rank's shard.

    parcel: the one that brings them, None for the rank's own rows; keys that are ranges are found without it.
    """
    if not isinstance(keys, Tensor):
        pieces = (keys,) if isinstance(keys, range) else keys.pieces
        firsts = itertools.accumulate(map(len, pieces), initial=0)
        ordered = sorted(((x, first) for x, first in zip(pieces, firsts, strict=False) if x), key=lambda y: y[0].start)
        lasts = [x[-1] for x, _ in ordered]

        def place(start, stop, parcel=None):
            y = bisect.bisect_left(lasts, start)  # the first piece that ends at or behind `start`
            if y == len(ordered) or not (some := clip(ordered[y][0], start, stop)):
                return slice(0, 0), range(0)
            piece, first = ordered[y]
            low = first + (some.start - piece.start) // piece.step
            return slice(low, low + len(some)), some

        return place
    order = keys.argsort(stable=True)
    ascending = keys[order]

    def place(start, stop, parcel=None):
        if parcel is not None:
            rows = parcel.rows.positions
            return as_index(order[torch.searchsorted(ascending, rows)]), rows
        at = ((keys >= start) & (keys < stop)).nonzero().flatten()
        return (as_index(at), keys[at]) if len(at) else (slice(0, 0), range(0))

    return place


def _even(pairs: list[tuple[int, int]]) -> list[tuple[slice, slice]]:
    """Pairs of heads as pairs of slices: one pair if both sides are evenly spaced, else one for each pair."""
    sides = list(zip(*pairs, strict=True))
    steps = [{b - a for a, b in zip(x, x[1:], strict=False)} or {1} for x in sides]
    if all(len(x) == 1 and min(x) > 0 for x in steps):
        return [tuple(slice(x[0], x[-1] + 1, min(step)) for x, step in zip(sides, steps, strict=True))]
    return [(slice(a, a + 1), slice(b, b + 1)) for a, b in pairs]
