"""Which calls of single-device attention a rank makes: partial ones, each of some queries to some of their keys.

Example: dense attention on 2 ranks is two partials on each: its queries to its own keys, and its queries to the keys
that arrive. Each gives out (B, Q, H, D) and lse (B, H, Q). Merged by lse (`engines.merge`) they are one softmax over
all keys. At the border of a window or a grid results are not merged: a later partial, with all keys of the border's
queries, overwrites what an earlier one gave for them (`Partial.overwritten`).

`own_partials` gives the calls that need the rank's own rows only, `stage_partials` those that need received ones too,
by pattern:

    dense          own keys in one call, those that a stage brings in another; causal: whole blocks and triangles
    dilated        whole segments inside the shard, by the pattern itself; of a segment that crosses a border, or a
                   shorter last one, the kept queries here on all its kept keys, which is dense attention
    block-sparse   shards of whole blocks: own blocks, and the blocks of others; else one call on both side by side
    window, grid   few rows arrive: own rows, and the border's queries anew; else one call on all side by side
    all others     one call on whole blocks, those that arrive and own ones side by side

All of it is arithmetic on positions: no tensor of the call is needed. `fills` finds where the keys lie.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.distributed import halo, views
from workbench.distributed.halo import segments
from workbench.distributed.plans import Plan, Stage, on_grid
from workbench.distributed.shards import Rows, Shards, as_tensor, clip
from workbench.engines.torch.dilated import offset_slices, share_heads
from workbench.patterns import BlockSparse, Dense, Dilated, Pattern, Window

FIRST = 4 << 30  # pairs that keep a card busy for two milliseconds, while ranks agree
PART = 2 << 20  # (row, head) of a call whose result needs memory beside out: 256 MB at head_dim 64 in 16 bits


class HeadGroup(NamedTuple):
    """Some query heads of a partial with the key heads that they share, all on the same queries and keys.

    heads, key_heads: slices of all heads of the call of `attention`
    queries: positions in the sequence, a range; or, where the partial overwrites results of another, int64, ascending
    keys: positions in the order in which the call has them: a range; several, of which each rank holds at most one; or
        int64, in which -1 is padding, which no query sees
    """

    queries: range | Tensor
    heads: slice
    keys: range | Rows | Tensor
    key_heads: slice


@dataclass(frozen=True, eq=False)
class Partial:
    """One call: of R queries on M keys, with h query heads on g key heads, and which rows and heads these are.

    The call's q is (B, R + spare, h, D), its k and v are (B, M, g, D).
    pattern: in the call's own numbering, heads and keys from 0; the queries are the last positions, as in every call
    groups: of heads, which lie side by side in the call in this order; each has R queries and M keys, not the same ones
    spare: rows of padding to be added behind the queries, whose results are dropped
    batch: the one entry of the batch that this is for, or None for all
    overwritten: the positions, int64, of queries whose results a later partial overwrites, so that they give no
        gradients here; or None
    """

    pattern: Pattern
    groups: tuple[HeadGroup, ...]
    spare: int = 0
    batch: int | None = None
    overwritten: Tensor | None = None


class Own(NamedTuple):
    """The partials that need no key of another rank, by when they run.

    first: while ranks agree
    second: while the keys of the first stage travel
    before: by stage, when its keys have arrived and ahead of the partials that need them: on queries of other ranks
    """

    first: list[Partial]
    second: list[Partial]
    before: dict[Stage, list[Partial]]


def own_partials(plan: Plan, rank: int) -> Own:
    """A rank's attention to its own keys; none where these come together with received ones (`stage_partials`)."""
    if not any(plan.work(rank)) or not plan.heads:
        return Own([], [], {})
    if isinstance(plan.pattern, Dense):
        return _own_dense(plan, rank)
    apart = _own if plan.layout.apart else lambda *_: []
    return Own((_whole_segments if isinstance(plan.pattern, Dilated) else apart)(plan, rank), [], {})


def stage_partials(plan: Plan, rank: int, stage: Stage) -> list[Partial]:
    """The partials that need the rows which a stage of the exchange brings."""
    if not any(plan.work(rank)) or not plan.heads:
        return []
    if isinstance(plan.pattern, Dense):
        others = [stage.of(plan.shards[x]) for x in range(plan.world) if x != rank]
        return _dense(plan, stage.heads, others, plan.work(rank))
    apart = _other_blocks if isinstance(plan.pattern, BlockSparse) else _border_calls
    rule = _dilated if isinstance(plan.pattern, Dilated) else apart if plan.layout.apart else _gathered
    return rule(plan, rank, stage)


def _heads_of(plan: Plan, key_heads: range) -> range:
    group = plan.heads // plan.kv_heads
    return range(key_heads.start * group, key_heads.stop * group)


