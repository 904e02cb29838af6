"""Ways to spread one attention call over ranks, under one interface: what a rank holds, and what it calls.

"one device"                 rank 0 holds and computes everything; the other ranks wait.
"data parallel"              torch's DataParallel: rank 0 holds everything, and copies each card's sequences there and back.
"distributed data parallel"  each rank has its share of the batch. This is DDP without torch's wrapper, which refuses a
                             module without parameters: attention has none, so that there are no gradients to reduce.
                             If there is one sequence, one rank has it and the others are idle.
"sequence", "heads"          `workbench.distributed.attention`, each rank with its shard of the sequence.
"context parallel"           torch's own, for dense attention on CUDA. If causal, a shard is an early and a late part, as
                             its load balancing wants; rows are made where they belong, so that it need not move them.
"module:function"            the user's: a function of this rank's shards q, k, v and of the pattern.

Dimensions: B batch, N keys, Nq queries (the last Nq of the N positions), H query heads, G key heads, D head_dim.
"""  # noqa: E501 (a table)

import contextlib
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from workbench.distributed import api, call
from workbench.distributed.halo import queries_of
from workbench.distributed.plans import Plan
from workbench.distributed.shards import Shards
from workbench.engines import dispatch
from workbench.engines.partial import BACKENDS
from workbench.harness.processes import imported
from workbench.patterns import Dense
from workbench.probes.case import Case

ONE = "one device"
OURS = ("sequence", "heads")
STRATEGIES = (ONE, "data parallel", "distributed data parallel", *OURS, "context parallel")
SHORT = {"data parallel": "DataParallel", "distributed data parallel": "DDP"}  # names by which users know them
CHUNK = 1 << 14  # rows that are drawn at once
TENSORS = ("q", "k", "v", "upstream")


class Share(NamedTuple):
    """What a rank holds: sequences of the batch, and positions of keys, in the order of its rows."""

    batch: range
    keys: tuple[range, ...]

    def queries(self, case: Case) -> tuple[range, ...]:
        """The rows of q that lie with the keys."""
        first = case.n - case.nq
        found = (queries_of(x, case.n, case.nq) for x in self.keys)
        return tuple(range(x.start - first, x.stop - first) for x in found if x)

    def rows(self, name: str, case: Case) -> tuple[range, ...]:
        """The rows of a tensor or result that the rank holds, by its name, e.g. "k", "out" or "dv"."""
        return self.keys if name in ("k", "v", "dk", "dv") else self.queries(case)


def share(strategy: str, case: Case, rank: int, world: int) -> Share:
    """What a strategy gives a rank to hold."""
    batch, every = range(case.batch), range(case.n)
    if strategy in (ONE, "data parallel"):
        return Share(batch, (every,)) if rank == 0 else Share(range(0), (every,))
    if strategy == "distributed data parallel":
        return Share(Shards.even(case.batch, world)[rank], (every,))
    if strategy == "context parallel" and case.pattern.causal:
        parts = Shards.even(case.n, 2 * world)
        return Share(batch, (parts[rank], parts[2 * world - 1 - rank]))
    return Share(batch, (Shards.even(case.n, world)[rank],))


def plan(strategy: str, case: Case, world: int) -> Plan | None:
    """The plan of "sequence" or "heads", None for others. ValueError if the strategy cannot do the case."""
    if strategy not in OURS:
        return None
    sizes = (case.pattern, Shards.even(case.n, world), case.heads, case.kv_heads, case.nq)
    return call.choose(strategy, sizes, case.dtype.itemsize, case.head_dim)


def check_name(strategy: str) -> None:
    if strategy not in STRATEGIES and not (isinstance(strategy, str) and all(strategy.partition(":"))):
        raise ValueError(f"strategy={strategy!r}: want one of {', '.join(STRATEGIES)}, or your own as module:function")


def check(strategy: str, case: Case, world: int) -> None:
    """ValueError with the reason if a strategy cannot do the case, NotImplementedError if it cannot on this device."""
    check_name(strategy)
    if case.backend not in BACKENDS:
        raise ValueError(f"backend={case.backend!r}: want one of {', '.join(BACKENDS)}, the same for all strategies")
    if ":" in strategy:
        imported(strategy)
    cuda = case.device.startswith("cuda")
    if strategy == "data parallel" and not cuda:
        raise NotImplementedError("DataParallel copies between CUDA cards; here the call is on the CPU")
    if strategy == "context parallel":
        if not isinstance(case.pattern, Dense):
            raise ValueError("torch's context parallel computes dense attention only")
        if case.nq != case.n or case.kv_heads != case.heads:
            raise ValueError("context parallel wants as many queries as keys, and as many key heads as heads")
        parts = 2 * world if case.pattern.causal else world
        if case.n % parts:
            raise ValueError(f"n={case.n}: context parallel wants a multiple of {parts}, for equal shards")
        if not cuda:
            raise NotImplementedError("torch's context parallel knows CUDA's fused kernels only; here it is the CPU")
    plan(strategy, case, world)


