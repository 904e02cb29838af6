"""The life of every tensor of a program, from running the program itself on tensors without data.

Tensors of the card are `meta` tensors: they have shapes, strides and storages, and the real code runs on them, its
Python, its autograd, the bodies of our operators. A function mode makes "cuda" mean `meta` and tells the program that
it is on the card; a dispatch mode sees each storage come, and a weak reference sees it go. What the program computes
on the CPU is computed, but of lists of blocks only the lengths. What depends on data that the card would have cannot
be traced, and raises.

Of equal calls in a row a few are made, which bring all of the memory; their events are repeated for some of the others,
until the allocator's free blocks have settled.

Below the dispatcher some kernels take scratch of their own: `scratch` has what was measured of it, by operator.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from workbench.cards import VIRTUAL, Card
from workbench.execution import block_sparse, fused
from workbench.patterns import BlockSparse, Neighborhood
from workbench.patterns.base import Blocks
from workbench.probes import scratch

CUDA, META = torch.device("cuda", 0), torch.device("meta")
SHARED_MEMORY = {(7, 0): 98_304, (7, 5): 65_536, (8, 0): 166_912, (8, 6): 101_376, (8, 9): 101_376, (9, 0): 232_448,
                 (10, 0): 232_448, (12, 0): 101_376}  # bytes a block, CUDA C++ programming guide, table 21  # fmt: skip


class Event(NamedTuple):
    """The birth of a storage of nbytes, or with nbytes -1 the death of the one with this id."""

    id: int
    nbytes: int
    name: str


class CannotTrace(ValueError):
    """The program looks at data that tensors without data do not have, or takes a way that is not known here."""


def run(
    program: Callable[[Callable], tuple], card: Card, names: tuple[str, ...] = ()
) -> tuple[list[Event], int, tuple]:
    """(events, how many of them are the preparation's, what the preparation returned) of a program on a card.

    program(make) prepares: it takes its inputs from make(shape, dtype), tensors on the card, and returns (call, ...);
    then call() is run once, and its result lives on until the last event. names: of the inputs, in order.
    """
    _settle()
    with _uncollected(), impersonate(card), Births(card) as births, births.tables_on_card():
        try:
            with births.functions:
                births.words = iter(names)
                prepared = program(lambda shape, dtype: torch.empty(shape, dtype=dtype, device=CUDA))
                births.words, before = iter(()), len(births.events)
                result = prepared[0]()
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError) or not _about_data(error):
                raise
            raise CannotTrace(f"it cannot be run without data: {str(error).strip().splitlines()[0]}"[:400]) from None
        events = list(births.events)
    del result
    return events, before, prepared


@contextlib.contextmanager
def _uncollected():
    """Python's search for garbage in circles, of which there is none here, takes as long as all the rest."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@functools.cache
def _settle() -> None:
    """What torch finds out about this machine's own card, once, it shall not find out from a card that is not there."""
    from torch.utils._triton import has_triton

    import workbench.execution.flex  # noqa: F401

    has_triton()


def _about_data(error: BaseException) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("meta", "data-dependent", "fake", "no data", "nonzero"))


# --- storages that come and go ---------------------------------------------------------------------------------------


