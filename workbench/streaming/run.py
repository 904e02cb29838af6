"""Running the calls of a stream: rows come, are computed with and go, three things at once on a card.

While a call runs, the rows of the next one travel to the card, and the results of the chunk before to the host. Two
slots of memory hold what has come; results are held until their copy has ended. The order of operations is the same on
a card, on a CPU, where they follow each other, and in a rehearsal without data, which tells what memory they take.

Dimensions: R rows (positions), H query heads, G key heads, D head_dim. All on the card is (1, R, heads, ...).
"""

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.engines import partial
from workbench.engines.merge import lse_dtype, merge_
from workbench.patterns import Dense
from workbench.streaming import host
from workbench.streaming.calls import EVERY, Call, Calls, Kept, Positions

MERGED = 1 << 18  # rows whose results are merged at once: they are float32 then


class Sent(NamedTuple):
    """Rows on the card and the rows `where` of a tensor on the host, which they become, or to which they are added."""

    rows: Tensor
    to: Tensor
    where: Positions
    add: bool = False


@dataclass
class Forward:
    """Attention. sink: out and lse on the host, or None; finish: of rows of out on the card before they go, or None."""

    source: object
    sink: tuple[Tensor | None, Tensor | None]
    finish: Callable[[Tensor], Tensor] | None = None
    adds = False

    def __post_init__(self):
        self.tensors = host.tensors(self.source)

    def wanted(self, call: Call) -> dict[str, tuple[str, Positions]]:
        """{what a call needs: (the tensor that has it, its rows there)}."""
        if not isinstance(self.source, host.Projected):
            return {"q": ("q", call.queries), "k": ("k", call.keys), "v": ("v", call.keys)}
        return {"x": ("x", call.queries)} | ({} if call.queries is call.keys else {"k": ("x", call.keys)})

    def inputs(self, loaded: dict[str, Tensor]) -> list[Tensor]:
        """q (1, L, H, D), k and v (1, M, G, D) from what was `wanted`."""
        if not isinstance(self.source, host.Projected):
            return [x[None] for x in loaded.values()]
        x, keys = loaded["x"], loaded.get("k", loaded["x"])
        return [self.source.q(x)[None], self.source.k(keys)[None], self.source.v(keys)[None]]

    def empty(self, calls: Calls, rows: int, like: Tensor) -> list[Tensor]:
        """What nothing has been merged into: out (1, R, H, D) in at least float32, lse (1, R, H)."""
        lse = like.new_full((1, rows, calls.heads), -torch.inf, dtype=lse_dtype(like))
        return [like.new_zeros((*lse.shape, like.shape[-1]), dtype=lse.dtype), lse]

    def compute(self, inputs: list[Tensor], pattern, options) -> list[Tensor]:
        out, lse = partial.forward(*inputs, pattern, options)
        return [out, lse.transpose(1, 2)]

    def merge(self, total: list[Tensor], part: list[Tensor], where, heads: slice, group: int) -> None:
        """Merge a part into some rows of some heads of the total, in float32 also where these are 16-bit."""
        out, lse = (x[:, where, heads] for x in total)
        wide, its_lse = out.to(lse.dtype), lse.clone()
        merge_(wide, its_lse, *part)
        total[0][:, where, heads], total[1][:, where, heads] = wide.to(out.dtype), its_lse

    def results(self, total: list[Tensor], calls: Calls, dtype, chunk: range) -> list[Sent]:
        (out, lse), divisor = total, calls.pattern.divisor(calls.heads)
        out = (out / divisor if divisor > 1 else out)[0].to(dtype)
        rows = [out if self.finish is None else self.finish(out), lse[0].contiguous()]
        return [Sent(x, to, chunk) for x, to in zip(rows, self.sink, strict=True) if to is not None]


