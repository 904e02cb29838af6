"""The life of every tensor of a program, from running the program itself on tensors without data.

Tensors of the card are `meta` tensors: they have shapes, strides and storages, and the real code runs on them, its
Python, its autograd, the bodies of our operators. A function mode tells the program that it is on the card
(`fake_cuda.OnCard`). A dispatch mode, `Births`, sees each new storage, and a weak reference tells when it is freed.
What the program computes on the CPU is computed. `tracer_shortcuts` leaves out calls equal to earlier ones. What looks
at data that the card would have raises `CannotTrace`.

Example: of (x + x) * 2 with x (4,) in float32, the events are the births of x (16 bytes, by its name), "add" (16) and
"mul" (16), and the death of "add", which nothing holds any longer.

Some kernels take memory of their own, which no dispatch mode sees: `workspace` has its size, by operator.
"""

import contextlib
import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from workbench.engines import fa4_backend, operators, torch_backend, torch_rules, triton_backend  # noqa: F401 (ops)
from workbench.engines.torch.fused import OFFSETS, span
from workbench.fit import workspace
from workbench.fit.cards import VIRTUAL, Card
from workbench.fit.fake_cuda import CUDA, META, CannotTrace, OnCard, impersonate
from workbench.fit.tracer_shortcuts import Shortcuts
from workbench.probes.case import Case


class Event(NamedTuple):
    """The birth of a storage of nbytes, or with nbytes -1 the death of the one with this id.

    id: the place of the birth in the list of events
    name: what it holds ("out", "dq", an input's name), or the operator that made it; "" in a death
    """

    id: int
    nbytes: int
    name: str


class Traced(NamedTuple):
    """What `run` has seen.

    events: in order; the first `before` of them come from the preparation
    backend: what executes the call
    wrong: what is known to compute wrongly (`WRONG_PAST_2_31`), None if nothing is
    kernel: the one that torch's scaled_dot_product_attention took, in the last such call, None if there was none
    """

    events: list[Event]
    before: int
    backend: str
    wrong: str | None
    kernel: str | None


def run(prepare: Callable[[], tuple[Callable, str]], card: Card, words=()) -> Traced:
    """The life of the tensors of a program on "cuda": prepare() gives the call, made once, whose result lives on until
    the last event, and the name of what executes it. words: what the first storages hold.

    CannotTrace if the program asks for data; torch.OutOfMemoryError and other errors of the program go through.
    """
    _settle()
    births = Births(card)
    with uncollected(), impersonate(card, births.functions), births, Shortcuts(births).taken():
        try:
            with births.functions:
                births.words = iter(words)
                call, backend = prepare()
                births.words, before = iter(()), len(births.events)
                result = call()
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError) or not any(x in str(error).lower() for x in ABOUT_DATA):
                raise
            raise CannotTrace(f"it cannot be run without data: {str(error).strip().splitlines()[0]}"[:400]) from None
        events = list(births.events)
    del result
    return Traced(events, before, backend, "; ".join(sorted(births.wrong)) or None, births.functions.kernel)


def of_case(case: Case, card: Card) -> Traced:
    """`run` of a case."""
    made = functools.partial(torch.empty, dtype=case.dtype, device=CUDA)
    return run(lambda: case.prepare_from(made), card, INPUTS if case.timed else ())