class Births(TorchDispatchMode):
    """Follows the storages of meta tensors. `events`, in order; `functions`: the mode that makes cuda mean meta."""

    def __init__(self, card: Card):
        super().__init__()
        self.card = card
        self.events: list[Event] = []
        self.alive: dict[int, int] = {}  # the address of a storage: its id
        self.watched: dict[int, weakref.ref] = {}
        self.place: dict[int, int] = {}  # an id: the place of its birth in `events`
        self.functions = OnCard(card)
        self.bodies = _bodies()
        self.words = iter(())  # names for what comes next
        self.mirrored = False  # whether the CPU stands for the card just now
        self.ids = itertools.count(1)
        self.workspaces: set[bool] = set()  # of which of the two threads, see `hidden`

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch.compile is not followed, and to forbid it takes time at every call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if func in self.bodies:  # an operator of ours: its Python, as it runs on the card
            with self, self.functions:
                out = self.bodies[func](*args, **kwargs)
            for x, word in zip(out, BACKWARD if "backward" in name else FORWARD, strict=False):
                self.rename(x, word)
            return out
        with torch._C.DisableTorchFunction():  # nothing here asks where it is, and each question takes time
            kind = _kind(func)
            if kind == "view":
                return func(*args, **kwargs)
            if kind in ("out", "in place") and args[0].is_meta:  # nothing comes, and of the result all is known
                return kwargs["out"] if kind == "out" else args[0]
            return self.follow(func, name, args, kwargs)

    def follow(self, func, name: str, args, kwargs):
        out = _run(func, args, kwargs)
        if isinstance(out, Tensor):
            self.born(out, name)
            if out.is_meta or any(isinstance(x, Tensor) and x.is_meta for x in args):
                self.hidden(name, args)
            return out
        results = out if isinstance(out, (tuple, list)) else (out,)
        words = ATTENTION.get(name, ())
        if name in ASKED_FOR_LSE and not args[4]:
            results = (results[0], None, *results[2:])  # the card's kernel makes no lse then, meta's does
        if name == EFFICIENT:
            results = results[:2]  # its seed and offset are on the CPU where there is no dropout
        for x, word in itertools.zip_longest(results, words[: len(results)], fillvalue=name):
            if isinstance(x, Tensor):
                self.born(x, word)
        if any(isinstance(x, Tensor) and x.is_meta for x in (*results, *args)):
            self.hidden(name, args)
        return out

    def born(self, x: Tensor, name: str) -> None:
        if not (x.is_meta or self.mirrored):
            return
        storage = x.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self.alive or nbytes == 0:
            return
        self.alive[address] = self.add(nbytes, next(self.words, name))
        self.watched[address] = weakref.ref(storage, lambda _: self.died(address))

    def died(self, address: int) -> None:
        self.watched.pop(address, None)
        gone = self.alive.pop(address, None)
        if gone is not None:
            self.events.append(Event(gone, -1, ""))

    def add(self, nbytes: int, name: str) -> int:
        id = next(self.ids)
        self.place[id] = len(self.events)
        self.events.append(Event(id, nbytes, name))
        return id

    def rename(self, x: Tensor, name: str) -> None:
        place = self.place.get(self.alive.get(x.untyped_storage()._cdata))
        if place is not None:
            self.events[place] = self.events[place]._replace(name=name)

    def hidden(self, name: str, args) -> None:
        """What the kernel of an operator takes beside its results."""
        if name in scratch.MATRIX_PRODUCTS and self.card.workspace_bytes:
            backward = torch._C._current_graph_task_id() != -1  # which on a card has a thread, so a handle of its own
            if backward not in self.workspaces:
                self.workspaces.add(backward)  # once a handle and stream, and kept
                self.add(self.card.workspace_bytes, "cuBLAS workspace")
        if name in scratch.RULES or name in scratch.table():
            taken = {}
            for step in scratch.of(name, args, self.card):
                if step >= 0:
                    taken[len(taken)] = self.add(step, f"scratch of {name}")
                else:
                    self.events.append(Event(taken[~step], -1, ""))
                    taken[~step] = None
            self.events += [Event(id, -1, "") for id in taken.values() if id is not None]

    @contextlib.contextmanager
    def tables_on_card(self):
        """Lists of blocks on the card have lengths and no contents; of calls in a row that are alike a few are made."""
        from workbench.execution import dilated, flex, torch_backend, triton_backend

        replaced = [
            (block_sparse, "strips", self.few_strips),
            (block_sparse, "split", self.few_stacks),
            (torch_backend, "blocks_of", self.blocks_of),
            (triton_backend, "plan_of", plan_of),
            (dilated, "select", _unseen(dilated.select)),
            (fused, "_chunks", _chunks),
            (dilated, "pieces", lambda *x, make=dilated.pieces: self.repeated(make(*x), _shape, 4)),
            (dilated, "parts", lambda *x, make=dilated.parts: self.repeated(make(*x), _shape, 6)),
            (fused, "range", lambda *x: self.repeated(range(*x), lambda start: start + x[2] <= x[1], 6)),
            (flex, "compiled", lambda: _flex),
        ]
        with _replaced(replaced):
            yield

    def blocks_of(self, pattern, q: Tensor, n: int) -> Listed:
        """As `torch_backend.blocks_of`, with lists that have lengths and no contents."""
        sizes = n, q.shape[2], q.shape[1]
        if isinstance(pattern, BlockSparse):
            with _disable_current_modes():
                counts, made = pattern.row_counts(*sizes), None
            lines, listed = counts[0].numel(), int(counts[0].sum())
            tensors = [self.given(*x) for x in ((lines + 1, "starts"), (listed, "columns", torch.int32))]
            tensors.append(self.given(listed, "full", torch.bool))
            return Listed(pattern.block_size, n, q.shape[1], len(counts[0]), *tensors, counts, made)
        self.mirrored = True
        try:
            made = pattern.blocks(*sizes)
        finally:
            self.mirrored = False
        with _disable_current_modes():
            tensors = [x.to(META) for x in (made.starts, made.columns, made.full)]
            return Listed(made.block_size, n, made.nq, made.layouts, *tensors, made.row_counts(), made)

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
            for length in range(0, int(values.max(initial=0)), limit):
                left = (per_unit - length).clamp(0, limit)
                many = collections.Counter()
                for value, time in zip((values - length).clip(0, limit).tolist(), times.tolist(), strict=True):
                    many[value] += time
                self.given(len(many), "unique")
                for count in sorted(x for x in many if x):
                    who = self.nonzero(left == count, many[count])
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
                twin = block_sparse.Strips(*_unseen(lambda *x: [*map(torch.empty_like, x)])(*one[:3]), one.full)
                yield twin
                del twin
            del one

    def few_stacks(self, s, height: int) -> Iterator:
        """As `block_sparse.split`, of many stacks a few."""
        stacks, rest = divmod(len(s.rows), height)
        some = few(stacks, STACKS) * height + rest
        with _disable_current_modes():
            views = [x[:some].split(height) for x in s[:3]]
        for x in s[:3]:
            self.born(x, "split")
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
                marks.append(len(self.events))
                if done > 1 and self.copied(*marks[-3:], total - done):
                    break
                yield item

    def copied(self, start: int, middle: int, end: int, times: int) -> bool:
        """Append the events [middle, end) so many times more, as further calls of their kind would bring them.

        False, and nothing is done, where they would not: where the call before had other births, in [start, middle), or
        not all that it left lived until this one.
        """
        segment = self.events[middle:end]
        before, last = ([x for x in self.events[i:j] if x.nbytes >= 0] for i, j in ((start, middle), (middle, end)))
        place, earlier = ({x.id: i for i, x in enumerate(some)} for some in (last, before))
        left = {earlier[x.id] for x in segment if x.nbytes < 0 and x.id in earlier}
        gone = {place[x.id] for x in segment if x.nbytes < 0 and x.id in place}
        if [x.nbytes for x in before] != [x.nbytes for x in last] or left | gone != set(range(len(last))):
            return False
        if left & gone or 2 * len(last) != len(segment):
            return False
        ids, previous = [x.id for x in last], []
        for _ in range(times):
            ids, previous = [next(self.ids) for _ in ids], ids
            for x in segment:
                id = ids[place[x.id]] if x.id in place else previous[earlier[x.id]]
                self.events.append(Event(id, x.nbytes, x.name))
        for address, id in self.alive.items():
            if id in place:
                self.alive[address] = ids[place[id]]
        return True

    def given(self, shape, name: str, dtype=torch.int64) -> Tensor:
        """What an operator makes whose result's shape depends on data."""
        made = torch.empty(shape, dtype=dtype, device=CUDA)
        self.rename(made, name)
        return made

    def nonzero(self, x: Tensor, many: int) -> Tensor:
        return self.given((many, 1), "nonzero").squeeze(1)


