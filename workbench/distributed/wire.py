"""What goes over the wire, counted where torch.distributed hands it to the backend, whoever asked for it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

SILENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "recv_", "recv_any_source_")  # by which nothing is sent


class Counted(TorchDispatchMode):
    """Bytes that this rank sends to others by collectives of the default group, in use as a context.

    rows: of floating-point tensors, which are data. control: of all others, by which ranks agree.
    A tensor that all get counts once for each other rank; so does a share of one that is reduced, once reduced there
    and once sent on. RuntimeError for a collective that is not known here: a number must not leave it out.
    """

    def __init__(self):
        super().__init__()
        self.rows = self.control = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it first: then its collectives are seen, too
        if function.namespace in ("c10d", "_c10d_functional"):
            name = function._opname
            if name not in SILENT:
                self._count(name, args)
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple) -> None:
        world = dist.get_world_size()
        if world == 1:
            return
        if name in ("alltoall_base_", "all_to_all_single"):
            x, splits = (args[1], args[4]) if name == "alltoall_base_" else (args[0], args[2])
            own = splits[dist.get_rank()] if len(splits) else len(x) // world
            rows = (sum(splits) if len(splits) else len(x)) - own
            self._add(x, rows * (x.numel() // max(1, len(x))))
            return
        others = {
            "allgather_": (1, world - 1), "_allgather_base_": (1, world - 1), "all_gather_into_tensor": (0, world - 1),
            "allreduce_": (0, 2 * (world - 1) / world), "all_reduce": (0, 2 * (world - 1) / world),
            "_reduce_scatter_base_": (1, (world - 1) / world), "reduce_scatter_tensor": (0, (world - 1) / world),
            "send": (0, 1),
        }  # fmt: skip
        if name not in others:
            raise RuntimeError(f"collective {name}: not counted; known are {', '.join(others)}")
        place, times = others[name]
        for x in [args[place]] if isinstance(args[place], Tensor) else args[place]:
            self._add(x, round(x.numel() * times))

    def _add(self, x: Tensor, elements: int) -> None:
        if torch.is_floating_point(x):
            self.rows += elements * x.element_size()
        else:
            self.control += elements * x.element_size()
