"""A race detector for a card's streams that needs no card: it notes which stream read or wrote which byte, and when.

Streams and events are stand-ins that keep vector clocks; tensors are on the CPU, where every operation runs at once. An
operation is ordered behind one of another stream only by an event, by the start of or the wait for a transfer, or by
the host. Freed memory goes back to the stream on which it was allocated: by then the other streams have to be done
with it.
"""

import contextlib
import itertools
import weakref

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.distributed.group import OneStream, Ranks

MAIN, BESIDE, WIRE = range(3)  # the caller's stream, the one beside it, and the communicator's own
NAMES = ("main", "beside", "wire")


class Memory:
    """The history of a storage: for each byte the last write (stream, when), and each stream's last read."""

    def __init__(self, size: int, stream: int):
        self.stream, self.last = stream, np.zeros(3, dtype=np.int64)
        self.writer, self.written = np.full(size, MAIN), np.zeros(size, dtype=np.int64)
        self.read = np.zeros((3, size), dtype=np.int64)


class Races(TorchDispatchMode):
    """Within it `distributed.attention` of the group `ranks` runs on streams, as on CUDA. found: the races, in words.

    by_host: whether ranks agree by gloo, as in a pool, which no stream waits for; else by NCCL
    """

    def __init__(self, by_host: bool = False):
        super().__init__()
        self.by_host, self.ranks = by_host, OnStreams(self)
        self.clock = np.zeros((3, 3), dtype=np.int64)  # [x, y]: how many operations of y are over before x goes on
        self.now, self.aside = MAIN, False
        self.memory: dict[int, Memory] = {}
        self.found: set[str] = set()

    # --- order --------------------------------------------------------------------------------------------------------

    def tick(self, stream: int) -> np.ndarray:
        """One more operation on a stream; returns its clock."""
        self.clock[stream, stream] += 1
        return self.clock[stream].copy()

    def wait(self, stream: int, clock: np.ndarray) -> None:
        self.clock[stream] = np.maximum(self.clock[stream], clock)

    @contextlib.contextmanager
    def on(self, stream: int):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    @contextlib.contextmanager
    def unseen(self):
        self.aside = True
        yield
        self.aside = False

    # --- memory -------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.aside or function.is_view or function.namespace == "c10d":
            return function(*args, **(kwargs or {}))
        given = list(itertools.zip_longest(function._schema.arguments[: len(args)], args))
        given += [(x, (kwargs or {})[x.name]) for x in function._schema.arguments if x.name in (kwargs or {})]
        sides = [], []
        for argument, x in given:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            sides[writes].extend(y for y in tree_leaves(x) if isinstance(y, torch.Tensor))
        old = {x.untyped_storage()._cdata for x in (*sides[0], *sides[1])}
        self.tick(self.now)
        self.touch(str(function), self.now, *sides)
        results = function(*args, **(kwargs or {}))
        new = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in old]
        self.touch(str(function), self.now, [], new)  # also uninitialized ones: their memory may be in use elsewhere
        return results

    def touch(self, what: str, stream: int, reads: list, writes: list) -> None:
        """Note what a stream reads and writes; add to `found` what is not ordered behind other streams' accesses."""
        clock = self.clock[stream]
        for x, write in [*((x, False) for x in reads), *((x, True) for x in writes)]:
            memory, place = self._memory(x), _bytes(x)
            late = memory.written[place] > clock[memory.writer[place]]
            before = {NAMES[y] for y in memory.writer[place][late]}
            if write:
                before |= {NAMES[y] for y in range(3) if (memory.read[y][place] > clock[y]).any()}
                memory.writer[place], memory.written[place] = stream, clock[stream]
            else:
                memory.read[stream][place] = clock[stream]
            memory.last[stream] = clock[stream]
            if before:
                self.found.add(f"{what} {'writes' if write else 'reads'} on {NAMES[stream]}, not behind {before}")

    def _memory(self, x: torch.Tensor) -> Memory:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.memory:
            self.memory[key] = Memory(storage.nbytes(), self.now)
            weakref.finalize(storage, self._free, key, self.memory[key])
        return self.memory[key]

    def _free(self, key: int, memory: Memory) -> None:
        self.memory.pop(key, None)
        busy = {NAMES[x] for x in range(3) if memory.last[x] > self.clock[memory.stream, x]}
        if busy:
            self.found.add(f"memory goes back to {NAMES[memory.stream]}, not behind {busy}")


class OnStreams(Ranks):
    """All ranks, on two streams and the communicator's own."""

    def __init__(self, races: Races):
        self.races, self.real = races, Ranks.of(None)
        super().__init__(self.real.group, self.real.world, self.real.rank, self.real.device)

    @property
    def by_card(self) -> bool:
        return not self.races.by_host

    def streams(self, _) -> OneStream:
        return Streams(self.races)

    def gather(self, names, numbers, dtype=torch.int64):
        return Gathered(self.races, self.real, (names, numbers, dtype))

    def all_to_all(self, target, source, into, out, wait=True):
        races = self.races
        races.wait(WIRE, races.clock[races.now])
        transfer = Transfer(races, races.tick(WIRE))
        races.touch("a transfer", WIRE, [source], [target])
        with races.unseen():
            self.real.all_to_all(target, source, into, out)
        return transfer.wait() if wait else transfer


class Streams(OneStream):
    def __init__(self, races: Races):
        self.races = races

    def beside(self):
        return self.races.on(BESIDE)

    def mark(self):
        return Point(self.races, self.races.tick(self.races.now))

    def join(self) -> None:
        self.races.wait(MAIN, self.races.clock[BESIDE])


class Point:
    """What a stream has done up to here."""

    def __init__(self, races: Races, clock: np.ndarray):
        self.races, self.clock = races, clock

    def wait(self) -> None:
        self.races.wait(self.races.now, self.clock)


class Transfer(Point):
    """Rows on their way: they have arrived at a point of the communicator's stream."""

    wait = Point.wait  # of its own, for a test to leave out


class Gathered:
    """An agreement by NCCL, on the stream beside the attention's, or by gloo."""

    def __init__(self, races: Races, real: Ranks, what: tuple):
        self.races = races
        if not races.by_host:
            races.wait(WIRE, races.clock[BESIDE])
            self.done = races.tick(WIRE)
        with races.unseen():
            self.gathering = real.gather(*what)

    def wait(self):
        races = self.races
        if not races.by_host:
            races.wait(BESIDE, self.done)
            for x in (MAIN, WIRE):  # the host waits for the numbers: what it starts later is behind them
                races.wait(x, races.clock[BESIDE])
        with races.unseen():
            return self.gathering.wait()


def _bytes(x: torch.Tensor) -> np.ndarray:
    """For each element of x the place of its first byte in the storage."""
    place = np.array([x.storage_offset()])
    for size, stride in zip(x.shape, x.stride(), strict=True):
        place = np.add.outer(place, np.arange(size) * stride).ravel()
    return place * x.element_size()
