"""A race detector for a card's streams that needs no card: it notes which stream read or wrote which byte, and when.

Streams and events are stand-ins that keep vector clocks; tensors are on the CPU, where every operation runs at once. An
operation is ordered behind one of another stream only by an event, by the start of or the wait for a transfer, or by
the host. Freed memory goes back to the stream on which it was allocated: by then the other streams have to be done
with it.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.distributed import agree, exchange, streams
from workbench.distributed.sequence import Sequence

MAIN, BESIDE, WIRE = range(3)  # the caller's stream, `streams.beside`, and the communicator's own
NAMES = ("main", "beside", "wire")

class Memory:
    """The history of a storage: for each byte the last write (stream, when), and each stream's last read."""

    def __init__(self, size: int, stream: int):
        self.stream, self.last = stream, np.zeros(3, dtype=np.int64)
        self.writer, self.written = np.full(size, MAIN), np.zeros(size, dtype=np.int64)
        self.read = np.zeros((3, size), dtype=np.int64)


class Races(TorchDispatchMode):
    """Within it `distributed.attention` runs as on CUDA. found: the races, in words.

    by_host: whether ranks agree by gloo, as in a pool, which no stream waits for; else by NCCL
    """

    def __init__(self, by_host: bool = False):
        super().__init__()
        self.by_host = by_host
        self.clock = np.zeros((3, 3), dtype=np.int64)  # [x, y]: how many operations of y are over before x goes on
        self.now, self.aside = MAIN, False
        self.memory: dict[int, Memory] = {}
        self.found: set[str] = set()

    def __enter__(self):
        self.patches = contextlib.ExitStack()
        for where in (
            (Sequence, "early", lambda *_: True), (streams, "beside", lambda _: Stream(self)),
            (torch.cuda, "Event", lambda: Event(self)), (torch.cuda, "stream", self._on_stream),
            (exchange, "all_to_all", self._transfer(exchange.all_to_all)),
            (agree, "_gather", self._gather(agree._gather)),
        ):  # fmt: skip
            self.patches.enter_context(patch.object(*where))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.patches.close()

    # --- order --------------------------------------------------------------------------------------------------------

    def tick(self, stream: int) -> np.ndarray:
        """One more operation on a stream; returns its clock."""
        self.clock[stream, stream] += 1
        return self.clock[stream].copy()

    def wait(self, stream: int, clock: np.ndarray) -> None:
        self.clock[stream] = np.maximum(self.clock[stream], clock)

    @contextlib.contextmanager
    def _on_stream(self, _):
        before, self.now = self.now, BESIDE
        try:
            yield
        finally:
            self.now = before

    def _transfer(self, real):
        def all_to_all(target, source, into, out, group, wait=True):
            self.wait(WIRE, self.clock[self.now])
            done = self.tick(WIRE)
            self.touch("a transfer", WIRE, [source], [target])
            with self._unseen():
                real(target, source, into, out, group)
            work = Work(self, done)
            return work.wait() if wait else work

        return all_to_all

    def _gather(self, real):
        def gather(*what):
            if not self.by_host:
                self.wait(WIRE, self.clock[self.now])
                done = self.tick(WIRE)
            with self._unseen():
                answers = real(*what)

            def told():
                if not self.by_host:
                    self.wait(BESIDE, done)
                    for x in (MAIN, WIRE):  # the host waits for the numbers: what it starts later is behind them
                        self.wait(x, self.clock[BESIDE])
                with self._unseen():
                    return answers()

            return told

        return gather

    @contextlib.contextmanager
    def _unseen(self):
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


class Stream:
    def __init__(self, races: Races):
        self.races = races

    def wait_event(self, event) -> None:
        self.races.wait(BESIDE, event.clock)


class Event:
    def __init__(self, races: Races):
        self.races = races

    def record(self) -> None:
        self.clock = self.races.tick(self.races.now)

    def wait(self) -> None:
        self.races.wait(self.races.now, self.clock)


class Work:
    def __init__(self, races: Races, done: np.ndarray):
        self.races, self.done = races, done

    def wait(self) -> None:
        self.races.wait(self.races.now, self.done)


def _bytes(x: torch.Tensor) -> np.ndarray:
    """For each element of x the place of its first byte in the storage."""
    place = np.array([x.storage_offset()])
    for size, stride in zip(x.shape, x.stride(), strict=True):
        place = np.add.outer(place, np.arange(size) * stride).ravel()
    return place * x.element_size()