@contextlib.contextmanager
def uncollected():
    """Without the collection of cyclic garbage: there is none here, and looking for it doubles the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@functools.cache
def _settle() -> None:
    """Have torch ask this machine, before `impersonate`, what it asks once about its card and then remembers."""
    from torch.utils._triton import has_triton

    has_triton()


ABOUT_DATA = ("meta", "data-dependent", "fake", "no data", "nonzero")


class Births(TorchDispatchMode):
    """Within it, the births and deaths of storages of meta tensors are noted, in `events`.

    wrong: what of the operators that ran is known to compute wrongly
    functions: the mode that makes "cuda" mean meta; it is entered beside this one
    words: an iterator of names for the next storages, before operators' own names are used
    """

    def __init__(self, card: Card):
        super().__init__()
        self.card = card
        self.events: list[Event] = []
        self.wrong: set[str] = set()
        self.alive: dict[int, tuple[int, weakref.ref]] = {}  # a storage, by its address: its id, and what sees it die
        self.functions = OnCard(card)
        self.words = iter(())  # names for what comes next
        self.shapes: dict[tuple, tuple] = {}  # of results, see `made`
        self.mirrored = False  # see `mirror`
        self.workspaces: set[bool] = set()  # of which of the two threads, see `hidden`

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch.compile is not followed, and to forbid it takes time at every call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """One of our operators runs as Python. Of torch's, what only writes to an argument makes no storage; all others
        are followed."""
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if func in operators.BODIES:  # an operator of ours: its Python, as it runs on the card
            with self, self.functions:
                out = operators.BODIES[func](*args, **kwargs)
            for x, word in zip(out, BACKWARD if "backward" in name else FORWARD, strict=False):
                self.rename(x, word)
            return out
        with torch._C.DisableTorchFunction():  # nothing here asks for a device, and the function mode takes time
            into = kwargs.get(written, *args[:1]) if (written := _written(func)) else None
            first = into[0] if isinstance(into, (list, tuple)) else into
            if isinstance(first, Tensor) and first.is_meta and first.numel():  # many are slow Python without data
                self.hidden(name, args)
                return into if func._schema.returns else None
            return self.follow(func, name, args, kwargs)

    def follow(self, func, name: str, args, kwargs):
        out = self.made(func, args, kwargs)
        results = out if isinstance(out, (tuple, list)) else (out,)
        if name in WRONG_PAST_2_31 and max(max(span(x), x.numel()) for x in args[:4]) > OFFSETS:
            self.wrong.add(WRONG_PAST_2_31[name])
        if name in ASKED_FOR_LSE and not args[4]:
            results = (results[0], None, *results[2:])  # the card's kernel makes no lse then, meta's does
        if name == EFFICIENT:
            results = results[:2]  # its seed and offset are on the CPU where there is no dropout
        for x, word in itertools.zip_longest(results, ATTENTION.get(name, ())[: len(results)], fillvalue=name):
            if isinstance(x, Tensor):
                self.born(x, word)
        if any(isinstance(x, Tensor) and x.is_meta for x in (*results, *args)):
            self.hidden(name, args)
        return out

    def made(self, func, args, kwargs):
        """func(*args, **kwargs). Where results depend on shapes alone, these are found once: meta's Python is slow."""
        if not _functional(func):
            return func(*args, **kwargs)
        try:
            shapes = self.shapes.get(key := (func, _signature(args), _signature(tuple(kwargs.items()))))
        except TypeError:  # a tensor that is not without data, or what cannot be a key
            return func(*args, **kwargs)
        if shapes is None:
            out = func(*args, **kwargs)
            results = out if isinstance(out, tuple) else (out,)
            if all(isinstance(x, Tensor) and x.is_meta for x in results):
                self.shapes[key] = [(x.shape, x.stride(), x.dtype) for x in results], isinstance(out, tuple)
            return out
        results = tuple(torch.empty_strided(*shape, dtype=dtype, device=META) for *shape, dtype in shapes[0])
        return results if shapes[1] else results[0]

    def born(self, x: Tensor, name: str) -> None:
        """Note the storage of a tensor, and watch it, unless it is known (x is a view), empty or not on the card."""
        storage = x.untyped_storage()
        nbytes = storage.nbytes() if x.is_meta or self.mirrored and x.is_cpu else 0
        if nbytes and storage._cdata not in self.alive:
            self.watch(storage, self.add(nbytes, next(self.words, name)))

    def watch(self, storage, id: int) -> None:
        address = storage._cdata
        self.alive[address] = id, weakref.ref(storage, lambda _: self.died(address))

    def mirror(self, call: Callable):
        """call(), whose tensors on the CPU count as if they were on the card."""
        self.mirrored = True
        try:
            return call()
        finally:
            self.mirrored = False

    def onto_card(self, x: Tensor) -> Tensor:
        """In the place of a tensor that `mirror` has counted, one without contents."""
        id, _ = self.alive.pop(x.untyped_storage()._cdata)
        with _disable_current_modes():
            made = torch.empty(x.shape, dtype=x.dtype, device=META)
        self.watch(made.untyped_storage(), id)
        return made

    def died(self, address: int) -> None:
        """Note that the storage at this address is gone; called by its weak reference."""
        if address in self.alive:
            self.events.append(Event(self.alive.pop(address)[0], -1, ""))

    def add(self, nbytes: int, name: str) -> int:
        """Note a birth; returns its id."""
        self.events.append(Event(len(self.events), nbytes, name))
        return self.events[-1].id

    def rename(self, x: Tensor, name: str) -> None:
        """Name a storage that is alive by what our operator returns it as."""
        if known := self.alive.get(x.untyped_storage()._cdata):
            self.events[known[0]] = self.events[known[0]]._replace(name=name)

    def hidden(self, name: str, args) -> None:
        """Note what the kernel of an operator takes beside its results, and frees again at its end.

        `workspace.of` gives it in steps: the bytes of a block that is taken, or ~i where the i-th block is freed early.
        What a kernel of the CPU takes for itself is not on a `VirtualCard`.
        """
        if self.card.key == VIRTUAL:
            return
        if name in workspace.MATRIX_PRODUCTS and self.card.workspace_bytes:
            backward = torch._C._current_graph_task_id() != -1  # on a card that has a thread and so a handle of its own
            if backward not in self.workspaces:
                self.workspaces.add(backward)  # once a handle and stream, and kept
                self.add(self.card.workspace_bytes, "cuBLAS workspace")
        taken, gone = [], set()
        for step in workspace.of(name, args, self.card):
            if step >= 0:
                taken.append(self.add(step, f"scratch of {name}"))
            else:
                self.events.append(Event(taken[~step], -1, ""))
                gone.add(taken[~step])
        self.events += [Event(id, -1, "") for id in taken if id not in gone]


