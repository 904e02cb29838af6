"""FlexAttention against the oracle. Compilations cost seconds each, so cases are few and share shapes."""

import contextlib

import pytest
import torch
from torch._dynamo.utils import counters

from tests import tools
from workbench import BlockSparse, Dense, Neighborhood, Predicate, layouts, reference
from workbench.engines import flex
from workbench.patterns import orderings

missing = flex.no_cpu_kernel()
compiles = pytest.mark.skipif(missing is not None, reason=str(missing))


def inputs(n, nq=None, batch=1, heads=2, key_heads=None, d=16, dtype=torch.float32):
    torch.manual_seed(n)
    q = torch.randn(batch, n if nq is None else nq, heads, d, dtype=torch.float64).to(dtype)
    k, v = (torch.randn(batch, n, key_heads or heads, d, dtype=torch.float64).to(dtype) for _ in range(2))
    return q, k, v


def run(q, k, v, pattern):
    assert flex.why_not(q, k, v, pattern) is None
    return flex.forward(q, k, v, pattern, q.shape[-1] ** -0.5, False)[0]


@contextlib.contextmanager
def compilations():
    """A list that ends up holding how often torch compiled inside."""
    before, count = counters["stats"]["unique_graphs"], []
    yield count
    count.append(counters["stats"]["unique_graphs"] - before)


@pytest.fixture
def traced(monkeypatch):
    """Trace and guard as ever, but generate no kernels: for counting compilations in a second, not in a minute."""
    call = torch.compile(flex.attend, dynamic=False, fullgraph=True, backend="eager")
    monkeypatch.setattr(flex, "compiled", lambda: call)


def batch_layout():
    """(2, 4, 5, 3) blocks; query rows 300..399 of the first sequence see nothing."""
    blocks = torch.rand(2, 4, 5, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    blocks[0, :, 4] = False
    blocks[1, :, 4, 0] = True
    return layouts.explicit(blocks)


CASES = {
    "neighborhood on a hilbert curve, 143 tokens, grouped heads": (
        Neighborhood((11, 13), (2, 3), orderings.hilbert((11, 13))),
        inputs(143, batch=2, heads=4, key_heads=2),
    ),
    "a layout a sequence and head, 64 x 128, last 100 queries, time unlike place, empty rows": (
        BlockSparse(batch_layout(), (64, 128), causal=True),
        inputs(300, nq=100, batch=2, heads=4, key_heads=1),
    ),
    "128 x 64 with a predicate that looks up a tensor, bfloat16": (
        BlockSparse(layouts.local(1), (128, 64)) & Predicate(lambda h, i, j: EVERY_THIRD[j] | (i == j)),
        inputs(200, dtype=torch.bfloat16),
    ),
    "one query, heads of their own, one of them sees nothing, float16": (
        Predicate(lambda h, i, j: (i - j) % 3 < h, causal=True),
        inputs(600, nq=1, heads=3, dtype=torch.float16),
    ),
    "only key block 0": (BlockSparse(layouts.explicit(torch.tensor([[1, 0], [1, 0]]) > 0)), inputs(200)),
}
EVERY_THIRD = torch.arange(200) % 3 == 0


@compiles
@pytest.mark.parametrize("case", tools.tiers(CASES, [x for x in CASES if "grouped" in x or "last 100" in x]))
def test_equals_the_oracle(case):
    pattern, (q, k, v) = CASES[case]
    want, lse = reference(q, k, v, pattern)
    out = run(q, k, v, pattern)
    assert out.dtype == q.dtype and out.shape == q.shape
    error, allowed = tools.relative(out, want), 2e-6
    if q.dtype != torch.float32:  # twice the error of torch's own attention under the same mask, plus one rounding
        own = tools.torch_own(q, k, v, pattern)[0]
        allowed = 2 * (tools.relative(own, want) + tools.relative(want.to(q.dtype), want))
    assert error <= allowed
    empty = (lse == -torch.inf).transpose(1, 2)
    assert bool(empty.any()) == ("nothing" in case or "empty" in case)
    assert not out[empty].any()


@compiles
@pytest.mark.slow
def test_needs_inputs_without_gradients_but_takes_them_under_no_grad():
    pattern, (q, k, v) = CASES["only key block 0"]
    k = k.clone().requires_grad_()
    assert "no backward on a CPU" in flex.why_not(q, k, v, pattern)
    with torch.no_grad():
        torch.testing.assert_close(run(q, k, v, pattern), run(q, k.detach(), v, pattern), rtol=0, atol=0)


@compiles
def test_a_predicate_that_cannot_be_compiled_is_refused():
    pattern = Predicate(lambda h, i, j: j <= i if int(i.max()) >= 0 else j > i)
    with pytest.raises(ValueError, match="backend='flex': torch cannot compile Predicate"):
        run(*inputs(16), pattern)


def test_twelve_lengths_are_twelve_compilations_past_torchs_limit(traced):
    with torch._dynamo.config.patch(recompile_limit=2), compilations() as count:
        for n in range(20, 32):
            flex.forward(*inputs(n), Dense(causal=True), 0.25, False)
    assert count == [12]


def test_equal_shapes_are_compiled_once(traced):
    q, k, v = inputs(30)
    with compilations() as count:
        for order in (orderings.hilbert((5, 6)), orderings.morton((5, 6)), orderings.random((5, 6), seed=1)):
            flex.forward(q, k, v, Neighborhood((5, 6), 1, order), 0.25, False)
        flex.forward(q * 2, k, v, Neighborhood((5, 6), 1, order), 0.25, False)
    assert count == [1]


def test_tables_do_not_grow_with_batch_or_heads_and_stay_small():
    def nbytes(n, block, heads):
        pattern = BlockSparse(layouts.local(4) | layouts.global_(1) | layouts.strided(16), block)
        mask = flex.make_plan(pattern, n, n, heads, heads, "cpu").mask
        tables = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
        return sum(x.untyped_storage().nbytes() for x in tables)

    assert nbytes(131_072, 128, 16) == nbytes(131_072, 128, 1) < 50e6
    assert nbytes(1 << 20, 512, 8) < 100e6


def test_lookup_tables_reach_past_the_last_block():
    pattern = Neighborhood((11, 13), 2)
    q, k, _ = inputs(143)
    visible = flex.visible_of(pattern, 143, 2, 143 + 128, "cpu")
    last = torch.tensor(255)  # of the block that holds the last token
    visible(torch.tensor(0), last, last)
    assert flex.plan_of(pattern, q, k) is flex.plan_of(pattern, q, k)


def test_says_that_there_is_no_compiler():
    from torch._inductor import config

    with config.patch("cpp.cxx", ("no-such-compiler",)):
        assert "no C++ compiler" in flex.why_not(*inputs(8), Dense())
