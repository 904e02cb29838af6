"""Block-sparse attention by gathering: rows with equally many key blocks go through one fused call, in bounded memory.

A pattern's `blocks` list the key blocks that each query block needs. Rows are cut into strips of at most `limit` key
blocks, fully visible blocks apart from partial ones (which carry a mask computed from `Pattern.count`); strips of equal
length are stacked, their keys gathered, and the results merged by log-sum-exp. Where all heads share a layout they stay
together in a unit, beside those of other short sequences of the batch, so that a mask is made once for all; where
layouts differ by head, every (head, block) is a unit of its own.

Dimensions: N keys, Nq queries, H query heads, G key heads, D head_dim; U units = layouts x blocks, R strips, C key
blocks a strip, a x c the block size.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.engines.merge import lse_dtype, merge_
from workbench.engines.torch import fused, steps
from workbench.patterns.base import Blocks

ELEMENTS = 1 << 20  # gathered key elements a fused call: 4 MB in float32, which stay in a CPU's cache
SCORES = 1 << 24  # mask elements a fused call


class Strips(NamedTuple):
    """R strips of C key blocks each: rows (R,) and columns (R, C) of the block grid, of layouts (R,)."""

    layout: Tensor
    rows: Tensor
    columns: Tensor
    full: bool


def strips(blocks: Blocks, limit: int) -> Iterator[Strips]:
    """Every block of the layout once, in strips of equal length and kind."""
    columns = blocks.columns.long()
    units = blocks.line
    whole = blocks.full
    if blocks.n % blocks.block_size[1]:  # the last key block is padded, and the padding has to be masked
        whole = whole & (columns < blocks.cols - 1)
    for full in (True, False):
        chosen = whole == full
        cols, unit = columns[chosen], units[chosen]
        per_unit = torch.bincount(unit, minlength=len(blocks.starts) - 1)
        first = torch.cumsum(per_unit, 0) - per_unit
        for length in range(0, int(per_unit.max()) if len(cols) else 0, limit):
            left = (per_unit - length).clamp(0, limit)  # blocks of each unit in this strip
            for count in torch.unique(left).tolist():
                if count:
                    who = (left == count).nonzero().squeeze(1)
                    at = (first[who] + length)[:, None] + torch.arange(count, device=columns.device)
                    yield Strips(who // blocks.rows, who % blocks.rows, cols[at], full)


def stacks(blocks: Blocks, row_elements: int) -> Iterator[Strips]:
    """The strips in stacks whose gathered keys and masks stay within ELEMENTS and SCORES."""
    a, c = blocks.block_size
    limit = max(1, ELEMENTS // (c * row_elements))
    for s in strips(blocks, limit):
        height = max(1, limit // s.columns.shape[1])
        if not s.full:
            height = max(1, min(height, SCORES // (a * c * s.columns.shape[1])))
        for x in steps.starts(len(s.rows), height, 16):
            yield Strips(*(of[x : x + height] for of in s[:3]), s.full)


class Grid:
    """The block grid of one call: tensors cut into units and back, and the masks of partial blocks."""

    def __init__(self, pattern, blocks: Blocks, heads: int, key_heads: int):
        self.pattern, self.blocks, self.heads = pattern, blocks, heads
        self.a, self.c = blocks.block_size
        self.start = blocks.first * self.a  # the position where the first row of blocks begins
        if blocks.rows == 1:  # few queries: a block has just these
            self.start, self.a = blocks.n - blocks.nq, blocks.nq
        self.split = blocks.layouts > 1  # layouts differ by head: units hold one head
        self.group = heads // key_heads
        self.front = blocks.n - blocks.nq - self.start  # rows of the first block that are no queries
        self.missing = blocks.cols * self.c - blocks.n  # positions that the last key block lacks
        self.place, self.cols, self.taken = torch.arange(blocks.cols, device=blocks.columns.device), blocks.cols, None
        if (used := blocks.used) is not None:  # few queries need few blocks: no others are read
            self.place[used], self.cols = torch.arange(len(used), device=used.device), len(used)
            self.taken = (used[:, None] * self.c + torch.arange(self.c, device=used.device)).flatten()

    def batches(self, k: Tensor) -> Iterator[slice]:
        """Which sequences of k (B, N, G, D) are computed at once: a single one where layouts differ by head. Their keys
        and their queries take a quarter of ELEMENTS each (with more, one by one is faster), and their heads are at most
        ELEMENTS / 32, which CUDA's kernels take."""
        keys, queries = self.cols * self.c * self.elements(k), self.blocks.nq * self.heads * k.shape[-1]
        many = 1 if self.split else max(1, ELEMENTS // max(1, 4 * keys, 4 * queries, 32 * self.heads))
        return (slice(x, x + many) for x in range(0, len(k), many))

    def query_units(self, x: Tensor, value: float = 0) -> Tensor:
        """x (Nq, H, ...) -> (U, a, heads of a unit, ...)."""
        return self._units(x, self.a, self.front, self.blocks.rows * self.a - self.front - x.shape[0], value)

    def key_units(self, x: Tensor) -> Tensor:
        """x (B, N, G, D) -> the units of the key blocks that are needed, heads beside each other as by `_beside`."""
        if self.taken is None:
            return self._units(_beside(x), self.c, 0, self.missing, 0)
        taken = self.taken.clamp(max=self.blocks.n - 1)
        return self._units(torch.cat([take(one, taken) for one in x], 1), self.c, 0, 0, 0)

    def _units(self, x, size, front, back, value):
        if front or back:
            x = pad(x, (0, 0) * (x.dim() - 1) + (front, back), value=value)
        x = x.unflatten(0, (-1, size))  # (blocks, size, H, ...)
        return x.movedim(2, 0).flatten(0, 1).unsqueeze(2) if self.split else x

    def rows(self, units: Tensor) -> Tensor:
        """The inverse of `query_units`: (Nq, H, ...)."""
        return self._positions(units, self.blocks.rows)[self.front : self.front + self.blocks.nq]

    def keys(self, units: Tensor) -> Tensor:
        """The inverse of `key_units`: (N, G, D), zeros where no key is needed."""
        if not self.cols:
            heads = self.heads // self.group if self.split else units.shape[2]
            return units.new_zeros(self.blocks.n, heads, units.shape[-1])
        x = self._positions(units, self.cols)
        if self.taken is None:
            return x[: self.blocks.n]
        room = x.new_zeros(self.blocks.cols * self.c, *x.shape[1:])
        return room.index_copy_(0, self.taken, x)[: self.blocks.n]

    def _positions(self, units, blocks):
        if self.split:  # (heads x blocks, size, 1, ...) -> (blocks, size, heads, ...)
            units = units.squeeze(2).unflatten(0, (-1, blocks)).movedim(0, 2)
        return units.flatten(0, 1)

    def query_index(self, s: Strips) -> Tensor:
        return s.layout * self.blocks.rows + s.rows  # (R,)

    def key_index(self, s: Strips) -> Tensor:
        return ((s.layout // self.group * self.cols)[:, None] + self.place[s.columns]).flatten()  # (R x C,)

    def positions(self, s: Strips) -> tuple[Tensor, Tensor, Tensor]:
        """The layout (R, 1, 1), the queries (R, a, 1) and keys (R, 1, C x c): positions that exist."""
        device, last = s.rows.device, self.blocks.n - 1
        i = self.start + s.rows[:, None] * self.a + torch.arange(self.a, device=device)
        j = (s.columns[..., None] * self.c + torch.arange(self.c, device=device)).flatten(1)
        return s.layout[:, None, None], i.clamp(0, last)[:, :, None], j.clamp(max=last)[:, None, :]

    def mask(self, s: Strips, dtype) -> Tensor | None:
        """Additive (R, 1, a, C x c): the logarithm of how often the pattern shows the pair; None where that is once."""
        if s.full:
            return None
        count = self.pattern.count(*self.positions(s), self.blocks.n, self.heads)
        if self.missing:
            j = s.columns[..., None] * self.c + torch.arange(self.c, device=count.device)
            count = count * (j.flatten(1) < self.blocks.n)[:, None, :]
        if count.dtype == torch.bool:  # the logarithms of 0 and 1 at a fraction of a CPU's time for them
            return torch.zeros(count.shape, dtype=dtype, device=count.device).masked_fill_(~count, -torch.inf)[:, None]
        return count.to(torch.promote_types(dtype, torch.float32)).log()[:, None]  # that of 2 is no 16-bit number

    def elements(self, units: Tensor) -> int:
        """How many elements a key of a strip takes, of keys (..., heads, D) as `key_units` gives them."""
        return units.shape[2:].numel()

    def forward(self, s: Strips, q, k, v, scale):
        return fused.forward(q, k, v, False, scale, self.mask(s, q.dtype))

    def backward(self, s: Strips, grad, q, k, v, out, lse, scale):
        return fused.backward(grad, q, k, v, out, lse, False, scale, self.mask(s, q.dtype))


def take(units: Tensor, index: Tensor, room: Tensor | None = None) -> Tensor:
    """units[index] along the first dimension, in 2-D, where index_select copies whole rows (50x faster on a CPU).

    room: a buffer for the result, reused between calls: fresh pages cost nearly as much as the copy.
    """
    flat = units.flatten(1)
    out = None if room is None else room[: len(index) * flat.shape[1]].view(len(index), -1)
    return torch.index_select(flat, 0, index, out=out).unflatten(1, units.shape[1:])


def gather(units: Tensor, index: Tensor, strips: int = 0, room: Tensor | None = None) -> Tensor:
    """Units (U, a, heads, D) -> (R, heads, positions, D); `strips` of them, len(index) / strips units each."""
    x = take(units, index, room)
    if strips:
        x = x.unflatten(0, (strips, -1)).flatten(1, 2)  # (R, C x c, heads, D)
    return x.transpose(1, 2)


def _beside(x: Tensor) -> Tensor:
    """(B, N, H, ...) -> (N, B x H, ...): the heads of all sequences side by side."""
    return x.transpose(0, 1).flatten(1, 2)


def forward(q: Tensor, k: Tensor, v: Tensor, grid: Grid, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, Nq, H, D) and lse (B, H, Nq) from q (B, Nq, H, D), k and v (B, N, G, D)."""
    b, nq, h, _ = q.shape
    wide = lse_dtype(q)
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(b, h, nq, dtype=wide)
    for x in grid.batches(k):
        qu, ku, vu = grid.query_units(_beside(q[x])), grid.key_units(k[x]), grid.key_units(v[x])
        total = torch.zeros(qu.shape, dtype=wide, device=q.device)
        total_lse = torch.full(qu.shape[:3], -torch.inf, dtype=wide, device=q.device)  # (U, a, heads)
        k_room, v_room = ku.new_empty(2, max(ELEMENTS, ku.shape[1:].numel()))
        for s in stacks(grid.blocks, grid.elements(ku)):
            rows, keys, r = grid.query_index(s), grid.key_index(s), len(s.rows)
            k_part, v_part = gather(ku, keys, r, k_room), gather(vu, keys, r, v_room)
            part, part_lse = grid.forward(s, gather(qu, rows), k_part, v_part, scale)
            merged, merged_lse = take(total, rows), take(total_lse, rows)
            merge_(merged, merged_lse, part.transpose(1, 2), part_lse.transpose(1, 2))
            total.index_copy_(0, rows, merged)
            total_lse.index_copy_(0, rows, merged_lse)
        out[x] = grid.rows(total).unflatten(1, (-1, h)).transpose(0, 1)
        lse[x] = grid.rows(total_lse).T.unflatten(0, (-1, h))
    return out, lse


def backward(grad, q, k, v, out, lse, grid: Grid, scale):
    """(dq, dk, dv) from the gradient of out, and what `forward` returned."""
    wide = lse_dtype(q)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # exact zeros for rows that nothing reaches
    for x in grid.batches(k):
        qu, gu, ou = (grid.query_units(_beside(t[x])) for t in (q, grad, out))
        lu = grid.query_units(lse[x].flatten(0, 1).T, torch.inf)
        ku, vu = grid.key_units(k[x]), grid.key_units(v[x])
        dqu, dku, dvu = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (qu, ku, vu))
        k_room, v_room = ku.new_empty(2, max(ELEMENTS, ku.shape[1:].numel()))
        for s in stacks(grid.blocks, grid.elements(ku)):
            rows, keys, r = grid.query_index(s), grid.key_index(s), len(s.rows)
            k_part, v_part = gather(ku, keys, r, k_room), gather(vu, keys, r, v_room)
            g_part, q_part, o_part, l_part = (gather(t, rows) for t in (gu, qu, ou, lu))
            dq_, dk_, dv_ = grid.backward(s, g_part, q_part, k_part, v_part, o_part, l_part, scale)
            dqu.index_add_(0, rows, dq_.transpose(1, 2).to(wide))
            for total, part in ((dku, dk_), (dvu, dv_)):
                part = fused.sum_heads(part, ku.shape[2])  # (R, G, C x c, D)
                total.index_add_(0, keys, part.transpose(1, 2).unflatten(1, (-1, grid.c)).flatten(0, 1).to(wide))
        for to, found in ((dq, grid.rows(dqu)), (dk, grid.keys(dku)), (dv, grid.keys(dvu))):
            to[x] = found.unflatten(1, (-1, to.shape[2])).transpose(0, 1)
    return dq, dk, dv
