"""The checks can fail: kernels degraded on purpose, each in one way that has been seen in the wild, must not pass."""

import math

import pytest
import torch

from tests import tools
from tests.tools import TABLE, Case
from workbench import BlockSparse, Dense, Dilated, Predicate, attention, layouts
from workbench.engines.merge import merge_
from workbench.engines.torch import block_sparse, dilated, fused


def right(q, k, v, pattern):
    return attention(q, k, v, pattern, backend="torch", return_lse=True)


# Each mutant changes the package through `patch`, or returns another run(q, k, v, pattern) -> (out, lse).


def detached_weights(patch):
    def backward(grad, q, k, v, out, lse, pattern, scale):
        totals = [torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v)]
        for piece in dilated.pieces(pattern, k.shape[1], q.shape[1], q.shape[2], k.shape[2]):
            of_rows = (dilated.select(x, piece, piece.queries, piece.heads)[0] for x in (grad, q, totals[0]))
            of_keys = (dilated.select(x, piece, piece.keys, piece.key_heads)[0] for x in (k, v, *totals[1:]))
            (g, q_, dq), (k_, v_, dk, dv) = of_rows, of_keys
            all_lse = dilated.select(lse.transpose(1, 2), piece, piece.queries, piece.heads)[0]
            part, part_lse = fused.forward(q_, k_, v_, piece.causal, scale)
            share = torch.exp(part_lse - all_lse)[..., None]  # treated as a constant
            each = fused.backward((g * share).to(g.dtype), q_, k_, v_, part, part_lse, piece.causal, scale)
            for total, x in zip((dq, dk, dv), each, strict=True):
                total += x
        return tuple(x.to(q.dtype) for x in totals)

    patch.setattr(dilated, "backward", backward)


def a_branch_dropped(patch):
    pieces = dilated.pieces

    def fewer(pattern, *sizes):
        return pieces(Dilated(pattern.segment_lengths[:-1], pattern.dilation_rates[:-1], pattern.causal), *sizes)

    patch.setattr(dilated, "pieces", fewer)


def next_offset(patch):
    slices = dilated.offset_slices

    def shifted(pattern, branch, heads):
        r = pattern.dilation_rates[branch]
        yield from (((offset + 1) % r, members) for offset, members in slices(pattern, branch, heads))

    patch.setattr(dilated, "offset_slices", shifted)


def zero_keys_as_padding(patch):
    def run(q, k, v, pattern):
        n, whole = q.shape[1], math.lcm(*pattern.segment_lengths)
        out, lse = right(*(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -n % whole)) for x in (q, k, v)), pattern)
        return out[:, :n], lse[..., :n]

    return run


def rounded_sums(patch):
    def merge(out, lse, part, part_lse):
        merge_(out, lse, part, part_lse)
        out.copy_(out.to(torch.bfloat16))

    patch.setattr(block_sparse, "ELEMENTS", 1)  # a merge for each block of keys
    patch.setattr(block_sparse, "merge_", merge)


def rounded_gradient_sums(patch):
    backward = block_sparse.backward

    def narrow(*arguments):
        index_add_ = torch.Tensor.index_add_
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(torch.Tensor, "index_add_", lambda t, *a: t.copy_(index_add_(t, *a).to(torch.bfloat16)))
            return backward(*arguments)

    patch.setattr(block_sparse, "ELEMENTS", 1)
    patch.setattr(block_sparse, "backward", narrow)


def a_softmax_a_block(patch):
    def add(out, lse, part, part_lse):
        out += part
        torch.logaddexp(lse, part_lse, out=lse)

    patch.setattr(block_sparse, "ELEMENTS", 1)
    patch.setattr(block_sparse, "merge_", add)


def partial_blocks_unmasked(patch):
    patch.setattr(block_sparse.Grid, "mask", lambda self, s, dtype: None)


def dk_and_dv_swapped(patch):
    backward = dilated.backward
    patch.setattr(dilated, "backward", lambda *x: tuple(backward(*x)[y] for y in (0, 2, 1)))