@dataclass
class Backward:
    """Gradients. source: (q, k, v); others: grad, out and lse on the host; sink: dq, dk and dv there; divisor: what out
    is the softmax's divided by; adds: whether dk and dv are sums over chunks, made on the host."""

    source: tuple[Tensor, Tensor, Tensor]
    others: dict[str, Tensor]
    sink: tuple[Tensor, Tensor, Tensor]
    divisor: int
    adds: bool

    def __post_init__(self):
        self.tensors = host.tensors(self.source) | self.others

    def wanted(self, call: Call):
        return {x: (x, call.keys if x in ("k", "v") else call.queries) for x in self.tensors}

    def inputs(self, loaded: dict[str, Tensor]) -> list[Tensor]:
        return [x[None] for x in loaded.values()]

    def empty(self, calls: Calls, rows: int, like: Tensor) -> list[Tensor]:
        if self.adds:  # dq alone, a sum over calls
            return [like.new_zeros(1, rows, calls.heads, like.shape[-1], dtype=lse_dtype(like))]
        return [like.new_zeros(1, rows, h, like.shape[-1]) for h in (calls.heads, calls.kv_heads, calls.kv_heads)]

    def compute(self, inputs: list[Tensor], pattern, options) -> list[Tensor]:
        q, k, v, grad, out, lse = inputs
        grad, out = (grad / self.divisor, out * self.divisor) if self.divisor > 1 else (grad, out)
        return [*partial.backward(grad, None, q, k, v, out, lse.transpose(1, 2).contiguous(), pattern, options)]

    def merge(self, total: list[Tensor], part: list[Tensor], where, heads: slice, group: int) -> None:
        """Add a part to some rows. group: of query heads, each of which has a dk and a dv of its own in the part."""
        for to, some in zip(total, part, strict=True):
            some, of = some.to(torch.promote_types(to.dtype, torch.float32)), heads
            if group > 1 and to is not total[0]:
                index = torch.arange(to.shape[2] * group, device=to.device)[heads] // group
                some, of = some.new_zeros(*some.shape[:2], *to.shape[2:]).index_add_(2, index, some), EVERY
            to[:, where, of] = (to[:, where, of] + some).to(to.dtype)

    def results(self, total: list[Tensor], calls: Calls, dtype, chunk: range) -> list[Sent]:
        return [Sent(x[0].to(dtype), to, chunk) for x, to in zip(total, self.sink, strict=not self.adds)]


