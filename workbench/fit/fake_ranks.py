"""One rank of many, traced alone: the ranks that are not there agree, and send rows as large as the plan says.

What ranks tell each other before data moves (`distributed.agree`) is known, because a plan is pure computation: all of
them make the same call, on shards of the lengths given here. Rows that travel have their sizes from the plan, and no
contents, as all tensors of a trace.

The tensors of the exchange are torch's and are followed. What NCCL takes for itself, its communicators and the buffers
in them, is not of torch's allocator, and is not in a trace.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.distributed import api, call
from workbench.distributed.group import OneStream, Ranks
from workbench.distributed.halo import queries_of
from workbench.distributed.shards import Shards
from workbench.fit.cards import VIRTUAL, Card
from workbench.fit.fake_cuda import CUDA, META, OnCard
from workbench.probes.case import Case


@dataclass(frozen=True)
class Rank:
    """Rank `rank` of `world`, each with an even shard of the keys; strategy as in `distributed.attention`."""

    world: int
    rank: int = 0
    strategy: str = "auto"

    def __post_init__(self):
        if type(self.world) is not int or type(self.rank) is not int or not 0 <= self.rank < self.world:
            raise ValueError(f"rank={self.rank!r} of world={self.world!r}: want ints, 0 <= rank < world")
        call.check_strategy(self.strategy)

    def own(self, case: Case, card: Card) -> tuple[Case, Lone]:
        """(the rank's part of a case whose n and nq are of all ranks: a call of `distributed.attention` among ranks of
        which the others are not there, these ranks)."""
        ranks = Lone(self, case, card)
        queries, keys = ranks.held[self.rank]

        def attention(q, k, v):
            return api.attention(q, k, v, case.pattern, ranks, self.strategy, backend=case.backend)

        attention.__name__ = case.fields()["backend"]  # for the estimate
        return replace(case, n=keys, nq=queries, backend=attention), ranks


class Lone(Ranks):
    """Ranks of which only one is there, on a card. held: (queries, keys) of each."""

    def __init__(self, place: Rank, case: Case, card: Card):
        super().__init__(self, place.world, place.rank, CUDA)
        shards = Shards.even(case.n, place.world)
        self.held = [(len(queries_of(shards[x], case.n, case.nq)), shards.lengths[x]) for x in range(place.world)]
        self.pattern, self.card = case.pattern, card

    @property
    def strategy(self) -> str:
        """The one that the last call took."""
        return list(call.plans_of(self.pattern).values())[-1].plan.strategy

    def gather(self, names, numbers, dtype=torch.int64) -> Known:
        """The others tell the same but for the rows that they hold. The tensors are those of `group.Gathering`."""
        mine = torch.empty(len(numbers), dtype=dtype, device=META)
        rows = [torch.empty_like(mine) for _ in self.held]
        if self.card.key != VIRTUAL:
            torch.empty(self.world, len(numbers), dtype=dtype, device=META)  # NCCL's, from which it copies to the rows
        torch.stack(rows)
        told = torch.tensor(numbers).repeat(self.world, 1)
        if "keys" in names:
            told[:, [names.index("queries"), names.index("keys")]] = torch.tensor(self.held)
        return Known(told)

    def all_to_all(self, target, source, into, out, wait=True) -> OneStream:
        return OneStream()

    def streams(self, device) -> OneStream:
        return OnOneStream(self.card)

    @contextlib.contextmanager
    def unfollowed(self):
        """It takes a third of the time so."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            yield


class Known:
    def __init__(self, told: Tensor):
        self.told = told

    def wait(self) -> Tensor:
        return self.told


class OnOneStream(OneStream):
    def __init__(self, card: Card):
        self.card = card

    def joined(self):
        """A backward runs outside of what tells a program that it is on a card."""
        return OnCard(self.card)


def busiest(case: Case, world: int, strategy: str) -> int:
    """The rank to which a forward brings the most bytes, the first of several."""
    if world == 1:
        return 0
    sizes = case.pattern, Shards.even(case.n, world), case.heads, case.kv_heads, case.nq
    plan = call.choose(strategy, sizes, case.dtype.itemsize, case.head_dim)
    return int(plan.bytes(case.dtype.itemsize, case.head_dim, case.batch).sum(0).argmax())
