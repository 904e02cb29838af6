"""Patterns in the terms of `block_sparse`'s kernels: lists of the blocks that each block sees, and what a mask reads.

Nested branches of a dilated pattern are blocks of their tile order (`patterns.tile_order`), which repeat from period to
period: the lists are those of one period, and of those at the ends, which may be cut short.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from workbench.patterns import tile_order
from workbench.patterns.base import Blocks
from workbench.patterns.tile_order import TileOrder


class Lists(NamedTuple):
    """Of each line (batch entry, layout, block) the full and the partial blocks that it sees: int32, CSR.

    In tile order a block is (its first position, from that of its period on; the bits of a float32, its bias).
    """

    full: Tensor
    full_blocks: Tensor
    part: Tensor
    part_blocks: Tensor


class Plan(NamedTuple):
    """by_queries: the key blocks that each block of queries sees; by_keys: the other way round.

    count: blocks of queries and of keys. block0: the number of the first block of queries. by_batch, by_head: strides,
    in layouts, from one batch entry to the next and from one head to the next. table, reach, mask: see `visible`.

    rate: that of a tile order, else 0. In tile order reach is the period, in positions, and the table has of each head
    its first line, of each block of a period its first position, and of each period which lines of a head it has.
    """

    by_queries: Lists
    by_keys: Lists
    block_size: tuple[int, int]
    count: tuple[int, int]
    block0: int
    by_batch: int
    by_head: int
    table: Tensor | None
    reach: int
    mask: str
    rate: int = 0


def make_plan(each: list[Blocks], pattern, device) -> Plan:
    """From the blocks of each batch entry (or of all: one)."""
    one = each[0]
    (bq, bk), rows, cols = one.block_size, one.rows, one.cols
    width = torch.cat([x.starts.diff() for x in each])
    line = torch.arange(len(width), device=width.device).repeat_interleave(width)
    column, full = torch.cat([x.columns for x in each]).long(), torch.cat([x.full for x in each])
    row, layout = line % max(1, rows), line // max(1, rows)
    # A block that does not exist as a whole needs the mask.
    if one.n % bk:
        full = full & (column < cols - 1)
    if one.n % bq:
        full = full & (row < rows - 1)
    if (one.n - one.nq) % bq:
        full = full & (row > 0)
    by_queries = lists(line, column, full, len(width))
    turned = layout * cols + column
    order = turned.argsort(stable=True)
    by_keys = lists(turned[order], row[order], full[order], len(each) * one.layouts * cols)
    several = one.layouts > 1
    return Plan(
        Lists(*(x.to(device) for x in by_queries)), Lists(*(x.to(device) for x in by_keys)), (bq, bk), (rows, cols),
        one.first, one.layouts if len(each) > 1 else 0, int(several), *mask_of(pattern, one.n, device),
    )  # fmt: skip


def make_ordered_plan(pattern, order: TileOrder, nq: int, heads: int, device) -> Plan:
    """From the branches of a dilated pattern that has this tile order."""
    size, n, period = tile_order.TILE, order.n, tile_order.period_of(pattern, order)
    many, start = period // size, torch.arange(0, n, period)
    spans = torch.stack([(n - nq - start).clamp(0, period), (n - start).clamp(max=period)], 1)
    kinds, kind = spans.unique(dim=0, return_inverse=True)
    begin = order.position(torch.arange(many) * size)
    last, found = begin + (size - 1) * order.rate, []
    for x, (low, high) in enumerate(kinds.tolist()):  # positions of a period that are queries; keys: all below high
        of = tile_order.pairs(pattern, order._replace(n=high), heads, high)
        i, j = begin[of.row], begin[of.col]
        full = (i >= low) & (torch.maximum(last[of.row], last[of.col]) < high)
        if pattern.causal:
            full &= i >= last[of.col]
        of_kind = (of.set * len(kinds) + x) * many
        bias = of.times.float().log2().view(torch.int32).long()
        both = of_kind + of.row, of_kind + of.col, torch.stack([j, bias], 1), torch.stack([i, bias], 1), full
        exist = (last[of.row] >= low) & (torch.maximum(i, j) < high)
        found.append([each[exist] for each in both])
    rows, cols, keys, queries, full = map(torch.cat, zip(*found, strict=True))
    lines, by_lines = (int(of.which.max()) + 1) * len(kinds) * many, []
    for line, block in ((rows, keys), (cols, queries)):
        turn = line.argsort(stable=True)
        by_lines.append(Lists(*(x.to(device) for x in lists(line[turn], block[turn], full[turn], lines))))
    table = torch.cat([of.which * len(kinds) * many, begin, kind * many]).to(torch.int32).to(device)
    first = (n - nq) // period * many
    count = len(start) * many
    return Plan(*by_lines, (size, size), (count - first, count), first, 0, 0, table, period,
                "causal" if pattern.causal else "all", order.rate)  # fmt: skip


def lists(line: Tensor, block: Tensor, full: Tensor, lines: int) -> Lists:
    found = []
    for chosen in (full, ~full):
        starts = torch.zeros(lines + 1, dtype=torch.int32, device=line.device)
        starts[1:] = torch.bincount(line[chosen], minlength=lines).cumsum(0)
        found += [starts, block[chosen].to(torch.int32)]
    return Lists(*found)


def mask_of(pattern, n: int, device) -> tuple[Tensor | None, int, str]:
    """(TABLE (N, 2) or None, reach, MASK) for `visible`."""
    if hasattr(pattern, "radius"):
        if len(pattern.shape) == 1 and pattern.ordering is None:
            return None, min(pattern.radius[0], n), "window"
        radius = [min(r, side) for r, side in zip(pattern.radius, pattern.shape, strict=True)]
        return pack(pattern.coordinates(torch.arange(n)), radius, n, device) + ("near",)
    return None, 0, "causal" if pattern.causal else "all"


def pack(fields: list[Tensor], radius: list[int], n: int, device) -> tuple[Tensor, int]:
    """(TABLE, reach): each field as wide as its largest number plus its radius, and one bit more."""
    low, high, reach, shift = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64), 0, 0
    for field, r in zip(fields, radius, strict=True):
        width = (int(field.max()) + r).bit_length() if n else 0
        low += field.cpu() << shift
        high += field.cpu() + r + (1 << width) << shift
        reach |= 1 << shift + width
        shift += width + 1
    if shift > 62:
        raise ValueError(f"the coordinates of {n:,} tokens take {shift} bits: the kernels have 62")
    return torch.stack([low, high], 1).to(torch.int32 if shift <= 31 else torch.int64).contiguous().to(device), reach