def make(case: Case, name: str, batch: range, rows: tuple[range, ...]) -> Tensor:
    """Rows of q, k, v or the upstream gradient, (sequences, rows, heads, D), the same on whichever rank they are made.

    Each chunk of rows has a seed of its own, so that a rank draws little more than what it holds.
    """
    total, heads = (case.n, case.kv_heads) if name in "kv" else (case.nq, case.heads)
    like = {"dtype": case.dtype, "device": case.device}
    found = torch.empty(len(batch), sum(map(len, rows)), heads, case.head_dim, **like)
    start, random = 0, torch.Generator(case.device)
    for part in rows if batch else ():
        for first in range(part.start // CHUNK * CHUNK, part.stop, CHUNK):
            some = range(max(part.start, first), min(part.stop, first + CHUNK))
            shape = case.batch, min(CHUNK, total - first), heads, case.head_dim
            random.manual_seed(zlib.crc32(f"{case.seed} {name} {first}".encode()))  # the CPU's uses 32 bits of a seed
            drawn = torch.randn(shape, generator=random, **like)[batch.start : batch.stop]
            found[:, start : start + len(some)] = drawn[:, some.start - first : some.stop - first]
            start += len(some)
    return found


@dataclass
class Work:
    """A rank's part of a call, to be called within `context`, torch's settings for the strategy, which is not timed.

    share: which part of the global tensors `inputs` are: q, k, v and, for gradients, the upstream one
    idle: whether this rank has nothing to do
    """

    case: Case
    share: Share
    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    inputs: list[Tensor]
    idle: bool = False
    context: Callable = contextlib.nullcontext

    def __call__(self, out: bool = False) -> dict[str, Tensor]:
        """Results by name: out, or dq, dk and dv. out: whether out is among the results in mode "fwdbwd", too."""
        if self.idle:
            return {}
        if self.case.mode == "fwd":
            with torch.no_grad():
                return {"out": self.function(*self.inputs)}
        *leaves, upstream = self.inputs
        with torch.enable_grad():
            result = self.function(*leaves)
            found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(result, leaves, upstream), strict=True))
        return found | {"out": result.detach()} if out else found


def prepare(strategy: str, case: Case, rank: int, world: int, made: dict | None = None) -> Work:
    """This rank's work, with its inputs. made: a dict in which they are kept, for strategies that hold the same."""
    mine, made = share(strategy, case, rank, world), {} if made is None else made
    if mine not in made:
        names = TENSORS if case.mode == "fwdbwd" else TENSORS[:3]
        tensors = [make(case, name, mine.batch, mine.rows(name, case)) for name in names]
        made[mine] = [x.requires_grad_(case.mode == "fwdbwd" and name != "upstream")
                      for x, name in zip(tensors, names, strict=True)]  # fmt: skip
    single = functools.partial(dispatch.attention, pattern=case.pattern, backend=case.backend)
    work = Work(case, mine, single, made[mine], idle=not mine.batch)
    if strategy == "data parallel":
        module = torch.nn.Module()
        module.forward = work.function
        work.function = torch.nn.DataParallel(module, device_ids=list(range(world)))
    elif strategy in OURS:
        work.function = functools.partial(api.attention, pattern=case.pattern, strategy=strategy, backend=case.backend)
    elif strategy == "context parallel":
        work.function = functools.partial(_sdpa, causal=case.pattern.causal)
        work.context = functools.partial(context_parallel, case.device, case.pattern.causal)
    elif ":" in strategy:
        work.function = functools.partial(imported(strategy), pattern=case.pattern)
    return work


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(kernels):  # in torch's order, see `dispatch.right_past_2_31`
        # looked up in its module, where the context puts torch's sharded one
        out = functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
    return out.transpose(1, 2)


@contextlib.contextmanager
def context_parallel(device: str, causal: bool):
    """torch's context_parallel around calls on shards that are already laid out as it wants.

    Unless causal, it wants its load balancing off, for which there is no public switch; and some versions leave torch's
    attention replaced after an exception. So both are set, and put back, here.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import _attention as experimental

    options, dispatcher = experimental._cp_options, DTensor._op_dispatcher
    kept = functional.scaled_dot_product_attention, options.enable_load_balance, dispatcher._custom_op_handlers
    mesh = _mesh(torch.device(device).type, dist.get_world_size())
    something = torch.zeros(2 * mesh.size(), device=device)  # it requires a tensor to shard, and ours are sharded
    options.enable_load_balance = causal
    try:
        sharded = {"buffers": [something], "buffer_seq_dims": [0], "no_restore_buffers": {something}}
        with experimental.context_parallel(mesh, **sharded):
            yield
    finally:
        functional.scaled_dot_product_attention, options.enable_load_balance, dispatcher._custom_op_handlers = kept


@functools.cache
def _mesh(kind: str, world: int):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(kind, (world,))
