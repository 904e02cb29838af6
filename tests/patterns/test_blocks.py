"""How the blocks of a pattern are found: a few at a time, and once for all heads that see the same."""

import subprocess
import sys

import pytest
import torch

from tests.patterns.test_definitions import FUNCTIONS, agree, definition
from workbench.patterns import BlockSparse, Predicate, base, block_sparse
from workbench.patterns.layouts import global_, local, random, strided, top_k


def test_one_layout_serves_all_heads_that_see_the_same():
    assert BlockSparse(local(4) | global_(1) | strided(16), 16, causal=True).blocks(1024, 64).layouts == 1
    assert BlockSparse(random(0.2, per_head=True), 16).blocks(256, 3).layouts == 3
    for name, want in (("window", 1), ("per-head", 3)):
        assert Predicate(FUNCTIONS[name]).blocks(64, 3, block_size=16).layouts == want


def test_chunks_do_not_change_the_blocks(monkeypatch):
    pattern = BlockSparse(random(0.2, seed=4) | local(1), (8, 4), causal=True)
    want, pairs = pattern.blocks(1000, 2, 701), pattern.pairs(1000, 2, 701)
    monkeypatch.setattr(block_sparse, "CHUNK", 100)
    got = pattern.blocks(1000, 2, 701)
    assert all(torch.equal(getattr(got, x), getattr(want, x)) for x in ("starts", "columns", "full"))
    assert pattern.pairs(1000, 2, 701) == pairs


def test_a_batch_is_indexed_before_it_is_counted():
    q, k = torch.randn(2, 20, 3, 8), torch.randn(2, 20, 3, 8)
    pattern = BlockSparse(top_k(q, k, 4, 2), 4)
    assert pattern.batch == 2
    for question in (pattern.pairs, pattern.multiplicity, pattern.blocks, pattern.coverage, pattern.density):
        with pytest.raises(ValueError, match=r"layout of batch 2: index the batch, for_batch\(b\), first"):
            question(20, 3)
    one = pattern.for_batch(1)
    assert one.batch is None
    agree(one, definition(one, 20, 3), block_sizes=(None,))
    assert pattern.check(20, 3) == (20, 3, 20)


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


def test_a_function_may_compute_in_place(monkeypatch):
    monkeypatch.setattr(base, "TILE", 26)  # two rows a tile: what one changes the next would see
    in_place, plain = Predicate(lambda h, i, j: j.sub_(2) <= i, True), Predicate(lambda h, i, j: j - 2 <= i, True)
    assert torch.equal(in_place.multiplicity(13, 1), plain.multiplicity(13, 1))
    assert torch.equal(in_place.blocks(13, 1, None, 4).columns, plain.blocks(13, 1, None, 4).columns)


def test_long_work_shows_progress(capsys, monkeypatch):
    clock = iter(range(0, 1000, 1))
    monkeypatch.setattr(base.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(base, "TILE", 13)
    Predicate(FUNCTIONS["window"]).pairs(13, 1)
    *lines, line, blank, rest = capsys.readouterr().err.split("\r")
    assert line.endswith(": 13 of 13 tiles") and blank == " " * len(line) and rest == ""
