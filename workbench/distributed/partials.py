"""Which calls of single-device attention a rank makes: partial ones, each of some queries to some of their keys.

Example: dense attention on 2 ranks is two partials on each: its queries to its own keys, and its queries to the keys
that arrive. Each gives out (B, Q, H, D) and lse (B, H, Q). Merged by lse (`engines.merge`) they are one softmax over
all keys. At the border of a neighborhood results are not merged: a later partial, with all keys of the border's
queries, overwrites what an earlier one gave for them (`Partial.overwritten`).

`own_partials` gives the calls that need the rank's own rows only, `stage_partials` those that need received ones too.
All of it is arithmetic on positions: no tensor of the call is needed. Where the keys lie is found by `fills`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.distributed import views
from workbench.distributed.plans import Plan, Stage
from workbench.distributed.shards import Rows, Shards, clip
from workbench.engines.torch.dilated import offset_slices, share_heads
from workbench.patterns import Dense, Dilated, Neighborhood, Pattern

FIRST = 2 << 30  # pairs that keep a card busy for a millisecond, while ranks agree
PART = 2 << 20  # (row, head) of a call whose result needs memory beside out: 256 MB at head_dim 64 in 16 bits


class HeadGroup(NamedTuple):
    """Some heads of a partial with their queries and keys, both as positions in the sequence.

    queries: a range; or, where the partial overwrites results of another, an int64 tensor in ascending order
    keys: in the order in which the call has them. Of several ranges at most one is on each rank. In a tensor, int64, -1
        is padding, which no query sees.
    """

    queries: range | Tensor
    heads: slice
    keys: range | Rows | Tensor
    key_heads: slice


@dataclass(frozen=True, eq=False)
class Partial:
    """One call: a pattern in the call's own numbering, and the rows that it is on.

    groups: heads that lie side by side in the call, in this order; all have equally many queries, and equally many keys
    spare: rows of padding to be added behind the queries, whose results are dropped
    batch: the one entry of the batch that this is for, or None for all
    overwritten: queries, int64, whose results a later partial overwrites, so that they give no gradients here; or None
    """

    pattern: Pattern
    groups: tuple[HeadGroup, ...]
    spare: int = 0
    batch: int | None = None
    overwritten: Tensor | None = None


class Own(NamedTuple):
    """The partials that need no row of another rank, by when they run.

    first: while ranks agree; second: while the rows of the first stage travel; before: by stage, ahead of the partials
    that need its rows
    """

    first: list[Partial]
    second: list[Partial]
    before: dict[Stage, list[Partial]]


def own_partials(plan: Plan, rank: int) -> Own:
    """Attention to a rank's own rows: dense, whole segments of dilated branches, or what `Layout.apart` is about."""
    if not any(plan.work(rank)) or not plan.heads:
        return Own([], [], {})
    return _own_dense(plan, rank) if isinstance(plan.pattern, Dense) else Own(_rules(plan)[0](plan, rank), [], {})


def stage_partials(plan: Plan, rank: int, stage: Stage) -> list[Partial]:
    """The partials that need the rows which a stage of the exchange brings."""
    if not any(plan.work(rank)) or not plan.heads:
        return []
    if isinstance(plan.pattern, Dense):
        others = [stage.of(plan.shards[x]) for x in range(plan.world) if x != rank]
        return _dense(plan, stage.heads, others, plan.work(rank))
    return _rules(plan)[1](plan, rank, stage)


def _rules(plan: Plan):
    """What finds the partials of own rows, (plan, rank), and those of a stage, (plan, rank, stage)."""
    if isinstance(plan.pattern, Dilated):
        return _whole_segments, _dilated
    if not plan.layout.apart:
        return lambda *_: [], _gathered
    return (_own_cells, _border_cells) if isinstance(plan.pattern, Neighborhood) else (_own_blocks, _other_blocks)


def _heads_of(plan: Plan, key_heads: range) -> range:
    group = plan.heads // plan.kv_heads
    return range(key_heads.start * group, key_heads.stop * group)


def head_group(plan: Plan, key_heads: range, queries: range | Tensor, keys: range | Rows | Tensor) -> HeadGroup:
    """These key heads, with all query heads that share them."""
    heads = _heads_of(plan, key_heads)
    return HeadGroup(queries, slice(heads.start, heads.stop), keys, slice(key_heads.start, key_heads.stop))


# --- dense ------------------------------------------------------------------------------------------------------------


def _own_dense(plan: Plan, rank: int) -> Own:
    """A kernel that fills the card leaves no room for an exchange until it ends. So attention begins with only as many
    heads as take the time of agreeing, and the first rows travel while the other heads are computed. These are cut as
    the stages are, since the result of a call needs memory beside out. Queries that stay on their rank come first.
    """
    own, held, work, every = plan.shards[rank], plan.queries(rank), plan.work(rank), range(plan.kv_heads)
    here = [x for x in work if held.start <= x.start and x.stop <= held.stop]
    moved = [x for x in work if x not in here]
    pairs = sum(_pairs(x, own, plan.pattern.causal) for x in here) * plan.heads // plan.kv_heads  # for each key head
    few = next((x for x in every if x * pairs >= FIRST), plan.kv_heads)
    rest = [range(max(few, x.heads.start), x.heads.stop) for x in plan.stages if x.piece == 0 and x.heads.stop > few]
    return Own(
        _dense(plan, every[:few], [own], here),
        [partial for heads in rest for partial in _dense(plan, heads, [own], here)],
        {x: _dense(plan, x.heads, [own], moved) for x in plan.stages if moved and x.piece == 0},
    )


