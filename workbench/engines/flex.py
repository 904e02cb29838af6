"""Block-sparse, neighborhood and predicate attention by FlexAttention (arXiv 2412.05496), torch's compiled kernel.

The kernel walks a table of key blocks for each block of queries, and asks a mask function about the pairs of those
blocks that are visible in part. Both come from the pattern: the tables from `Pattern.blocks`, so that nothing of the
size N x N is made, and the mask from its predicate, with the tensors it looks up padded past the last block. Shapes and
scale are compiled in (a captured tensor of symbolic length does not compile on a CPU): new ones cost a compilation.

Dimensions: B batch, N keys, Nq queries (the last Nq of the N positions), H query heads, G key heads, D head_dim. h, i
and j are a query head and absolute positions of a query and a key.
"""

import functools
import importlib.util
import os
import sys
import sysconfig
from typing import NamedTuple

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from workbench.engines.torch.fused import GRID
from workbench.patterns import BlockSparse, Neighborhood, Predicate
from workbench.patterns.base import Blocks
from workbench.patterns.listed import repeats

TILE = 128  # CUDA: the largest tile of torch's kernels, forward and backward; a block is a whole number of tiles
COMPILATIONS = 1 << 20  # in effect no limit: past torch's own it would run unfused, with an N x N tensor


def why_not(q: Tensor, k: Tensor, v: Tensor, pattern, return_lse: bool = False) -> str | None:
    """Why FlexAttention does not run this call, in a sentence, or None.

    q (B, Nq, H, D), k and v (B, N, G, D).
    """
    (b, _, h, d), n = q.shape, k.shape[1]
    if q.dtype == torch.float64:
        return "FlexAttention has no float64 kernel"
    if q.device.type not in ("cpu", "cuda"):
        return f"FlexAttention runs on a CPU or CUDA here, not on {q.device.type}"
    if repeats(pattern, n, h):
        return f"{pattern.name} counts how often a query sees a key, which a mask cannot say"
    if q.device.type == "cpu":
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            return "FlexAttention has no backward on a CPU (under torch.no_grad() it runs there)"
        if return_lse:
            return "FlexAttention returns no lse on a CPU"
        return no_cpu_kernel()
    if torch.cuda.get_device_capability(q.device) < (7, 0):
        return "FlexAttention's CUDA kernels are written in Triton, which needs compute capability 7.0"
    if importlib.util.find_spec("triton") is None:
        return "FlexAttention's CUDA kernels are written in Triton, which is not installed"
    if not 16 <= d <= 256:
        return f"FlexAttention's CUDA kernels want a head_dim of 16 to 256, not {d}"
    if max(b, h) > GRID:
        return f"FlexAttention's CUDA kernels want at most {GRID} sequences and heads, not {b} and {h}"
    bq, bk = block_size = pattern.block_of()
    if bq % TILE or bk % TILE:
        return f"FlexAttention's CUDA kernels walk tiles of up to {TILE}: blocks of {block_size} are no multiple of it"
    return None


def no_cpu_kernel() -> str | None:
    """Why this machine cannot build FlexAttention's CPU kernel, or None."""
    if sys.platform == "darwin" or not torch.cpu._is_avx2_supported():
        return "FlexAttention's CPU kernel wants Linux and AVX2"
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        cpp_builder.get_cpp_compiler()
    except InvalidCxxCompiler:
        return "FlexAttention compiles its CPU kernel, and there is no C++ compiler here (Debian's package is g++)"
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        return "FlexAttention compiles its CPU kernel, and Python.h is missing here (Debian's package is python3-dev)"
    return None


class CannotCompile(ValueError):
    """torch cannot compile what a pattern's own function does; known only once it has tried."""