def key_heads_in_the_wrong_order(patch):
    def run(q, k, v, pattern):
        return right(q, *(x.repeat(1, 1, q.shape[2] // x.shape[2], 1) for x in (k, v)), pattern)

    return run


def with_results(change):
    """A mutant whose out and lse are changed: change(out, lse)."""
    return lambda patch: lambda q, k, v, pattern: change(*right(q, k, v, pattern))


def with_pattern(change):
    """A mutant that attends to another pattern: change(pattern, n, nq, heads)."""
    return lambda patch: lambda q, k, v, x: right(q, k, v, change(x, k.shape[1], q.shape[1], q.shape[2]))


def union_not_multiset(pattern, n, nq, heads):
    count = pattern.multiplicity(n, heads, nq) > 0
    return Predicate(lambda h, i, j: count[h, i, j])


LONGNET = TABLE["dilated-longnet-64-grouped"]
LOCAL = TABLE["local-ragged"]
MANY_BLOCKS = Case("many-key-blocks", lambda: BlockSparse(layouts.strided(1), 4), n=512, nq=8, head_dim=16)
WIDE, NARROW = torch.float64, torch.bfloat16
MUTANTS = {
    "detached weights": (detached_weights, TABLE["dilated-longnet-1-head"], WIDE),
    "detached weights, 16 bits": (detached_weights, TABLE["dilated-longnet-1-head"], NARROW),
    "a branch dropped": (a_branch_dropped, LONGNET, NARROW),
    "union, not multiset": (with_pattern(union_not_multiset), LONGNET, NARROW),
    "next offset": (next_offset, TABLE["dilated-12-heads-5-branches"], torch.float32),
    "zero keys as padding": (zero_keys_as_padding, TABLE["dilated-29-tokens"], NARROW),
    "rounded sums": (rounded_sums, MANY_BLOCKS, NARROW),
    "rounded gradient sums": (rounded_gradient_sums, MANY_BLOCKS, NARROW),
    "a softmax a block": (a_softmax_a_block, MANY_BLOCKS, NARROW),
    "partial blocks unmasked": (partial_blocks_unmasked, LOCAL, NARROW),
    "layout ignored": (with_pattern(lambda x, *_: Dense(x.causal)), TABLE["only-key-block-0"], NARROW),
    "second sequence zero": (
        with_results(lambda out, lse: (out * torch.tensor([1, 0]).view(2, 1, 1, 1), lse)), LOCAL, NARROW
    ),
    "dk and dv swapped": (dk_and_dv_swapped, TABLE["dilated-prime-segments"], NARROW),
    "lse in base 2": (with_results(lambda out, lse: (out, lse / math.log(2))), LOCAL, NARROW),
    "lse 0 where nothing is seen": (
        with_results(lambda out, lse: (out, lse.masked_fill(lse == -torch.inf, 0))), TABLE["one-dark-row"], NARROW
    ),
    "lse's gradient dropped": (with_results(lambda out, lse: (out, lse.detach() + 0 * out.sum())), LOCAL, NARROW),
    "key heads in the wrong order": (key_heads_in_the_wrong_order, TABLE["random-by-head-grouped"], NARROW),
    "causal from the first query": (
        with_pattern(lambda _, n, nq, __: Predicate(lambda h, i, j: j <= i - (n - nq))),
        TABLE["dense-last-9-queries-causal"], NARROW,
    ),
    "last row not written": (
        with_results(lambda out, lse: (torch.cat([out[:, :-1], torch.empty_like(out[:, -1:])], 1), lse)), LOCAL, WIDE
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutate, case, dtype", MUTANTS.values(), ids=list(MUTANTS))
def test_a_degraded_kernel_fails_the_check(mutate, case, dtype, monkeypatch):
    tools.check(case, dtype)
    run = mutate(monkeypatch)
    with pytest.raises(AssertionError):
        tools.check(case, dtype, run=run)
