"""Attention over several ranks. A call runs through these files, in this order:

api        what a user calls
call       checks this rank's input, agrees with the other ranks on a plan (`agree`), and runs it as one autograd function
plans      who sends which rows to whom, by arithmetic alone: `shards` who holds what, `halo` who needs what
           (all but dense and dilated patterns, windows and grids by their lists of blocks)
sequence   one rank's run of such a plan: its own rows, then those that arrive, stage by stage
           (`partials`: as which calls, of which parts of the pattern: `views`; `buffers` and `fills`: where their rows
           lie, moved by `copies`; `exchange`: how rows are packed and sent)
ulysses    the other strategy: all rows, for a part of the heads
"""  # noqa: E501 (a table)

import torch
from torch import Tensor

from workbench.distributed import call
from workbench.distributed.agree import Agreement
from workbench.distributed.group import Ranks
from workbench.engines import dispatch
from workbench.patterns import Pattern


@torch.compiler.disable
def attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, group=None, strategy: str = "auto", scale: float | None = None,
    return_lse: bool = False, backend: str = "auto", **unknown,
):  # fmt: skip
    """Attention of this rank's queries to the keys of all ranks: this rank's rows of what `workbench.attention` gives.

    pattern: any. What has a function of yours is looked at pair by pair once, on every rank: N^2 evaluations.
    q (B, Lq, H, D), k and v (B, L, G, D): this rank's contiguous shard, shards in the order of ranks; their lengths may
    differ and be 0. If there are fewer queries than keys in all, the queries are the last positions of the sequence,
    each on the rank that holds the key of its position. Returns out like q, or (out, lse (B, H, Lq)) with return_lse.
    group: a process group (None: the default one). A single rank needs none: it calls `workbench.attention`.
    strategy: "sequence" (a rank attends for its own rows and fetches the key rows that they need), "heads" (a rank
        attends to the whole sequence for a part of the heads), or "auto", the one of these that brings fewer bytes to
        the rank that receives most.
    backend: "auto", "torch" or "triton", for what each rank computes.
    Block-sparse attention is faster, and takes less memory, if each shard is a whole number of query and of key blocks.
    Just the rows that queries see are sent; of a pattern that is neither dense, dilated, block-sparse, a window nor a
    grid, the whole blocks of them, of 128 keys or the pattern's own size.

    All ranks of the group call this, and its backward, together. Where one rank's input is wrong, or ranks disagree
    (on the pattern, dtype, ...), every rank raises ValueError before any row is sent. An out-of-memory before rows are
    sent, in forward or backward, is likewise raised on every rank, with one exception: in a group of NCCL alone it is
    not, once ranks have begun to agree. What moves: keys and values, once forward and once backward, and their
    gradients in float32 (float64 for float64); `Plan.bytes` has the numbers.
    """
    ranks = Ranks.of(group)
    if ranks.world == 1:
        call.check_strategy(strategy)
        dispatch.refuse("attention", unknown)
        return dispatch.attention(q, k, v, pattern, scale=scale, backend=backend, return_lse=return_lse)
    with Agreement(ranks, call.PROPOSED) as agreement:
        dispatch.refuse("attention", unknown)
        q, k, v, this = call.check(q, k, v, pattern, ranks, strategy, scale, backend, return_lse)
        out, lse = call.Attend.apply(q, k, v, this, agreement)
    out = dispatch.divided(out, pattern)
    return (out, lse) if return_lse else out