@torch.compiler.disable
def forward(q: Tensor, k: Tensor, v: Tensor, pattern, scale: float, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """out (B, Nq, H, D) and, with return_lse, lse (B, H, Nq) float32, from q (B, Nq, H, D), k and v (B, N, G, D).

    Both are differentiable on CUDA. Wants `why_not` to be None; ValueError where torch cannot compile the pattern.
    """
    if q.numel() == 0:
        out = q * (k.sum() + v.sum())  # nothing, and zero gradients
        return out, out.sum(-1).transpose(1, 2).float() if return_lse else None
    if q.device.type == "cpu":
        q, k, v = q.detach(), k.detach(), v.detach()  # refused there with requires_grad, even under no_grad
    plan = plan_of(pattern, q, k)
    queries = pad(q, (0, 0, 0, 0, plan.front, 0)) if plan.front else q
    q_, k_, v_ = (x.transpose(1, 2) for x in (queries, k, v))  # (B, heads, positions, D)
    limits = {"recompile_limit": COMPILATIONS, "accumulated_recompile_limit": COMPILATIONS}
    grad = torch.is_grad_enabled() and q.device.type == "cuda"  # one compilation on a CPU, whatever the mode
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, **limits), torch.set_grad_enabled(grad):
        try:
            out, lse = compiled()(q_, k_, v_, plan.mask, scale, return_lse, plan.options)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise CannotCompile(
                f"backend='flex': torch cannot compile {pattern!r}, another may run it: {reason}"
            ) from error
    out = out[:, :, plan.front :].transpose(1, 2)
    return out, lse[:, :, plan.front :] if return_lse else None


def attend(q, k, v, mask: BlockMask, scale: float, return_lse: bool, options: dict):
    """What is compiled: (out (B, H, queries, D), lse (B, H, queries) or None)."""
    grouped = q.shape[1] != k.shape[1]
    options = dict(options)
    if not return_lse:
        return flex_attention(q, k, v, None, mask, scale, grouped, kernel_options=options), None
    out, aux = flex_attention(
        q, k, v, None, mask, scale, grouped, kernel_options=options, return_aux=AuxRequest(lse=True)
    )
    return out, aux.lse


@functools.cache
def compiled():
    return torch.compile(attend, dynamic=False, fullgraph=True)


class Plan(NamedTuple):
    """mask: the tables and the mask function. front: zero queries put before the first, so that blocks start where the
    pattern's do. options: for the kernel."""

    mask: BlockMask
    front: int
    options: dict


def plan_of(pattern, q: Tensor, k: Tensor) -> Plan:
    """The plan for these sizes, kept with the pattern: a predicate's blocks take N^2 evaluations to find."""
    key = (k.shape[1], q.shape[1], q.shape[2], k.shape[2], str(q.device))
    return pattern.kept("flex", key, lambda: make_plan(pattern, *key))


