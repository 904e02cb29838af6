"""LongNet's dilated attention (arXiv 2307.02486): segments, and within a segment every r-th position.

Branch b has segment length w and dilation rate r. Position t is in segment t // w; a head with offset o keeps the
positions with (t mod w) mod r == o, for queries and keys alike, and sees what is kept in its own segment. Branches mix
by their softmax denominators: one softmax over the multiset of visible keys, so `count` may exceed 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.patterns.base import Blocks, Pattern, ranges
from workbench.patterns.checks import choice, flag, wholes
from workbench.patterns.listed import ALL, NOTHING, PART, States, merged

MOST = 1 << 53  # of a length and a rate: sums and products with positions stay within 64 bits
PAPER = (2048, 4096, 8192, 16384, 32768)
NAMES = {(PAPER, (1, 2, 4, 6, 12)): "longnet-paper", (PAPER, (1, 2, 4, 8, 16)): "longnet-pow2"}


def geometric(n: int, causal: bool = False, first: int = 4096) -> Dilated:
    """LongNet's dilated attention for n positions, with equal work in each branch.

    The first branch has segments of `first` tokens and rate 1; each further one has segments four times as long and
    twice the rate. The last branch is one segment of all n positions.
    """
    lengths, rates = [first], [1]
    while lengths[-1] < n:
        lengths, rates = [*lengths, 4 * lengths[-1]], [*rates, 2 * rates[-1]]
    return Dilated([*lengths[:-1], max(1, n)], rates, causal)


class Dilated(Pattern):
    """count(h, i, j) = #{branches b : i // w == j // w, both kept under head h's offset, and j <= i if causal}.

    segment_lengths, dilation_rates: ints >= 1, one of each per branch; any combination is valid, also w longer than the
    sequence and r longer than w.
    heads: "all", every head is in every branch; "partition", each branch owns a group of heads (sizes differ by at most
    one, larger first) with offset branch mod r, and the output is divided by `divisor(heads)`.
    offsets: a head's offset in a branch, "interleaved" h mod r (the paper) or "blocked" h // ceil(heads / r) (the
    official code, so published weights).
    """

    by_value = True

    def __init__(self, segment_lengths, dilation_rates, causal=False, heads="all", offsets="interleaved"):
        self.segment_lengths = wholes("segment_lengths", segment_lengths, 1, MOST)
        self.dilation_rates = wholes("dilation_rates", dilation_rates, 1, MOST)
        if len(self.segment_lengths) != len(self.dilation_rates):
            raise ValueError(
                f"segment_lengths={self.segment_lengths!r}, dilation_rates={self.dilation_rates!r}: want one rate for "
                f"each segment length, got {len(self.dilation_rates)} for {len(self.segment_lengths)}"
            )
        self.causal = flag("causal", causal)
        self.heads = choice("heads", heads, "all", "partition")
        self.offsets = choice("offsets", offsets, "interleaved", "blocked")
        if self.heads == "partition" and self.offsets == "blocked":
            why = "with heads='partition' the offset is the branch's"
            raise ValueError(f"offsets='blocked': {why}, want offsets='interleaved'")

    def head_range(self, branch: int, heads: int) -> range:
        """The heads that take part in a branch; empty where there are fewer heads than branches (partition)."""
        if self.heads == "all":
            return range(heads)
        size, larger = divmod(heads, len(self.segment_lengths))
        start = branch * size + min(branch, larger)
        return range(start, start + size + (branch < larger))

    def offset(self, branch: int, h: int, heads: int) -> int | None:
        """The residue that head h keeps in a branch, below r; None where the head is not in the branch."""
        if h not in self.head_range(branch, heads):
            return None
        divide, plus = self.rule(branch, heads)
        return (h // divide + plus) % self.dilation_rates[branch]

    def rule(self, branch: int, heads: int) -> tuple[int, int]:
        """(divide, plus): head h of a branch has the offset (h // divide + plus) mod r."""
        if self.heads == "partition":
            return heads, branch
        return (1 if self.offsets == "interleaved" else -(-heads // self.dilation_rates[branch])), 0

    def of_branches(self, which: Sequence[int]) -> Dilated:
        """The pattern of some of its branches."""
        lengths, rates = ([x[b] for b in which] for x in (self.segment_lengths, self.dilation_rates))
        return Dilated(lengths, rates, self.causal, self.heads, self.offsets)

    def divisor(self, heads: int) -> int:
        """What the output is divided by: 1, or min(heads, branches) under heads="partition"."""
        return 1 if self.heads == "all" else max(1, min(heads, len(self.segment_lengths)))

    def _offsets(self, heads: int) -> Tensor:
        """int64 (heads, branches): each head's offset in each branch, -1 where it is not in it."""
        branches = range(len(self.segment_lengths))
        table = [[self.offset(b, h, heads) for b in branches] for h in range(heads)]
        flat = [-1 if o is None else o for row in table for o in row]
        return torch.tensor(flat, dtype=torch.int64, device="cpu").view(heads, len(branches))

    def count(self, h, i, j, n, heads):
        table = self._offsets(heads).to(h.device)
        total = torch.zeros((), dtype=torch.int32, device=h.device)
        for b, (w, r) in enumerate(zip(self.segment_lengths, self.dilation_rates, strict=True)):
            o = table[:, b][h]
            total = total + ((i // w == j // w) & (i % w % r == o) & (j % w % r == o))
        return torch.where(j <= i, total, 0) if self.causal else total

    def _by_offsets(self, heads: int, answer) -> list:
        """answer(the branches that a head is in, as (w, r, its offset)), of each head."""
        lengths, rates = self.segment_lengths, self.dilation_rates
        offsets = self._offsets(heads).tolist()
        known = {
            line: answer([(w, r, o) for w, r, o in zip(lengths, rates, line, strict=True) if o >= 0])
            for line in set(map(tuple, offsets))
        }
        return [known[tuple(line)] for line in offsets]

    def _pairs(self, n, heads, nq):
        def before(x, branches):  # how many (query, key) have a query before position x: Python ints, squares overflow
            total = 0
            for w, r, o in branches:
                segments, inside = divmod(x, w)
                # kept positions: of a whole segment, of that of x before x, of all of that of x
                whole, part, last = (max(0, -((o - y) // r)) for y in (w, inside, min(w, n - segments * w)))
                if self.causal:
                    total += segments * (whole * (whole + 1) // 2) + part * (part + 1) // 2
                else:
                    total += segments * whole**2 + part * last
            return total

        return self._by_offsets(heads, lambda branches: before(n, branches) - before(n - nq, branches))

    def _distinct(self, n, heads, nq):
        if 1 << len(self.segment_lengths) > max(1, n):
            return super()._distinct(n, heads, nq)
        return self._by_offsets(heads, lambda branches: self._union(branches, None, torch.zeros(0).long(), n, nq))

    def _union(self, branches, kept, cuts, n, nq) -> int:
        """(query, key) that some of the branches show, by inclusion and exclusion; all of them only such of positions
        that are `kept` and with none of `cuts` between them."""
        total = 0
        for place, (w, r, o) in enumerate(branches):
            mine = torch.arange(n) % w % r == o
            mine = mine if kept is None else mine & kept
            ends = torch.cat([cuts, torch.arange(0, n, w), torch.tensor([n])]).unique()
            before = torch.cat([torch.zeros(1, dtype=torch.int64), mine.cumsum(0)])
            keys = before[ends].diff()
            queries = (before[ends[1:]] - before[ends[:-1].clamp(min=n - nq)]).clamp(min=0)  # the last ones
            pairs = queries * (2 * keys - queries + 1) // 2 if self.causal else queries * keys
            total += int(pairs.sum()) - self._union(branches[place + 1 :], mine, ends, n, nq)
        return total

    def _uncovered(self, n, heads, nq):
        t = torch.arange(n - nq, n)

        def unseen(branches):  # what is kept sees itself
            return nq - int(sum((t % w % r == o for w, r, o in branches), start=t < 0).sum())

        return torch.tensor(self._by_offsets(heads, unseen), dtype=torch.int64)

    def _blocks(self, n, heads, nq, block_size):
        key, state, _ = merged("+", self.states(n, heads, nq, block_size))
        return Blocks.of(block_size, n, nq, heads, key, state == ALL)

    def states(self, n, heads, nq, block_size) -> list[States]:
        """The blocks of each branch."""
        (bq, bk), size = block_size, Blocks.joined(block_size, n, nq, heads, [])
        found = []
        for branch, (w, r) in enumerate(zip(self.segment_lengths, self.dilation_rates, strict=True)):
            each, known = [], {}
            for h in self.head_range(branch, heads):
                o = self.offset(branch, h, heads)
                if o not in known:
                    known[o] = self._list(_pieces(n - nq, n, bq, w, r, o), _pieces(0, n, bk, w, r, o), size)
                each.append((known[o].key + h * size.rows * size.cols, *known[o][1:]))
            found.append(States(*map(torch.cat, zip(*each, strict=True))) if each else NOTHING)
        return found

    def _list(self, queries: _Pieces, keys: _Pieces, size) -> States:
        """The blocks of one branch and head."""
        low = torch.searchsorted(keys.segment, queries.segment)
        high = torch.searchsorted(keys.segment, queries.segment, right=True)
        if self.causal:
            high = high.minimum(torch.searchsorted(keys.first, queries.last, right=True))
        many = (high - low).clamp(min=0)
        y, x = ranges(low, many), torch.arange(len(many)).repeat_interleave(many)
        share = queries.share[x] * keys.share[y]
        full = queries.whole[x] & keys.whole[y] & ((keys.last[y] <= queries.first[x]) | (not self.causal))
        key = (queries.block[x] - size.first) * size.cols + keys.block[y]
        if bool((key[1:] <= key[:-1]).any()):  # several segments in a block
            key, place = key.unique(return_inverse=True)
            full = place[full].bincount(minlength=len(key)) > 0
            share = place.bincount(share.double(), minlength=len(key)).float()
        return States(key, torch.where(full, ALL, PART), share)

    def spec(self):
        branches = {x: list(getattr(self, x)) for x in ("segment_lengths", "dilation_rates")}
        return {"pattern": "Dilated"} | branches | {x: getattr(self, x) for x in ("causal", "heads", "offsets")}

    @property
    def short_name(self):
        branches = zip(self.segment_lengths, self.dilation_rates, strict=True)
        spelled = "dilated-" + "-".join(f"{w}x{r}" for w, r in branches)
        name = NAMES.get((self.segment_lengths, self.dilation_rates), spelled)
        return name + ("-partition" if self.heads == "partition" else "") + ("-blocked" * (self.offsets == "blocked"))


class _Pieces(NamedTuple):
    """Stretches of positions of one block and one segment, of which some are kept: int64 (pieces,), ascending.

    first, last: kept positions. share: of the positions of its block, float32. whole: bool, whether that is all.
    """

    block: Tensor
    segment: Tensor
    first: Tensor
    last: Tensor
    share: Tensor
    whole: Tensor


def _pieces(low: int, n: int, size: int, w: int, r: int, o: int) -> _Pieces:
    """Of the positions [low, n), in blocks of a size and segments of w, that a branch keeps under the offset o."""
    start = torch.cat([torch.arange(low // size * size, n, size), torch.arange(low // w * w, n, w)])
    start = start.clamp(min=low).unique()
    stop = torch.cat([start[1:], torch.full_like(start[:1], n)])
    first, last, block = start + (o - start % w) % r, stop - 1 - ((stop - 1) % w - o) % r, start // size
    there = (block * size + size).clamp(max=n) - (block * size).clamp(min=low)
    many = torch.where(first < stop, (last - first) // r + 1, 0)
    kept = many > 0
    return _Pieces(*(x[kept] for x in (block, start // w, first, last, many / there, many == there)))
