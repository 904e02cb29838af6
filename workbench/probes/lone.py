"""One rank of many, traced alone: the ranks that are not there agree, and send rows as large as the plan says.

What ranks tell each other before data moves (`distributed.agree`) is known, because a plan is pure computation: all of
them make the same call, on shards of the lengths given here. Rows that travel have their sizes from the plan, and no
contents, as all tensors of a trace.

The tensors of the exchange are torch's and are followed. What NCCL takes for itself, its communicators and the buffers
in them, is not of torch's allocator, and is not in a trace.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, replace

import torch

from workbench.cards import VIRTUAL, Card
from workbench.distributed import agree, api, exchange, partials, ulysses
from workbench.distributed.halo import queries_of
from workbench.distributed.plans import Plan
from workbench.distributed.sequence import Sequence
from workbench.distributed.shards import Shards
from workbench.execution import partial
from workbench.probes.absent import CUDA, LOCK, META, OnCard, replaced
from workbench.probes.case import Case
from workbench.probes.shortcuts import unseen


@dataclass(frozen=True)
class Rank:
    """Rank `rank` of `world`, each with an even shard of the keys; strategy as in `distributed.attention`."""

    world: int
    rank: int = 0
    strategy: str = "auto"

    def __post_init__(self):
        if type(self.world) is not int or type(self.rank) is not int or not 0 <= self.rank < self.world:
            raise ValueError(f"rank={self.rank!r} of world={self.world!r}: want ints, 0 <= rank < world")
        api._check_strategy(self.strategy)

    def own(self, case: Case) -> Case:
        """The rank's part of a case whose n and nq are of all ranks: a call of `distributed.attention`."""
        shard = Shards.even(case.n, self.world)[self.rank]
        mine = len(queries_of(shard, case.n, case.nq))

        def attention(q, k, v):
            return api.attention(q, k, v, case.pattern, strategy=self.strategy, backend=case.backend)

        attention.__name__ = case.fields()["backend"]  # for the estimate
        return replace(case, n=len(shard), nq=mine, backend=attention)

    @contextlib.contextmanager
    def alone(self, case: Case, card: Card):
        """Meanwhile `distributed.attention` on the card runs as that rank of the case, whose n is of all ranks.

        Yields what tells, once it ran, which strategy it took.
        """
        shards = Shards.even(case.n, self.world)
        held = [(len(queries_of(shards[x], case.n, case.nq)), shards.lengths[x]) for x in range(self.world)]

        def gather(row: list[int], dtype, group, device):
            """As `agree._gather` on the card; the others tell the same but for the rows that they hold."""
            mine = torch.empty(len(row), dtype=dtype, device=META)
            rows = [torch.empty_like(mine) for _ in held]
            if card.key != VIRTUAL:
                torch.empty(len(held), len(row), dtype=dtype, device=META)  # NCCL's, from which it copies to the rows
            torch.stack(rows)
            state, *numbers = row
            told = [row] * self.world
            if len(numbers) == 3 + len(api.SAME):  # their lengths, on which there is no plan yet
                told = [(state, *lengths, *numbers[2:]) for lengths in held]
            return lambda: torch.tensor(told)

        def on_card(function):
            """A backward runs outside of what tells a program that it is on a card."""

            def told(*arguments):
                with OnCard(card):
                    return function(*arguments)

            return told

        stand_ins = [
            (api, "_place", lambda group: (group, self.world, self.rank, CUDA)),
            (agree, "_gather", gather),
            (exchange, "all_to_all", _moved),
            (ulysses, "all_to_all", _moved),
            (partial, "_operators", on_card(partial._operators)),
            (partial, "narrow", on_card(partial.narrow)),
            # what is computed of a plan is no tensor of the card
            (api, "choose", unseen(api.choose)),
            (partials, "local", unseen(partials.local)),
            (partials, "remote", unseen(partials.remote)),
            (partials, "fills", unseen(partials.fills)),
            (Plan, "parcels", unseen(Plan.parcels)),
            # and what only packs rows into buffers makes none
            (exchange.Exchange, "pack", _packed(exchange.Exchange.pack)),
            (Sequence, "early", lambda self: False),
            (exchange.Exchange, "parcels", unseen(exchange.Exchange.parcels)),
        ]
        with LOCK, replaced(stand_ins):
            yield lambda: list(api._kept(case.pattern)["plans"].values())[-1].plan.strategy


def busiest(case: Case, world: int, strategy: str) -> int:
    """The rank to which a forward brings the most bytes, the first of several."""
    if world == 1:
        return 0
    sizes = case.pattern, Shards.even(case.n, world), case.heads, case.kv_heads, case.nq
    plan, _ = api.choose(strategy, sizes, case.dtype.itemsize, case.head_dim)
    return int(plan.bytes(case.dtype.itemsize, case.head_dim, case.batch).sum(0).argmax())


def _moved(*_, **__):
    return exchange._Done


def _packed(pack):
    """`Exchange.pack`, followed only where rows are gathered before they are packed."""
    quick = unseen(pack)

    def packed(self, stage, *buffers):
        slots = itertools.chain.from_iterable(self.slots[stage][0])
        return (quick if all(isinstance(x.own, slice) for x in slots) else pack)(self, stage, *buffers)

    return packed
