"""FlexAttention on CUDA: values, lse and gradients against the oracle, with gradients asked of out and lse at once."""

import pytest
import torch

from tests import tools
from workbench import BlockSparse, Dense, Neighborhood, Predicate, layouts
from workbench.engines import flex
from workbench.patterns import orderings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card here")]


def batch_layout():
    """(2, 4, 5, 5), head 0 of the first sequence sees nothing; key block 3 is seen by every row of the second."""
    blocks = torch.rand(2, 4, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.4
    blocks[0, 0] = False
    blocks[1, :, :, 3] = True
    return layouts.explicit(blocks)


def odd(h, i, j):
    return (i * j + j + h) % 3 < 2


def even_distances(h, i, j):
    return (i - j) % 2 == 0


TALL = layouts.explicit(torch.tensor([[0, 1], [0, 1], [1, 0]]) > 0)
HILBERT = orderings.hilbert((29, 41))
CASES = [
    (tools.Case("one-token", lambda: Dense(True), 1, head_dim=64), torch.float32),
    (tools.Case("grouped-heads", lambda: Dense(True), 300, None, 8, 2, 64, 2), torch.bfloat16),
    (tools.Case("hilbert-last-1000", lambda: Neighborhood((29, 41), (5, 3), HILBERT), 1189, 1000, 4, 2, 128, 2),
     torch.float32),
    (tools.Case("a-layout-a-head", lambda: BlockSparse(batch_layout(), causal=True), 600, None, 4, 2, 64, 2),
     torch.float32),
    (tools.Case("a-layout-a-head-last-257", lambda: BlockSparse(batch_layout(), causal=True), 600, 257, 4, 2, 128, 2),
     torch.float16),
    # a length that is a multiple of 128 alone
    (tools.Case("blocks-256x384", lambda: BlockSparse(TALL, (256, 384)), 640, head_dim=80), torch.bfloat16),
    (tools.Case("3-queries-on-5000-keys", lambda: Dense(True), 5000, 3, 8, 2, 64, 2), torch.float32),
    # more grouped heads than a tile has rows for
    (tools.Case("many-grouped-heads", lambda: Dense(True), 1000, 100, 16, 2, 64), torch.bfloat16),
    (tools.Case("one-query", lambda: Predicate(odd, True), 1000, 1, 64, 2, 16), torch.float32),
    (tools.Case("random", lambda: BlockSparse(layouts.random(0.2, 1), causal=True) & Predicate(even_distances), 2048,
                None, 4, head_dim=64, batch=2), torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("through_lse", [False, True])
@pytest.mark.parametrize("case, dtype", CASES, ids=[case.id for case, _ in CASES])
def test_agrees_with_the_oracle(case, dtype, through_lse):
    tools.check(case, dtype, device="cuda", backend="flex", through_lse=through_lse)


def test_without_gradients_and_without_lse():
    case, dtype = CASES[-1]
    (q, k, v, *_), pattern = case.inputs(dtype, "cuda"), case.pattern()
    out, _ = flex.forward(*(x.requires_grad_() for x in (q, k, v)), pattern, 0.125, True)
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


@pytest.mark.parametrize(
    "head_dim, dtype, pattern, reason",
    [(8, torch.float32, Dense(), "head_dim of 16 to 256, not 8"), (64, torch.float64, Dense(), "no float64"),
     (64, torch.float32, BlockSparse(layouts.local(1), (64, 128)), "no multiple")],
)  # fmt: skip
def test_says_why_not(head_dim, dtype, pattern, reason):
    q, k, v, *_ = tools.Case("", None, 256, head_dim=head_dim).inputs(dtype, "cuda")
    assert reason in flex.why_not(q, k, v, pattern)
