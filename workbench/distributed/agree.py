"""Agreement: before any row is sent, all ranks exchange a few numbers that say what each is about to do.

If one rank has failed by then, it says so instead, and the same error is raised on all ranks: none waits in vain.

    with Agreement(ranks, ("rows", "plan")) as agreement:
        ...                              # an error here, on any rank, is raised on all of them
        agreement.propose([64, digest])  # starts a small all-gather and returns at once
        ...                              # an error here stays on this rank: the others already count on it
        told = agreement.settle()        # waits; told[p] is what rank p proposed
    same(told, ("rows", "plan"))         # ValueError on all ranks if a column differs between ranks

What is gathered is a state, 0 or 1 + the error's place in `KINDS`, and the numbers, zeros where there is an error. Only
if a state is not 0 do all ranks gather a second time: the texts of the errors.

Ranks agree while each attends to its own rows. It would be simpler to agree first, but slower: on two H200s (bfloat16,
12 heads x 64, forward, one call from a barrier on) dense attention takes 1.18 times as long at 32,768 tokens and 1.02
times at 131,072, LongNet 1.16 times at 131,072.
"""

from __future__ import annotations

import torch

from workbench.distributed.group import Ranks

TEXT = 400  # bytes of an error's message that the other ranks get
KINDS = (ValueError, torch.OutOfMemoryError, RuntimeError)


class Agreement:
    """One exchange of numbers between all ranks, as shown above. names: one for each number, in their order.

    An error inside the `with` and before `propose` is told to the other ranks, and goes on here as it is.
    """

    def __init__(self, ranks: Ranks, names: tuple[str, ...]):
        self.ranks, self.names = ranks, names
        self.proposed, self.pending = False, None

    def propose(self, numbers: list[int]) -> None:
        """Start to tell all ranks these numbers, ints of 64 bits, one for each name. It does not wait."""
        self._tell(0, numbers)

    def settle(self) -> list[list[int]]:
        """What each rank has proposed; waits for it.

        If ranks have failed instead, an error of the first one's kind (ValueError, OutOfMemoryError, else RuntimeError)
        that names the rank and its reason. The group stays usable.
        """
        told = self._told()
        for rank, (state, *_) in enumerate(told):
            if state:
                raise KINDS[state - 1](f"rank {rank}: {self._reasons('')[rank]}")
        return [numbers for _, *numbers in told]

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        if isinstance(error, Exception) and not self.proposed:  # the other ranks wait for a proposal
            self._tell(1 + _kind(error), [0] * len(self.names))
            self._told()
            self._reasons(str(error))

    def _tell(self, state: int, numbers: list[int]) -> None:
        """Start to gather this rank's state and numbers."""
        self.proposed = True
        self.pending = self.ranks.gather(("state", *self.names), [state, *numbers])

    def _told(self) -> list[list[int]]:
        """What was gathered: each rank's state and numbers."""
        told, self.pending = self.pending.wait(), None  # what was gathered takes no memory from here on
        return told

    def _reasons(self, own: str) -> list[str]:
        """By rank, its reason to fail, "" if it has none; `own` is this rank's. All ranks call it together."""
        text = list(own.encode()[:TEXT].ljust(TEXT, b"\0"))
        texts = self.ranks.gather(("reason",), text, torch.uint8).wait()
        return [bytes(x).rstrip(b"\0").decode(errors="replace") for x in texts]


def _kind(error: Exception) -> int:
    if isinstance(error, MemoryError):
        return KINDS.index(torch.OutOfMemoryError)
    return next((x for x, kind in enumerate(KINDS) if isinstance(error, kind)), len(KINDS) - 1)


def same(told: list[list[int]], names: tuple[str, ...]) -> None:
    """ValueError if what ranks have told, one number for each name, differs; it names the first that does."""
    for name, numbers in zip(names, zip(*told, strict=True), strict=True):
        if other := next((rank for rank, x in enumerate(numbers) if x != numbers[0]), 0):
            raise ValueError(f"{name} of rank {other} is not that of rank 0: want one {name} on all ranks")