@dataclass
class Stream:
    """One run of a job's calls. device: as of `host.Lane`. options: head_dim, dtype; and scale and backend, of calls.

    chunks: those to run. finished(chunk): called when its rows are on the host; changing(chunk, tensor, rows): before
        some of it are added to rows there.
    """

    calls: Calls
    job: Forward | Backward
    device: str
    options: SimpleNamespace
    chunks: list[range]
    finished: Callable[[range], None] = lambda chunk: None
    changing: Callable[[range, Tensor, Positions], None] = lambda chunk, to, where: None
    bytes_in: int = 0
    bytes_out: int = 0
    turn: int = 0
    times: int = 0  # that rows have left
    leaving: deque = field(default_factory=deque)  # (what is on its way to the host, an event, what ends it, a chunk)

    @torch.no_grad()
    def run(self) -> None:
        self.into, self.back = host.Lane(self.device), host.Lane(self.device)
        self.group = self.calls.heads // self.calls.kv_heads
        where = {"device": "cpu" if self.device == "cpu" else "cuda", "dtype": self.options.dtype}
        self.like = torch.empty((0, self.options.head_dim), **where)
        self.slots = [SimpleNamespace(rows={}, used=None, there=None) for _ in range(2)]
        # The rows that are kept come first: they are read before anything is written, perhaps over them.
        self.held = [(kept, self.of_kept(kept)) for kept in self.calls.kept] if self.chunks else []
        steps = ((chunk, call) for chunk in self.chunks for call in [*self.calls.of_chunk(chunk)] or [None])
        step, total = next(steps, None), None
        slot = self.fetch(step)
        while step:
            (chunk, call), step = step, next(steps, None)
            last, sent = not step or step[0] is not chunk, []
            if call is not None:
                part = self.compute(slot, call.pattern)
                if self.job.adds:
                    added = zip(part[1:], self.job.sink[1:], strict=True)
                    sent = [Sent(x[0].to(self.like.dtype), to, call.keys, True) for x, to in added]
                    part = part[:1]
                total, part = self.added(total, part, chunk, call, last), None
            if last:
                sent += self.finish(chunk, total)
                total = None
            sent = self.send(sent, chunk, last)
            slot = self.fetch(step)
            self.settle(1)
        self.settle(0)

    def of_kept(self, kept: Kept) -> list[Tensor]:
        """The results of attention among the rows that are kept, of the heads that keep them."""
        rows, first, every, parts, done = len(kept), kept.branches[0][0], [], [], 0
        for start in range(0, rows, self.calls.chunk):
            stop = min(rows, start + self.calls.chunk)
            where = kept.at(start, stop)
            slot = self.fetch((None, Call(where, where, self.calls.pattern)))
            some = self.arrived(slot)
            if self.group > 1:  # a key head that is shared is kept under each query head's own offset
                some[1:3] = [x.repeat_interleave(self.group, 2) for x in some[1:3]]
            some = [x[:, :, kept.heads] for x in some]
            every = every or [x.new_empty((1, rows, *x.shape[2:])) for x in some]
            for to, x in zip(every, some, strict=True):
                to[:, start:stop] = x
            slot.used = self.into.mark()
            del some, x, to
            whole = stop if stop == rows else stop // first * first  # segments, computed while the next rows come
            parts += self.of_branch(kept.branches[0], every, done, whole, None)
            done = whole
        total = [torch.cat(x, 1) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True)]
        del parts
        for branch in kept.branches[1:]:
            [*self.of_branch(branch, every, 0, rows, total)]
        return total

    def of_branch(self, branch: tuple[int, int, int], every: list[Tensor], begin: int, end: int, total):
        """Attention in the segments of a branch between two rows: merged into the total, or yielded if that is None."""
        length, rate, offset = branch
        whole = begin + (end - begin) // length * length
        for start, stop, long in ((begin, whole, length), (whole, end, end - whole)):
            if start == stop or offset >= long:
                continue
            inputs, to = ([x[0, start:stop].unflatten(0, (-1, long))[:, offset::rate] for x in y or ()]
                          for y in (every, total))  # (segments, rows, heads, ...)  # fmt: skip
            part = self.job.compute(inputs, Dense(self.calls.pattern.causal), self.options)
            if total is None:
                yield [x.reshape(1, stop - start, *x.shape[2:]) for x in part]
                continue
            step = max(1, MERGED // len(part[0]))
            for first in range(0, part[0].shape[1], step):
                some = slice(first, first + step)
                self.job.merge(to, [x[:, some] for x in part], some, EVERY, 1)

    def fetch(self, step: tuple[range | None, Call | None] | None):
        """Have the rows of a step's call on their way to the card; returns the slot where they arrive."""
        _, call = step or (None, None)
        if call is None:
            return None
        self.turn += 1
        slot, wanted = self.slots[self.turn % 2], self.job.wanted(call)
        for name, (which, _) in wanted.items():
            if name not in slot.rows:
                shape = self.calls.most[name in ("k", "v")], *self.job.tensors[which].shape[1:]
                slot.rows[name] = self.like.new_empty(shape, dtype=self.job.tensors[which].dtype)
        slot.loaded = {name: slot.rows[name][: len(where)] for name, (_, where) in wanted.items()}
        self.bytes_in += sum(x.nbytes for x in slot.loaded.values())
        if self.device == "rehearsal":
            return slot
        if slot.there:
            slot.there.synchronize()  # what is pinned for this slot has been copied
        if self.device == "cuda":
            self.into.stream.wait_event(slot.used or self.into.mark())
        with self.into.within():
            for name, (which, where) in wanted.items():
                self.into.bring(self.job.tensors[which], where, slot.loaded[name], (self.turn % 2, name))
            slot.there = self.into.mark()
        return slot

    def arrived(self, slot) -> list[Tensor]:
        if slot.there:
            torch.cuda.current_stream().wait_event(slot.there)
        return self.job.inputs(slot.loaded)

    def compute(self, slot, pattern) -> list[Tensor]:
        found = self.job.compute(self.arrived(slot), pattern, self.options)
        slot.used = self.into.mark()
        return found

    def added(self, total, part: list[Tensor], chunk: range, call: Call, last: bool) -> list[Tensor]:
        part = [x[:, call.rows] for x in part]
        if total is None and last:
            return part
        total = total or self.job.empty(self.calls, len(chunk), self.like)
        self.job.merge(total, part, EVERY, EVERY, 1)
        return total

    def finish(self, chunk: range, total: list[Tensor] | None) -> list[Sent]:
        """The chunk's results, merged with what was computed of kept rows."""
        total = total or self.job.empty(self.calls, len(chunk), self.like)
        for kept, part in self.held:
            start, stop = kept.before(chunk.start), kept.before(chunk.stop)
            where = kept.at(start, stop, chunk.start)
            listed = isinstance(where, Tensor)
            where = where.to(self.like.device) if listed else slice(where.start, where.stop, where.step)
            if start < stop:
                self.job.merge(total, [x[:, start:stop] for x in part], where, kept.heads, self.group)
        return self.job.results(total, self.calls, self.options.dtype, chunk)

    def send(self, sent: list[Sent], chunk: range, last: bool) -> None:
        """Have rows on their way to the host; with the last of a chunk, it is finished."""
        if not sent:
            return
        self.times += 1
        self.bytes_out += sum(x.rows.nbytes for x in sent)
        if self.device == "cuda":
            self.back.stream.wait_event(self.back.mark())
        with self.back.within():
            ends = []
            for x in sent if self.device != "rehearsal" else ():
                if x.add:
                    ends.append(functools.partial(self.changing, chunk, x.to, x.where))
                ends.append(self.back.put(*x, (self.times % 2, id(x.to))))
            self.leaving.append((sent, self.back.mark(), ends, chunk if last else None))

    def settle(self, most: int) -> None:
        """Wait until at most so many times rows are on their way."""
        while len(self.leaving) > most:
            _, event, ends, chunk = self.leaving[0]
            if event:
                event.synchronize()
            with self.back.within():
                for end in ends:
                    end()
            self.leaving.popleft()
            if chunk is not None:
                self.finished(chunk)
