"""What torch's kernels take beside their results: measured on a card, operator by operator, and kept as a table.

The scratch of a kernel is a constant, so much a row (B x H x N queries) and so much an element (rows x D), where N and
D are rounded up to the kernel's tiles. `measure` runs each operator on the card of this machine, `fit` finds roundings
and bytes, and `scratch.json` holds them with the card and the versions they are from. Where that is not how an operator
takes its scratch, its own rule stands here (RULES), as torch's sources have it, and is measured against, too.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

TABLE = Path(__file__).with_name("scratch.json")
MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}  # which take cuBLAS's workspace
aten = torch.ops.aten


def of(name: str, args: tuple, card) -> list[int]:
    """The scratch of the operator `name`, called with these arguments on a card, step by step: the bytes of a block
    that is taken, or ~i where the i-th block is given back; what is left is at the end. [] for those that take none."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if name in RULES:
        steps = RULES[name](*tensors, card=card)
        return steps if isinstance(steps, list) else [steps] if steps else []
    line = table().get(name)
    if line is None or not tensors:
        return []
    found = line.get(str(tensors[0].dtype).removeprefix("torch."))
    if found is None:
        return []
    shape = tensors[name.endswith("_backward")].shape  # the backward's first is the upstream gradient
    rows, elements = sizes(shape, found["round_n"], found["round_d"])
    total = round(found["constant_bytes"] + found["row_bytes"] * rows + found["element_bytes"] * elements)
    return [total] if total > 0 else []


def peak(steps: list[int]) -> int:
    """The most bytes that are taken at once."""
    blocks, now, most = [], 0, 0
    for step in steps:
        now += step if step >= 0 else -blocks[~step]
        if step >= 0:
            blocks.append(step)
        most = max(most, now)
    return most


@functools.cache
def table() -> dict:
    """{operator: {dtype: {round_n, round_d, constant_bytes, row_bytes, element_bytes, worst}}}."""
    return json.loads(TABLE.read_text())["operators"] if TABLE.exists() else {}


