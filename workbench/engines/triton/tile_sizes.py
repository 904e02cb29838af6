"""Which tile each kernel takes: a small table, found by measurement (see outputs/records), no search at run time.

M queries and N keys a tile, warps, and stages of the software pipeline.
"""

import itertools
import math
from typing import NamedTuple

import torch

LOG2_E = math.log2(math.e)  # kernels take powers of two
SHARED = 160 << 10  # bytes of shared memory a block that the table's large tiles need (A100, H100)


class Tile(NamedTuple):
    M: int
    N: int
    warps: int
    stages: int
    registers: int | None = None  # a limit for each thread, where it lets one more block run on a multiprocessor

    def options(self) -> dict:
        """What a launch takes."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"M": self.M, "N": self.N, "num_warps": self.warps, "num_stages": self.stages} | limit


HEAD_DIMS = 16, 32, 64, 128, 256  # padded
# By kernel, for 16-bit inputs, on an H100 or an H200. Walking lists of blocks takes more stages or larger tiles: loads
# of keys and values wait for that of a block's number. "narrow": blocks smaller than the tile.
TABLE = {kernel: dict(zip(HEAD_DIMS, itertools.starmap(Tile, tiles), strict=True)) for kernel, tiles in {
    "dilated forward": [(128, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3, 128), (128, 64, 8, 3), (128, 64, 8, 2)],
    "dilated dq": [(64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3), (64, 32, 8, 1)],
    "dilated dkdv": [(64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (32, 64, 4, 3), (32, 64, 8, 1)],
    "blocks forward": [(128, 64, 4, 5), (128, 64, 4, 5), (128, 64, 8, 5, 128), (128, 128, 8, 3), (128, 64, 8, 2)],
    "narrow blocks forward": [(64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3, 128), (64, 64, 4, 3), (64, 64, 8, 2)],
    "blocks dq": [(64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 5), (64, 32, 8, 1)],
    "blocks dkdv": [(64, 64, 4, 5), (64, 64, 4, 5), (64, 64, 4, 5), (32, 64, 4, 5), (32, 64, 8, 1)],
}.items()}  # fmt: skip
SMALL = Tile(32, 32, 4, 1)  # float32, whose products run without tensor cores, and cards with less shared memory
SMALLER = Tile(16, 16, 4, 1)  # the same from this head_dim on, where SMALL takes minutes to compile
WIDE = 128


def padded(head_dim: int) -> int:
    """The head_dim that a kernel's tiles have: products want a power of two, at least 16."""
    return max(16, power_of_2(head_dim))


def power_of_2(x: int) -> int:
    """The least that is not below x. Triton's own function, as its cdiv, takes longer on the host than a launch."""
    return 1 << (x - 1).bit_length()


def constants(q: torch.Tensor, k: torch.Tensor, causal: bool) -> dict:
    """What kernels of attention are compiled for, beside their tiles. q (B, Nq, H, D), k (B, N, G, D)."""
    return {"GROUP": q.shape[2] // k.shape[2], "D": q.shape[3], "BLOCK_D": padded(q.shape[3]), "CAUSAL": causal}


def choose(kernel: str, q: torch.Tensor, block_size: tuple[int, int] | None = None) -> Tile:
    """The tile of a kernel of `TABLE` for inputs like q (..., head_dim).

    block_size: of queries and keys, multiples of 16 that the tile has to divide.
    """
    if q.device.type == "cpu":  # the interpreter, whose tests want several tiles in small shapes
        tile = Tile(16, 16, 1, 1)
    elif q.dtype == torch.float32 or torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin < SHARED:
        tile = SMALLER if padded(q.shape[-1]) >= WIDE else SMALL
    else:
        tile = TABLE[kernel][padded(q.shape[-1])]
        if block_size and block_size[0] % tile.M and f"narrow {kernel}" in TABLE:
            tile = TABLE[f"narrow {kernel}"][padded(q.shape[-1])]
    if block_size is None:
        return tile
    return tile._replace(M=math.gcd(tile.M, block_size[0]), N=math.gcd(tile.N, block_size[1]))


def overlap(q: torch.Tensor) -> tuple[dict, dict]:
    """Options of an operator's first launch and of the later ones, which may begin before the one before them ends."""
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) < (9, 0):
        return {"OVERLAP": False}, {"OVERLAP": False}
    return {"OVERLAP": True}, {"OVERLAP": True, "launch_pdl": True}
