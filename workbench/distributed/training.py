"""Training with each sequence spread over some ranks, and the batch over others: one mesh, and torch's own DDP.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "sequence"))  # torch.distributed.device_mesh's
    rows = Shards.even(n, 4)[mesh.get_local_rank("sequence")]  # of the sequences that this rank's data index has
    sharded = {"attention": wb.distributed.MultiheadAttention, "group": mesh.get_group("sequence")}
    model = DistributedDataParallel(wb.LongNet(..., **sharded))  # over all ranks, both axes of the mesh
    loss = training.loss(model, tokens, group=sharded["group"])  # tokens: this rank's rows
    loss.backward()  # now every rank has the gradient that one device would have: clip it, and step

In a model of yours the layer is `wb.distributed.MultiheadAttention(512, 8, pattern, group=...)`, and the loss
`training.mean(losses)` of this rank's losses, one for each token.

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

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from workbench.distributed.group import Ranks
from workbench.distributed.layers import MultiheadAttention
from workbench.distributed.shards import Shards
from workbench.distributed.traffic import Traffic
from workbench.models.transformer import IGNORED, LongNet


def mean(losses: Tensor, group=None) -> Tensor:
    """This rank's loss, such that DDP over `group` (None: all ranks) gives the gradient of the mean over all ranks.

    losses: this rank's, one element for each token that counts; any shape, also empty (backward has to be called even
    so). Returns a scalar whose mean over the ranks is the mean over all elements. All ranks call it together: it adds
    up their counts.
    """
    return _scaled(losses.sum(), torch.tensor(losses.numel(), device=losses.device), group)


def _scaled(total: Tensor, count: Tensor, group=None) -> Tensor:
    """W / T of a sum over the `count` tokens of this rank."""
    dist.all_reduce(count, group=group)
    return total / count.clamp(min=1) * dist.get_world_size(group)


def loss(model, tokens: Tensor, labels: Tensor | None = None, group=None) -> Tensor:
    """`Transformer.loss` of sequences that the ranks of a group share, scaled as by `mean`: a scalar.

    model: of `wb.distributed.MultiheadAttention` on this group, in DistributedDataParallel over all ranks or alone.
    tokens, labels (B, L): this rank's; labels are by default the next tokens, the last of them the next rank's first.
    """
    if labels is None:
        labels, ranks = getattr(model, "module", model).next_tokens(tokens), Ranks.of(group)
        first = tokens[:, :1].flatten().tolist() or [IGNORED] * len(tokens)
        told = ranks.gather(("rows", *["token"] * len(first)), [tokens.shape[1], *first]).wait()
        if following := next((heads for rows, *heads in told[ranks.rank + 1 :] if rows), None):
            labels[:, -1:] = labels.new_tensor(following)[:, None]
    count = (labels != IGNORED).sum()
    return _scaled(model(tokens, labels) * count.clone(), count)  # which is then the count of all


def demo(steps: int = 40, n: int = 512, data: int = 1) -> dict:
    """Train a small LongNet to foresee walks of 16 places, which at each token stay or go on; each step draws new ones.

        torchrun --nproc_per_node 2 -m workbench.harness.ranks workbench.distributed.training:demo '{"steps": 20}'

    n: tokens; data: into how many parts the 8 sequences of a step are divided, a divisor of the number of ranks.
    Returns {"losses": by step, the same on any number of ranks; "bytes": what this rank sent in the last step}.
    """
    kind, sizes = "cuda" if "nccl" in dist.get_backend_config() else "cpu", (data, dist.get_world_size() // data)
    ranks = init_device_mesh(kind, sizes, mesh_dim_names=("data", "sequence"))
    torch.manual_seed(0)  # the same weights and sequences everywhere
    group = ranks.get_group("sequence")
    sharded = {"attention": MultiheadAttention, "group": group, "device": ranks.device_type}
    model = DistributedDataParallel(LongNet(16, 64, 2, 8, [max(1, n // 8), n], [1, 4], **sharded))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    some = Shards.even(8, data)[ranks.get_local_rank("data")]
    rows = Shards.even(n, dist.get_world_size(group))[dist.get_rank(group)]
    losses = []
    for _ in range(steps):
        tokens = torch.randint(2, (8, n)).cumsum(1)[some.start : some.stop, rows.start : rows.stop] % 16
        optimizer.zero_grad()
        with Traffic() as traffic:
            mine = loss(model, tokens.to(ranks.device_type), group=group)
            mine.backward()
        optimizer.step()
        total = mine.detach() / dist.get_world_size()
        dist.all_reduce(total)
        losses.append(float(total))
    return {"losses": losses, "bytes": traffic.by_collective}
