"""What goes over the wire, counted where torch.distributed hands it to the backend, whoever asked for it."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Each collective under the names of both of torch's interfaces, c10d's and the functional one (of compiled code).
NAMES = {
    "alltoall_base_": "all-to-all", "all_to_all_single": "all-to-all",
    "allgather_": "all-gather", "_allgather_base_": "all-gather", "all_gather_into_tensor": "all-gather",
    "allreduce_": "all-reduce", "all_reduce": "all-reduce", "all_reduce_": "all-reduce",
    "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_tensor": "reduce-scatter",
    "broadcast_": "broadcast", "broadcast": "broadcast", "send": "send", "isend": "send",
}  # fmt: skip
# By which nothing is sent.
SILENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "check_for_nan", "recv_", "recv_any_source_", "irecv")
INPUTS = ("input", "input_tensor", "input_tensors", "tensors", "tensor")  # what goes in, by the operators' schemas


class Traffic(TorchDispatchMode):
    """Bytes that this rank sends to other ranks while it is in use, also by what DDP starts and by compiled code.

        with Traffic() as traffic:
            loss.backward()
        traffic.by_collective  # Counter({"all-reduce": 6408, "all-to-all": 4096})

    rows: of floating-point tensors, which are data; by_collective: the same, one by one. control: of all other tensors,
    by which ranks agree. calls: the collectives in order. A tensor that all get counts once for each other rank; so
    does a share of one that is reduced, once to be reduced there and once sent on.
    RuntimeError for a collective that is not known here: a number must not leave it out.
    """

    def __init__(self):
        super().__init__()
        self.control, self.by_collective = 0, Counter()
        self.calls: list[str] = []

    @property
    def rows(self) -> int:
        return self.by_collective.total()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it first: then its collectives are seen, too
        if function.namespace in ("c10d", "_c10d_functional") and function._opname not in SILENT:
            self._count(function._opname, _named(function, args) | (kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _count(self, operator: str, given: dict) -> None:
        if operator not in NAMES:
            raise RuntimeError(f"collective {operator}: not counted; known are {', '.join(NAMES)}")
        name, group = NAMES[operator], _group(given)
        self.calls.append(name)
        world, rank = group.size(), group.rank()
        inputs = next(given[x] for x in INPUTS if x in given)
        for x in [inputs] if isinstance(inputs, Tensor) else inputs:
            if name == "all-to-all":
                splits = given["input_split_sizes"] or [len(x) // world] * world
                sent = (sum(splits) - splits[rank]) * (x.numel() // max(1, len(x)))
            elif name == "broadcast":
                sent = x.numel() * (world - 1) * (rank == given.get("root_rank", given.get("src")))
            else:
                others = {"all-gather": world - 1, "all-reduce": 2 * (world - 1) / world, "send": 1}
                sent = round(x.numel() * others.get(name, (world - 1) / world))
            if torch.is_floating_point(x):
                self.by_collective[name] += sent * x.element_size()
            else:
                self.control += sent * x.element_size()


def _named(function, args: tuple) -> dict:
    return {argument.name: x for argument, x in zip(function._schema.arguments, args, strict=False)}


def _group(given: dict) -> dist.ProcessGroup:
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    group = given["group_name"]  # which newer versions of torch also give as the group
    return dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