def head_group(plan: Plan, key_heads: range, queries: range | Tensor, keys: range | Rows | Tensor) -> HeadGroup:
    """These key heads of the call of `attention`, with all query heads that share them."""
    heads = _heads_of(plan, key_heads)
    return HeadGroup(queries, slice(heads.start, heads.stop), keys, slice(key_heads.start, key_heads.stop))


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
    """Attention of ranges of queries to pieces of the sequence, in ascending order, at most one of each rank.

    One call to all the pieces that the queries see whole; of causal attention, `_calls` to each of the others.
    """
    return [
        Partial(Dense(triangle), (head_group(plan, key_heads, some, keys),))
        for part in queries
        for some, keys, triangle in _calls(part, [x for x in pieces if x], plan.pattern.causal)
    ]


def _calls(queries: range, pieces: list[range], causal: bool) -> Iterator[tuple[range, range | Rows, bool]]:
    """(queries, keys, causal) of each call that makes up the queries' attention to the pieces.

    In a causal call the queries are the last of the keys' positions, as `Dense(causal=True)` takes them.
    """
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


def _whole_segments(plan: Plan, rank: int) -> list[Partial]:
    """A call for the branches whose whole segments lie in the same run of the shard, which is mostly all of it."""
    queries, made = plan.queries(rank), {}
    runs, ends = halo.runs(plan.pattern, plan.shards[rank], queries, plan.n, plan.heads)
    alone = [clip(queries, x.start, x.stop) for x in runs] == [queries]  # its result becomes out, for others to merge

    def branches(run: range, which: list[int], heads: range) -> views.Branches:
        """The same object for runs of one length, so that its lists of blocks are made once."""
        key = len(run), *which, heads
        return made.setdefault(key, views.Branches(plan.pattern, tuple(which), heads.start, plan.heads))

    return [
        Partial(part, (head_group(plan, keys, some, run),))
        for keys in ([range(plan.kv_heads)] if alone else _parts(plan, max(map(len, runs), default=0)))
        for heads in [_heads_of(plan, keys)]
        for run, which in runs.items()
        if (some := clip(queries, run.start, run.stop)) and (part := branches(run, which, heads)).any(len(heads))
    ] + [
        partial
        for keys in _parts(plan, max((len(x) for (x,) in ends.values()), default=0))
        for partial in _kept(plan, rank, ends, _heads_of(plan, keys))
    ]


