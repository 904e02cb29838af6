"""What the training tests run on every rank: a small model, trained on a mesh and on one device."""

import copy
import functools

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import workbench as wb
from workbench import BlockSparse, Dense, Dilated, layouts
from workbench.distributed import Shards, Traffic, training
from workbench.models.layer import Layer

N, BATCH, STEPS = 40, 3, 4
PATTERNS = {
    "dense": lambda: Dense(causal=True),
    "dilated": lambda: Dilated([8, 24, 40], [1, 2, 3], causal=True),
    "block-sparse": lambda: BlockSparse(layouts.local(1) | layouts.global_(1), 4),
}
EVEN, UNEVEN, HOLE = {1: [40], 2: [20, 20], 4: [10] * 4}, {2: [29, 11], 4: [3, 20, 1, 16]}, {2: [0, 40]}


class Checkpointed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def model(name, group=None, alone=False, checkpointed=False, dtype=torch.float64, strategy="auto"):
    torch.manual_seed(0)
    kind, options = (wb.MultiheadAttention, {}) if alone else (
        wb.distributed.MultiheadAttention, {"group": group, "strategy": strategy})  # fmt: skip
    pattern = PATTERNS[name]()  # one, for both layers
    layers = [Layer(16, kind(16, 4, pattern, num_kv_heads=2, **options)) for _ in range(2)]
    if checkpointed:
        layers = [Checkpointed(layer) for layer in layers]
    return nn.Sequential(nn.Linear(5, 16), *layers, nn.Linear(16, 3)).to(dtype)


def data(dtype=torch.float64):
    random = torch.Generator().manual_seed(1)
    x, y = (torch.randn(STEPS, BATCH, N, size, generator=random, dtype=dtype) for size in (5, 3))
    return x, y


def losses_of(net, x, y):
    return (net(x) - y).square().mean(-1)


def steps(net, batches, loss) -> list:
    """SGD, and the loss by step; `loss` makes one of the losses (B, L)."""
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), []
    for x, y in batches:
        optimizer.zero_grad()
        now = loss(losses_of(net, x, y))
        now.backward()
        optimizer.step()
        found.append(now.detach())
    return found


def parameters(net) -> torch.Tensor:
    return torch.cat([x.detach().flatten() for x in net.parameters()])


@functools.cache
def mesh_of(data: int, sequence: int):
    return init_device_mesh("cpu", (data, sequence), mesh_dim_names=("data", "sequence"))


def on_mesh(parts, lengths, dtype=torch.float64, drawn=data):
    """(mesh, this rank's part of the batches): `parts` of the batch, `lengths` of the sequence."""
    mesh = mesh_of(len(parts), len(lengths))
    some = Shards(tuple(parts))[mesh.get_local_rank("data")]
    rows = Shards(tuple(lengths))[mesh.get_local_rank("sequence")]
    mine = [t[:, some.start : some.stop, rows.start : rows.stop] for t in drawn(dtype)]
    return mesh, list(zip(*mine, strict=True))


def train(parts, lengths, name, wrap=DistributedDataParallel, loss=training.mean, dtype=torch.float64, **options):
    """(parameters after the steps, losses by step, the model)"""
    mesh, batches = on_mesh(parts, lengths, dtype)
    net = wrap(model(name, mesh.get_group("sequence"), dtype=dtype, **options))
    found = steps(net, batches, loss)
    return parameters(net), torch.stack(found), net


def alone(name, dtype=torch.float64):
    net = model(name, alone=True, dtype=dtype)
    before = parameters(net)
    found = steps(net, zip(*data(dtype), strict=True), torch.mean)
    assert (parameters(net) - before).abs().max() > 0.05, "nothing was learnt"
    return parameters(net), torch.stack(found)


def errors(rank, world, parts, lengths, name, **options):
    """The largest differences from one device: of a parameter after the steps, of a step's loss."""
    (want, losses), (got, mine, _) = alone(name), train(parts, lengths, name, **options)
    dist.all_reduce(mine)
    return float((got - want).abs().max()), float((mine / world - losses).abs().max())


MUTANTS = {
    "no-scaling": lambda losses: losses.mean(),
    "sum-over-all-tokens": lambda losses: losses.sum() / (BATCH * N),
    "count-of-a-sequence-group": lambda losses: losses.sum() / losses.shape[0] / N * dist.get_world_size(),
}


def mutated(rank, world, parts, lengths, name, mutant):
    return errors(rank, world, parts, lengths, name, loss=MUTANTS[mutant])[0]


def only_over_data(rank, world, parts, lengths, name):
    """The error if gradients are reduced over the data axis alone, and not over the sequence's."""
    group = mesh_of(len(parts), len(lengths)).get_group("data")
    wrap = functools.partial(DistributedDataParallel, process_group=group)
    return errors(rank, world, parts, lengths, name, wrap=wrap)[0]


