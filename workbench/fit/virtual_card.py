"""A card in software: computation on the CPU that runs out of memory where a card of a given size would.

    with wb.VirtualCard(8) as card:
        out = wb.attention(q, k, v, pattern)  # computed for real, or torch.OutOfMemoryError
    card.peak_reserved_bytes

Every tensor is allocated on a replica of torch's CUDA allocator (`fit.allocator`) as long as its storage lives. What
an operator returns is allocated before it computes, so one that does not fit takes no memory and no time here either.
"""

from __future__ import annotations

import functools
import traceback
import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from torch._library.custom_ops import _maybe_get_opdef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from workbench.engines.operators import BODIES
from workbench.fit.allocator import MIB, Allocator, OutOfMemory
from workbench.patterns.checks import FINITE, number

META = torch.device("meta")


class VirtualCard(TorchDispatchMode):
    """A card of `gib` GiB, while the block lasts, for what this thread computes on the CPU (its backward included).

    gib: memory that tensors may take: the whole card's less its CUDA context, which is about half a GiB.

    A tensor made inside counts from its birth to its death, also where it outlives the block; one made before counts
    from its first use inside, as if it were copied to the card then. Operators defined in Python, as attention's
    here are, run their Python inside, and its tensors count. What a kernel allocates for itself does not: it is the
    CPU's. Nor do tensors of threads that the block starts, nor sparse ones. Functions of torch.compile run as they are
    written, uncompiled; FlexAttention is refused, by torch (NotImplementedError).

    torch.OutOfMemoryError leaves nothing alive that the failing operator made; its operands go with the error.

    requested, allocated and reserved: as of `Allocator`. One card at a time: RuntimeError for a card inside a card.
    A card can be entered again, with what is still alive on it.
    """

    def __init__(self, gib: float):
        super().__init__()
        self.allocator = Allocator(int(number("gib", gib, 0, FINITE, "the card's memory in GiB, e.g. 8") * 1024 * MIB))
        self.known: dict[int, tuple] = {}  # a storage that lives, by its address: its bytes and its block
        # Storages die at any time, even while the allocator is at work (when cycles are collected), so they queue.
        self.dead: deque[int] = deque()

    def __enter__(self) -> VirtualCard:
        if any(isinstance(mode, VirtualCard) for mode in _get_current_dispatch_mode_stack()):
            raise RuntimeError("a VirtualCard is in use: a tensor lies on one card, leave that card's block first")
        return super().__enter__()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks in use now; the peaks below are since the card was made."""
        return self.settled().allocated

    @property
    def peak_requested_bytes(self) -> int:
        return self.allocator.peak_requested

    @property
    def peak_reserved_bytes(self) -> int:
        return self.allocator.peak_reserved

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        body, on_meta = _way(func)
        try:
            if body is None:
                return self.run(func, args, kwargs or {}, on_meta)
            with self:
                return body(*args, **(kwargs or {}))
        except OutOfMemory as error:
            # What ran below this call ends with it, as it would in C++: its frames let go of their tensors.
            traceback.clear_frames(error.__traceback__)
            raise

    def run(self, func, args, kwargs, on_meta: dict | None):
        """Run an operator on the CPU, once there is room for its results, if running it on_meta tells their sizes."""
        allocator, tried = self.settled(), []
        for x in _tensors((args, kwargs)):
            self.count(x)
        try:
            for nbytes in () if on_meta is None else _sizes(func, args, kwargs, on_meta):
                tried.append(allocator.malloc(nbytes))
        finally:
            for block in tried:
                allocator.free(block)
        out = func(*args, **kwargs)
        self.settled()
        for x in _tensors(out):
            self.count(x)
        return out

    def count(self, x: Tensor) -> None:
        """Put the storage of x on the allocator, if it is not there with its size."""
        if not (x.is_cpu and x.layout is torch.strided and torch._C._has_storage(x)):
            return
        storage = x.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        before = self.known.get(address)
        if before is not None and before[0] == nbytes:
            return
        self.known[address] = nbytes, self.allocator.malloc(nbytes)
        if before is None:
            weakref.finalize(storage, self.dead.append, address)
        else:  # resized: its old memory goes once it is copied
            self.allocator.free(before[1])

    def settled(self) -> Allocator:
        """The allocator, with the dead taken off it."""
        while self.dead:
            self.allocator.free(self.known.pop(self.dead.popleft())[1])
        return self.allocator


@functools.cache
def _way(func) -> tuple[Callable | None, dict | None]:
    """(the Python that an operator runs on a CPU, None if it is not defined so; what else it is called with on meta for
    the sizes of its results, None if it makes none: it works in place, or returns a view)."""
    has, name, schema = torch._C._dispatch_has_kernel_for_dispatch_key, func.name(), func._schema
    definition = _maybe_get_opdef(func)
    of_custom = definition._backend_fns if definition else {}
    body = BODIES.get(func) or of_custom.get("cpu") or of_custom.get(None)
    if body is None and has(name, "CompositeImplicitAutograd") and not has(name, "CPU"):
        body = func.decompose
    if schema.is_mutable or any(x.alias_info is not None for x in schema.returns):
        return body, None
    return body, {"device": META} if any(x.name == "device" for x in schema.arguments) else {}


def _sizes(func, args, kwargs, on_meta: dict) -> list[int]:
    """Bytes of each CPU tensor that an operator will return; [] where it cannot tell without data."""
    elsewhere = torch.device(kwargs.get("device") or "cpu").type != "cpu"
    if elsewhere or not all(x.is_cpu for x in _tensors((args, kwargs))):
        return []
    try:
        out = func(*_on_meta(args), **(_on_meta(kwargs) | on_meta))
    except Exception:  # if the call itself is wrong, it will say so when it is run
        return []
    return [x.untyped_storage().nbytes() for x in _tensors(out)]


def _on_meta(x):
    return tree_map_only(Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META), x)


def _tensors(x) -> list[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]
