"""Training with each sequence spread over some ranks, and the batch over others: one mesh, and torch's own DDP.

    mesh = training.mesh(data=2, sequence=4)
    rows = Shards.even(n, 4)[mesh.get_local_rank("sequence")]  # of the sequences that this rank's data index has
    layer = wb.distributed.MultiheadAttention(512, 8, pattern, group=mesh.get_group("sequence"))  # in your model
    model = DistributedDataParallel(model)  # over all ranks, both axes of the mesh
    losses = cross_entropy(model(x), y, reduction="none")  # x and y: this rank's rows
    training.mean(losses).backward()  # now every rank has the gradient that one device would have: clip it, and step

Why it is that gradient. Attention's backward returns the gradients of keys and values to the ranks that hold the rows.
So a rank's parameters get their gradient through the rank's own rows, of all losses of its sequences. Summed over the W
ranks of the mesh, that is the gradient of the sum of all losses; DDP gives this sum divided by W. For a mean over T
tokens, a rank's loss then has to be W / T times the sum over its own tokens, which is `mean`. It is the plain mean over
the rank's tokens only if all ranks have equally many.

Activation checkpointing (`use_reentrant=False`) gives the same bits: all ranks recompute alike, and so repeat their
exchanges together. torch.compile, of the model or of DDP around it, breaks its graph at each attention. Around a
checkpoint it compiles nothing, since the graph breaks inside: compile the layer, and checkpoint the compiled layer.

An error that attention raises is raised on all ranks of that sequence, but not on the rest of the mesh, which waits for
their gradients: let it end the process, as `harness.ranks` does.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from workbench.distributed.layers import MultiheadAttention
from workbench.distributed.shards import Shards
from workbench.distributed.traffic import Traffic
from workbench.models.layer import Layer
from workbench.patterns import Dilated


def mesh(data: int = 1, sequence: int | None = None) -> DeviceMesh:
    """All ranks as a mesh of dimensions ("data", "sequence"); ranks that share a sequence are neighbours.

    data: into how many parts the batch is divided; sequence: how many ranks share a sequence (default: world / data).
    The same sizes give the same mesh again, since a group takes memory (with NCCL about half a GB).
    ValueError if there is no process group, or data * sequence is not its size.
    """
    if not dist.is_initialized():
        raise ValueError("want a process group: run under workbench.harness.ranks, or call init_process_group")
    world = dist.get_world_size()
    sequence = max(1, world // data) if sequence is None and data > 0 else sequence
    if data < 1 or data * sequence != world:
        raise ValueError(f"data={data}, sequence={sequence}: want integers whose product is the {world} ranks")
    return _mesh(dist.group.WORLD, data, sequence)


@functools.lru_cache(8)
def _mesh(world: dist.ProcessGroup, data: int, sequence: int) -> DeviceMesh:
    kind = "cuda" if "nccl" in dist.get_backend_config(world) else "cpu"
    return init_device_mesh(kind, (data, sequence), mesh_dim_names=("data", "sequence"))


def mean(losses: Tensor, group=None) -> Tensor:
    """This rank's loss, such that DDP over `group` (None: all ranks) gives the gradient of the mean over all ranks.

    losses: this rank's, one element for each token that counts; any shape, also empty (backward has to be called even
    so). Returns a scalar whose mean over the ranks is the mean over all elements. All ranks call it together: it adds
    up their counts.
    """
    count = torch.tensor(losses.numel(), device=losses.device)
    dist.all_reduce(count, group=group)
    return losses.sum() / count * dist.get_world_size(group)


def demo(steps: int = 40, n: int = 512, data: int = 1) -> dict:
    """Train a small model to tell the level of a noisy sequence from the positions so far; each step draws new ones.

        torchrun --nproc_per_node 2 -m workbench.harness.ranks workbench.distributed.training:demo '{"steps": 20}'

    n: positions; data: into how many parts the 8 sequences of a step are divided.
    Returns {"losses": by step, the same on any number of ranks; "bytes": what this rank sent in the last step}.
    """
    ranks = mesh(data)
    torch.manual_seed(0)  # the same weights and sequences everywhere
    pattern, group = Dilated([n // 8, n], [1, 4], causal=True), ranks.get_group("sequence")
    layers = (Layer(64, MultiheadAttention(64, 8, pattern, group=group)) for _ in range(2))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 64), *layers, nn.Linear(64, 1)).to(ranks.device_type))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    some = Shards.even(8, data)[ranks.get_local_rank("data")]
    rows = Shards.even(n, dist.get_world_size(group))[dist.get_rank(group)]
    losses = []
    for _ in range(steps):
        levels = torch.linspace(-1.5, 1.5, 8)[:, None, None]
        x = (levels + 2 * torch.randn(8, n, 1))[:, rows.start : rows.stop]
        x, levels = (t[some.start : some.stop].to(ranks.device_type) for t in (x, levels))
        optimizer.zero_grad()
        with Traffic() as traffic:
            loss = mean((model(x) - levels).square())
            loss.backward()
        optimizer.step()
        total = loss.detach() / dist.get_world_size()
        dist.all_reduce(total)
        losses.append(float(total))
    return {"losses": losses, "bytes": traffic.by_collective}