INPUTS, FORWARD, BACKWARD = ("q", "k", "v", "gradient of out"), ("out", "lse"), ("dq", "dk", "dv")
ATTENTION = {
    f"_scaled_dot_product_{kernel}_attention{direction}": words
    for kernel in ("cudnn", "flash", "efficient")
    for direction, words in (("", FORWARD), ("_backward", BACKWARD))
}  # of each operator, what it returns
WRONG_PAST_2_31 = {
    f"_scaled_dot_product_{kernel}_attention_backward": why for kernel, why in torch_rules.WRONG_PAST_2_31.items()
}  # args[:4] are the upstream gradient, q, k and v
EFFICIENT = "_scaled_dot_product_efficient_attention"
ASKED_FOR_LSE = {"_scaled_dot_product_cudnn_attention", EFFICIENT}


@functools.cache
def _functional(func) -> bool:
    """Whether an operator writes to nothing and returns new tensors."""
    new = all(str(x.type) == "Tensor" and x.alias_info is None for x in func._schema.returns)
    return new and not func._schema.is_mutable


def _signature(x):
    """What the shapes of results depend on; TypeError where that is data."""
    if isinstance(x, Tensor):
        if not x.is_meta:
            raise TypeError
        return x.shape, x.stride(), x.dtype
    return tuple(map(_signature, x)) if isinstance(x, (tuple, list)) else (type(x), x)


@functools.cache
def _written(func) -> str | None:
    """Of an operator that makes no storage, as it returns what it writes to, or nothing: that argument's name."""
    schema = func._schema
    if not schema.is_mutable or torch.Tag.inplace_view in func.tags or len(schema.returns) > 1:
        return None
    if any(x.alias_info is None for x in schema.returns):
        return None
    return next((x.name for x in schema.arguments if x.is_out), schema.arguments[0].name)