def checkpointed(rank, world, parts, lengths, name, strategy):
    """(the largest difference that checkpoints make, exchanges of a step without and with them, names of collectives
    with them)"""
    found, exchanges = [], []
    for on in (False, True):
        with Traffic() as traffic:
            found.append(train(parts, lengths, name, checkpointed=on, strategy=strategy)[0])
        exchanges.append(traffic.calls.count("all-to-all"))
    return float((found[0] - found[1]).abs().max()), exchanges, traffic.calls


WRAPS = {
    "inside-ddp": lambda net: DistributedDataParallel(torch.compile(net, backend="aot_eager")),
    "around-ddp": lambda net: torch.compile(DistributedDataParallel(net), backend="aot_eager"),
}


def compiled(rank, world, parts, lengths, name, wrap):
    """(errors against one device, graphs that were compiled)"""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        found = errors(rank, world, parts, lengths, name, wrap=WRAPS[wrap])
        return *found, torch._dynamo.utils.counters["stats"]["unique_graphs"]
    finally:
        torch._dynamo.reset()


def collectives(rank, world):
    """(data bytes counted by collective, those of 12 float32 by hand, control bytes, what an unknown one raises), of
    four ranks; the functional calls are what compiled code has."""
    x, pair = torch.ones(12), mesh_of(world // 2, 2).get_group("sequence")
    with Traffic() as traffic:
        dist.all_reduce(x)
        dist.broadcast(x, 1)
        dist.all_gather([torch.empty(12) for _ in range(world)], x)
        dist.all_gather([torch.empty(1, dtype=torch.int64) for _ in range(world)], torch.ones(1, dtype=torch.int64))
        dist.reduce_scatter_tensor(torch.empty(3), x)
        dist.all_to_all_single(torch.empty(12), x)
        request = dist.isend(x, (rank + 1) % world)
        dist.recv(torch.empty(12), (rank - 1) % world)
        request.wait()
        functional.wait_tensor(functional.all_reduce(x, "sum", pair))
        functional.wait_tensor(functional.all_gather_tensor(x, 0, pair))
        functional.wait_tensor(functional.all_to_all_single(x, [6, 6], [6, 6], pair))
        try:
            dist.reduce(x, 0)
        except RuntimeError as error:
            message = str(error)
    want = {"all-reduce": 72 + 48, "all-gather": 144 + 48, "reduce-scatter": 36, "all-to-all": 36 + 24, "send": 48}
    return traffic.by_collective, want, traffic.control, message


def copied(rank, world):
    """Whether a deepcopy of a layer on a sub-group gives the same and has parameters of its own; a state_dict fits."""
    mesh = mesh_of(world // 2, 2)
    one = model("dilated", mesh.get_group("sequence"))
    other, single = copy.deepcopy(one), model("dilated", alone=True)
    single.load_state_dict(one.state_dict())
    x = torch.randn(1, 20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    same = torch.equal(one(x), other(x)) and other[1].attention.group is one[1].attention.group
    own = all(a is not b for a, b in zip(one.parameters(), other.parameters(), strict=True))
    return same and own and other[1].attention.pattern is not one[1].attention.pattern


def refused(rank, world):
    layer = wb.distributed.MultiheadAttention(8, 1, wb.Dense(True), rope=100, xpos=1)
    try:
        layer(torch.randn(1, 40, 8))
    except ValueError as error:
        return str(error)  # on every rank: the others would wait for one that raises alone


def demo(rank, world, **options):
    return training.demo(**options)


def longnet(rank, world, parts, lengths, **options):
    """The largest differences from one device of LongNet's loss and gradients, of two steps in a row, by DDP."""
    tokens = [torch.randint(20, (BATCH, N), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    mesh, here = on_mesh(parts, lengths, drawn=lambda _: [torch.stack(tokens)])
    sizes, group, worst = (20, 16, 2, 4, [8, 40], [1, 2]), mesh.get_group("sequence"), []
    torch.manual_seed(0)
    one = wb.LongNet(*sizes, dtype=torch.float64, **options)
    one.norm.weight.data *= 3
    mine = wb.LongNet(*sizes, dtype=torch.float64, attention=wb.distributed.MultiheadAttention, group=group, **options)
    mine.load_state_dict(one.state_dict())
    net = DistributedDataParallel(mine)
    for whole, (some,) in zip(tokens, here, strict=True):
        want, found = one.loss(whole), training.loss(net, some, group=group)
        want.backward(), found.backward()
        found = found.detach()
        dist.all_reduce(found)
        worst += [float((found / dist.get_world_size() - want).abs())]
        both = zip(one.parameters(), mine.parameters(), strict=True)
        worst += [float((a.grad - b.grad).abs().max()) for a, b in both]
        one.zero_grad(), mine.zero_grad()
    return max(worst)
