"""Checks a pattern against a brute-force N x N count that the test wrote down independently."""

import pytest
import torch


def _agree(pattern, want, nq=None, block_sizes=(4, (3, 5), 128), exact=True):
    """want: int (heads, n, n), how often each query of all n sees each key. exact: every full block is called full."""
    heads, n, _ = want.shape
    want = want[:, n - nq :] if nq is not None else want
    assert torch.equal(pattern.multiplicity(n, heads, nq).long(), want.long())
    seen = want > 0
    assert pattern.pairs(n, heads, nq) == int(want.sum())
    assert pattern.distinct(n, heads, nq) == int(seen.sum())
    assert pattern.uncovered(n, heads, nq) == int((~seen.any(-1)).sum())
    covered = seen.any(-1).double().mean(-1) if want.shape[1] else torch.ones(heads, dtype=torch.float64)
    torch.testing.assert_close(pattern.coverage(n, heads, nq), covered)
    if want.numel():
        assert pattern.density(n, heads, nq) == pytest.approx(int(seen.sum()) / want.numel(), rel=1e-15)
    for block_size in block_sizes:
        _agree_on_blocks(pattern.blocks(n, heads, nq, block_size), want, exact)


def _agree_on_blocks(blocks, want, exact):
    heads, nq, n = want.shape
    bq, bk = blocks.block_size
    assert blocks.layouts in (1, heads)
    assert blocks.columns.dtype == torch.int32 and blocks.full.dtype == torch.bool
    assert len(blocks.starts) == blocks.layouts * blocks.rows + 1
    for h in range(heads):
        for x in range(blocks.rows):
            line = x + blocks.rows * (h if blocks.layouts > 1 else 0)
            span = slice(*blocks.starts[line : line + 2].tolist())
            found = dict(zip(blocks.columns[span].tolist(), blocks.full[span].tolist(), strict=True))
            assert list(found) == sorted(found)
            low, high = (max((blocks.first + x + d) * bq - (n - nq), 0) for d in (0, 1))
            for y in range(blocks.cols):
                block = want[h, low:high, y * bk : (y + 1) * bk]
                assert (y in found) == bool((block > 0).any()), (h, x, y)
                full = bool((block == 1).all())
                assert found.get(y, False) == full or (full and not exact), (h, x, y)


@pytest.fixture(scope="session")
def agree():
    return _agree
