"""FlashAttention-4's kernels on Hopper: values, lse and gradients against the oracle, with gradients through lse."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.engines.fa4.test_engine import CASES as emulated
from tests.engines.fa4.test_engine import RATES, blocks
from workbench import BlockSparse, Dense, Dilated, Window, attention, explain, layouts, reference
from workbench.engines import fa4_backend
from workbench.patterns.tile_order import tile_order

if torch.cuda.is_available() and (reason := fa4_backend.MISSING):
    pytest.skip(reason, allow_module_level=True)

CASES = emulated | {
    "nested-4096": (Dilated(*RATES), 1, 4096, 4096, 4, 4),
    "causal-3900": (Dilated(*RATES, causal=True), 2, 3900, 3900, 4, 4),
    "some-by-triton": (Dilated([512, 1024, 2048, 3000], [1, 2, 4, 6]), 1, 4096, 4096, 6, 6),
    "blocks-of-256": (BlockSparse(layouts.local(1), 256, causal=True), 1, 2000, 2000, 2, 2),
    "dense-1-query": (Dense(causal=True), 2, 1, 1000, 4, 2),
}
BF16, FP16 = torch.bfloat16, torch.float16
COMPILED = [  # head_dim, dtype, cases most of which share what is compiled
    (64, BF16, "nested two-sequences blocked partition some-heads some-heads-partition one-segment"),
    (128, FP16, "nested-4096"), (96, BF16, "nested"), (64, FP16, "short-last-segment"), (128, BF16, "all-one-segment"),
    (64, BF16, "causal last-queries"), (128, FP16, "causal-short causal-3900"), (64, BF16, "grouped-heads"),
    (128, BF16, "empty-rows some-without-order"), (64, FP16, "some-by-triton"),
    (128, BF16, "blocks window-both-wide"), (32, BF16, "blocks"), (64, FP16, "blocks-of-heads-empty"),
    (64, FP16, "blocks-causal-ragged blocks-last-queries"), (128, BF16, "blocks-of-256"),
    (128, FP16, "window"), (64, BF16, "window-back"), (128, BF16, "window-back-last-queries window-of-one"),
    (128, FP16, "window-back-sinks"), (64, BF16, "window-sinks-last-queries"),
    (64, FP16, "dense"), (128, BF16, "dense-causal-last"), (64, BF16, "dense-1-query"),
]  # fmt: skip


def inputs(b, nq, n, h, g, d, dtype=torch.bfloat16):
    torch.manual_seed(n)
    poison = torch.full((1 << 26,), math.nan, device="cuda")  # what is not written shows
    made = [torch.randn(b, *shape, d, device="cuda").to(dtype) for shape in ((nq, h), (n, g), (n, g), (nq, h))]
    del poison
    return made


def errors(found, want):
    """Relative to the norm, or to what is lost in 16 bits."""
    return [float((x.double() - y).norm() / y.norm().clamp(min=1e-3)) for x, y in zip(found, want, strict=True)]


def answers(run, q, k, v, grad, grad_lse):
    """out, lse (0 where no key is seen) and the gradients of a run on leaves like q, k, v."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = run(*leaves)
    lse = lse.masked_fill(lse == -math.inf, 0)
    return [x.detach() for x in (out, lse, *torch.autograd.grad((out * grad).sum() + (lse * grad_lse).sum(), leaves))]


def test_every_case_is_compiled():
    assert {case for *_, cases in COMPILED for case in cases.split()} == set(CASES)


@pytest.mark.parametrize(("head_dim", "dtype", "cases"), COMPILED, ids=str)
def test_agrees_with_the_oracle(head_dim, dtype, cases, subtests):
    for case in cases.split():
        with subtests.test(case):
            agrees(case, head_dim, dtype)


def agrees(case, head_dim, dtype):
    pattern, *sizes = CASES[case]
    q, k, v, grad = inputs(*sizes, head_dim, dtype)
    grad_lse = torch.randn(q.shape[0], q.shape[2], q.shape[1], device="cuda")
    want = answers(lambda *x: reference(*x, pattern, 0.1), *(x.double() for x in (q, k, v, grad, grad_lse)))

    def run(*x, **more):
        return attention(*x, pattern, scale=0.1, backend="fa4", return_lse=True, **more)

    assert max(errors(answers(run, q, k, v, grad, grad_lse), want)) < (0.005 if dtype == BF16 else 0.001)
    if "nested" in case or case in ("short-last-segment", "causal"):
        order = tile_order(pattern, q.shape[1]).cuda()
        tiled = [x[:, order] for x in (q, k, v, grad)]
        found = answers(lambda *x: run(*x, tokens="tile order"), *tiled, grad_lse[..., order])
        assert max(errors(found, [x[..., order] if i == 1 else x[:, order] for i, x in enumerate(want)])) < 0.005


@pytest.mark.parametrize("n, heads_first", [(4096, True), (4000, False)])
def test_strided_views_and_a_scale_are_read_as_they_are(n, heads_first):
    packed = torch.randn(2, n, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = packed.unbind(2)
    if heads_first:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    found = attention(q, k, v, Dilated(*RATES), backend="fa4", scale=0.3)
    want = reference(q, k, v, Dilated(*RATES), 0.3)[0]
    assert errors([found], [want])[0] < 0.005


@pytest.mark.parametrize("pattern", [Dilated(*RATES), blocks(), Window(600)], ids=lambda p: p.short_name)
def test_compiled_checkpointed_and_replayed_calls_are_the_same(pattern):
    n = 1024 if isinstance(pattern, BlockSparse) else 4096
    q, k, v, grad = inputs(1, n, n, 4, 4, 64)

    def run(*x):
        return attention(*x, pattern, backend="fa4", return_lse=True)

    want = answers(run, q, k, v, grad, torch.zeros(1, 4, n, device="cuda"))
    for other in (
        torch.compile(run, fullgraph=True),
        torch.compile(run, mode="reduce-overhead", fullgraph=True),
        lambda *x: checkpoint(run, *x, use_reentrant=False),
    ):
        for _ in range(3):
            found = answers(other, q, k, v, grad, torch.zeros(1, 4, n, device="cuda"))
            assert max(errors(found, want)) < 1e-3
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        run(q, k, v)
        with torch.cuda.graph(graph):
            held = run(q, k, v)
    q.copy_(q.flip(1))
    graph.replay()
    assert torch.equal(held[0], run(q, k, v)[0])


def test_auto_takes_it_and_says_why_and_determinism_takes_triton():
    q, k, v, _ = inputs(1, 4096, 4096, 4, 4, 64)
    words = explain(q, k, v, Dilated(*RATES))
    assert words.startswith("fa4: ") and "last bits" in words
    torch.use_deterministic_algorithms(True)
    try:
        assert explain(q, k, v, Dilated(*RATES)).startswith("triton: ")
        with pytest.raises(ValueError, match="deterministic"):
            attention(q, k, v, Dilated(*RATES), backend="fa4")
    finally:
        torch.use_deterministic_algorithms(False)
