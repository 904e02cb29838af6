"""What torch's kernels take beside their results: measured on a card, operator by operator, and kept as a table.

The scratch of a kernel is a constant, so much a row (B x H x N queries) and so much an element (rows x D), where N and
D are rounded up to the kernel's tiles; `workspace.json` holds these with the card and the versions that they were
measured on. Where that is not how an operator takes its scratch, its own rule stands here (RULES), as torch's sources
have it, and is measured against, too.
"""

import functools
import json
from pathlib import Path

import torch

TABLE = Path(__file__).with_name("workspace.json")
MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}  # which take cuBLAS's workspace


def of(name: str, args: tuple, card) -> list[int]:
    """The scratch of the operator `name`, called with these arguments on a card, step by step: the bytes of a block
    that is taken, or ~i where the i-th block is given back; what is left is at the end. [] for those that take none."""
    if name not in RULES and name not in table():
        return []
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if name in RULES:
        return RULES[name](*tensors, card=card)
    found = table()[name].get(str(tensors[0].dtype).removeprefix("torch."))
    if found is None:
        return []
    shape = tensors[name.endswith("_backward")].shape  # the backward's first is the upstream gradient
    rows, elements = sizes(shape, found["round_n"], found["round_d"])
    total = round(found["constant_bytes"] + found["row_bytes"] * rows + found["element_bytes"] * elements)
    return [total] if total > 0 else []


@functools.cache
def table() -> dict:
    """{operator: {dtype: {round_n, round_d, constant_bytes, row_bytes, element_bytes, worst}}}."""
    return json.loads(TABLE.read_text())["operators"]


def sizes(shape, round_n: int, round_d: int) -> tuple[int, int]:
    """(rows, elements) of (B, H, N, D), N and D rounded up."""
    b, h, n, d = shape
    rows = b * h * -(-n // round_n) * round_n
    return rows, rows * -(-d // round_d) * round_d


def flash(q: torch.Tensor, k: torch.Tensor, *_, card) -> list[int]:
    """Bytes of the parts' float32 out and lse in FlashAttention-2's forward: the rule of its num_splits_heuristic.

    Where there are too few queries to fill the card it splits the keys: into as few parts as give 85 % of the best use
    of the card's multiprocessors, twice their number counted; none where the blocks of 64 queries fill 80 % of them
    already (flash_api.cpp of torch 2.11).
    """
    b, h, n, d = q.shape
    units, filled = b * h * -(-n // 64), 2 * card.multiprocessors
    blocks = -(-k.shape[2] // (256 if d <= 64 else 128 if d <= 128 else 64))
    if units >= 0.8 * filled:
        return []
    parts = [s for s in range(1, min(128, filled, blocks) + 1) if s == 1 or -(-blocks // s) != -(-blocks // (s - 1))]
    use = {s: units * s / filled / -(-units * s // filled) for s in parts}
    best = next(s for s in parts if use[s] >= 0.85 * max(use.values()))
    rows, elements = sizes(q.shape, 1, 32 if d <= 128 else 64)
    return [] if best == 1 else [best * 4 * (rows + elements)]


def flash_backward(_, q: torch.Tensor, *__, card) -> list[int]:
    """The steps of FlashAttention-2's backward: delta, a float32 a row, and dq in float32 (flash_api.cpp)."""
    rows, elements = sizes(q.shape, 128, 32 if q.shape[3] <= 128 else 64)
    return [4 * rows, 4 * elements]


def efficient(q: torch.Tensor, *_, card) -> list[int]:
    """Bytes of the float32 out that the memory-efficient forward sums in, where 16 bits do not stay in registers."""
    return [4 * q.numel()] if q.element_size() == 2 and q.shape[3] > 128 else []


def efficient_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *__, card) -> list[int]:
    """The steps of the memory-efficient backward's workspace and of delta, a float32 a row.

    The workspace sums dq in tiles of queries x columns with a lock each, and dk and dv of each split of the keys where
    they do not stay in registers (kernel_backward.h, workspace_size; the tiles are generate_kernels.py's). In float32
    delta is made outside the kernel, from the product of out and its gradient, before there is a workspace. The
    gradient of out is copied where it is strided (attention_backward.cu). All of torch 2.11.
    """
    b, h, n, d = q.shape
    half, columns = q.element_size() == 2, next(x for x in (32, 64, 128, 1 << 16) if d <= x)
    wide = columns > 64 and card.capability in LARGE_SHARED
    tile = 128 if wide else 64
    stays = half and columns <= tile  # dk and dv, in registers
    keys = 128 if wide and stays else 64
    used = 0
    if half or card.capability >= (7, 0):
        used += -(-n // tile) * -(-d // keys) * (16 + 4 * tile * keys)
    if half and not stays:
        splits = -(-k.shape[2] // keys)
        if b * h < 256:
            splits = max(1, min(splits, 200 // (b * h)))
        elif splits <= 2:
            splits = 1
        used += 2 * 4 * splits * keys * -(-d // tile) * tile
    workspace, delta = b * h * -(-used // 16) * 16, 4 * b * h * n
    steps = [] if grad.transpose(1, 2).is_contiguous() else [grad.numel() * grad.element_size()]
    if half:
        return [*steps, delta, workspace]
    first = len(steps)  # the product, its sum, and that in another order
    return [*steps, 4 * b * h * n * d, delta, delta, ~first, ~(first + 1), workspace]


LARGE_SHARED = ((8, 0), (9, 0), (10, 0))  # whose blocks may have enough shared memory for tiles of 128 queries
RULES = {
    "_scaled_dot_product_flash_attention": flash, "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_softmax_backward_data": lambda grad, *_, card: [grad.numel() * grad.element_size()],  # grad * output (SoftMax.cu)
}  # fmt: skip