@dataclasses.dataclass(frozen=True)
class Listed(Blocks):
    """Lists of blocks without contents. counts: `Blocks.row_counts`; made: what has to stay alive as long."""

    counts: Tensor
    made: Blocks | None


def plan_of(pattern, q: Tensor, n: int):
    """As `triton_backend.plan_of`, with lists that have lengths and no contents."""
    from workbench.execution import triton_backend
    from workbench.execution.kernels import blocks

    (bq, bk), nq, heads = triton_backend.block_size_of(pattern), q.shape[1], q.shape[2]
    kept = getattr(pattern, "_plan", None)
    if kept is not None and kept[0] == (n, nq, heads):  # forward, and now backward
        return kept[1]
    batch = getattr(pattern, "batch", None)
    each = [pattern] if batch is None else [pattern.for_batch(x) for x in range(batch)]
    with _disable_current_modes():
        seen, full = torch.stack([x.row_counts(n, heads, nq, (bq, bk)) for x in each], 1)  # (batch, layouts, rows)
        full = full.clone()
        if n % bq:
            full[..., -1:] = 0
        if (n - nq) % bq:
            full[..., :1] = 0
        full, listed = int(full.sum()), int(seen.sum())
    batch, layouts, rows = seen.shape
    cols = -(-n // bk)
    lists = [
        blocks.Lists(*(_blank(x).to(q.device) for x in (lines + 1, full, lines + 1, listed - full)))
        for lines in (seen.numel(), batch * layouts * cols)
    ]
    if isinstance(pattern, Neighborhood) and pattern.ordering is None and len(pattern.shape) > 1:
        dtype = torch.int32 if triton_backend.coordinate_bits(pattern) <= 31 else torch.int64
        mask = _blank(n, 2, dtype=dtype).to(q.device), 0, "near"
    else:
        mask = blocks.mask_of(pattern, n, q.device)
    by_batch, first = layouts if batch > 1 else 0, (n - nq) // bq
    plan = blocks.Plan(*lists, (bq, bk), (rows, cols), first, by_batch, int(layouts > 1), *mask)
    pattern._plan = (n, nq, heads), plan
    return plan


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


def _unseen(views: Callable) -> Callable:
    """A function that makes views only, where nobody follows it, which is three times as fast."""

    def unseen(*arguments):
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return views(*arguments)

    return unseen


def _chunks(x: Tensor, most: int | None = None) -> tuple[Tensor, ...]:
    """`fused._chunks`, which mostly has nothing to cut."""
    most = fused.MAX_BATCH if most is None else most
    return (x,) if x.shape[0] <= most else x.split(most)


def _shape(piece) -> tuple:
    """What the memory that a `dilated.Piece` takes depends on."""
    sizes = (len(range(x.start, x.stop, x.step or 1)) for x in piece[3:7])
    return piece.length, piece.count, piece.queries.step, piece.heads.step, piece.causal, *sizes


FORWARD, BACKWARD = ("out", "lse"), ("dq", "dk", "dv")
ATTENTION = {
    f"_scaled_dot_product_{kernel}_attention{direction}": words
    for kernel in ("cudnn", "flash", "efficient")
    for direction, words in (("", FORWARD), ("_backward", BACKWARD))
}  # of each operator, what it returns


EFFICIENT = "_scaled_dot_product_efficient_attention"
ASKED_FOR_LSE = {"_scaled_dot_product_cudnn_attention", EFFICIENT}


class _Flex(torch.autograd.Function):
    """FlexAttention's results, and what its kernels hold beside them as measured on an H100 with torch 2.11.

    Forward: the largest score of each row too. Backward: delta, a float32 a row and head, then one of dq's copies.
    """

    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        peaks = torch.empty_like(lse)
        ctx.save_for_backward(q, k, v, out, lse)
        del peaks
        return out, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        q, k, v, _, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        del delta
        copy = torch.empty_like(dq)
        del copy
        return dq, dk, dv


def _flex(q, k, v, mask, scale, return_lse, options):
    return _Flex.apply(q, k, v)


def _bodies() -> dict:
    """Our operators and the Python that they run."""
    from workbench.execution import torch_backend, triton_backend

    found = (torch_backend.attend, torch_backend.attend_backward, triton_backend.attend, triton_backend.attend_backward)
    return {op._opoverload: op._init_fn for op in found}


# --- a card that is not there ----------------------------------------------------------------------------------------


class OnCard(TorchFunctionMode):
    """Calls that name a CUDA device get meta tensors; meta tensors say that they are on CUDA."""

    def __init__(self, card: Card):
        super().__init__()
        self.card = card

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in PLAIN:  # most calls are these
            return func(*args)
        kwargs = kwargs or {}
        if func in _GETTERS:
            return _GETTERS[func](func(*args, **kwargs))
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].is_meta:
            return self.attention(*args, **kwargs)
        if func is torch.Tensor.cuda:
            func, args = torch.Tensor.to, (args[0], META)
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = kwargs | {"device": META}
        if func is torch.Tensor.to:
            args = tuple(META if _is_cuda(x) else x for x in args)
        return func(*args, **kwargs)

    def attention(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        """torch's choice among its kernels, as of 2.11: cuDNN on Hopper and later, flash, memory-efficient."""
        if attn_mask is not None or dropout_p:
            raise CannotTrace("scaled_dot_product_attention with a mask or dropout is not followed")
        aten, cuda, d = torch.ops.aten, torch.backends.cuda, q.shape[-1]
        if self.card.key == VIRTUAL:  # which gives its lse also where nobody asks for it
            return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)[0]
        half, needs = q.dtype in (torch.float16, torch.bfloat16), q.requires_grad or k.requires_grad or v.requires_grad
        compute_lse = needs and torch.is_grad_enabled()
        if half and cuda.cudnn_sdp_enabled() and self.card.capability >= (9, 0) and d % 8 == 0 and d <= 128:
            return aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, compute_lse, 0.0, is_causal, False, scale=scale
            )[0]
        if half and cuda.flash_sdp_enabled() and self.card.capability >= (8, 0) and d % 8 == 0 and d <= 256:
            return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)[0]
        if enable_gqa and k.shape[1] != q.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if q.dtype != torch.float64 and cuda.mem_efficient_sdp_enabled():
            return aten._scaled_dot_product_efficient_attention(
                q, k, v, None, compute_lse, 0.0, is_causal, scale=scale
            )[0]
        if not cuda.math_sdp_enabled():
            raise NotImplementedError(f"No available kernel for {q.dtype} and head_dim {d} on {self.card.name}")
        return aten._scaled_dot_product_attention_math(q, k, v, None, 0.0, is_causal, scale=scale)[0]


