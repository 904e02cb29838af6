"""Patterns in the terms of `block_sparse`'s kernels: lists of the blocks that each block sees, and what a mask reads.

Nested branches of a dilated pattern are blocks of their tile order (`patterns.tile_order`), which repeat from period to
period: the lists are those of one period, and of those at the ends, which may be cut short.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.patterns import BlockSparse, Neighborhood, Window, tile_order
from workbench.patterns.base import Blocks
from workbench.patterns.tile_order import TileOrder


class Lists(NamedTuple):
    """Of each line (batch entry, layout, block) the full and the partial blocks that it sees: int32, CSR.

    In tile order a block is (its first position, from that of its period on; the bits of a float32, its bias); where
    the mask is "bits" a partial block is (its number, that of its mask).
    """

    full: Tensor
    full_blocks: Tensor
    part: Tensor
    part_blocks: Tensor


class Plan(NamedTuple):
    """by_queries: the key blocks that each block of queries sees; by_keys: the other way round.

    count: blocks of queries and of keys. block0: the number of the first block of queries. by_batch, by_head: strides,
    in layouts, from one batch entry to the next and from one head to the next. table, reach, mask: see `visible`; of
    mask "bits" the table is that of `bit_masks`.

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


def every(each: list[Blocks]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each block its layout, counted on through batch entries, its row, its column, and whether it is full."""
    layout = torch.cat([x.place[0] + place * x.layouts for place, x in enumerate(each)])
    row, column, full = (torch.cat(x) for x in zip(*((x.place[1], x.columns, x.full) for x in each), strict=True))
    return layout, row, column.long(), full


def sides(each: list[Blocks]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`every`, but what needs no mask for full."""
    one, (layout, row, column, full) = each[0], every(each)
    (bq, bk), rows, cols = one.block_size, one.rows, one.cols
    # A block that does not exist as a whole needs the mask.
    if one.n % bk:
        full = full & (column < cols - 1)
    if one.n % bq:
        full = full & (row < rows - 1)
    if (one.n - one.nq) % bq:
        full = full & (row > 0)
    return layout, row, column, full


def make_plan(each: list[Blocks], bits: Tensor | None, which: Tensor | None, pattern, device) -> Plan:
    """From what `bit_masks.find` found."""
    one, (layout, row, column, full), both = each[0], sides(each), []
    for lines, of, block in ((one.rows, row, column), (one.cols, column, row)):
        line, many = layout * lines + of, len(each) * one.layouts * lines
        found = lists(line, block, full, many)
        if which is not None:
            masks = lists(line, torch.zeros_like(row).masked_scatter(~full, which), full, many).part_blocks
            found = found._replace(part_blocks=torch.stack([found.part_blocks, masks], 1))
        both.append(Lists(*(x.to(device) for x in found)))
    mask = mask_of(pattern, one.n, device) if bits is None else (bits.to(device), 0, "bits")
    return Plan(
        *both, one.block_size, (one.rows, one.cols), one.first, one.layouts if len(each) > 1 else 0,
        int(one.layouts > 1), *mask,
    )  # fmt: skip


def make_ordered_plan(pattern, order: TileOrder, nq: int, heads: int, device) -> Plan:
    """From the branches of a dilated pattern that has this tile order."""
    size, n, period = tile_order.TILE, order.n, tile_order.period_of(pattern, order)
    many, start = period // size, torch.arange(0, n, period)
    spans = torch.stack([(n - nq - start).clamp(0, period), (n - start).clamp(max=period)], 1)
    kinds, kind = spans.unique(dim=0, return_inverse=True)
    begin = order.position(torch.arange(many) * size)
    last = begin + (size - 1) * order.rate
    each = [tile_order.pairs(pattern, order._replace(n=high), heads, high) for high in kinds[:, 1].tolist()]
    sets, by_lines = each[0].sets, ([], [])
    for (base, by), (low, high), of in ((x, *y) for x in sets for y in zip(kinds.tolist(), each, strict=True)):
        # positions from `low` to `high` of a period are queries, all below `high` are keys
        ours = of.base == base
        row, col = (tile_order.turn(x[ours], by, of.segment) for x in (of.row, of.col))
        i, j = begin[row], begin[col]
        full = (i >= low) & (torch.maximum(last[row], last[col]) < high)
        if pattern.causal:
            full &= i >= last[col]
        exist = (last[row] >= low) & (torch.maximum(i, j) < high)
        bias = of.times[ours].float().log2().view(torch.int32).long()
        for found, line, first in zip(by_lines, (row, col), (j, i), strict=True):
            found.append(lists(line[exist], torch.stack([first, bias], 1)[exist], full[exist], many))
    table = torch.cat([each[0].which * len(kinds) * many, begin, kind * many]).to(torch.int32).to(device)
    first = (n - nq) // period * many
    count = len(start) * many
    by_queries, by_keys = (_joined(x, device) for x in by_lines)
    return Plan(by_queries, by_keys, (size, size), (count - first, count), first, 0, 0, table, period,
                "causal" if pattern.causal else "all", order.rate)  # fmt: skip


def lists(line: Tensor, block: Tensor, full: Tensor, lines: int) -> Lists:
    """The lists of so many lines, of blocks that come in any order and keep it within their line."""
    order = np.argsort(line.numpy().astype(np.uint16), kind="stable")  # 16 bits: by radix, in a tenth
    if lines > 1 << 16:
        order = order[np.argsort((line.numpy()[order] >> 16).astype(np.uint16), kind="stable")]
    order = torch.from_numpy(order)
    line, block, full, found = line[order], block[order], full[order], []
    for chosen in (full, ~full):
        starts = torch.zeros(lines + 1, dtype=torch.int32)
        starts[1:] = torch.bincount(line[chosen], minlength=lines).cumsum(0)
        found += [starts, block[chosen].to(torch.int32)]
    return Lists(*found)


def _joined(parts: list[Lists], device) -> Lists:
    """The lists of one set of lines after the other."""
    found = []
    for starts, blocks in zip(*[iter(zip(*parts, strict=True))] * 2, strict=True):
        width = torch.cat([starts[0][:1], *(x.diff() for x in starts)])
        found += [width.cumsum(0).to(torch.int32).to(device), torch.cat(blocks).to(device)]
    return Lists(*found)


def kind_of(pattern) -> str:
    """What says which pairs of a partial block are visible: see `block_sparse.visible`."""
    if isinstance(pattern, BlockSparse):
        return "causal" if pattern.causal else "all"
    if isinstance(pattern, Window):
        return "window" if pattern.dilation == 1 and not pattern.sinks else "bits"
    if not isinstance(pattern, Neighborhood) or not pattern.plain:
        return "bits"
    if pattern.line:
        return "window"
    fields = zip(pattern.shape, pattern.radius, strict=True)
    return "near" if sum((side - 1 + min(r, side)).bit_length() + 1 for side, r in fields) <= 62 else "bits"


def mask_of(pattern, n: int, device) -> tuple[Tensor | None, int, str]:
    """(TABLE (N, 2) or None, reach, MASK) for `visible`, where MASK is not "bits"."""
    kind = kind_of(pattern)
    if kind == "window":
        return None, pattern.reach(n)[0] if isinstance(pattern, Window) else min(pattern.radius[0], n), kind
    if kind == "near":
        radius = [min(r, side) for r, side in zip(pattern.radius, pattern.shape, strict=True)]
        return pack(pattern.coordinates(torch.arange(n)), radius, n, device) + (kind,)
    return None, 0, kind


def pack(fields: list[Tensor], radius: list[int], n: int, device) -> tuple[Tensor, int]:
    """(TABLE, reach): each field as wide as its largest number plus its radius, and one bit more."""
    low, high, reach, shift = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64), 0, 0
    for field, r in zip(fields, radius, strict=True):
        width = (int(field.max()) + r).bit_length() if n else 0
        low += field.cpu() << shift
        high += field.cpu() + r + (1 << width) << shift
        reach |= 1 << shift + width
        shift += width + 1
    return torch.stack([low, high], 1).to(torch.int32 if shift <= 31 else torch.int64).contiguous().to(device), reach
