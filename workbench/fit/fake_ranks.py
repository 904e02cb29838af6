"""One rank of many, traced alone: the ranks that are not there agree, and send rows as large as the plan says.

What ranks tell each other before data moves (`distributed.agree`) is known, because a plan is pure computation: all of
them make the same call, on shards of the lengths given here. Rows that travel have their sizes from the plan, and no
contents, as all tensors of a trace.

The tensors of the exchange are torch's and are followed. What NCCL takes for itself, its communicators and the buffers
in them, is not of torch's allocator, and is not in a trace.
"""

from __future__ import annotations

import contextlib
import types
from dataclasses import replace

import torch

from workbench.distributed import api, call
from workbench.distributed.group import OneStream, Ranks
from workbench.distributed.halo import queries_of
from workbench.distributed.shards import Shards
from workbench.fit.cards import VIRTUAL, Card
from workbench.fit.fake_cuda import CUDA, META
from workbench.probes.case import Case


def check(world: int, rank: int, strategy: str) -> None:
    """ValueError for what is no rank of so many, and no strategy of `distributed.attention`."""
    if type(world) is not int or type(rank) is not int or not 0 <= rank < world:
        raise ValueError(f"rank={rank!r} of world={world!r}: want ints, 0 <= rank < world")
    call.check_strategy(strategy)


def share(case: Case, card: Card, world: int, rank: int, strategy: str) -> tuple[Case, Lone]:
    """(a rank's part of a case whose n and nq are of all ranks, each with an even shard of the keys: a call of
    `distributed.attention` among ranks of which the others are not there, these ranks)."""
    ranks = Lone(case, card, world, rank)
    queries, keys = ranks.held[rank]

    def attention(q, k, v):
        return api.attention(q, k, v, case.pattern, ranks, strategy, backend=case.backend)

    attention.__name__ = case.fields()["backend"]  # for the estimate
    return replace(case, n=keys, nq=queries, backend=attention), ranks


class Lone(Ranks):
    """Ranks of which only one is there, on a card. held: (queries, keys) of each."""

    def __init__(self, case: Case, card: Card, world: int, rank: int):
        super().__init__(self, world, rank, CUDA)
        shards = Shards.even(case.n, world)
        self.held = [(len(queries_of(shards[x], case.n, case.nq)), shards.lengths[x]) for x in range(world)]
        self.pattern, self.card = case.pattern, card

    @property
    def strategy(self) -> str:
        """The one that the last call took."""
        return list(call.plans_of(self.pattern).values())[-1].plan.strategy

    def gather(self, names, numbers, dtype=torch.int64):
        """The others tell the same but for the rows that they hold. The tensors are those of `group.Gathering`."""
        mine = torch.empty(len(numbers), dtype=dtype, device=META)
        rows = [torch.empty_like(mine) for _ in self.held]
        if self.card.key != VIRTUAL:
            torch.empty(self.world, len(numbers), dtype=dtype, device=META)  # NCCL's, from which it copies to the rows
        torch.stack(rows)
        told = torch.tensor(numbers).repeat(self.world, 1)
        if "keys" in names:
            told[:, [names.index("queries"), names.index("keys")]] = torch.tensor(self.held)
        return types.SimpleNamespace(wait=told.tolist)  # a `group.Gathering`

    def all_to_all(self, target, source, into, out, wait=True) -> OneStream:
        return OneStream()

    def streams(self, device) -> OneStream:
        return OneStream()

    @contextlib.contextmanager
    def unfollowed(self):
        """It takes a third of the time so."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            yield
