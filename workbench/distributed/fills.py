"""Where the keys of a partial come from: the rank's own rows, and parcels that other ranks send."""

import bisect
import itertools

import torch
from torch import Tensor

from workbench.distributed.copies import Copy, StridedView, evenly, joined
from workbench.distributed.exchange import Slot
from workbench.distributed.partials import Partial
from workbench.distributed.plans import Plan, Stage
from workbench.distributed.shards import Rows, as_index, clip


def fills(plan: Plan, rank: int, stage: Stage | None, partial: Partial, slots: list[list[Slot]]) -> list[Copy]:
    """The copies that bring all of a partial's keys but padding; with stage None, from the rank's own rows alone.

    Of each, `source` are own rows or rows of a block that the stage brings, `target` keys and key heads of the partial,
    which its head groups have side by side. slots: by rank, where the stage's parcels arrive.
    """
    found, first, own = [], 0, plan.shards[rank]
    for group in partial.groups:
        heads = range(plan.kv_heads)[group.key_heads]
        at = {h: first + x for x, h in enumerate(heads)}
        place = _places(group.keys)
        to, rows = place(own.start, own.stop)
        if len(rows):
            ours = StridedView(as_index(rows, own.start), group.key_heads)
            found.append(Copy(None, ours, StridedView(to, slice(first, first + len(heads)))))
        for source in range(plan.world) if stage is not None else ():
            for slot, parcel in zip(slots[source], plan.parcels(source, rank, stage), strict=True):
                pairs = [(at[h], slot.at + y) for y, h in enumerate(parcel.heads) if h in at]
                to, rows = place(plan.shards[source].start, plan.shards[source].stop, parcel)
                if pairs and len(rows):
                    where = parcel.rows.find(rows) if isinstance(rows, range) else slice(0, len(rows))
                    for its_heads, from_heads in evenly(pairs):
                        found.append(Copy(slot.block, StridedView(where, from_heads), StridedView(to, its_heads)))
        first += len(heads)
    return joined(sorted(found, key=lambda copy: -1 if copy.block is None else copy.block.start))


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
