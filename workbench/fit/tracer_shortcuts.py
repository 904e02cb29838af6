"""What a trace leaves out and still gets the same peaks: the contents of lists of blocks, and most of many equal calls.

Lists of blocks on the card have the lengths that the pattern's counts give, and no contents. Of equal calls in a row a
few are run, which show all the memory that such a call takes; their events are repeated for some of the others, until
the allocator's free blocks have settled.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from workbench.engines.torch import block_sparse, fused
from workbench.fit.fake_cuda import CUDA, replaced
from workbench.patterns import BlockSparse, Neighborhood, Pattern
from workbench.patterns.base import Blocks


class Shortcuts:
    """The shortcuts of one trace, of the storages that `births` (`trace.Births`) follows, while `taken`."""

    def __init__(self, births):
        self.births = births
        self.lists: weakref.WeakKeyDictionary[Pattern, tuple[tuple, Listed]] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def taken(self):
        """Lists of blocks on the card have lengths and no contents; of calls in a row that are alike a few are made."""
        from workbench.engines import torch_backend, triton_backend
        from workbench.engines.fa4 import plans
        from workbench.engines.torch import dilated

        found = [
            (block_sparse, "strips", self.few_strips),
            (block_sparse, "split", self.few_stacks),
            (torch_backend, "blocks_of", self.blocks_of),
            (triton_backend, "plan_of", plan_of),
            (plans, "plan_of", fa4_plan_of),
            (dilated, "pieces", lambda *x, make=dilated.pieces: self.repeated(make(*x), _shape, 4)),
            (dilated, "parts", lambda *x, make=dilated.parts: self.repeated(make(*x), _shape, 6)),
            (fused, "range", lambda *x: self.repeated(range(*x), lambda start: start + x[2] <= x[1], 6)),
        ]
        with replaced(found):
            yield

    def blocks_of(self, pattern, q: Tensor, n: int) -> Listed:
        """As `torch_backend.blocks_of`, with lists that have lengths and no contents."""
        sizes = n, q.shape[2], q.shape[1]
        if self.lists.get(pattern, (None,))[0] == sizes:
            return self.lists[pattern][1]
        with _disable_current_modes():  # the host makes them, and moves to the card what an execution reads
            if isinstance(pattern, BlockSparse):
                block_size, counts = pattern.block_size, pattern.row_counts(*sizes)
            else:
                made = pattern.blocks(*sizes)
                block_size, counts = made.block_size, made.row_counts()
        lines, listed = counts[0].numel(), int(counts[0].sum())
        tensors = [self.given(*x) for x in ((lines + 1, "starts"), (listed, "columns", torch.int32))]
        tensors.append(self.given(listed, "full", torch.bool))
        made = Listed(block_size, n, q.shape[1], len(counts[0]), *tensors, counts)
        self.lists[pattern] = sizes, made
        return made

    def strips(self, blocks: Listed, limit: int):
        """`block_sparse.strips` line by line, with the lengths that the numbers of blocks give: the same storages."""
        lines, (seen, full) = len(blocks.starts) - 1, blocks.counts.flatten(1).numpy()
        columns = blocks.columns.long()
        line, widths = torch.arange(lines, device=CUDA), blocks.starts.diff()
        index = self.given(int(seen.sum()), "repeat_interleave")
        kept = {"units": line.index_select(0, index)}
        del line, widths, index
        whole = blocks.full
        if blocks.n % blocks.block_size[1]:
            whole = whole & (columns < blocks.cols - 1)
        for kind, numbers in ((True, full), (False, seen - full)):
            total, (values, times) = int(numbers.sum()), np.unique(numbers, return_counts=True)
            kept["chosen"] = whole == kind
            kept["chosen columns"], kept["their units"] = self.given(total, "index"), self.given(total, "index")
            per_unit = self.given(lines, "bincount")
            first = torch.cumsum(per_unit, 0) - per_unit
            if total:
                per_unit.max()
            units = list(zip(values.tolist(), times.tolist(), strict=True))
            lengths = range(0, int(values.max(initial=0)), limit)
            for length in self.repeated(lengths, lambda length, units=units: _widths(units, length, limit), 6):
                left = (per_unit - length).clamp(0, limit)
                many = _widths(units, length, limit)
                self.given(len(many), "unique")
                for count, lines_of_it in many:
                    if not count:
                        continue
                    who = self.nonzero(left == count, lines_of_it)
                    at = (first[who] + length)[:, None] + torch.arange(count, device=CUDA)
                    yield block_sparse.Strips(
                        who // blocks.rows, who % blocks.rows, self.given((len(at), count), "index"), kind
                    )

    def few_strips(self, blocks: Listed, limit: int):
        """The strips of `strips`, two of a shape."""
        found, times = self.strips(blocks, limit), collections.Counter()
        while (one := next(found, None)) is not None:
            shape = one.columns.shape, one.full
            times[shape] += 1
            if times[shape] <= 2:
                yield one
            del one

    def few_stacks(self, s, height: int) -> Iterator:
        """As `block_sparse.split`, of many stacks a few."""
        stacks, rest = divmod(len(s.rows), height)
        some = few(stacks, STACKS) * height + rest
        with _disable_current_modes():
            views = [x[:some].split(height) for x in s[:3]]
        found = (block_sparse.Strips(*x, s.full) for x in zip(*views, strict=True))
        return self.repeated(found, lambda one: len(one.rows), STACKS)

    def repeated(self, items: Iterable, shape: Callable, most: int) -> Iterator:
        """The items; of a run of equal shape(item), only until two in a row bring the same events.

        The events of the others, up to `most`, come from these: what a birth is to one call, the birth in its place is
        to the next.
        """
        for _, run in itertools.groupby(items, shape):
            alike, marks = list(run), []
            total = few(len(alike), most)
            for done, item in enumerate(alike[:total]):
                marks.append(len(self.births.events))
                if done > 1 and self.copied(*marks[-3:], total - done):
                    break
                yield item

    def copied(self, start: int, middle: int, end: int, times: int) -> bool:
        """Append the events [middle, end) so many times more, as further calls of their kind would bring them.

        False, and nothing is done, where they would not: where the call before had other births, in [start, middle), or
        not all that it left lived until this one.
        """
        segment = self.births.events[middle:end]
        before, last = (
            [x for x in self.births.events[i:j] if x.nbytes >= 0] for i, j in ((start, middle), (middle, end))
        )
        place, earlier = ({x.id: i for i, x in enumerate(some)} for some in (last, before))
        left = {earlier[x.id] for x in segment if x.nbytes < 0 and x.id in earlier}
        gone = {place[x.id] for x in segment if x.nbytes < 0 and x.id in place}
        if [x.nbytes for x in before] != [x.nbytes for x in last] or left | gone != set(range(len(last))):
            return False
        if left & gone or 2 * len(last) != len(segment):
            return False
        ids, previous = [x.id for x in last], []
        for _ in range(times):
            ids, previous = [next(self.births.ids) for _ in ids], ids
            for x in segment:
                id = ids[place[x.id]] if x.id in place else previous[earlier[x.id]]
                self.births.events.append(type(x)(id, x.nbytes, x.name))
        for address, id in self.births.alive.items():
            if id in place:
                self.births.alive[address] = ids[place[id]]
        return True

    def given(self, shape, name: str, dtype=torch.int64) -> Tensor:
        """What an operator makes whose result's shape depends on data."""
        made = torch.empty(shape, dtype=dtype, device=CUDA)
        self.births.rename(made, name)
        return made

    def nonzero(self, x: Tensor, many: int) -> Tensor:
        """x.nonzero() of a line, with `many` results; x lives until they are made."""
        return self.given((many, 1), "nonzero").squeeze(1)


