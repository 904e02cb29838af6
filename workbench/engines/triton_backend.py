"""Our Triton kernels: which calls they take, what a pattern is in their terms, and their operators.

Dimensions: B batch, N keys, Nq queries (the last Nq of the N positions), H query heads, G key heads, D head_dim.
"""

import importlib.util
import sys
from operator import index  # which has torch.compile take a length as a constant

import torch
from torch import Tensor

from workbench.engines import operators
from workbench.engines.torch_backend import one_branch
from workbench.engines.triton.block_lists import kind_of
from workbench.patterns import Dense, Dilated, Neighborhood, tile_order
from workbench.patterns.listed import repeats
from workbench.patterns.tables import place

INSTALLED = importlib.util.find_spec("triton") is not None
LENGTH = 1 << 30  # positions are int32 in the kernels, and some are computed one tile beyond the last
BLOCK = 128  # the block size of patterns that have none of their own
GRID = 64  # of neighborhoods on a grid: smaller blocks hold fewer pairs that are not visible
DECODED = 1 << 15  # rows that one program of `decode` goes through, of all branches; more are faster in parts
ONCE = {torch.float16: 64, torch.bfloat16: 64}  # up to which head_dim nested branches run in one pass


def why_not(q: Tensor, k: Tensor, pattern) -> str | None:
    """Why the kernels do not run this call, in a sentence, or None. q (B, Nq, H, D), k (B, N, G, D)."""
    if not INSTALLED:
        return "Triton is not installed"
    if q.device.type != "cuda" and not interpreted():
        return f"the kernels are for CUDA, not {q.device.type}"
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the kernels need compute capability 8.0"
    if q.dtype == torch.float64:
        return "the kernels have no float64"
    if interpreted() and q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    if q.shape[-1] > 256:
        return f"the kernels want a head_dim of at most 256, not {q.shape[-1]}"
    if k.shape[1] > LENGTH:
        return f"the kernels count positions up to {LENGTH:,}, not {k.shape[1]:,}"
    if isinstance(pattern, (Dense, Dilated)):
        return None
    if kind_of(pattern) == "bits" and pattern.answer(repeats, index(k.shape[1]), index(q.shape[2])):
        return f"the kernels take pairs once, and {pattern.name} counts some several times"
    if any(size % 16 for size in block_size_of(pattern)):
        return f"the kernels want blocks of a multiple of 16, not {block_size_of(pattern)}"
    return None


def too_many_masks(pattern, n: int, heads: int, nq: int) -> str | None:
    """Why the kernels do not run a pattern whose partial blocks differ too much, in a sentence, or None."""
    from workbench.engines.triton.bit_masks import MOST, find

    if isinstance(pattern, (Dense, Dilated)) or kind_of(pattern) != "bits" or not n * heads * nq:
        return None
    if find(pattern, n, 1 if pattern.same_heads else heads, nq, block_size_of(pattern)):
        return None
    return f"the masks of the blocks of {pattern.name} that are visible in part take more than {MOST >> 20:,} MiB"


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, on any device, for tests."""
    steps = sys.modules.get("workbench.engines.triton.tile_ops")
    return steps is not None and steps.INTERPRETED


def block_size_of(pattern) -> tuple[int, int]:
    if hasattr(pattern, "block_size"):
        return pattern.block_size
    size = GRID if isinstance(pattern, Neighborhood) and len(pattern.shape) > 1 else BLOCK
    return size, size


def forward(q: Tensor, k: Tensor, v: Tensor, pattern, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, Nq, H, D) and lse (B, H, Nq), float32."""
    found = ()
    for execution, arguments in kernels(pattern, q, k.shape[1]):
        found = (execution.forward(q, k, v, *arguments, scale, *found),)
    return found[0]


def backward(grad, grad_lse, q, k, v, out, lse, pattern, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the gradients of out and lse, the inputs, and out and lse."""
    found = ()
    for execution, arguments in kernels(pattern, q, k.shape[1]):
        found = (execution.backward(grad, grad_lse, q, k, v, out, lse, *arguments, scale, *found),)
    return found[0]


attend, attend_backward = operators.define("attend_by_kernels", forward, backward)


def kernels(pattern, q: Tensor, n: int) -> list[tuple]:
    """[(a module that runs the pattern or some of its branches, what its functions take for them), ...]: each after the
    first adds to the results of those before."""
    from workbench.engines.triton import block_sparse, dilated

    if isinstance(pattern, Dense):
        pattern = one_branch(pattern, n)
    if not isinstance(pattern, Dilated):
        return [(block_sparse, (plan_of(pattern, q, n), pattern.causal))]
    plan, rest = in_tile_order(pattern, q, n)
    first = [] if plan is None else [(block_sparse, (plan, pattern.causal))]
    return first if rest is None else [*first, (dilated, (rest,))]


def in_tile_order(pattern: Dilated, q: Tensor, n: int):
    """(the plan of the branches that run in one pass, each key once, or None; the branches left, or None).

    Nested branches show many keys to a query several times, and launches that merge read and write all results. Left as
    they are: steps of decoding, since each length has lists of its own. Up to the head_dim of ONCE one pass was faster
    than the branches by Triton and by cuDNN on an H200.
    """
    from workbench.engines.triton import block_lists

    _, nq, h, d = q.shape
    if d > ONCE.get(q.dtype, 0) or nq < tile_order.TILE or len(pattern.segment_lengths) == 1:
        return None, pattern

    def make():
        some, rest = tile_order.together(pattern, n)
        order = some and tile_order.of(some, n)
        if some is None or len(some.segment_lengths) == 1 or tile_order.period_of(some, order) > tile_order.PERIOD:
            return None
        return block_lists.make_ordered_plan(some, order, nq, h, q.device), rest

    return pattern.kept("tile order", (n, nq, h, place(q)), make) or (None, pattern)


def plan_of(pattern, q: Tensor, n: int):
    """The pattern's lists of blocks for these sizes, kept with the pattern."""
    from workbench.engines.triton import bit_masks, block_lists

    sizes = n, 1 if pattern.same_heads else q.shape[2], q.shape[1]

    def make():
        found = bit_masks.find(pattern, *sizes, block_size_of(pattern))
        if found is None:
            raise ValueError(f"backend='triton': {too_many_masks(pattern, *sizes)}")
        return block_lists.make_plan(*found, pattern, q.device)

    return pattern.kept("plan", (*sizes, place(q)), make)
