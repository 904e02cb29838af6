"""The entry point to attention over several ranks: agree, plan, exchange, attend.

Dimensions: B batch, L rows of this rank, N rows of all ranks together, H query heads, G key heads, D head_dim.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from workbench import dispatch
from workbench.distributed import streams, ulysses
from workbench.distributed.agree import ask, same
from workbench.distributed.plans import Plan, describe, digest
from workbench.distributed.sequence import Buffers, Sequence
from workbench.distributed.shards import Shards
from workbench.distributed.ulysses import HeadsPlan
from workbench.execution import partial
from workbench.execution.fused import unit_stride
from workbench.patterns import Dense, Pattern

STRATEGIES = ("auto", "sequence", "heads")
PLANS = 8  # kept with a pattern: the layers that share it may differ in heads, group and strategy
SAME = (  # what has to be the same on all ranks
    "pattern",
    "shape",
    "dtype",
    "device",
    "strategy",
    "scale",
    "backend",
    "return_lse",
    "requires_grad",
)


@torch.compiler.disable
def attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, group=None, strategy: str = "auto", scale: float | None = None,
    return_lse: bool = False, backend: str = "auto",
):  # fmt: skip
    """Attention of this rank's queries to the keys of all ranks: this rank's rows of what `workbench.attention` gives.

    q (B, Lq, H, D), k and v (B, L, G, D): this rank's contiguous shard, shards in the order of ranks; their lengths may
    differ and be 0. If there are fewer queries than keys in all, the queries are the last positions of the sequence,
    each on the rank that holds the key of its position. Returns out like q, or (out, lse (B, H, Lq)) with return_lse.
    group: a process group (None: the default one). A single rank needs none: it calls `workbench.attention`.
    strategy: "sequence" (a rank attends for its own rows and fetches the key rows that they need), "heads" (a rank
        attends to the whole sequence for a part of the heads), or "auto", the one of these that brings fewer bytes to
        the rank that receives most (see `explain`).
    backend: "auto", "torch" or "triton", for what each rank computes.
    Block-sparse attention is faster, and takes less memory, if each shard is a whole number of query and of key blocks.

    All ranks of the group call this, and its backward, together. Where one rank's input is wrong, or ranks disagree
    (on the pattern, dtype, ...), every rank raises ValueError before any row is sent. An out-of-memory before rows are
    sent, in forward or backward, is likewise raised on every rank, with one exception: in a group of NCCL alone it is
    not, once a rank has its buffers. What moves: keys and values, once forward and once backward, and their gradients
    in float32 (float64 for float64); `Plan.bytes` has the numbers.
    """
    q, k, v, call = _agreed(q, k, v, pattern, group, strategy, scale, return_lse, backend)
    if call is None:
        return dispatch.attention(q, k, v, pattern, scale=scale, backend=backend, return_lse=return_lse)
    try:
        found = _function(call).apply(q, k, v, call)
    except _Anew as anew:
        made, buffers = anew.args
        call = call._replace(made=made, buffers=buffers, tell=None)
        found = _function(call).apply(q, k, v, call)
    return (dispatch._divided(found[0], pattern), found[1]) if return_lse else dispatch._divided(found, pattern)


def _function(call: Call) -> type[torch.autograd.Function]:
    return ulysses.Attend if isinstance(call.made.plan, HeadsPlan) else _Attend


def explain(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, group=None, strategy: str = "auto") -> str:
    """Which strategy this call takes, why, and the bytes that it moves, in a sentence. All ranks call it together."""
    q, k, v, call = _agreed(q, k, v, pattern, group, strategy, None, False, "auto")
    if call is None:
        return f"one rank: {dispatch.explain(q, k, v, pattern)}"
    made = call.tell(None)()[0] if call.tell else call.made
    sizes = q.element_size(), q.shape[3], q.shape[0]
    forward, backward = (made.plan.bytes(*sizes, mode=mode) for mode in ("fwd", "bwd"))
    return (
        f"{made.plan.strategy}: {made.why}; forward moves {int(forward.sum()):,} bytes, at most "
        f"{int(forward.sum(0).max()):,} to one rank, and backward {int(backward.sum()):,}"
    )


class Made(NamedTuple):
    """A plan, why it was chosen and, for "sequence", its side of this rank. Kept with the pattern for similar calls."""

    plan: Plan
    why: str
    ready: Sequence | None


class Call(NamedTuple):
    """One call, with its plan (`made`) and the buffers of its forward.

    tell: None once the ranks have agreed. Until then tell(error) sends the other ranks what this one is about to do, or
        the error that ends it; what it returns waits for their answers and gives the plan and buffers, or raises.
    device: where the tensors that ranks gather to agree have to be, on the CPU (gloo) or a card (NCCL)
    """

    made: Made
    buffers: Buffers | None
    tell: Callable[[Exception | None], Callable[[], tuple[Made, Buffers | None]]] | None
    rank: int
    group: object
    device: torch.device
    scale: float
    backend: str
    return_lse: bool


class _Anew(Exception):
    """Some rank had not kept this plan, so that all have made it anew: its arguments are the new `Made` and buffers.

    What was computed with the old ones is discarded.
    """


def _agreed(
    q, k, v, pattern, group, strategy, scale, return_lse, backend
) -> tuple[Tensor, Tensor, Tensor, Call | None]:
    """(q, k, v under autocast, the call, None for a single rank). Raises on all ranks or on none.

    On a card whose rank has kept the plan, the ranks agree only later, in the forward, while it computes (`Call.tell`).
    """
    group, world, rank, device = _place(group)
    if world == 1:
        _check_strategy(strategy)
        return q, k, v, None
    error, made, buffers, numbers = None, None, None, [0] * (3 + len(SAME))
    try:
        _check_strategy(strategy)
        _check(q, k, v, pattern, scale, backend)
        if device.type == "cuda" and q.device.type != "cuda":
            raise ValueError(f"q is on {q.device}, and the group moves what is on CUDA")
        q, k, v = dispatch.autocast(q, k, v)
        key = (group, q.shape, k.shape, q.device, q.dtype, strategy)
        made = _recall(pattern, key)
        buffers = _buffers(made, rank, q, k) if made else None
        numbers = [q.shape[1], k.shape[1], made.plan.digest if made else 0]
        numbers += _numbers(q, k, v, pattern, strategy, scale, backend, return_lse)
    except Exception as found:
        error = found

    def tell(error: Exception | None) -> Callable[[], tuple[Made, Buffers | None]]:
        answers = ask(group, device, error, numbers)

        def settle() -> tuple[Made, Buffers | None]:
            """The plan and buffers to use: those at hand, or new ones where some rank has kept another plan or none."""
            told = answers()
            same(told[:, 3:], SAME)
            if made is not None and not bool((told[:, 2] != made.plan.digest).any()):
                return made, buffers
            anew = room = error = None
            try:
                anew = _make(q, k, pattern, told, rank, group, strategy)
                _keep(pattern, key, anew)
                room = _buffers(anew, rank, q, k)
            except Exception as found:
                error = found
            try:
                told = ask(group, device, error, [anew.plan.digest if anew else 0])()
            finally:
                error = None
            same(told, ("plan",))
            return anew, room

        return settle

    scale = 1 / math.sqrt(q.shape[-1]) if error is None and scale is None else scale
    call = Call(made, buffers, tell, rank, group, device, scale, backend, return_lse)
    if error is None and made is not None and made.ready is not None and made.ready.early():
        return q, k, v, call
    try:
        made, buffers = tell(error)()
    finally:
        error = None
    return q, k, v, call._replace(made=made, buffers=buffers, tell=None)


def _check_strategy(strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: want one of {', '.join(map(repr, STRATEGIES))}")


def _check(q, k, v, pattern, scale, backend) -> None:
    """ValueError for what is wrong in this rank's own shard."""
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern={pattern!r}: want a pattern, e.g. Dense() or Dilated([2048, 4096], [1, 2])")
    dispatch.check(q, k, v, Dense(), scale)
    if pattern.batch not in (None, q.shape[0]):
        raise ValueError(f"the layout is for a batch of {pattern.batch}, but q is {tuple(q.shape)}")
    reason = partial.why_not(backend, q, k, pattern)
    if reason:
        raise ValueError(reason)


