"""The kernels of `hopper`: compiled when first called, kept in this process and on disk, and called on tensors.

Dimensions: B sequences, N keys, Nq queries, H query heads, G key heads, D head_dim.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from pathlib import Path

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from flash_attn.cute import cache_utils, interface
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.utils import AuxData
from quack.compile_utils import make_fake_tensor

from workbench.engines.fa4 import hopper
from workbench.engines.fa4.lists import Lists
from workbench.engines.fa4.plans import Variant
from workbench.patterns.tile_order import TILE

DTYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}


@functools.cache
def _cache():
    """Compiled kernels on disk, apart for each version of the package and of this folder."""
    here = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    mark = hashlib.sha256(here + cache_utils._compute_source_fingerprint().encode()).hexdigest()[:32]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache_utils.JITPersistentCache(root / "attention-workbench" / mark)


@functools.cache
def compiled(kind: str, *key):
    """The kernel `kind` ("forward", "backward" or "convert") of a key, compiled where it is not on disk."""
    name = (kind, *map(str, key))
    cache = _cache()
    if name not in cache:
        if sys.stderr.isatty():
            print(f"compiling FlashAttention-4, {kind}, once: about 15 s", file=sys.stderr, flush=True)
        cache[name] = {"forward": _forward, "backward": _backward, "convert": _convert}[kind](*key)
    return cache[name]


def _compile(kernel, *arguments):
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, *arguments, stream, options="--enable-tvm-ffi")


class Fake:
    """Tensors without data, of sizes and strides that only a call knows."""

    def __init__(self, variant: Variant):
        self.variant, self.dtype = variant, DTYPES[variant.dtype]
        sym = cute.sym_int
        self.b, self.nq, self.n, self.h = 1 if variant.natural else sym(), sym(), sym(), sym()
        self.g = self.h if variant.group == 1 else sym()
        self.d = sym()

    def queries(self):
        return make_fake_tensor(self.dtype, (self.b, self.nq, self.h, self.d), divisibility=8)

    def keys(self):
        return make_fake_tensor(self.dtype, (self.b, self.n, self.g, self.d), divisibility=8)

    def rows(self, heads, divisibility: int):
        return make_fake_tensor(Float32, (self.b, heads, cute.sym_int()), divisibility=divisibility)

    def lists(self) -> BlockSparseTensors | None:
        if not self.variant.listed:
            return None
        sizes = [cute.sym_int() for _ in range(3)]
        some = [make_fake_tensor(Int32, (*sizes, cute.sym_int())[:rank]) for rank in (3, 4, 3, 4)]
        return BlockSparseTensors(*some)


def _mask(variant: Variant) -> hopper.Mask | None:
    return None if variant.mask in (None, "none") else hopper.Mask(variant.mask, variant.order)


def _forward(variant: Variant):
    listed, d = variant.listed, variant.head_dim
    size = TILE if listed else None
    tile = interface._tile_size_fwd_sm90(d, d, variant.causal, bool(variant.band), sparse_block_size_q=size)
    kernel = hopper.Forward(
        DTYPES[variant.dtype], d, d, variant.group, is_causal=variant.causal, is_local=bool(variant.band),
        pack_gqa=False, tile_m=tile.m_block_size, tile_n=tile.n_block_size, num_stages=2, num_threads=384,
        Q_in_regs=False,
        intra_wg_overlap=tile.intra_wg_overlap, mma_pv_is_rs=tile.mma_pv_is_rs, mask_mod=_mask(variant),
        weighed=variant.weighed, order=variant.order if variant.natural else None, back=variant.band == "back",
    )  # fmt: skip
    fake = Fake(variant)
    lse = fake.rows(fake.h, 1)
    return _compile(
        kernel, fake.queries(), fake.keys(), fake.keys(), fake.queries(), lse, Float32(1.0),
        Int32(1) if variant.band else None, fake.lists(), _given(variant, Int32(1)),
    )  # fmt: skip


def _backward(variant: Variant):
    listed, d = variant.listed, variant.head_dim
    tile = _backward_tile(variant)
    kernel = hopper.Backward(
        DTYPES[variant.dtype], d, d, variant.group, variant.causal, is_local=False, deterministic=False,
        tile_m=tile.m_block_size, tile_n=tile.n_block_size, Q_stage=tile.num_stages_Q, dO_stage=tile.num_stages_dO,
        PdS_stage=tile.num_stages_PdS, SdP_swapAB=tile.SdP_swapAB, dKV_swapAB=tile.dKV_swapAB,
        dQ_swapAB=tile.dQ_swapAB, AtomLayoutMSdP=tile.AtomLayoutMSdP, AtomLayoutNdKV=tile.AtomLayoutNdKV,
        AtomLayoutMdQ=tile.AtomLayoutMdQ, num_threads=(tile.num_wg + 1) * 128, mask_mod=_mask(variant),
        q_subtile_factor=TILE // tile.m_block_size if listed else 1, dQ_single_wg=tile.dQ_single_wg,
        weighed=variant.weighed, order=variant.order if variant.natural else None,
    )  # fmt: skip
    fake = Fake(variant)
    dk, dv = (fake.keys(), fake.keys()) if variant.group == 1 else (fake.rows(fake.g, 4), fake.rows(fake.g, 4))
    return _compile(
        kernel, fake.queries(), fake.keys(), fake.keys(), fake.queries(), fake.rows(fake.h, 4), fake.rows(fake.h, 4),
        fake.rows(fake.h, 4), dk, dv, Float32(1.0), fake.lists(), _given(variant, Int32(1)),
    )  # fmt: skip


def _convert(dtype: torch.dtype, head_dim: int, rows: int, threads: int, layout: int, swapped: bool):
    return interface._compile_bwd_postprocess(
        DTYPES[dtype], head_dim, rows, threads, layout, swapped, False, False, False, 1, hopper.ARCH
    )


# --- calls ------------------------------------------------------------------------------------------------------------


def forward(variant: Variant, q, k, v, out, lse, scale: float, scalar: int | None, lists) -> None:
    """Write out (B, Nq, H, D) and lse (B, H, Nq) from q, k and v (B, N, G, D)."""
    reach = scalar if variant.band else None
    compiled("forward", variant)(q, k, v, out, lse, scale, reach, _tensors(lists), _given(variant, scalar))


def backward(variant: Variant, q, k, v, grad, lse2, delta, dq, dk, dv, scale: float, scalar: int | None, lists) -> None:
    """Add to the sums of dq, (B, H, places * D rounded up to 32) in an order of the kernel's, and write dk and dv.

    lse2, delta (B, H, places): `places.rows`. Where several query heads share a key head, dk and dv are sums, too.
    """
    found = _tensors(lists), _given(variant, scalar)
    compiled("backward", variant)(q, k, v, grad, lse2, delta, dq, dk, dv, scale, *found)


def convert(variant: Variant, of_queries: bool, sums, to, scale: float) -> None:
    """Write the sums, times scale, as the kernel of queries or of keys leaves them, to (B, places, heads, D)."""
    compiled("convert", *conversion(variant, of_queries))(sums, to, scale, None, None)


def conversion(variant: Variant, of_queries: bool) -> tuple:
    """What the kernel that converts sums is compiled for."""
    tile, d = _backward_tile(variant), variant.head_dim
    if of_queries:
        threads = 128 if tile.dQ_single_wg else tile.num_wg * 128
        return variant.dtype, d, tile.m_block_size, threads, tile.AtomLayoutMdQ, tile.dQ_swapAB
    return variant.dtype, d, tile.n_block_size, tile.num_wg * 128, tile.AtomLayoutNdKV, tile.dKV_swapAB


def _backward_tile(variant: Variant):
    d, size = variant.head_dim, TILE if variant.listed else None
    return interface._tile_size_bwd_sm90(d, d, variant.causal, False, sparse_block_size_q=size)


def _given(variant: Variant, scalar) -> AuxData:
    """What the mask is given: the reach of a window (and how many sinks), or the length of the last segment."""
    if variant.mask in ("window sinks", "back sinks"):
        return AuxData(None, scalar if isinstance(scalar, tuple) else (scalar, scalar))
    return AuxData(None, (scalar,) if variant.mask in ("window", "back", "padding") else None)


def _tensors(lists: Lists | None) -> tuple | None:
    return None if lists is None else (*lists, None, None, None, None)
