"""What a trace leaves out and still gets the same peaks: most of many equal calls, and what is in lists of blocks.

Of equal calls in a row a few are run, which show all the memory that such a call takes. The torch backend cuts lists of
blocks into strips by what is in the lists: it does so on the host, whose tensors then count as if they were the card's.
"""

import collections
from collections.abc import Callable, Iterator

from workbench.engines.torch import block_sparse, steps
from workbench.engines.torch.block_sparse import Strips
from workbench.fit.fake_cuda import replaced
from workbench.patterns.base import Blocks

EACH = 2  # strips of a shape that are followed


class Shortcuts:
    """The shortcuts of one trace, of the storages that `births` (`tracer.Births`) follows, while `taken`."""

    def __init__(self, births):
        self.births = births
        self.hosts: dict[int, Blocks] = {}  # lists on the host, by the id of what was moved to the card

    def taken(self):
        """A context in which of calls in a row that are alike a few are made."""
        return replaced([
            (Blocks, "to", lambda *x, to=Blocks.to: self.moved(*x, to)),
            (block_sparse, "strips", lambda *x, make=block_sparse.strips: self.strips(*x, make)),
            (steps, "starts", few_starts),
        ])  # fmt: skip

    def moved(self, blocks: Blocks, device, to: Callable) -> Blocks:
        made = to(blocks, device)
        self.hosts[id(made)] = blocks
        return made

    def strips(self, blocks: Blocks, limit: int, make: Callable) -> Iterator[Strips]:
        """The strips of the lists on the host, EACH of a shape, without contents."""
        found, times = make(self.hosts[id(blocks)], limit), collections.Counter()
        while (one := self.births.mirror(lambda: next(found, None))) is not None:
            times[shape := (one.columns.shape, one.full)] += 1
            if times[shape] <= EACH:
                yield Strips(*map(self.births.onto_card, one[:3]), one.full)
            del one


def few_starts(length: int, step: int, followed: int = 6) -> range:
    """As `steps.starts`, of many whole steps `followed`, or one more: the same as of a shorter `length`.

    What is alive at once is known from the second on; which free blocks an allocator takes for it settles later, and
    may alternate between two places.
    """
    whole, rest = divmod(length, step)
    if whole > followed:
        whole = followed + (whole - followed) % 2
    return range(0, whole * step + rest, step)
