"""The fa4 backend: FlashAttention-4's kernels where the package is installed, which calls they take, their operators.

Dimensions: B batch, N keys, Nq queries (the last Nq of the N positions), H query heads, G key heads, D head_dim.
"""

import importlib.metadata
import importlib.util
from operator import index  # which has torch.compile take a length as a constant

import torch
from torch import Tensor

from workbench.engines import fa4, operators
from workbench.engines.fa4.lists import SHIFT, TIMES
from workbench.engines.triton.block_lists import kind_of
from workbench.patterns import BlockSparse, Dense, Dilated, Window, tile_order
from workbench.patterns.tile_order import TILE

# The adapter (`fa4.hopper`) changes what is inside these versions. `pip install -e '.[hopper]'` has them.
PINNED = {"flash-attn-4": "4.0.0b18", "nvidia-cutlass-dsl": "4.5.2", "quack-kernels": "0.5.0"}
BLOCKS = 1 << SHIFT  # of 128 tokens, of all sequences together: the numbers of a list
PADDED = 1.25  # places of the tile order for a token, from which on padding costs more than the engine gains


def _missing() -> str | None:
    """What is not there, in a sentence, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    for name, want in PINNED.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed: `pip install -e '.[hopper]'` installs {name} {want}"
        if found != want:
            return f"{name} is {found}, and the adapter is for {want}"
    return None


MISSING = _missing()


def why_not(q: Tensor, k: Tensor, pattern) -> str | None:
    """Why the kernels do not run this call, in a sentence, or None. q (B, Nq, H, D), k (B, N, G, D)."""
    if q.device.type != "cuda":
        return f"the kernels are for CUDA, not {q.device.type}"
    if MISSING and fa4.STAND_IN is None:
        return MISSING
    if torch.cuda.get_device_capability(q.device) != (9, 0):
        return "the adapter is for compute capability 9.0 (H100, H200)"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"the kernels are for bfloat16 and float16, not {str(q.dtype).removeprefix('torch.')}"
    if q.shape[3] not in (32, 64, 96, 128):
        return f"the adapter is tested for a head_dim of 32, 64, 96 or 128, not {q.shape[3]}"
    if torch.are_deterministic_algorithms_enabled():
        return "its gradients differ in their last bits from run to run, and deterministic algorithms are asked for"
    if not q.numel() or k.shape[0] * -(-k.shape[1] // TILE) >= BLOCKS:
        return f"the kernels want at least one token, and fewer than {BLOCKS:,} blocks of {TILE} tokens"
    return pattern.answer(unfit, index(k.shape[1]), index(q.shape[1]))


def unfit(pattern, n: int, nq: int) -> str | None:
    """Why a pattern is not for the engine, or None."""
    if isinstance(pattern, Dense):
        return None
    unit = TILE
    if isinstance(pattern, Dilated):
        some, _ = tile_order.together(pattern, n)
        if some is None:
            words = f", a causal one at most {tile_order.CAUSAL_RATE}" if pattern.causal else ""
            return f"no branch has a tile order: want segment lengths that are multiples of {TILE} times a rate{words}"
        if len(pattern.segment_lengths) >= TIMES:
            return f"an entry of a list counts fewer than {TIMES} branches, not {len(pattern.segment_lengths)}"
        unit = tile_order.of(some, n).segment
    elif isinstance(pattern, BlockSparse):
        if any(size % TILE for size in pattern.block_size):
            return f"the kernels want blocks of a multiple of {TILE}, not {pattern.block_size}"
    elif kind_of(pattern) != "window" and not (isinstance(pattern, Window) and pattern.dilation == 1):
        windows = "windows on a line without dilation"
        return f"the kernels know dense, dilated and block-sparse patterns and {windows}, not {pattern.name}"
    if (n - nq) % unit:
        return f"the queries have to begin at a multiple of {unit:,} positions, not at {n - nq:,}"
    return None


def preferred(q: Tensor, k: Tensor, pattern) -> bool:
    """Whether the engine is there, takes the call, and was measured to be the faster for such (on an H200)."""
    least = 16_384 if isinstance(pattern, Dense) else 1024  # dense calls that are shorter wait for the host
    widths = (32, 64, 128) if isinstance(pattern, (Dense, Dilated)) else (64, 128)
    if MISSING or q.shape[3] not in widths or min(q.shape[1], k.shape[1]) < least or why_not(q, k, pattern):
        return False
    return not isinstance(pattern, Dilated) or pattern.answer(worthwhile, index(k.shape[1]))


def in_its_order(pattern: Dilated, n: int) -> bool:
    """Whether tokens in the pattern's tile order are in the kernels': all branches, and no padding."""
    order = tile_order.of(pattern, n)
    return order is not None and order.padded == n and tile_order.together(pattern, n)[1] is None


def worthwhile(pattern: Dilated, n: int) -> bool:
    """Whether there is little padding, and the lists are made in seconds."""
    some, _ = tile_order.together(pattern, n)
    order = tile_order.of(some, n)
    return order.padded <= PADDED * n and tile_order.period_of(some, order) <= tile_order.PERIOD


def directions(natural: bool):
    """The forward and the backward, for `operators.define`, of tokens that lie in natural order or in tile order."""

    def forward(*args, **into):
        from workbench.engines.fa4 import engine

        return engine.forward(*args, natural, **into)

    def backward(*args):
        from workbench.engines.fa4 import engine

        return engine.backward(*args, natural)

    return forward, backward


attend, attend_backward = operators.define("attend_by_fa4", *directions(natural=True))
attend_tiled, _ = operators.define("attend_by_fa4_tiled", *directions(natural=False))
