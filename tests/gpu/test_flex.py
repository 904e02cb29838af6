"""FlexAttention on CUDA: values, lse and gradients against the oracle, with gradients asked of out and lse at once."""

import pytest
import torch

from workbench import BlockSparse, Dense, Neighborhood, Predicate, layouts, reference
from workbench.engines import flex
from workbench.patterns import orderings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card here")]


def batch_layout():
    """(2, 4, 5, 5), head 0 of the first sequence sees nothing; key block 3 is seen by every row of the second."""
    blocks = torch.rand(2, 4, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.4
    blocks[0, 0] = False
    blocks[1, :, :, 3] = True
    return layouts.explicit(blocks)


def inputs(n, nq=None, batch=1, heads=2, key_heads=None, d=64, dtype=torch.float32):
    torch.manual_seed(n)
    shapes = [(batch, n if nq is None else nq, heads, d), *[(batch, n, key_heads or heads, d)] * 2]
    return [torch.randn(shape, dtype=torch.float64).to("cuda", dtype).requires_grad_() for shape in shapes]


CASES = {
    "dense, causal, one token": (Dense(causal=True), dict(n=1)),
    "dense, causal, 300 tokens, grouped heads, bfloat16": (
        Dense(causal=True),
        dict(n=300, batch=2, heads=8, key_heads=2, dtype=torch.bfloat16),
    ),
    "neighborhood on a hilbert curve, 1189 tokens, last 1000": (
        Neighborhood((29, 41), (5, 3), orderings.hilbert((29, 41))),
        dict(n=1189, nq=1000, batch=2, heads=4, key_heads=2, d=128),
    ),
    "a layout a sequence and head, causal, empty rows": (
        BlockSparse(batch_layout(), causal=True),
        dict(n=600, batch=2, heads=4, key_heads=2),
    ),
    "the same in float16, last 257, empty rows": (
        BlockSparse(batch_layout(), causal=True),
        dict(n=600, nq=257, batch=2, heads=4, key_heads=2, d=128, dtype=torch.float16),
    ),
    "blocks of 256 x 384, a length that is a multiple of 128 alone": (
        BlockSparse(layouts.explicit(torch.tensor([[0, 1], [0, 1], [1, 0]]) > 0), (256, 384), causal=False),
        dict(n=640, d=80, dtype=torch.bfloat16),
    ),
    "dense, causal, 3 queries on 5000 keys, grouped heads": (
        Dense(causal=True),
        dict(n=5000, nq=3, batch=2, heads=8, key_heads=2),
    ),
    "dense, causal, last 100, more grouped heads than a tile has rows for": (
        Dense(causal=True),
        dict(n=1000, nq=100, heads=16, key_heads=2, dtype=torch.bfloat16),
    ),
    "one query, many grouped heads, head_dim 16": (
        Predicate(lambda h, i, j: (i * j + j + h) % 3 < 2, causal=True),
        dict(n=1000, nq=1, heads=64, key_heads=2, d=16),
    ),
    "random blocks, one layout, bfloat16, empty rows": (
        BlockSparse(layouts.random(0.2, seed=1), causal=True, predicate=lambda h, i, j: (i - j) % 2 == 0),
        dict(n=2048, batch=2, heads=4, dtype=torch.bfloat16),
    ),
}


def mask_of(pattern, q, k):
    each = [pattern.for_batch(x) for x in range(pattern.batch)] if getattr(pattern, "batch", None) else [pattern]
    return torch.stack([x.multiplicity(k.shape[1], q.shape[2], q.shape[1]) > 0 for x in each]).to(q.device)


def errors(got, want, upstream):
    """Relative, for out, dq, dk, dv."""
    return [
        float((x.detach().double() - w).norm() / max(w.norm(), upstream.double().norm()))
        for x, w in zip(got, want, strict=True)
    ]


def budgets(q, k, v, mask, want, upstream):
    """2e-6 in float32; in 16 bit twice the error of torch's own attention under the same mask plus one rounding."""
    if q.dtype == torch.float32:
        return [2e-6] * 4
    seen = mask.any(-1).transpose(1, 2)[..., None]  # rows without a key are no part of it
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, *(x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v)))),
        attn_mask=mask | ~mask.any(-1, keepdim=True),
    ).transpose(1, 2)
    grads = torch.autograd.grad(out, (q, k, v), upstream * seen)
    theirs = errors((out * seen, *grads), want, upstream)
    rounding = errors([w.to(q.dtype) for w in want], want, upstream)
    return [2 * (x + y) for x, y in zip(theirs, rounding, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(case):
    pattern, arguments = CASES[case]
    q, k, v = inputs(**arguments)
    assert flex.why_not(q, k, v, pattern, True) is None
    want, want_lse = reference(q, k, v, pattern)
    out, lse = flex.forward(q, k, v, pattern, q.shape[-1] ** -0.5, True)
    assert out.dtype == q.dtype and out.shape == q.shape and lse.dtype == torch.float32

    mask = mask_of(pattern, q, k)
    empty = want_lse == -torch.inf
    assert bool(empty.any()) == ("empty" in case)
    assert not out.detach()[empty.transpose(1, 2)].any() and (lse[empty] == -torch.inf).all()
    tolerance = 1e-6 if q.dtype == torch.float32 else 1e-4
    off = (lse - want_lse)[~empty].abs() / want_lse[~empty].abs().clamp(min=1)
    assert off.max() <= tolerance

    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)
    want_grads = torch.autograd.grad(want, (q, k, v), upstream.double(), retain_graph=True)
    want_all = (want.detach(), *want_grads)
    got, allowed = errors((out, *grads), want_all, upstream), budgets(q, k, v, mask, want_all, upstream)
    assert all(x <= y for x, y in zip(got, allowed, strict=True)), (got, allowed)

    upstream_lse = torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), (q, k, v), (upstream, upstream_lse))
    want_grads = torch.autograd.grad((want, want_lse), (q, k, v), (upstream.double(), upstream_lse.double()))
    got = errors((out, *grads), (want.detach(), *want_grads), upstream)
    assert all(x <= y for x, y in zip(got, allowed, strict=True)), (got, allowed)


def test_without_gradients_and_without_lse():
    pattern, arguments = CASES["random blocks, one layout, bfloat16, empty rows"]
    q, k, v = inputs(**arguments)
    out, _ = flex.forward(q, k, v, pattern, 0.125, True)
    with torch.no_grad():
        again, lse = flex.forward(q, k, v, pattern, 0.125, False)
    assert lse is None and not again.requires_grad
    torch.testing.assert_close(again, out.detach(), rtol=0, atol=0)


def test_a_million_tokens_take_little_memory_beside_the_tensors():
    n = 1 << 20
    pattern = BlockSparse(layouts.local(2) | layouts.strided(512), 256, causal=True)
    q, k, v = (torch.randn(1, n, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flex.forward(q, k, v, pattern, 0.125, False)
    assert torch.cuda.max_memory_allocated() - before < 100e6 + 2 * q.nbytes


REFUSED = {
    "head_dim of 16 to 256, not 8": (dict(n=8, d=8), Dense()),
    "no float64": (dict(n=8, dtype=torch.float64), Dense()),
    "no multiple": (dict(n=256), BlockSparse(layouts.local(1), (64, 128))),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_says_why_not(reason):
    arguments, pattern = REFUSED[reason]
    assert reason in flex.why_not(*inputs(**arguments), pattern)
