"""What torch's collectives carry, counted."""

from __future__ import annotations

from collections import Counter

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Counts what this rank gives to collectives while it is in use, also those that DDP starts by itself.

        with Traffic() as traffic:
            loss.backward()
        traffic.bytes  # Counter({"allreduce": 6408, "alltoall_base": 4096, "allgather": 88})

    calls: (collective, bytes of the tensors that go in), in order, each named as torch's c10d names it. A ring of W
    ranks sends 2 (W - 1) / W of an all-reduce's bytes. Functional collectives of compiled code are not seen.
    """

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    @property
    def bytes(self) -> Counter:
        """By collective, all of its calls."""
        total = Counter()
        for name, size in self.calls:
            total[name] += size
        return total

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            sizes = [
                _size(x)
                for argument, x in zip(func._schema.arguments, args, strict=False)
                if not argument.name.startswith("output")
            ]
            self.calls.append((func._schema.name.removeprefix("c10d::").strip("_"), sum(sizes)))
        return func(*args, **(kwargs or {}))


def _size(x) -> int:
    if isinstance(x, (list, tuple)):
        return sum(map(_size, x))
    return x.numel() * x.element_size() if isinstance(x, Tensor) else 0
