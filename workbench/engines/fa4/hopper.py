"""FlashAttention-4's kernels for Hopper, changed in two ways: a block of a list may count several times, and tokens may
lie in natural order while the kernel walks them in tile order.

The package is flash_attn.cute (FlashAttention-3's algorithm, arXiv 2407.08608, in the CuTe DSL), of the version that
`fa4_backend` pins. Its modules of kernels are loaded a second time under names of our own; only those copies change:

- An entry of a list says how often its block counts (`lists.SHIFT`). Loads take the number alone; the consumers add
  log2(times) / scale_log2 to the scores, which is log(times) after scaling. FlashAttention-4 computes exp2(score *
  scale_log2 - max), so each weight is multiplied by `times`, in the forward and in the backward alike.
- A sequence mode becomes (places of a residue, residues, segments) with the strides of natural order (`tile_ordered`):
  the kernel's tile of 128 places is then one strided box for the tensor memory accelerator, and nothing is copied.

Dimensions: B batch, N tokens, H query heads, G key heads, D head_dim. Nothing here needs a card until a kernel is run.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.mask import AttentionMask
from flash_attn.cute.seqlen_info import SeqlenInfoQK
from flash_attn.cute.utils import AuxData, scalar_to_ssa

from workbench.engines.fa4.lists import NUMBER, SHIFT
from workbench.patterns.tile_order import TILE

ARCH = 90


def _copy(name: str, *changes: tuple[str, str, str]):
    """A module of the package, loaded again under a name of ours.

    changes: (after, old, new): in its text, the first `old` after `after` is replaced. The text is kept in a file,
    since the DSL reads functions from theirs.
    """
    source = Path(importlib.util.find_spec(f"flash_attn.cute.{name}").origin)
    text = source.read_text()
    for after, old, new in changes:
        at = text.index(old, text.index(after))
        text = text[:at] + new + text[at + len(old) :]
    if changes:
        source = Path(_folder.name, f"{name}.py")
        source.write_text(text)
    spec = importlib.util.spec_from_file_location(f"fa4_{name}", source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_folder = tempfile.TemporaryDirectory(prefix="workbench-fa4-")  # until the process ends
# The forward masks all blocks of causal attention and of windows, also those in which nothing is hidden.
MASKED = "mask_fn=partial(mask_fn, mask_mod=self.mask_mod, mask_seqlen=False),"
walks, backward = map(_copy, ("block_sparse_utils", "flash_bwd_sm90"))
forward = _copy("flash_fwd_sm90", ("# The remaining iterations have no masking", MASKED, "mask_fn=None,"))


class Lengths:
    """SeqlenInfoQK for sequence modes of several modes."""

    @staticmethod
    def create(batch_idx, seqlen_q_static, seqlen_k_static, *args, **options):
        q, k = cute.size(seqlen_q_static), cute.size(seqlen_k_static)
        return SeqlenInfoQK.create(batch_idx, q, k, *args, **options)


forward.SeqlenInfoQK = backward.SeqlenInfoQK = Lengths


# --- which pairs of a partial block are hidden ------------------------------------------------------------------------


class Mask(NamedTuple):
    """What hides pairs of the blocks of partial lists, by the package's own masks of a row's last and first column.

    kind: "causal"; "window", a reach to both sides, "back", to keys before the query alone; "later", causality between
    two runs of the tile order that begin together; "padding", at the end of the last segment's residues. order:
    (segment, rate) of the tile order. "window sinks" and "back sinks": the first tokens are visible besides.
    """

    kind: str
    order: tuple[int, int] | None

    def __call__(self, *_):
        raise NotImplementedError("marks partial blocks; it is applied block by block")

    def seen(self, _batch, _head, i, j, lengths, _tensors, scalars):
        """Which pairs of a window with sinks are visible, for the package's mask by a function of places."""
        shift, zero, reach, sinks = (
            scalar_to_ssa(x, Int32) for x in (lengths.seqlen_k - lengths.seqlen_q, 0, *scalars)
        )  # fmt: skip
        apart = i + shift - j
        if self.kind == "back sinks":
            return ((apart <= reach) | (j < sinks)) & (apart >= zero)
        return ((apart <= reach) & (apart + reach >= zero)) | (j < sinks)

    def apply(self, of: AttentionMask, acc_S, m_block, n_block, aux: AuxData, **more):
        """Set the hidden scores of a block to -inf. aux: the reach (and how many sinks), or the tokens of the last
        segment."""
        given = None if aux.scalars is None else aux.scalars[0]
        hide = {"mask_seqlen": True, "mask_causal": False, "mask_local": False} | more
        if self.kind == "causal":
            of.apply_mask(acc_S, m_block=m_block, n_block=n_block, **hide | {"mask_causal": True})
        elif self.kind in ("window", "back"):
            ahead = given if self.kind == "window" else Int32(0)
            of = replace(of, window_size_left=given, window_size_right=ahead)
            of.apply_mask(acc_S, m_block=m_block, n_block=n_block, **hide | {"mask_local": True})
        elif self.kind in ("window sinks", "back sinks"):
            of.apply_mask(acc_S, m_block=m_block, n_block=n_block, mask_mod=self.seen, aux_data=aux, **hide)
        elif self.kind == "later":  # of one run of places: t + r i sees u + r j where j <= i - (u > t)
            t, u = self.residue(m_block * of.tile_m), self.residue(n_block * of.tile_n)
            lengths = of.seqlen_info
            shift = lengths.seqlen_q - lengths.seqlen_k - cutlass.min(cutlass.max(u - t, 0), 1)
            of = replace(of, window_size_right=shift)
            of.apply_mask(acc_S, m_block=m_block % (TILE // of.tile_m), n_block=Int32(0), **hide | {"mask_local": True})
        elif self.kind == "padding":
            place = n_block * of.tile_n
            segment, rate = self.order
            there = (given - self.residue(place) + rate - 1) // rate - place % (segment // rate)
            of = replace(of, seqlen_info=replace(of.seqlen_info, seqlen_k=there))
            of.apply_mask(acc_S, m_block=m_block, n_block=Int32(0), **hide)

    def residue(self, place):
        segment, rate = self.order
        return place % segment // (segment // rate)


# --- lists, and blocks that count several times -----------------------------------------------------------------------


@cute.jit
def weigh(acc_S: cute.Tensor, times: Int32, scale_log2: Float32):
    """Add log2(times) / scale_log2 to the scores of a block."""
    if times > 1:
        bias = cute.math.log2(Float32(times), fastmath=True) / scale_log2
        for i in cutlass.range(cute.size(acc_S), unroll_full=True):
            acc_S[i] = acc_S[i] + bias


def hide(mask, acc_S, m_block, n_block, **options):
    """The mask of a block as the kernels call it, a partial of AttentionMask.apply_mask."""
    of, keywords = mask.func.__self__, mask.keywords | options
    kind = keywords.pop("mask_mod", None)
    keywords |= {"m_block": m_block, "n_block": n_block}
    if kind is None:
        of.apply_mask(acc_S, **keywords)
        return
    same = {x: keywords[x] for x in ("batch_idx", "head_idx", "thr_mma")}
    kind.apply(of, acc_S, m_block, n_block, keywords["aux_data"], **same)


def produce(*args):
    args = list(args)

    def numbered(load):
        return lambda src_idx, producer_state: load(src_idx=src_idx & NUMBER, producer_state=producer_state)

    args[6:8] = map(numbered, args[6:8])  # load_K, load_V
    return walks.produce_block_sparse_loads(*args)


def consume(*args):
    args = list(args)
    begin, mask = args[8], args[10]

    def mask_and_weigh(acc_S, n_block, **options):
        hide(mask, acc_S, mask.keywords["m_block"], n_block & NUMBER, **options)
        if begin.func.__self__.weighed:
            weigh(acc_S, n_block >> SHIFT, begin.keywords["softmax"].scale_log2)

    args[10] = mask_and_weigh
    return walks.consume_block_sparse_loads(*args)


forward.produce_block_sparse_loads, forward.consume_block_sparse_loads = produce, consume


class Halves(NamedTuple):
    """How an entry of the backward is read: a block of 128 queries is `factor` tiles, and it is multiplied by that."""

    factor: int

    def number(self, tile):
        return tile & ((self.factor << SHIFT) - 1)

    def times(self, tile):
        return tile >> (SHIFT + self.factor.bit_length() - 1)


LAST = 1 << 30  # in place of the number of tiles, which the package compares entries with


def produce_backward(*args, q_subtile_factor, m_block_max, **options):
    read, args = Halves(q_subtile_factor), list(args)

    def numbered(load):
        return lambda m_block, **more: load(read.number(m_block), **more)

    args[10:14] = map(numbered, args[10:14])  # load_Q, load_dO, load_LSE, load_dPsum
    cute.arch.griddepcontrol_wait()  # the package's own lists do not wait for the kernel that made lse and dpsum
    return walks.produce_block_sparse_q_loads_bwd_sm90(
        *args, q_subtile_factor=q_subtile_factor, m_block_max=Int32(LAST), **options
    )


def consume_backward(*args, q_subtile_factor, m_block_max, **options):
    read, args = Halves(q_subtile_factor), list(args)
    step = args[6]

    def step_once(m_block, *rest, mask_fn, **more):
        def mask_and_weigh(acc_S, m_block):
            hide(mask_fn, acc_S, read.number(m_block), mask_fn.keywords["n_block"])
            if step.func.__self__.weighed:
                weigh(acc_S, read.times(m_block), step.keywords["softmax_scale_log2"])

        return step(m_block, *rest, mask_fn=mask_and_weigh, **more)

    args[6] = step_once
    return walks.consume_block_sparse_mma_bwd_sm90(
        *args, q_subtile_factor=q_subtile_factor, m_block_max=Int32(LAST), **options
    )


store_one = walks._store_one_dQaccum_sm90


def store_backward(*args, q_subtile_factor, m_block_max, **options):
    read = Halves(q_subtile_factor)
    walks._store_one_dQaccum_sm90 = lambda tile, *rest: store_one(read.number(tile), *rest)  # while this is traced
    cute.arch.griddepcontrol_wait()
    walks.dQaccum_store_block_sparse_bwd_sm90(
        *args, q_subtile_factor=q_subtile_factor, m_block_max=Int32(LAST), **options
    )


backward.produce_block_sparse_q_loads_bwd_sm90 = produce_backward
backward.consume_block_sparse_mma_bwd_sm90 = consume_backward
backward.dQaccum_store_block_sparse_bwd_sm90 = store_backward


# --- tokens in natural order ------------------------------------------------------------------------------------------


align = forward.assume_tensor_aligned  # it knows no sequence modes of several modes: called before they are made
forward.assume_tensor_aligned = backward.assume_tensor_aligned = lambda tensor: tensor


def tile_ordered(x: cute.Tensor, mode: int, segment: int, rate: int) -> cute.Tensor:
    """x with its sequence mode in tile order: (places of a residue, residues, segments), colexicographic."""
    shape, stride = list(x.shape), list(x.stride)
    n, step = shape[mode], stride[mode]
    shape[mode] = (segment // rate, rate, n // segment)
    stride[mode] = (step * rate, step, step * segment)
    return cute.make_tensor(x.iterator, cute.make_layout(tuple(shape), stride=tuple(stride)))


class Forward(forward.FlashAttentionForwardSm90):
    """The forward. weighed: whether entries say how often a block counts; order: (segment, rate) where tokens lie in
    natural order and blocks are those of the tile order; back: whether a reach is to keys before the query alone."""

    def __init__(self, *args, weighed: bool, order: tuple[int, int] | None, back: bool, **options):
        super().__init__(*args, **options)
        self.weighed, self.order, self.back = weighed, order, back

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, scale: Float32,
        reach: Int32 | None, lists: BlockSparseTensors | None, aux: AuxData, stream=None,
    ):  # fmt: skip
        q, k, v, out = [align(x) for x in (q, k, v, out)]
        if const_expr(self.order is not None):
            q, k, v, out = [tile_ordered(x, 1, *self.order) for x in (q, k, v, out)]
            lse = tile_ordered(lse, 2, *self.order)
        ahead = Int32(0) if const_expr(self.back) else reach
        forward.FlashAttentionForwardSm90.__call__(
            self, q, k, v, out, lse, scale, window_size_left=reach, window_size_right=ahead, blocksparse_tensors=lists,
            aux_data=aux, stream=stream,
        )  # fmt: skip


class Backward(backward.FlashAttentionBackwardSm90):
    """The backward of `Forward`: lse, dpsum and dq_sum are in tile order, q, k, v, dout, dk and dv as `order` says."""

    def __init__(self, *args, weighed: bool, order: tuple[int, int] | None, **options):
        super().__init__(*args, **options)
        self.weighed, self.order = weighed, order

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dout: cute.Tensor, lse: cute.Tensor, dpsum: cute.Tensor,
        dq_sum: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor, scale: Float32, lists: BlockSparseTensors | None,
        aux: AuxData, stream=None,
    ):  # fmt: skip
        q, k, v, dout, lse, dpsum, dq_sum, dk, dv = [align(x) for x in (q, k, v, dout, lse, dpsum, dq_sum, dk, dv)]
        if const_expr(self.order is not None):
            q, k, v, dout = [tile_ordered(x, 1, *self.order) for x in (q, k, v, dout)]
            if const_expr(self.qhead_per_kvhead == 1):
                dk, dv = [tile_ordered(x, 1, *self.order) for x in (dk, dv)]
        backward.FlashAttentionBackwardSm90.__call__(
            self, q, k, v, dout, lse, dpsum, dq_sum, dk, dv, scale, aux_data=aux, blocksparse_tensors=lists,
            stream=stream,
        )  # fmt: skip
