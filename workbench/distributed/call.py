"""One call on one rank: its input is checked, the ranks agree on a plan, and the plan is run, forward and backward.

A plan is kept with its pattern, so that a later call like this one only has to ask whether the other ranks have kept it
too. They answer while the attention to the rank's own rows runs (`start`). If one has not, all make the plan anew.

Dimensions: B batch, L rows of this rank, Lq its queries, H query heads, G key heads, D head_dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workbench.distributed import sequence, ulysses
from workbench.distributed.agree import Agreement, same
from workbench.distributed.group import Ranks
from workbench.distributed.plans import Plan, describe, digest
from workbench.distributed.shards import Shards
from workbench.engines import dispatch, partial
from workbench.engines.operators import transformed
from workbench.engines.torch.fused import unit_stride
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
PROPOSED = ("queries", "keys", "plan", *SAME)  # how many rows the rank has, its kept plan, and a hash of each of SAME


class Prepared(NamedTuple):
    """A plan, why it was chosen, and what runs it on this rank. Kept with the pattern for similar calls."""

    plan: Plan
    why: str
    executor: sequence.Executor | ulysses.Executor


class Call(NamedTuple):
    """One call whose input is right on this rank.

    key: what a plan has to be for; kept: the plan of an earlier call with this key, or None
    numbers: what this rank proposes, see PROPOSED
    """

    ranks: Ranks
    pattern: Pattern
    strategy: str
    scale: float
    backend: str
    return_lse: bool
    key: tuple
    kept: Prepared | None
    numbers: list[int]


# --- before ranks agree -----------------------------------------------------------------------------------------------


def check_strategy(strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: want one of {', '.join(map(repr, STRATEGIES))}")


def check(q, k, v, pattern, ranks: Ranks, strategy, scale, backend, return_lse) -> tuple[Tensor, Tensor, Tensor, Call]:
    """(q, k, v as autocast wants them, the call); ValueError for what is wrong in this rank's own shard."""
    check_strategy(strategy)
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern={pattern!r}: want a pattern, e.g. Dense() or Dilated([2048, 4096], [1, 2])")
    q, k, v = dispatch.check(q, k, v, Dense(), scale)
    if transformed(q, k, v):
        raise ValueError(
            "transforms of torch.func and forward-mode derivatives do not go through several ranks: "
            "torch.autograd.grad and backward do, and workbench.attention with backend='reference' takes all"
        )
    if pattern.batch not in (None, q.shape[0]):
        raise ValueError(f"the layout is for a batch of {pattern.batch}, but q is {tuple(q.shape)}")
    reason = partial.why_not(backend, q, k, pattern)
    if reason:
        raise ValueError(reason)
    if ranks.device.type == "cuda" and q.device.type != "cuda":
        raise ValueError(f"q is on {q.device}, and the group moves what is on CUDA")
    scale = None if scale is None else float(scale)  # ranks compare it
    key = (ranks.group, q.shape, k.shape, q.device, q.dtype, strategy)
    kept = recall(pattern, key)
    numbers = [q.shape[1], k.shape[1], kept.plan.digest if kept else 0]
    numbers += _hashes(q, k, v, pattern, strategy, scale, backend, return_lse)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return q, k, v, Call(ranks, pattern, strategy, scale, backend, return_lse, key, kept, numbers)


def _hashes(q, k, v, pattern, strategy, scale, backend, return_lse) -> list[int]:
    """A hash of each of SAME."""
    kept = _kept_with(pattern)
    if "digest" not in kept:
        kept["digest"] = digest(describe(pattern))
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)]
    shape = [q.shape[0], *q.shape[2:], k.shape[2]]
    words = (shape, q.dtype, q.device.type, strategy, scale, backend, return_lse, wanted)
    return [kept["digest"], *(_hash(repr(x)) for x in words)]


_hash = functools.lru_cache(256)(digest)


# --- the plan ---------------------------------------------------------------------------------------------------------


def start(call: Call, agreement: Agreement, q: Tensor, k: Tensor, run: Callable) -> tuple[Prepared, object]:
    """(the plan that all ranks have, this rank's run of it, begun), or an error on all ranks.

    run(prepared) -> a run whose attention to the rank's own rows has been started
    """
    running = _begin(agreement, call.numbers, call.kept and functools.partial(run, call.kept))
    told = agreement.settle()
    same(told[:, 3:], SAME)
    if call.kept is not None and bool((told[:, 2] == call.kept.plan.digest).all()):
        return call.kept, running
    call.ranks.streams(q.device).join()  # what is thrown away may still be in use there
    del running
    with Agreement(call.ranks, ("plan",)) as again:
        prepared = _make(call, told[:, :2].tolist(), q, k)
        keep(call.pattern, call.key, prepared)
        running = _begin(again, [prepared.plan.digest], functools.partial(run, prepared))
        same(again.settle(), ("plan",))
    return prepared, running


