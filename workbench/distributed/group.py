"""The ranks of a process group, as one of them sees it: how they gather numbers, how rows move, and on which stream.

`attention` takes a `Ranks` in place of a group. One with other methods stands for ranks that are not there: so
`fit.fake_ranks` traces the memory of one rank alone, and the tests look for races.
"""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """`world` ranks, of which this one is `rank`.

    device: where tensors have to be that ranks gather: the CPU (by gloo), or a card (a group that has NCCL alone)
    """

    def __init__(self, group, world: int, rank: int, device: torch.device):
        self.group, self.world, self.rank, self.device = group, world, rank, device

    @classmethod
    def of(cls, group) -> Ranks:
        """The ranks of a process group (None: the default one). Without any process group: a single rank."""
        if isinstance(group, Ranks):
            return group
        if not (dist.is_available() and dist.is_initialized()):
            return cls(group, 1, 0, torch.device("cpu"))
        group, nccl = dist.group.WORLD if group is None else group, dist.get_backend(group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        return cls(group, group.size(), group.rank(), device)

    @property
    def by_card(self) -> bool:
        """Whether the card gathers numbers, by a kernel of NCCL that may have to wait for room beside the attention."""
        return self.device.type == "cuda"

    def gather(self, names: tuple[str, ...], numbers: list[int], dtype: torch.dtype = torch.int64) -> Gathering:
        """Start an all-gather of this rank's numbers; they are what `names` says."""
        return Gathering(self, numbers, dtype)

    def all_to_all(self, target: Tensor, source: Tensor, into: list[int], out: list[int], wait: bool = True):
        """torch's all-to-all, by which all rows move. out, into: how many elements go to and come from each rank."""
        return dist.all_to_all_single(target, source, into, out, group=self.group, async_op=not wait)

    def streams(self, device: torch.device) -> OneStream:
        """On which streams attention on a device, and what moves to and from it, run."""
        return _two_streams(device) if device.type == "cuda" else OneStream()

    def unfollowed(self):
        """A context for what takes no memory on a card, so that a trace need not follow it: plans, views, copies."""
        return contextlib.nullcontext()


class Gathering:
    """An all-gather on its way: `wait` gives what each rank gave.

    On a card it is on the stream beside the attention's, so that the host does not wait for the attention.
    """

    def __init__(self, ranks: Ranks, numbers: list[int], dtype: torch.dtype):
        self.streams = ranks.streams(ranks.device)
        with self.streams.beside():
            mine = torch.tensor(numbers, dtype=dtype, device=ranks.device)
            self.rows = [torch.empty_like(mine) for _ in range(ranks.world)]
            self.work = dist.all_gather(self.rows, mine, group=ranks.group, async_op=True)

    def wait(self) -> list[list[int]]:
        with self.streams.beside():
            self.work.wait()
            return torch.stack(self.rows).tolist()


class OneStream:
    """A device on which every operation is over before the next begins (a CPU): nothing has to wait for anything."""

    def beside(self):
        """A context for operations that run beside the attention."""
        return contextlib.nullcontext()

    def mark(self):
        """A point in the current stream. Its `wait` makes the stream that is then current wait until it is reached."""
        return self

    def wait(self) -> None:
        """There is nothing to wait for. So this is also the handle of an exchange in which nothing moves."""

    def join(self) -> None:
        """Make the current stream wait for what runs beside it."""

    @contextlib.contextmanager
    def joined(self):
        """However the block ends, `join`: memory that the current stream gets back is no longer used beside it."""
        try:
            yield
        finally:
            self.join()


class TwoStreams(OneStream):
    """A card: attention runs on the caller's stream, what moves rows on one of a higher priority, whose kernels run
    before queued ones of other streams."""

    def __init__(self, device: torch.device):
        self.other = torch.cuda.Stream(device, priority=-1)

    def beside(self):
        return torch.cuda.stream(self.other)

    def mark(self):
        event = torch.cuda.Event()
        event.record()
        return event

    def join(self) -> None:
        with self.beside():
            done = self.mark()
        done.wait()


@functools.cache
def _two_streams(device: torch.device) -> TwoStreams:
    """A device's: one, since the allocator keeps freed memory for its stream."""
    return TwoStreams(device)
