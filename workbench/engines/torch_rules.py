"""Which kernels behind torch's scaled_dot_product_attention take a call, by the card that it is made on.

Read from torch 2.11 to 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: `can_use_cudnn_attention`,
`can_use_flash_attention`, `can_use_mem_efficient_attention` with the checks they name, and `priority_order`. Of calls
without mask and dropout, on a CUDA build with cuDNN 9.15.1 or later (older ones prefer flash to cuDNN on every card).
tests/gpu/test_rules.py asks torch itself on the card that it runs on.

| kernel    | capability | dtypes                    | head_dim                         | key heads | causal, Nq != N |
|-----------|------------|---------------------------|----------------------------------|-----------|-----------------|
| cudnn     | from 8.0   | float16, bfloat16         | multiples of 8 to 128, 9.0: 256  | grouped   | yes             |
| flash     | from 8.0   | float16, bfloat16         | to 256 (torch pads it to 8s)     | grouped   | no              |
| efficient | from 5.0   | float16, float32;         | multiples of `alignment`         | as many   | yes             |
|           |            | bfloat16 from 8.0 on      |                                  |           |                 |
| math      | any        | any                       | any                              | grouped   | yes             |

Beside the table: cuDNN takes no single key, and flash no gradients of head_dims 193 to 224 on consumers' cards (8.6 to
8.9, 12.x). Where `causal` is taken with Nq != N, torch means the first Nq positions, not the last.
"""

import functools

import torch

HALF = (torch.float16, torch.bfloat16)
PROCESSOR = (0, 0)  # the capability of a card in software, for which this processor computes
CUDNN_FIRST = ((9, 0), (10, 0), (10, 3))  # the cards on which torch prefers cuDNN; on others it comes after math
# Measured with torch 2.11 on an H100 and an H200 (tests/gpu/test_validity.py); the others are right.
WRONG_PAST_2_31 = {
    "cudnn": "past 2^31 elements cuDNN's gradients are wrong, silently",
    "flash": "past 2^31 elements FlashAttention's gradients fail",
}


@functools.cache
def kernels(
    capability: tuple[int, int], dtype: torch.dtype, head_dim: int, *, grouped: bool = False, n: int = 2,
    nq: int | None = None, causal: bool = False, gradients: bool = False,
) -> tuple[str, ...]:  # fmt: skip
    """The kernels that take a call, in torch's order: the first is what torch runs, each runs if asked for by name.

    Names: "cudnn", "flash", "efficient", "math". capability: of the card, (major, minor). grouped: fewer key heads than
    query heads (enable_gqa). n, nq: keys and queries, at least one. gradients: whether a backward may follow.
    """
    taken = {"math"}
    if dtype in HALF and capability >= (8, 0):
        if head_dim % 8 == 0 and head_dim <= (256 if capability == (9, 0) else 128) and n > 1:
            taken.add("cudnn")
        consumer = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
        unfit = head_dim > 256 or gradients and consumer and 192 < head_dim <= 224
        if not unfit and not (causal and nq not in (None, n)):
            taken.add("flash")
    known = dtype in (torch.float16, torch.float32) or dtype == torch.bfloat16 and capability >= (8, 0)
    if known and not grouped and capability >= (5, 0) and head_dim % alignment(capability, dtype) == 0:
        taken.add("efficient")
    order = ("flash", "efficient", "math")
    order = ("cudnn", *order) if capability in CUDNN_FIRST else (*order, "cudnn")
    return tuple(x for x in order if x in taken)


def alignment(capability: tuple[int, int], dtype: torch.dtype) -> int:
    """What the memory-efficient kernel wants head_dim to be a multiple of (`minimum_gemm_alignment`)."""
    half = dtype in HALF
    if capability >= (8, 0):
        return 8 if half else 4
    return 8 if half and capability >= (7, 0) else 1