def _begin(agreement: Agreement, numbers: list[int], run: Callable | None):
    """run(), and propose the numbers, so that the ranks agree while the run's own rows are attended to.

    An error in run() is then told to the others. What a card gathers would itself queue behind that attention, so there
    it begins before it, and an error in run() is this rank's alone.
    """
    if agreement.ranks.by_card:
        agreement.propose(numbers)
    running = run() if run else None
    if not agreement.ranks.by_card:
        agreement.propose(numbers)
    if running:
        running.pack()
    return running


def _make(call: Call, held: list[tuple[int, int]], q: Tensor, k: Tensor) -> Prepared:
    """The plan and this rank's executor. held: (queries, keys) of each rank. ValueError where these do not fit."""
    queries, lengths = zip(*held, strict=True)
    shards, nq, (b, _, h, d) = Shards(lengths), sum(queries), q.shape
    for p, count in enumerate(queries):
        want = max(0, shards[p].stop - max(shards[p].start, shards.n - nq))
        if count != want:
            raise ValueError(
                f"rank {p} has {count} queries on {lengths[p]} keys: the last {nq} of {shards.n} positions are "
                f"queries, so want {want}, those that are among its keys"
            )
    with call.ranks.unfollowed():
        plan, why = choose(call.strategy, (call.pattern, shards, h, k.shape[2], nq), q.element_size(), d)
        by_heads = isinstance(plan, ulysses.HeadsPlan)
        executor = ulysses.Executor(plan, call.ranks) if by_heads else sequence.Executor(plan, call.ranks, b, d)
    return Prepared(plan, why, executor.to(q.device))


def choose(strategy: str, sizes: tuple, itemsize: int, head_dim: int) -> tuple[Plan, str]:
    """(the plan, why it). sizes: the arguments of `Plan`. ValueError where the strategy asked for is not possible."""
    if strategy == "heads":
        return ulysses.HeadsPlan(*sizes), "asked for by name"
    plan = Plan(*sizes)
    if strategy == "sequence":
        return plan, "asked for by name"
    try:
        other = ulysses.HeadsPlan(*sizes)
    except ValueError as error:
        return plan, f"not possible by heads ({error})"
    most = [int(x.bytes(itemsize, head_dim).sum(0).max()) for x in (plan, other)]
    if most[1] < most[0]:
        return other, f"it brings one rank at most {most[1]:,} bytes, the rows that queries touch are {most[0]:,}"
    return plan, f"the rows that queries touch are at most {most[0]:,} bytes for one rank, by heads it is {most[1]:,}"


def _kept_with(pattern: Pattern) -> dict:
    return pattern.kept("shared", (), lambda: {"plans": {}})


def recall(pattern: Pattern, key: tuple) -> Prepared | None:
    """The plan made for a call like this one, or None. It becomes the most recently used."""
    plans = _kept_with(pattern)["plans"]
    if key in plans:
        plans[key] = plans.pop(key)
    return plans.get(key)


def last(pattern: Pattern) -> Prepared:
    """The plan of the last call on a pattern."""
    return list(_kept_with(pattern)["plans"].values())[-1]


def keep(pattern: Pattern, key: tuple, prepared: Prepared) -> None:
    """Keep a plan, and forget the least recently used. Ranks may forget differently: then all make the plan anew."""
    plans = _kept_with(pattern)["plans"]
    plans.pop(key, None)
    plans[key] = prepared
    while len(plans) > PLANS:
        del plans[next(iter(plans))]


# --- the run ----------------------------------------------------------------------------------------------------------


class Attend(torch.autograd.Function):
    """(q (B, Lq, H, D), k and v (B, L, G, D), the call, its agreement) -> (out like q, lse (B, H, Lq) or None)."""

    @staticmethod
    def forward(ctx, q, k, v, call: Call, agreement: Agreement):
        q, k, v = map(unit_stride, (q, k, v))
        needs_gradients = any(ctx.needs_input_grad)
        with call.ranks.streams(q.device).joined():
            prepared, running = start(
                call, agreement, q, k, lambda prepared: prepared.executor.forward(q, k, v, call, needs_gradients)
            )
            out, lse, saved = running.finish()
            del running
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.executor = call._replace(kept=None), prepared.executor
        back = prepared.executor.held_here
        return back(out), back(lse.transpose(1, 2)).transpose(1, 2) if call.return_lse else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_lse=None):
        call, executor = ctx.call, ctx.executor
        with Agreement(call.ranks, ("gradient of lse",)) as agreement:
            saved = ctx.saved_tensors  # an error where one has been changed meanwhile
            with call.ranks.streams(saved[0].device).joined():
                running = _begin(
                    agreement, [int(grad_lse is not None)],
                    lambda: executor.backward(grad, grad_lse, saved, call),
                )  # fmt: skip
                dq, dk, dv = running.finish(bool(agreement.settle().any()))
                del running
        return executor.held_here(dq), dk, dv, None, None