def _parts(plan: Plan, rows: int) -> list[range]:
    """Ranges of key heads, a call each: few, so that a result needs little memory beside out, if the pattern can be cut
    so, else all of them. rows: how many queries."""
    parts = list(Shards.even(plan.kv_heads, max(1, min(plan.kv_heads, rows * plan.heads // PART))))
    with contextlib.suppress(ValueError):
        for heads in (_heads_of(plan, keys) for keys in parts):
            views.some_heads(plan.pattern, heads.start, len(heads), plan.heads)
        return parts
    return [range(plan.kv_heads)]


def _dilated(plan: Plan, rank: int, stage: Stage) -> list[Partial]:
    """Segments that cross the shard's borders."""
    each = (plan.shards[rank], plan.queries(rank), plan.n, plan.pattern.causal)
    found = {branch: segments(w, *each)[::2] for branch, w in enumerate(plan.pattern.segment_lengths)}
    return _kept(plan, rank, found, _heads_of(plan, stage.heads))


def _kept(plan: Plan, rank: int, of_branches: dict[int, Iterable[range]], heads: range) -> list[Partial]:
    """Segments of branches, each by itself: a head's kept queries here attend to all kept keys of the segment, which is
    dense attention."""
    own, queries, pattern = plan.shards[rank], plan.queries(rank), plan.pattern
    group, together = plan.heads // plan.kv_heads, {}
    for branch, found in of_branches.items():
        r = pattern.dilation_rates[branch]
        for segment in found:
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


def _needed(plan: Plan, rank: int, stage: Stage) -> Tensor:
    """The positions of other ranks that some key head of the stage needs, int64, ascending."""
    rows = [need.rows.positions for need in plan.halo(rank) if set(need.heads) & set(stage.heads)]
    return torch.cat([as_tensor(range(0)), *rows]).unique()


def _by_batch(pattern: Pattern) -> list[tuple[int | None, Pattern]]:
    """(batch entry, its pattern); one pair with None if all entries have the same."""
    return [(None, pattern)] if pattern.batch is None else list(enumerate(pattern.each()))


def _own(plan: Plan, rank: int) -> list[Partial]:
    """Attention of all of a rank's queries to its own rows. On windows and grids that is the result of queries that see
    no row of another rank; those of the others are overwritten."""
    own, queries, heads = plan.shards[rank], plan.queries(rank), plan.heads
    border = [] if isinstance(plan.pattern, BlockSparse) else [of for of, _ in _border(plan, rank)]

    def among(pattern: Pattern) -> Pattern:
        if isinstance(pattern, BlockSparse):
            return views.beside(pattern, queries, own, as_tensor(range(0)), plan.n, heads).pattern
        return views.neighborhood(pattern, as_tensor(own)).pattern if on_grid(pattern) else pattern

    group, overwritten = head_group(plan, range(plan.kv_heads), queries, own), torch.cat(border) if border else None
    return [Partial(among(one), (group,), 0, b, overwritten) for b, one in _by_batch(plan.pattern)]


def _on_views(plan: Plan, rank: int, stage: Stage, make: Callable) -> list[Partial]:
    """A partial for each (queries, view) of make(pattern), for the pattern of each batch entry and the stage's heads.

    Views are kept with the plan, and stages whose heads see the same share them: backends keep their lists of blocks
    with the patterns in them.
    """
    heads, found = _heads_of(plan, stage.heads), []
    kept = plan.views.setdefault((rank, None if plan.pattern.same_heads else heads), {})
    for batch, one in _by_batch(plan.pattern):
        if batch not in kept:
            kept[batch] = make(views.some_heads(one, heads.start, len(heads), plan.heads))
        for queries, view in kept[batch]:
            group = head_group(plan, stage.heads, queries, view.position)
            found.append(Partial(view.pattern, (group,), view.spare, batch))
    return found


def _other_blocks(plan: Plan, rank: int, stage: Stage) -> list[Partial]:
    """Attention to the key blocks that a stage brings, for the queries that see some of them."""
    needed, queries, heads = _needed(plan, rank, stage), plan.queries(rank), len(_heads_of(plan, stage.heads))

    def make(pattern: Pattern) -> list[tuple[range, views.View]]:
        on = lambda run: views.beside(pattern, run, range(run.stop, run.stop), needed, plan.n, heads)  # noqa: E731
        return [(run, on(run)) for run in views.seeing(on(queries), queries, heads)]

    return _on_views(plan, rank, stage, make) if len(needed) else []


def _border(plan: Plan, rank: int) -> list[tuple[Tensor, views.View]]:
    """(queries, a call of theirs) for those that see rows of other ranks, kept with the plan.

    On a grid the keys are those rows, then the own ones that the queries see, at the end the queries themselves.
    """
    if (rank, "border") not in plan.views:
        pattern, own, queries = plan.pattern, plan.shards[rank], plan.queries(rank)
        if isinstance(pattern, Window):
            back, ahead, step, _ = pattern.reach(plan.n)
            left = clip(queries, 0, own.start + back * step if own.start else 0)
            right = clip(queries, own.stop - ahead * step if own.stop < plan.n else own.stop, own.stop)
            runs = [left, right] if left.stop < right.start else [range(left.start, right.stop)]
            found = [(as_tensor(x), views.window(pattern, x, plan.n)) for x in runs if x]
        else:
            needed = _needed(plan, rank, plan.stages[0])
            border = Rows.of([pattern.near(needed)]).within(queries.start, queries.stop).positions
            around = Rows.of([pattern.near(border)]).within(own.start, own.stop).positions
            every = torch.cat([needed, around[~torch.isin(around, border)], border])
            found = [(border, views.neighborhood(pattern, every))] if len(border) else []
        plan.views[rank, "border"] = found
    return plan.views[rank, "border"]


def _border_calls(plan: Plan, rank: int, stage: Stage) -> list[Partial]:
    """Attention of the queries that see what arrives: to that, and to what they see of the rank's own rows."""
    return [
        Partial(view.pattern, (head_group(plan, stage.heads, queries, view.position),), view.spare)
        for queries, view in _border(plan, rank)
    ]


def _gathered(plan: Plan, rank: int, stage: Stage) -> list[Partial]:
    """Attention of all of a rank's queries to what arrives and its own rows, side by side in one call."""
    own, queries, needed = plan.shards[rank], plan.queries(rank), _needed(plan, rank, stage)
    heads = len(_heads_of(plan, stage.heads))

    def make(pattern: Pattern) -> list[tuple[range, views.View]]:
        if isinstance(pattern, Window):
            return [(queries, views.window(pattern, queries, plan.n))]
        if on_grid(pattern):
            return [(queries, views.neighborhood(pattern, torch.cat([needed, as_tensor(own)])))]
        return [(queries, views.beside(pattern, queries, own, needed, plan.n, heads))]

    return _on_views(plan, rank, stage, make)
