"""One call on one rank: its input is checked, the ranks agree on a plan, and the plan is run, forward and backward.

A plan is kept with its pattern, so that a later call like this one only has to ask whether the other ranks have kept it
too. They answer while the attention to the rank's own rows runs (`start`). If one has not, all make the plan anew.

Dimensions: B batch, L rows of this rank, Lq its queries, H query heads, G key heads, D head_dim.
"""

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
from workbench.engines.operators import refuse_transforms
from workbench.engines.torch.fused import unit_stride
from workbench.patterns import Dense, Pattern
from workbench.patterns.checks import choice

DENSE = Dense()
STRATEGIES = ("auto", "sequence", "heads")
PLANS = 8  # kept with a pattern: the layers that share it may differ in heads, group and strategy
# What has to be the same on all ranks.
SAME = "pattern", "shape", "dtype", "device", "strategy", "scale", "backend", "return_lse", "requires_grad"
PROPOSED = ("queries", "keys", "plan", *SAME)  # how many rows the rank has, its kept plan, and a hash of each of SAME


Executor = sequence.Executor | ulysses.Executor  # a plan, made ready to run on this rank


class Call(NamedTuple):
    """One call whose input is right on this rank.

    key: what a plan has to be for; kept: the executor of an earlier call with this key, or None
    numbers: what this rank proposes, see PROPOSED
    """

    ranks: Ranks
    pattern: Pattern
    strategy: str
    scale: float
    backend: str
    return_lse: bool
    key: tuple
    kept: Executor | None
    numbers: list[int]


def check_strategy(strategy: str) -> None:
    choice("strategy", strategy, *STRATEGIES)


def check(q, k, v, pattern, ranks: Ranks, strategy, scale, backend, return_lse) -> tuple[Tensor, Tensor, Tensor, Call]:
    """(q, k, v as autocast wants them, the call); ValueError for what is wrong in this rank's own shard."""
    check_strategy(strategy)
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern={pattern!r}: want a pattern, e.g. Dense() or Dilated([2048, 4096], [1, 2])")
    q, k, v = dispatch.check(q, k, v, DENSE, scale)
    if q.shape[-1] != v.shape[-1]:
        raise ValueError(f"q {tuple(q.shape)}, v {tuple(v.shape)}: want one head_dim, pad the narrower with zeros")
    refuse_transforms(q, k, v)
    if pattern.batch not in (None, q.shape[0]):
        raise ValueError(f"the layout is for a batch of {pattern.batch}, but q is {tuple(q.shape)}")
    reason = partial.why_not(backend, q, k, pattern)
    if reason:
        raise ValueError(reason)
    if ranks.device.type == "cuda" and q.device.type != "cuda":
        raise ValueError(f"q is on {q.device}, and the group moves what is on CUDA")
    scale = None if scale is None else float(scale)  # ranks compare it
    key = (ranks.group, q.shape, k.shape, q.device, q.dtype, strategy)
    plans = plans_of(pattern)
    if kept := plans.pop(key, None):
        plans[key] = kept  # now the most recently used one
    wanted = tuple(torch.is_grad_enabled() and x.requires_grad for x in (q, k, v))
    shape = q.shape[0], *q.shape[2:], k.shape[2]
    words = (shape, q.dtype, q.device.type, strategy, scale, backend, return_lse, wanted)  # of SAME, all but the first
    numbers = [q.shape[1], k.shape[1], kept.plan.digest if kept else 0]
    numbers += [pattern.kept("digest", (), lambda: digest(describe(pattern))), *_hashes(words)]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return q, k, v, Call(ranks, pattern, strategy, scale, backend, return_lse, key, kept, numbers)


@functools.lru_cache(256)
def _hashes(words: tuple) -> list[int]:
    return [digest(repr(x)) for x in words]


def start(call: Call, agreement: Agreement, q: Tensor, k: Tensor, run: Callable) -> tuple[Executor, object]:
    """(the executor of the plan that all ranks have, this rank's run of it, begun), or an error on all ranks.

    run(executor) -> a run whose attention to the rank's own rows has been started
    """
    running = _begin(agreement, call.numbers, call.kept and functools.partial(run, call.kept))
    told = agreement.settle()
    same([x[3:] for x in told], SAME)
    if call.kept is not None and all(x[2] == call.kept.plan.digest for x in told):
        return call.kept, running
    call.ranks.streams(q.device).join()  # what is thrown away may still be in use there
    del running
    with Agreement(call.ranks, ("plan",)) as again:
        executor = _make(call, [x[:2] for x in told], q, k)
        running = _begin(again, [executor.plan.digest], functools.partial(run, executor))
        same(again.settle(), ("plan",))
    return executor, running


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


def _make(call: Call, held: list[tuple[int, int]], q: Tensor, k: Tensor) -> Executor:
    """The executor of a new plan, kept with the pattern. held: (queries, keys) of each rank; ValueError where these do
    not fit. The least recently used plan is forgotten; where ranks forget different ones, all make the plan anew."""
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
        plan = choose(call.strategy, (call.pattern, shards, h, k.shape[2], nq), q.element_size(), d)
        by_heads = isinstance(plan, ulysses.HeadsPlan)
        executor = ulysses.Executor(plan, call.ranks) if by_heads else sequence.Executor(plan, call.ranks, b, d)
    executor.to(q.device)  # takes memory there
    plans = plans_of(call.pattern)
    plans.pop(call.key, None)
    plans[call.key] = executor
    if len(plans) > PLANS:
        del plans[next(iter(plans))]
    return executor


def choose(strategy: str, sizes: tuple, itemsize: int, head_dim: int) -> Plan:
    """The plan. sizes: the arguments of `Plan`. ValueError where the strategy is not possible."""
    if strategy == "heads":
        return ulysses.HeadsPlan(*sizes)
    plan = Plan(*sizes)
    if strategy == "sequence":
        return plan
    try:
        other = ulysses.HeadsPlan(*sizes)
    except ValueError:  # its heads do not divide
        return plan
    return min((plan, other), key=lambda one: int(one.bytes(itemsize, head_dim).sum(0).max()))


def plans_of(pattern: Pattern) -> dict[tuple, Executor]:
    """What is kept with the pattern, by `Call.key`, the most recently used one last."""
    return pattern.kept("plans", (), dict)


class Attend(torch.autograd.Function):
    """(q (B, Lq, H, D), k and v (B, L, G, D), the call, its agreement) -> (out like q, lse (B, H, Lq) or None)."""

    @staticmethod
    def forward(ctx, q, k, v, call: Call, agreement: Agreement):
        q, k, v = map(unit_stride, (q, k, v))
        needs_gradients = any(ctx.needs_input_grad)
        with call.ranks.streams(q.device).joined():
            executor, running = start(call, agreement, q, k, lambda x: x.forward(q, k, v, call, needs_gradients))
            out, lse, saved = running.finish()
            del running
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.executor, back = call._replace(kept=None), executor, executor.held_here
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
                dq, dk, dv = running.finish(any(map(any, agreement.settle())))
                del running
        return executor.held_here(dq), dk, dv, None, None
