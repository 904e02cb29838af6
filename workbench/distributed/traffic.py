"""Bytes on the wire, counted where torch.distributed hands tensors to its backend, whoever started the collective."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Each collective by its names in both of torch's interfaces: c10d's, and the functional one that compiled code uses.
NAMES = {
    "alltoall_base_": "all-to-all", "all_to_all_single": "all-to-all",
    "allgather_": "all-gather", "_allgather_base_": "all-gather", "all_gather_into_tensor": "all-gather",
    "allreduce_": "all-reduce", "all_reduce": "all-reduce", "all_reduce_": "all-reduce",
    "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_tensor": "reduce-scatter",
    "broadcast_": "broadcast", "broadcast": "broadcast", "send": "send", "isend": "send",
}  # fmt: skip
# Operators that send nothing, or nothing that counts.
SILENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "check_for_nan", "recv_", "recv_any_source_", "irecv")
INPUTS = ("input", "input_tensor", "input_tensors", "tensors", "tensor")  # names of what is sent, in operators' schemas


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank sends to other ranks inside the `with`, also those of DDP and of compiled code.

        with Traffic() as traffic:
            loss.backward()
        traffic.by_collective  # Counter({"all-reduce": 6408, "all-to-all": 4096})

    rows: bytes of floating-point tensors, which are data; by_collective: the same, by kind of collective
    control: bytes of all other tensors, by which ranks agree
    calls: the names of the collectives, in order
    An all-gather or a broadcast sends its tensor once to each other rank, an all-reduce over W ranks 2 (W - 1) / W of
    it and a reduce-scatter half of that, as in a ring.
    RuntimeError for an unknown collective, which the count would miss.
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
            return NotImplemented  # DTensor's own dispatch goes first, and then calls collectives on plain tensors
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
    group = given["group_name"]  # newer versions of torch pass the group itself
    return dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
