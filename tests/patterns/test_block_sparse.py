import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.patterns import BlockSparse, block_sparse
from workbench.patterns.layouts import explicit, global_, local, random, strided, top_k

MILLION = 1 << 20
USUAL = local(4) | global_(1) | strided(16)


def count(blocks, block_size, n, time=None):
    """blocks: bool (heads, rows, cols); every position looks up its block."""
    bq, bk = block_size
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    seen = blocks[:, (i // bq), (j // bk)]
    if time is not None:
        seen = seen & (time[j] <= time[i])
    return seen.int()


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(1, 40),
    queries=st.floats(0, 1),
    block_size=st.sampled_from([(1, 1), (4, 4), (3, 5), (8, 4), (64, 64)]),
    heads=st.integers(1, 3),
    shared=st.booleans(),
    causal=st.booleans(),
    density=st.sampled_from([0.1, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_any_configuration(agree, n, queries, block_size, heads, shared, causal, density, seed):
    generator = torch.Generator().manual_seed(seed)
    grid = (1 if shared else heads, -(-n // block_size[0]), -(-n // block_size[1]))
    blocks = torch.rand(grid, generator=generator) < density
    pattern = BlockSparse(explicit(blocks[0] if shared else blocks), block_size, causal=causal)
    want = count(blocks.expand(heads, *grid[1:]), block_size, n, torch.arange(n) if causal else None)
    coarser = tuple(x * y for x, y in zip(block_size, (2, 3), strict=True))
    agree(pattern, want, round(queries * n), block_sizes=(None, coarser))


def test_one_layout_serves_every_head():
    pattern = BlockSparse(USUAL, 16, causal=True)
    assert pattern.blocks(1024, 64).layouts == 1
    assert BlockSparse(random(0.2, per_head=True), 16).blocks(256, 3).layouts == 3


def test_chunks_do_not_change_the_blocks(monkeypatch):
    pattern = BlockSparse(random(0.2, seed=4) | local(1), (8, 4), causal=True)
    want, pairs = pattern.blocks(1000, 2, 701), pattern.pairs(1000, 2, 701)
    monkeypatch.setattr(block_sparse, "CHUNK", 100)
    got = pattern.blocks(1000, 2, 701)
    assert all(torch.equal(getattr(got, x), getattr(want, x)) for x in ("starts", "columns", "full"))
    assert pattern.pairs(1000, 2, 701) == pairs


def test_a_batch_is_indexed_before_it_is_counted(agree):
    q, k = torch.randn(2, 20, 3, 8), torch.randn(2, 20, 3, 8)
    pattern = BlockSparse(top_k(q, k, 4, 2), 4)
    assert pattern.batch == 2
    for question in (pattern.pairs, pattern.multiplicity, pattern.blocks, pattern.coverage, pattern.density):
        with pytest.raises(ValueError, match=r"layout of batch 2: index the batch, for_batch\(b\), first"):
            question(20, 3)
    one = pattern.for_batch(1)
    assert one.batch is None
    agree(one, count(pattern.layout.tensor[1], (4, 4), 20), block_sizes=(None,))
    assert pattern.check(20, 3) == (20, 3, 20)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("question", ["pairs", "density", "blocks"])
def test_a_million_tokens_take_less_than_a_second(one_core_seconds, question, causal):
    pattern = BlockSparse(USUAL, 128, causal)
    assert one_core_seconds(lambda: getattr(pattern, question)(MILLION, 12)) < 1


def test_memory_of_a_mask():
    code = """
import resource, sys, torch
from workbench.patterns import BlockSparse, layouts
pattern = BlockSparse(layouts.local(4) | layouts.global_(1) | layouts.strided(16), 512, causal=True)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
pattern.blocks(2048, 12)
before = peak()
blocks = pattern.blocks(1 << 20, 12)
assert len(blocks.columns) > blocks.rows
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100e6