def make_plan(pattern, n: int, nq: int, heads: int, key_heads: int, device: str) -> Plan:
    cpu = torch.device(device).type == "cpu"
    block_size = bq, bk = pattern.block_of()
    blocks = [one.blocks(n, heads, nq, block_size) for one in pattern.each()]
    rows = blocks[0].rows
    first = n - nq if rows == 1 else blocks[0].first * bq  # the position of the kernel's query 0
    front = n - nq - first
    mask = BlockMask(
        (nq + front, n),
        *key_tables(blocks, device, wide=cpu),
        *((None,) * 4 if cpu else query_tables(blocks, device)),  # for the backward, which a CPU does not have
        block_size,
        mask_mod(visible_of(pattern, n, heads, n + max(bq, bk), device), first),
    )
    if cpu:
        # For a single query torch would take another kernel, which returns NaN where it sees no key; this prevents it.
        options = {"PARTITION_SIZE": 1 << 20}
    else:
        # For few queries torch takes another kernel, which fails where they are more than a tile has rows. And torch
        # takes every length that is a multiple of 128 to end with a whole block, which is wrong for larger blocks.
        options = {"FORCE_USE_FLEX_ATTENTION": (nq + front) * heads // key_heads > TILE}
        if n % bk or (nq + front) % bq:
            options["IS_DIVISIBLE"] = False
    return Plan(mask, front, options)


def key_tables(blocks: list[Blocks], device, wide: bool = False) -> list[Tensor]:
    """The key blocks of each row of queries, from the blocks of each batch entry (or of all: one).

    How many are visible in part, int32 (batch, layouts, rows), and which, (batch, layouts, rows, most); then the same
    for those that are visible as a whole. wide: with a column for every key block there is (see `ragged`).
    """
    one = blocks[0]
    shape = len(blocks), one.layouts, one.rows
    return ragged(entries(blocks), shape, one.cols, device, wide)


def query_tables(blocks: list[Blocks], device) -> list[Tensor]:
    """The rows of queries that see each key block: what `key_tables` returns, transposed."""
    one, swapped = blocks[0], []
    for line, column in entries(blocks):
        line, row = line // one.rows * one.cols + column, line % one.rows
        line, order = line.sort(stable=True)
        swapped.append((line, row[order]))
    return ragged(swapped, (len(blocks), one.layouts, one.cols), one.rows, device)


def entries(blocks: list[Blocks]) -> list[tuple[Tensor, Tensor]]:
    """(row, counted on through layouts and batch entries; key block) of the partial blocks, and of the full ones."""
    number = torch.cat([x.starts.diff() for x in blocks])
    line = torch.arange(len(number)).repeat_interleave(number)
    column, full = torch.cat([x.columns for x in blocks]), torch.cat([x.full for x in blocks])
    return [(line[kind], column[kind]) for kind in (~full, full)]


def ragged(parts, shape: tuple[int, int, int], most: int, device, wide: bool = False) -> list[Tensor]:
    """Two lists of (line, value), by ascending line, as the tables of `key_tables`.

    Both get the width of the longest line (torch 2.11 reads one table at the other's strides), rounded up to a power of
    two: a layout of about the same size then needs no other compilation. wide: torch's CPU kernel is not compiled for
    fewer columns than `most`, of which it reads a line's own, so lines of that length overlap.
    """
    lines = shape[0] * shape[1] * shape[2]
    numbers = [torch.bincount(line, minlength=lines) for line, _ in parts]
    width = min(most, 1 << (max(1, *(int(x.max()) for x in numbers)) - 1).bit_length())
    stride = (shape[1] * shape[2] * width, shape[2] * width, width, 1)
    out = []
    for (line, value), number in zip(parts, numbers, strict=True):
        place = torch.arange(len(line)) - (number.cumsum(0) - number)[line]
        flat = torch.zeros(lines * width + wide * (most - width), dtype=torch.int32)
        flat[line * width + place] = value.to(torch.int32)
        table = flat.to(device).as_strided((*shape, most if wide else width), stride)
        out += [number.to(torch.int32).view(shape).to(device), table]
    return out


def mask_mod(visible, first: int):
    """FlexAttention's mask function, of positions within the call, from fn(h, i, j) of absolute ones."""
    return lambda b, h, q, k: visible(h, q + first, k)


def visible_of(pattern, n: int, heads: int, end: int, device):
    """fn(h, i, j) -> bool, right for the pairs of visible blocks, and defined for all positions below `end`."""
    if isinstance(pattern, Neighborhood):
        places = pattern.coordinates(torch.arange(n))
        if pattern.plain:
            return near([padded(x, end, device) for x in places], pattern.radius)
        axes = [(place[x], low[place[x]], high[place[x]])
                for x, (place, low, high) in zip(places, pattern.windows, strict=True)]  # fmt: skip
        return windowed([[padded(x, end, device) for x in tables] for tables in axes])
    if isinstance(pattern, BlockSparse):
        return refined(pattern.causal, None, n)
    if isinstance(pattern, Predicate):
        return refined(pattern.causal, pattern.fn, n)
    return refined(False, lambda h, i, j: pattern.count(h, i, j, n, heads), n)


def padded(x: Tensor, end: int, device) -> Tensor:
    """A lookup table of positions, int32, for all positions below `end`."""
    return pad(x.to(torch.int32), (0, end - len(x))).to(device)


def near(places: list[Tensor], radius: tuple[int, ...]):
    def visible(h, i, j):
        seen = i >= 0
        for place, r in zip(places, radius, strict=True):
            seen = seen & ((place[i] - place[j]).abs() <= r)
        return seen

    return visible


def windowed(axes: list[list[Tensor]]):
    def visible(h, i, j):
        seen = i >= 0
        for place, low, high in axes:
            seen = seen & (place[j] >= low[i]) & (place[j] <= high[i])
        return seen

    return visible


def refined(causal: bool, fn, n: int):
    def visible(h, i, j):
        seen = i >= 0
        if causal:
            seen = j <= i
        if fn is not None:  # a user's function may look up tensors of n entries, and wants int64
            seen = seen & fn(h.to(torch.int64), i.to(torch.int64).clamp(max=n - 1), j.to(torch.int64).clamp(max=n - 1))
        return seen

    return visible