def _pairs(queries: range, keys: range, causal: bool) -> int:
    """How many (query, key) pairs; causal queries have to be among the keys or behind them."""
    if not causal or queries.start >= keys.stop:
        return len(queries) * len(keys)
    return len(queries) * (queries.start + queries.stop + 1 - 2 * keys.start) // 2


def _dense(plan: Plan, key_heads: range, pieces: list[range], queries: list[range]) -> list[Partial]:
    """Attention to pieces of the sequence, in ascending order: one call to all pieces that the queries see whole."""
    return [
        Partial(Dense(triangle), (head_group(plan, key_heads, some, keys),))
        for part in queries
        for some, keys, triangle in _calls(part, [x for x in pieces if x], plan.pattern.causal)
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


def _whole_segments(plan: Plan, rank: int) -> list[Partial]:
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
        Partial(part, (head_group(plan, keys, some, run),))
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


def _dilated(plan: Plan, rank: int, stage: Stage) -> list[Partial]:
    """Segments that cross the shard's borders: a head's kept queries here attend to all kept keys of the segment, which
    is dense attention."""
    own, queries, pattern = plan.shards[rank], plan.queries(rank), plan.pattern
    group, heads = plan.heads // plan.kv_heads, _heads_of(plan, stage.heads)
    together: dict[tuple, list[HeadGroup]] = {}
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
                    together.setdefault(key, []).append(HeadGroup(q, q_heads, k, k_heads))
    return [Partial(Dense(pattern.causal), tuple(groups)) for groups in together.values()]


# --- block-sparse and neighborhood ------------------------------------------------------------------------------------


def _needed(plan: Plan, rank: int, stage: Stage) -> Tensor:
    """int64, ascending: the rows of other ranks that some head of the stage needs."""
    rows = [need.rows.positions for need in plan.halo(rank) if set(need.heads) & set(stage.heads)]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *rows]).unique()


def _kept(plan: Plan, rank: int, stage: Stage) -> dict:
    """What is kept with the plan for the stage, by batch entry. Stages whose heads see the same share it, since
    executions keep their lists of blocks with the patterns in it."""
    heads = None if plan.pattern.same_heads else _heads_of(plan, stage.heads)
    return plan.views.setdefault((rank, heads), {})


def _by_batch(pattern: Pattern) -> list[tuple[int | None, Pattern]]:
    """(batch entry, its pattern); one pair with None if all entries have the same."""
    return [(None, pattern)] if pattern.batch is None else list(enumerate(pattern.each()))


def _own_blocks(plan: Plan, rank: int) -> list[Partial]:
    own = plan.shards[rank]
    group = head_group(plan, range(plan.kv_heads), plan.queries(rank), own)
    return [Partial(views.own_blocks(one, own, plan.n), (group,), batch=b) for b, one in _by_batch(plan.pattern)]


def _other_blocks(plan: Plan, rank: int, stage: Stage) -> list[Partial]:
    """Attention to the key blocks that a stage brings, for the queries that see some of them."""
    columns = (_needed(plan, rank, stage) // plan.pattern.block_size[1]).unique()
    queries, heads, kept = plan.queries(rank), _heads_of(plan, stage.heads), _kept(plan, rank, stage)
    found = []
    for batch, one in _by_batch(plan.pattern) if len(columns) else ():
        if batch not in kept:
            one = views.some_heads(one, heads.start, len(heads), plan.heads)
            runs = _runs(views.other_blocks(one, queries, columns, plan.n), queries, len(heads))
            kept[batch] = [(run, views.other_blocks(one, run, columns, plan.n)) for run in runs]
        for run, view in kept[batch]:
            group = head_group(plan, stage.heads, run, view.position)
            found.append(Partial(view.pattern, (group,), batch=batch))
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


def _own_cells(plan: Plan, rank: int) -> list[Partial]:
    own, border = plan.shards[rank], _border(plan, rank)
    group = head_group(plan, range(plan.kv_heads), plan.queries(rank), own)
    overwritten = border.position[len(border.position) - border.queries :]
    return [
        Partial(views.own_cells(plan.pattern, own), (group,), overwritten=overwritten if len(overwritten) else None)
    ]


def _border_cells(plan: Plan, rank: int, stage: Stage) -> list[Partial]:
    """Attention of the queries that see what arrives: to that, and to what they see of the rank's own rows."""
    border = _border(plan, rank)
    queries = border.position[len(border.position) - border.queries :]
    group = head_group(plan, stage.heads, queries, border.position)
    return [Partial(border.pattern, (group,))] if len(queries) else []


def _gathered(plan: Plan, rank: int, stage: Stage) -> list[Partial]:
    own, queries, pattern = plan.shards[rank], plan.queries(rank), plan.pattern
    heads, needed, kept = _heads_of(plan, stage.heads), _needed(plan, rank, stage), _kept(plan, rank, stage)
    found = []
    for batch, one in _by_batch(pattern):
        if batch not in kept and isinstance(pattern, Neighborhood):
            position = torch.cat([needed, torch.arange(own.start, own.stop)])
            kept[batch] = views.neighborhood(one, position, len(queries))
        elif batch not in kept:
            kept[batch] = views.block_sparse(
                views.some_heads(one, heads.start, len(heads), plan.heads), queries, own, needed, plan.n
            )
        view = kept[batch]
        found.append(Partial(view.pattern, (head_group(plan, stage.heads, queries, view.position),), view.spare, batch))
    return found