def _place(group) -> tuple[object, int, int, torch.device]:
    """(group, its size, this rank in it, the device of tensors that it gathers)."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return group, 1, 0, torch.device("cpu")
    group, nccl = dist.group.WORLD if group is None else group, dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    return group, dist.get_world_size(group), dist.get_rank(group), device


def _kept(pattern: Pattern) -> dict:
    return pattern.__dict__.setdefault("_shared", {"plans": {}})


def _recall(pattern: Pattern, key: tuple) -> Made | None:
    """The plan made for a call like this one, or None. It becomes the most recently used."""
    plans = _kept(pattern)["plans"]
    if key in plans:
        plans[key] = plans.pop(key)
    return plans.get(key)


def _keep(pattern: Pattern, key: tuple, made: Made) -> None:
    """Keep a plan, and forget the least recently used. Ranks may forget differently: then all make the plan anew."""
    plans = _kept(pattern)["plans"]
    plans.pop(key, None)
    plans[key] = made
    while len(plans) > PLANS:
        del plans[next(iter(plans))]


def _numbers(q, k, v, pattern, strategy, scale, backend, return_lse) -> list[int]:
    """A hash of each of SAME, which ranks compare."""
    kept = _kept(pattern)
    if "digest" not in kept:
        kept["digest"] = digest(describe(pattern))
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)]
    shape = [q.shape[0], *q.shape[2:], k.shape[2]]
    words = (shape, q.dtype, q.device.type, strategy, scale, backend, return_lse, wanted)
    return [kept["digest"], *(_number(repr(x)) for x in words)]


_number = functools.lru_cache(256)(digest)


def _make(q, k, pattern, told: Tensor, rank: int, group, strategy: str) -> Made:
    """The plan, ready for this rank, from the (queries, keys) that each rank holds: the first two columns of `told`."""
    held, lengths = told[:, 0].tolist(), told[:, 1].tolist()
    shards, nq, (b, _, h, d) = Shards(tuple(lengths)), sum(held), q.shape
    for p, count in enumerate(held):
        first = max(shards[p].start, shards.n - nq)
        if count != max(0, shards[p].stop - first):
            raise ValueError(
                f"rank {p} has {count} queries on {lengths[p]} keys: the last {nq} of {shards.n} positions are "
                f"queries, so want {max(0, shards[p].stop - first)}, those that are among its keys"
            )
    plan, why = choose(strategy, (pattern, shards, h, k.shape[2], nq), q.element_size(), d)
    ready = None if isinstance(plan, HeadsPlan) else Sequence(plan, rank, group, b, d, q.device)
    return Made(plan, why, ready)


def choose(strategy: str, sizes: tuple, itemsize: int, head_dim: int) -> tuple[Plan, str]:
    """(the plan, why it). sizes: the arguments of `Plan`. ValueError where the strategy asked for is not possible."""
    if strategy == "heads":
        return HeadsPlan(*sizes), "asked for by name"
    plan = Plan(*sizes)
    if strategy == "sequence":
        return plan, "asked for by name"
    try:
        other = HeadsPlan(*sizes)
    except ValueError as error:
        return plan, f"not possible by heads ({error})"
    most = [int(x.bytes(itemsize, head_dim).sum(0).max()) for x in (plan, other)]
    if most[1] < most[0]:
        return other, f"it brings one rank at most {most[1]:,} bytes, the rows that queries touch are {most[0]:,}"
    return plan, f"the rows that queries touch are at most {most[0]:,} bytes for one rank, by heads it is {most[1]:,}"


def _buffers(made: Made, rank: int, q: Tensor, k: Tensor) -> Buffers | None:
    if made.ready is None:
        return ulysses.rehearse(made.plan, rank, q)
    return made.ready.prepare(q, k, backward=False)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call: Call):
        q, k, v = map(unit_stride, (q, k, v))
        ready, regroup = call.made.ready, call.made.ready.regroup

        def tell(error: Exception | None) -> Callable[[], None]:
            if call.tell is None:  # the ranks have agreed on a new plan, but each may still fail on its own rows
                return ask(call.group, call.device, error, [])
            settle = call.tell(error)

            def confirm() -> None:
                if (found := settle())[0] is not call.made:
                    raise _Anew(*found)

            return confirm

        def attend(begin):
            rows = regroup.kept(q) if regroup else q

            def bring() -> None:
                if regroup:
                    regroup.bring(q, rows)

            return rows, *ready.forward(rows, k, v, call.scale, call.backend, call.buffers, begin, bring)

        rows, out, lse = _telling(call, tell if ready.early() else None, attend)
        ctx.save_for_backward(rows, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.call = call._replace(buffers=None, tell=None)
        if regroup:
            out = regroup.back(out)
            lse = regroup.back(lse.transpose(1, 2)).transpose(1, 2) if call.return_lse else None
        return (out, lse) if call.return_lse else out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_lse=None):
        call, ready, error = ctx.call, ctx.call.made.ready, None
        try:
            rows, k, v, out, lse = ctx.saved_tensors  # an error where one has been changed meanwhile
            buffers = ready.prepare(rows, k, backward=True)
        except Exception as found:
            error = found
        tell = functools.partial(ask, call.group, call.device, numbers=[int(grad_lse is not None)])
        regroup, held = ready.regroup, len(ready.plan.queries(call.rank))
        if error is not None or not ready.early() or regroup and call.return_lse:
            try:
                told = tell(error)()
            finally:
                error = None
            tell = functools.partial(ask, call.group, call.device, numbers=[]) if ready.early() else None
            if regroup and bool(told.any()) and grad_lse is None:
                grad_lse = lse.new_zeros(*lse.shape[:2], held)

        def attend(begin):
            of_out, of_lse, moves = grad, grad_lse, []  # moves: (rows held, rows computed) of what is regrouped
            if of_out is None:
                of_out = out.new_zeros(out.shape[0], held, *out.shape[2:])
            if regroup:
                moves.append((of_out, of_out := regroup.kept(of_out)))
                if of_lse is not None:
                    its_rows = of_lse.transpose(1, 2)
                    moves.append((its_rows, to := regroup.kept(its_rows)))
                    of_lse = to.transpose(1, 2)

            def bring() -> None:
                for x, to in moves:
                    regroup.bring(x, to)

            more = call.scale, call.backend, buffers, begin, bring
            return ready.backward(of_out, of_lse, rows, k, v, out, lse, *more)

        dq, dk, dv = _telling(call, tell, attend)
        return regroup.back(dq) if regroup else dq, dk, dv, None


def _telling(call: Call, tell: Callable[[Exception | None], Callable] | None, attend: Callable[[Callable], tuple]):
    """attend(begin), where an error in attend before it calls `begin` is told to the other ranks and raised on all.

    begin() tells the other ranks that this one takes part, and returns what waits for their answers; `attend` calls it
    once the attention to its own rows is queued on the card.
    tell: see `Call`; None where the ranks have agreed already. With NCCL, what ranks tell would itself queue behind
    that attention, so it is told first, and a later error is this rank's alone.
    """
    ready, waits = call.made.ready, (lambda: None) if tell is None else None
    if waits is None and call.device.type == "cuda":
        waits = tell(None)

    def begin() -> Callable:
        nonlocal waits
        waits = waits or tell(None)
        return waits

    try:
        with streams.joined(ready.exchange.device) if ready.early() else contextlib.nullcontext():
            return attend(begin)
    except Exception as error:
        if waits is None:
            tell(error)()
        raise
