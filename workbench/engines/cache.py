"""Decoding: the keys and values that queries to come can still see, and the attention of new tokens to them.

A lane has, for some heads, every r-th position of a segment, or the last so many of them, and its queries see all of
them up to their own: dense attention over rows that lie side by side. Dense attention is one lane; a window, a lane for
each residue of its dilation and one for its sinks; a dilated branch, a lane for each offset, emptied where a segment
ends. What lanes give is merged by its log-sum-exp. Any other pattern has `Rest`.

Dimensions: B batch, C new tokens, H query heads, G key heads, D head_dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.engines import operators, scores, triton_backend
from workbench.engines.check import check, refuse
from workbench.engines.dispatch import attention, even
from workbench.engines.merge import lse_dtype, merge_
from workbench.engines.torch import fused
from workbench.engines.torch.dilated import offset_slices, share_heads
from workbench.patterns import Dense, Dilated, Neighborhood, Pattern, Window
from workbench.patterns.checks import describe, whole
from workbench.patterns.listed import Looked

FAR, MOST = 1 << 62, 1 << 10  # MOST: lanes of a window
ALL = slice(None)
Part = tuple[slice, slice, Tensor, Tensor]  # some of the new tokens and heads, their out (B, c, h, D) and lse (B, h, c)


class Rows:
    """Keys and values (B, rows, G, D), at most `limit` rows: from then on a new one takes the place of the oldest."""

    def __init__(self, limit: int):
        self.limit, self.seen, self.room = limit, 0, None

    def reserve(self, like: Tensor, need: int) -> None:
        """Have room for so many rows: for twice as many as before whenever it is full, up to the limit."""
        old = 0 if self.room is None else self.room.shape[2]
        if need > old:
            grown = like.new_empty(2, len(like), min(self.limit, max(need, 2 * old)), *like.shape[2:])
            if old:
                grown[:, :, :old] = self.room
            self.room = grown

    def hold(self, k: Tensor, v: Tensor) -> None:
        """Append rows."""
        gone = max(0, k.shape[1] - self.limit)  # before all are in
        k, v, at = k[:, gone:], v[:, gone:], (self.seen + gone) % self.limit
        self.seen += gone
        if at + k.shape[1] > self.limit:
            for some in (slice(self.limit - at), slice(self.limit - at, None)):
                self.hold(k[:, some], v[:, some])
            return
        self.seen += k.shape[1]
        self.reserve(k, min(self.limit, self.seen))
        for room, x in zip(self.room, (k, v), strict=True):
            room[:, at : at + x.shape[1]] = x

    def held(self, ordered: bool = False) -> Tensor:
        """(2, B, rows, G, D): keys and values; ordered: the oldest first."""
        held, turn = self.room[:, :, : min(self.limit, self.seen)], self.seen % self.limit
        return held.roll(-turn, 2) if ordered and turn and self.seen > self.limit else held


@dataclass
class Lane:
    """The positions p of [first, end) with p mod segment mod rate == offset, of the current segment, for some heads.

    Queries are those positions too, and beyond the end all. limit: how many a query sees, itself and those before it.
    """

    heads: slice
    key_heads: slice
    segment: int = FAR
    rate: int = 1
    offset: int = 0
    first: int = 0
    end: int = FAR
    limit: int = FAR
    branch: int = 0

    def __post_init__(self):
        self.kept = Rows(min(self.limit, max(1, len(range(self.offset, self.segment, self.rate)))))

    def _next(self, p: int) -> int:
        """The first position of the lane from p on, were there no segments to come."""
        p = max(p, self.first)
        return p + (self.offset - p % self.segment) % self.rate

    def rows(self, n: int, key_heads: int) -> int:
        """How many (key head, position) queries after n positions can see; a ring has the oldest too."""
        begin = n // self.segment * self.segment
        many = len(range(self._next(begin), min(n, self.end), self.rate)) * (self._next(n) < begin + self.segment)
        return min(self.limit, many) * len(range(key_heads)[self.key_heads])

    def step(self, start: int, q: Tensor | None, k: Tensor, v: Tensor, scale: float) -> Iterator[Part]:
        """Hold what is new from position start on, and where there are queries attend."""
        stop = start + k.shape[1]
        while start < stop:  # as far as a segment, or the keys
            begin = start // self.segment * self.segment
            upto = min(stop, begin + self.segment, self.end if start < self.end else FAR)
            if start == begin:
                self.kept.seen = 0
            if (first := self._next(start)) < upto:
                here = slice(first - stop, upto - stop or None, self.rate)
                new = [x[:, here, self.key_heads] for x in (k, v)] if start < self.end else []
                if q is not None:
                    yield here, self.heads, *self._attend(q[:, here, self.heads], new, scale)
                elif new:
                    self.kept.hold(*new)
            start = upto

    def _attend(self, q: Tensor, new: list[Tensor], scale: float) -> tuple[Tensor, Tensor]:
        kept, options = self.kept, {"scale": scale, "return_lse": True}
        if len(new) and q.shape[1] > 1 and kept.seen + q.shape[1] > kept.limit:  # the last replace what the first see
            old = kept.held(ordered=True) if kept.seen else [x[:, :0] for x in new]
            keys = [torch.cat(x, 1) for x in zip(old, new, strict=True)]
            kept.hold(*new)
            return attention(q, *keys, Window(kept.limit, causal=True), **options)
        if new:
            kept.hold(*new)
        if new and q.shape[1] > 1:
            return attention(q, *kept.held(), Dense(causal=True), **options)
        out, lse = fused.forward(*(x.transpose(1, 2) for x in (q, *kept.held())), False, scale)
        return out.transpose(1, 2), lse


class Held(Looked):
    """A pattern of n positions on those that are held, `at`, ascending."""

    causal = True

    def __init__(self, pattern: Pattern, at: Tensor, n: int):
        self.pattern, self.at, self.n = pattern, at, n
        self.same_heads, self.divisor = pattern.same_heads, pattern.divisor

    def count(self, h, i, j, n, heads):
        at = self.at.to(i.device)
        return self.pattern.count(h, at[i], at[j], self.n, heads)

    def spec(self):
        return {"pattern": "Held", "of": self.pattern.spec(), "n": self.n}


class Rest:
    """The keys of any pattern: all, or where the greatest length n is said, those that a later query sees.

    changes: what is done to scores, where all keys are held.
    """

    def __init__(self, pattern: Pattern, n: int | None, heads: int, changes: dict | None = None):
        self.pattern, self.n, self.kept, self.at, self.last = pattern, n, Rows(FAR), torch.arange(0), None
        self.changes = changes or {}
        if n is not None:  # of each key, the end of the last block of queries that sees some of its block
            blocks = pattern.blocks(n, heads)
            last, row = torch.zeros(blocks.cols, dtype=torch.int64), blocks.line % blocks.rows
            last.scatter_reduce_(0, blocks.columns.long(), (row + 1) * blocks.block_size[0], "amax")
            self.last = last.repeat_interleave(blocks.block_size[1])[:n]

    def rows(self, n: int, key_heads: int) -> int:
        return key_heads * (n if self.last is None else int((self.last[:n] > n).sum()))

    def step(self, start: int, q: Tensor | None, k: Tensor, v: Tensor, scale: float) -> Iterator[Part]:
        stop, pattern, backend = start + k.shape[1], self.pattern, "auto"
        self.kept.hold(k, v)
        self.at = torch.cat([self.at, torch.arange(start, stop)])
        if q is not None:
            if len(self.at) < (n := self.n or stop):
                pattern, backend = Held(pattern, self.at, n), "torch"  # which takes any pattern
            options = {"scale": scale, "backend": backend, "return_lse": True} | self.changes
            found = attention(q, *self.kept.held(), pattern, **options)
            yield ALL, ALL, *found
        seen = self.at if self.last is None else (self.last[self.at] > stop).nonzero().squeeze(1)
        if 2 * len(seen) <= len(self.at):  # a copy now and then
            self.at, self.kept.seen = self.at[seen], len(seen)
            self.kept.room = self.kept.room.index_select(2, seen.to(k.device))


class Cache:
    """Decoding with a causal pattern: `step` takes the next tokens, one or several, and returns what attention over the
    whole sequence would for them. It holds the keys and values that later queries can see, and no others:

    Dense: all. Window: width * dilation positions and the sinks. Dilated: for each branch and key head, what the
    current segment keeps, a copy for each offset that its query heads have. Others: all, or with max_len those whose
    block a block of later queries sees, and at most as many again. Where scores are changed: all.

    max_len: the greatest length; longer is refused. Patterns that differ by it (layouts.random, explicit ones, a
    Neighborhood) are those of max_len positions, and need it. Sizes, dtype and device are the first step's.
    """

    def __init__(self, pattern: Pattern, max_len: int | None = None):
        if not isinstance(pattern, Pattern) or not pattern.causal or pattern.batch is not None:
            want = "want a causal one, the same for the batch, e.g. Dense(True)"
            raise ValueError(f"pattern={describe(pattern)}: {want}")
        self.max_len = None if max_len is None else whole("max_len", max_len, 1)
        self.by_length = _by_length(pattern)
        if max_len is None and self.by_length:
            raise ValueError(f"pattern={pattern!r}: it differs by length; want max_len, the greatest length")
        self.pattern, self.n, self.like, self.lanes, self.fast, self.table = pattern, 0, None, [], False, (None, None)

    def _lanes(self, heads: int, key_heads: int) -> list:
        pattern = self.pattern
        if isinstance(pattern, Dense):
            return [Lane(ALL, ALL, limit=self.max_len or FAR)]
        if isinstance(pattern, Window) and pattern.dilation <= MOST:
            rate, sinks = pattern.dilation, pattern.sinks
            first = [Lane(ALL, ALL, end=sinks, limit=sinks)] if sinks else []
            return first + [Lane(ALL, ALL, FAR, rate, o, sinks, FAR, pattern.width) for o in range(rate)]
        if not isinstance(pattern, Dilated):
            return [Rest(pattern, self.max_len, heads)]
        return [
            Lane(*some, w, r, offset, branch=branch)
            for branch, (w, r) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True))
            for offset, of_heads in offset_slices(pattern, branch, heads)
            for some in share_heads(of_heads, heads // key_heads)
        ]

    def rows(self, n: int, heads: int, key_heads: int | None = None) -> int:
        """How many (key head, position) are held after n positions, in each sequence of the batch."""
        return sum(lane.rows(n, key_heads or heads) for lane in self._lanes(heads, key_heads or heads))

    def _begin(self, q: Tensor, k: Tensor, changes: dict | None) -> tuple[list, bool]:
        """The lanes, and whether one kernel takes a token: where there is one, and they hold no more than it takes."""
        if changes:
            return [Rest(self.pattern, None, q.shape[2], changes)], False
        lanes, fast = self._lanes(q.shape[2], k.shape[2]), isinstance(self.pattern, Dilated)
        rows = sum({lane.branch: lane.kept.limit for lane in lanes}.values()) if fast else 0
        return lanes, 0 < rows <= triton_backend.DECODED and triton_backend.why_not(q, k, self.pattern) is None

    @property
    def nbytes(self) -> int:
        """What is allocated now."""
        return sum(lane.kept.room.nbytes for lane in self.lanes if lane.kept.room is not None)

    @torch._disable_dynamo
    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, return_lse=False, **options):
        """The next positions: k, v (B, C, G, D), and q (B, Cq, H, D) of the last Cq -> out, or (out, lse (B, H, Cq)).

        options: what changes scores, as of `attention`, the same at each step.
        Without gradients, which are refused; torch.compile breaks its graph here.
        """
        refuse("Cache.step", scores.others(options))
        q, k, v = check(q, k, v, Dense(True), scale)
        changes = scores.of(options, q, self.pattern)
        if changes and self.by_length:
            raise ValueError(f"{changes} with {self.pattern!r}: a cache changes scores of patterns of any length only")
        like = (q.shape[0], *q.shape[2:], *v.shape[2:], q.dtype, q.device, str(changes))
        stop = self.n + k.shape[1]
        if self.like not in (None, like):
            raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, {q.dtype}: want the first step's, {self.like}")
        if self.max_len is not None and stop > self.max_len:
            raise ValueError(f"{stop} positions, where max_len={self.max_len}: want no more")
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise ValueError("a cache has no gradients: call it under torch.no_grad(), or attention for the whole")
        scale, width = q.shape[-1] ** -0.5 if scale is None else scale, v.shape[-1]
        q, k, v = map(fused.unit_stride, even(q, k, v))
        if self.like is None:
            self.like, (self.lanes, self.fast) = like, self._begin(q, k, options if changes else None)
        if self.n == 0 and k.shape[1] > 1 and not (self.by_length and stop < self.max_len):  # a prompt
            self._run(None, k, v, scale)
            out, lse = attention(q, k, v, self.pattern, scale=scale, return_lse=True, **options)
        else:
            out, lse = self._next(q, k, v, scale)
        return (out[..., :width], lse) if return_lse else out[..., :width]

    def _next(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        if self.fast and q.shape[1] == k.shape[1] == 1:
            return self._token(q, k, v, scale)
        before = k.shape[1] - q.shape[1]
        self._run(None, k[:, :before], v[:, :before], scale)
        return self._merged(q, self._run(q, k[:, before:], v[:, before:], scale))

    def _run(self, q: Tensor | None, k: Tensor, v: Tensor, scale: float) -> list[Part]:
        parts = [part for lane in self.lanes for part in lane.step(self.n, q, k, v, scale)] if k.shape[1] else []
        self.n += k.shape[1]
        return parts

    def _token(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The next token by one kernel, which holds it, too."""
        from workbench.engines.triton import decode

        for lane in self.lanes:
            kept = lane.kept
            kept.seen = kept.seen * (self.n % lane.segment > 0) + (lane._next(self.n) == self.n)
            if kept.room is None or kept.room.shape[2] < kept.seen:
                kept.reserve(k[:, :, lane.key_heads], max(1, kept.seen))
        where = [(x.kept.room.data_ptr(), x.kept.room.shape[2]) for x in self.lanes]  # of a copy of this, elsewhere
        if self.table[0] != where:
            self.table = where, decode.table(self.lanes, q.shape[2], k.shape[2], q.device)
        self.n += 1
        with operators.device_of(q):
            return decode.token(q, k, v, self.table[1], self.n - 1, scale, self.pattern.divisor(q.shape[2]))

    def _merged(self, q: Tensor, parts: list[Part]) -> tuple[Tensor, Tensor]:
        if len(parts) == 1 and parts[0][2].shape == q.shape:
            return parts[0][2:]
        wide = lse_dtype(q)
        out, lse = q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        for tokens, heads, some, its_lse in parts:
            merge_(out[:, tokens, heads], lse[:, tokens, heads], some, its_lse.transpose(1, 2).to(wide))
        return (out / self.pattern.divisor(q.shape[2])).to(q.dtype), lse.transpose(1, 2)


def _by_length(part) -> bool:
    """Whether a layout or a pattern is of one length, or another one for each."""
    part = getattr(part, "layout", part)
    fixed = isinstance(part, Neighborhood) or getattr(part, "kind", None) in ("random", "explicit")
    return fixed or any(map(_by_length, getattr(part, "of", ())))