def _run(func, args, kwargs):
    """func's result. Many operators have Python behind them on tensors without data, which is slow: the shapes, strides
    and dtypes of their results are kept."""
    kind = _kind(func)
    if kind != "new" or not (isinstance(args[0], Tensor) and args[0].is_meta):
        return func(*args, **kwargs)
    key = func, repr(kwargs), *(_like(x) if isinstance(x, Tensor) else repr(x) for x in args)
    if key not in _results:
        if len(_results) >= KEPT:
            _results.clear()
        out = func(*args, **kwargs)
        made = out if isinstance(out, tuple) else (out,)
        forms = [(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x for x in made]
        _results[key] = isinstance(out, tuple), forms
        return out
    several, forms = _results[key]
    made = tuple(torch.empty_strided(*x[:2], dtype=x[2], device=x[3]) if isinstance(x, tuple) else x for x in forms)
    return made if several else made[0]


def _like(x: Tensor) -> tuple:
    """What results depend on: of the strides, which is the larger, and which are zero."""
    strides = x.stride()
    return x.shape, *sorted(range(len(strides)), key=strides.__getitem__), 0 in strides, x.dtype, x.device.type


KEPT = 4096
_results: dict[tuple, tuple] = {}
VIEWS = {"select", "slice", "split", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view"}
SLOW = {
    "cumsum", "empty_like", "floor_divide", "index_add_", "index_copy_", "index_select", "logsumexp", "masked_fill_",
    "matmul", "sum", "zeros_like",
}  # beside what works element by element  # fmt: skip


@functools.cache
def _kind(func) -> str | None:
    """Of an operator whose result need not be asked for each time: whether it is "new", args[0] or kwargs["out"]."""
    name, returns = func.overloadpacket.__name__, func._schema.returns
    if name in VIEWS:
        return "view"
    if name in ATTENTION:
        return "new"
    if len(returns) != 1 or str(returns[0].type) != "Tensor":
        return None
    if torch.Tag.pointwise not in func.tags and name not in SLOW:
        return None
    if name.endswith("_"):
        return "in place"
    if any(x.name == "out" for x in func._schema.arguments):
        return "out"
    return "new" if returns[0].alias_info is None else None


def _is_cuda(x) -> bool:
    return (isinstance(x, torch.device) and x.type == "cuda") or (isinstance(x, str) and x.startswith("cuda"))


PLAIN = {torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.__len__}
_GETTERS = {
    torch.Tensor.device.__get__: lambda device: CUDA if device.type == "meta" else device,
    torch.Tensor.is_cuda.__get__: lambda _: True,
}


@contextlib.contextmanager
def impersonate(card: Card):
    """torch.cuda as it is on the card, and kernels of Triton that do nothing."""
    shared = SHARED_MEMORY.get(card.capability, 101_376)
    properties = types.SimpleNamespace(
        name=card.name, total_memory=card.total_bytes, major=card.capability[0], minor=card.capability[1],
        shared_memory_per_block_optin=shared,
    )  # fmt: skip
    replaced = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device", lambda *_: contextlib.nullcontext()),
        (torch.cuda, "get_device_capability", lambda *_: card.capability),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", lambda *_: None),
        (torch.backends.cudnn, "is_available", lambda: True),
    ]
    with contextlib.suppress(ImportError):
        from triton.runtime import interpreter, jit

        replaced += [(jit.JITFunction, "run", lambda *_, **__: None)]
        replaced += [(interpreter.GridExecutor, "__call__", lambda *_, **__: None)]
    with _LOCK, _replaced(replaced):
        yield


@contextlib.contextmanager
def _replaced(what: list[tuple]):
    """(object, name of an attribute, its value meanwhile)."""
    kept = [(where, name, getattr(where, name, None)) for where, name, _ in what]
    try:
        for where, name, new in what:
            setattr(where, name, new)
        yield
    finally:
        for where, name, old in kept:
            if old is None:  # a builtin, which a module of its own name hid meanwhile
                delattr(where, name)
            else:
                setattr(where, name, old)


_LOCK = threading.RLock()
