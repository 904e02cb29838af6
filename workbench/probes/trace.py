"""The life of every tensor of a program, from running the program itself on tensors without data.

Tensors of the card are `meta` tensors: they have shapes, strides and storages, and the real code runs on them, its
Python, its autograd, the bodies of our operators. A function mode makes "cuda" mean `meta` and tells the program that
it is on the card; a dispatch mode sees each storage come, and its finalizer sees it go. What the program computes on
the CPU (lists of blocks, say) is computed. What depends on data that the card would have cannot be traced, and raises.

Below the dispatcher some kernels take scratch of their own: `scratch` has what was measured of it, by operator.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
import types
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.cards import Card
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
    with impersonate(card), Births(card) as births, births.tables_on_card():
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
        self.place: dict[int, int] = {}  # an id: the place of its birth in `events`
        self.functions = OnCard(card)
        self.bodies = _bodies()
        self.words = iter(())  # names for what comes next
        self.mirrored = False  # whether the CPU stands for the card just now
        self.ids = itertools.count(1)
        self.workspaces: set[bool] = set()  # of which of the two threads, see `hidden`

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if func in self.bodies:  # an operator of ours: its Python, as it runs on the card
            with self, self.functions:
                out = self.bodies[func](*args, **kwargs)
            for x, word in zip(out, BACKWARD if "backward" in name else FORWARD, strict=False):
                self.rename(x, word)
            return out
        out = func(*args, **kwargs)
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
        if storage._cdata in self.alive or storage.nbytes() == 0:
            return
        self.alive[storage._cdata] = self.add(storage.nbytes(), next(self.words, name))
        weakref.finalize(storage, self.died, storage._cdata)

    def died(self, address: int) -> None:
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
        backward = torch._C._current_graph_task_id() != -1  # which on a card has a thread and so a handle of its own
        if name in scratch.MATRIX_PRODUCTS and backward not in self.workspaces and self.card.workspace_bytes:
            self.workspaces.add(backward)  # once a handle and stream, and kept
            self.add(self.card.workspace_bytes, "cuBLAS workspace")
        nbytes = scratch.of(name, args, self.card)
        if nbytes:
            self.events.append(Event(self.add(nbytes, f"scratch of {name}"), -1, ""))

    @contextlib.contextmanager
    def tables_on_card(self):
        """Where an execution works on lists of blocks on the card, it does so on the CPU, and their bytes count."""
        from workbench.execution import block_sparse, flex, torch_backend

        strips = block_sparse.strips

        def counted(blocks, limit):
            found, times = strips(blocks, limit), collections.Counter()
            while True:
                self.mirrored = True
                try:
                    one = next(found, None)
                finally:
                    self.mirrored = False
                if one is None:
                    return
                shape = one.columns.shape, one.full
                times[shape] += 1
                if times[shape] > 2:  # as the two before: nothing new for memory
                    continue
                with torch.utils._python_dispatch._disable_current_modes():
                    twin = block_sparse.Strips(*(x.to(META) for x in one[:3]), one.full)
                yield twin
                del one, twin

        def blocks_of(pattern, q, n):
            self.mirrored = True
            try:
                return pattern.blocks(n, q.shape[2], q.shape[1])
            finally:
                self.mirrored = False

        replaced = [
            (block_sparse, "strips", counted),
            (torch_backend, "blocks_of", blocks_of),
            (flex, "compiled", lambda: _flex),
        ]
        with _replaced(replaced):
            yield


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


def _is_cuda(x) -> bool:
    return (isinstance(x, torch.device) and x.type == "cuda") or (isinstance(x, str) and x.startswith("cuda"))


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
    kept = [(where, name, getattr(where, name)) for where, name, _ in what]
    try:
        for where, name, new in what:
            setattr(where, name, new)
        yield
    finally:
        for where, name, old in kept:
            setattr(where, name, old)


_LOCK = threading.RLock()