@dataclasses.dataclass(frozen=True)
class Listed(Blocks):
    """Lists of blocks without contents. counts: `Blocks.row_counts`."""

    counts: Tensor


def plan_of(pattern, q: Tensor, n: int):
    """As `triton_backend.plan_of`, with lists that have lengths and no contents."""
    sizes = n, q.shape[1], q.shape[2]
    return pattern.kept("plan without contents", sizes, lambda: _plan(pattern, *sizes, q.device))  # for the backward


def _plan(pattern, n: int, nq: int, heads: int, device):
    from workbench.engines import triton_backend
    from workbench.engines.triton import block_lists as blocks

    bq, bk = triton_backend.block_size_of(pattern)
    with _disable_current_modes():
        counts = [one.row_counts(n, heads, nq, (bq, bk)) for one in pattern.each()]
        seen, full = torch.stack(counts, 1)  # (batch, layouts, rows)
        full = full.clone()
        if n % bq:
            full[..., -1:] = 0
        if (n - nq) % bq:
            full[..., :1] = 0
        full, listed = int(full.sum()), int(seen.sum())
    batch, layouts, rows = seen.shape
    cols = -(-n // bk)
    lists = [
        blocks.Lists(*(_blank(x).to(device) for x in (lines + 1, full, lines + 1, listed - full)))
        for lines in (seen.numel(), batch * layouts * cols)
    ]
    if isinstance(pattern, Neighborhood) and pattern.ordering is None and len(pattern.shape) > 1:
        dtype = torch.int32 if triton_backend.coordinate_bits(pattern) <= 31 else torch.int64
        mask = _blank(n, 2, dtype=dtype).to(device), 0, "near"
    else:
        mask = blocks.mask_of(pattern, n, device)
    by_batch, first = layouts if batch > 1 else 0, (n - nq) // bq
    return blocks.Plan(*lists, (bq, bk), (rows, cols), first, by_batch, int(layouts > 1), *mask)


def fa4_plan_of(pattern, q: Tensor, n: int):
    """As `plans.plan_of`: the lists are made on the host, which nobody follows, and moved."""
    from workbench.engines.fa4 import plans

    (b, nq, h, _), device = q.shape, q.device
    with _disable_current_modes():
        made = pattern.kept("fa4 on the host", (b, nq, h, n), lambda: plans.make_plan(pattern, b, n, nq, h))
    return pattern.kept("fa4 without contents", (b, nq, h, n), lambda: made.to(device))


def _widths(units: list[tuple[int, int]], length: int, limit: int) -> tuple[tuple[int, int], ...]:
    """(blocks that a strip takes, of how many lines), from (blocks of a line, how many lines), `length` blocks on."""
    many = collections.Counter()
    for blocks, lines in units:
        many[min(max(blocks - length, 0), limit)] += lines
    return tuple(sorted(many.items()))


def _blank(*shape: int, dtype=torch.int32) -> Tensor:
    """A tensor on the CPU that takes no memory there, and all of it once it is moved to the card."""
    return torch.empty((), dtype=dtype).expand(shape)


# --- calls that are alike --------------------------------------------------------------------------------------------


STACKS = 16  # how many stacks of a shape are followed, where one call does not hold many others


def few(times: int, most: int) -> int:
    """How many of so many equal calls in a row are followed: at most `most`, or one more.

    What is alive at once is known from the second on; which free blocks an allocator takes for it settles later, and
    may alternate between two places.
    """
    return times if times <= most + 1 else most + (times - most) % 2


def _shape(piece) -> tuple:
    """What the memory that a `dilated.Piece` takes depends on."""
    sizes = (len(range(x.start, x.stop, x.step or 1)) for x in piece[3:7])
    return piece.length, piece.count, piece.queries.step, piece.heads.step, piece.causal, *sizes