def sizes(shape, round_n: int, round_d: int) -> tuple[int, int]:
    """(rows, elements) of (B, H, N, D), N and D rounded up."""
    b, h, n, d = shape
    rows = b * h * -(-n // round_n) * round_n
    return rows, rows * -(-d // round_d) * round_d


# --- operators with a rule of their own ------------------------------------------------------------------------------


def flash(q: torch.Tensor, k: torch.Tensor, *_, card) -> int:
    """Bytes of the parts' float32 out and lse in FlashAttention-2's forward: the rule of its num_splits_heuristic.

    Where there are too few queries to fill the card it splits the keys: into as few parts as give 85 % of the best use
    of the card's multiprocessors, twice their number counted; none where the blocks of 64 queries fill 80 % of them
    already (flash_api.cpp of torch 2.11).
    """
    b, h, n, d = q.shape
    units, filled = b * h * -(-n // 64), 2 * card.multiprocessors
    blocks = -(-k.shape[2] // (256 if d <= 64 else 128 if d <= 128 else 64))
    if units >= 0.8 * filled:
        return 0
    parts = [s for s in range(1, min(128, filled, blocks) + 1) if s == 1 or -(-blocks // s) != -(-blocks // (s - 1))]
    use = {s: units * s / filled / -(-units * s // filled) for s in parts}
    best = next(s for s in parts if use[s] >= 0.85 * max(use.values()))
    rows, elements = sizes(q.shape, 1, 32 if d <= 128 else 64)
    return 0 if best == 1 else best * 4 * (rows + elements)


def flash_backward(_, q: torch.Tensor, *__, card) -> list[int]:
    """The steps of FlashAttention-2's backward: delta, a float32 a row, and dq in float32 (flash_api.cpp)."""
    rows, elements = sizes(q.shape, 128, 32 if q.shape[3] <= 128 else 64)
    return [4 * rows, 4 * elements]


def efficient(q: torch.Tensor, *_, card) -> int:
    """Bytes of the float32 out that the memory-efficient forward sums in, where 16 bits do not stay in registers."""
    return 4 * q.numel() if q.element_size() == 2 and q.shape[3] > 128 else 0


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


def softmax_backward(grad: torch.Tensor, *_, card) -> int:
    """Bytes of grad * output, which the kernel is given (SoftMax.cu of torch 2.11)."""
    return grad.numel() * grad.element_size()


LARGE_SHARED = ((8, 0), (9, 0), (10, 0))  # whose blocks may have enough shared memory for tiles of 128 queries
RULES = {
    "_scaled_dot_product_flash_attention": flash, "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward, "_softmax_backward_data": softmax_backward,
}  # fmt: skip


# --- measuring, on a card --------------------------------------------------------------------------------------------

SHAPES = (
    (1, 2048, 4, 64), (1, 8192, 12, 64), (2, 4096, 8, 64), (3, 1000, 4, 64), (1, 5000, 6, 64), (1, 4096, 8, 128),
    (2, 3000, 4, 128), (1, 8192, 16, 128), (1, 4096, 2, 32), (1, 16384, 8, 32), (1, 3001, 2, 80), (2, 2048, 4, 80),
    (1, 3000, 4, 160), (2, 2048, 4, 256),
)  # B, N, H, D  # fmt: skip


def measure() -> list[dict]:
    """A row an operator, dtype and shape (B, H, N, D): the bytes requested at its peak beyond inputs and results."""
    rows = []
    for name, dtypes, make in operators():
        for dtype in dtypes:
            for b, n, h, d in SHAPES:
                call = make((b, n, h, d), dtype)
                call()  # handles, plans and workspaces that stay
                rows.append({"operator": name, "dtype": str(dtype).removeprefix("torch."), "shape": (b, h, n, d),
                             "scratch_bytes": beyond_results(call)})  # fmt: skip
    return rows


def beyond_results(call: Callable) -> int:
    """Requested bytes at the peak of a call, less what is requested after it, when its results are alive."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    statistics = torch.cuda.memory_stats()
    del result
    return statistics["requested_bytes.all.peak"] - statistics["requested_bytes.all.current"]


def operators():
    """(name, dtypes, make), where make(shape (B, N, H, D), dtype) gives a call without arguments."""
    half, all_ = (torch.bfloat16, torch.float16), (torch.bfloat16, torch.float32)

    def random(shape, dtype, count):
        b, n, h, d = shape
        return [torch.randn(b, n, h, d, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(count)]

    def forward(op, *rest):
        def make(shape, dtype):
            q, k, v = random(shape, dtype, 3)
            return lambda: op(q, k, v, *rest)

        return make

    def backward(op, forward):
        def make(shape, dtype):
            q, k, v, grad = random(shape, dtype, 4)
            out, lse, *_ = forward(q, k, v)
            seed = torch.zeros((), dtype=torch.int64, device="cuda" if op is cudnn_backward else "cpu")
            return lambda: op(grad, q, k, v, out, lse, seed, shape[1])

        return make

    def cudnn_backward(grad, q, k, v, out, lse, seed, n):
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, seed, seed, None, None, None, n, n, 0.0, False
        )

    def flash_backward(grad, q, k, v, out, lse, seed, n):
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, n, n, 0.0, False, seed, seed
        )

    def efficient_backward(grad, q, k, v, out, lse, seed, n):
        return aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], False
        )

    cudnn, flash = aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_flash_attention
    efficient = aten._scaled_dot_product_efficient_attention
    return [
        ("_scaled_dot_product_cudnn_attention", half, forward(cudnn, None, True)),
        ("_scaled_dot_product_flash_attention", half, forward(flash)),
        ("_scaled_dot_product_efficient_attention", all_, forward(efficient, None, True)),
        ("_scaled_dot_product_cudnn_attention_backward", half,
         backward(cudnn_backward, lambda q, k, v: cudnn(q, k, v, None, True))),
        ("_scaled_dot_product_flash_attention_backward", half, backward(flash_backward, flash)),
        ("_scaled_dot_product_efficient_attention_backward", all_,
         backward(efficient_backward, lambda q, k, v: efficient(q, k, v, None, True))),
    ]  # fmt: skip


def fit(rows: list[dict]) -> dict:
    """The table from `measure`'s rows. Of the roundings the finest that fits is taken, whole bytes where they fit.

    worst: the largest deviation, over the bytes of q.
    """
    operators: dict = {}
    for name, dtype in dict.fromkeys((row["operator"], row["dtype"]) for row in rows):
        some = [row for row in rows if (row["operator"], row["dtype"]) == (name, dtype)]
        y = np.array([row["scratch_bytes"] for row in some], dtype=float)
        if name in RULES or not y.any():
            continue
        q_bytes = np.array([np.prod(row["shape"]) for row in some]) * getattr(torch, dtype).itemsize
        best = None
        for round_n, round_d in itertools.product((1, 32, 64, 128), (1, 32, 64)):
            x = np.array([(1, *sizes(row["shape"], round_n, round_d)) for row in some], dtype=float)
            found = np.linalg.lstsq(x / q_bytes[:, None], y / q_bytes, rcond=None)[0]
            for bytes_each in (found.round(), found):
                worst = float(np.max(np.abs(x @ bytes_each - y) / q_bytes))
                if best is None or worst < best["worst"] - 1e-4:
                    best = {"round_n": round_n, "round_d": round_d, "worst": worst}
                    best |= zip(("constant_bytes", "row_bytes", "element_bytes"), map(float, bytes_each), strict=True)
        operators.setdefault(name, {})[dtype] = best
    return operators


def write() -> dict:
    """Measure on this machine's card, fit, and write the table; returns it."""
    from workbench import machine

    rows = measure()
    described = machine.describe()
    found = {x: described[x] for x in ("device", "torch", "cuda", "driver")} | {"operators": fit(rows)}
    TABLE.write_text(json.dumps(found, indent=1) + "\n")
    table.cache_clear()
    return found | {"rows": rows}
