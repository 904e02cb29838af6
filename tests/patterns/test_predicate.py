import pytest
import torch

from workbench.patterns import Predicate, base, listed


def count(fn, n, heads, causal):
    """One pair at a time."""
    total = torch.zeros(heads, n, n, dtype=torch.int64)
    for h in range(heads):
        for i in range(n):
            for j in range(n):
                total[h, i, j] = bool(fn(*map(torch.tensor, (h, i, j)))) and (j <= i or not causal)
    return total


FUNCTIONS = {
    "window": lambda h, i, j: (i - j).abs() < 4, "per-head": lambda h, i, j: (i - j).abs() <= 3 * h,
    "keys-only": lambda h, i, j: j < 3, "queries-only": lambda h, i, j: i % 2 == 0,
    "heads-only": lambda h, i, j: h > 0, "everything": lambda h, i, j: True,
}  # fmt: skip


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
def test_against_brute_force(agree, monkeypatch, fn, causal):
    for n, nq, tile in ((13, 13, 1 << 22), (13, 5, 50), (1, 1, 50), (13, 0, 50)):
        monkeypatch.setattr(base, "TILE", tile)
        monkeypatch.setattr(listed, "TILE", 4 * tile)  # a few pairs a tile: rows and columns are both cut
        agree(Predicate(fn, causal), count(fn, n, 2, causal), nq, block_sizes=(4, (3, 5), 64))


def test_no_tokens_and_no_heads():
    everything = Predicate(FUNCTIONS["everything"])
    assert everything.pairs(0, 2) == everything.pairs(5, 0) == 0
    assert everything.blocks(0, 2).rows == 0
    assert len(everything.blocks(5, 0).columns) == 0


def test_one_layout_where_heads_do_not_matter():
    assert Predicate(FUNCTIONS["window"]).blocks(64, 3, block_size=16).layouts == 1
    assert Predicate(FUNCTIONS["per-head"]).blocks(64, 3, block_size=16).layouts == 3


def test_a_table_of_n_entries_is_never_read_out_of_range():
    table = torch.arange(143)  # not a multiple of the block size
    pattern = Predicate(lambda h, i, j: table[j] <= table[i])
    assert pattern.pairs(143, 1) == 143 * 144 // 2
    assert len(pattern.blocks(143, 1, block_size=64).columns) == 6


def test_a_function_may_compute_in_place(monkeypatch):
    monkeypatch.setattr("workbench.patterns.base.TILE", 26)  # two rows a tile: what one changes the next would see
    in_place, plain = Predicate(lambda h, i, j: j.sub_(2) <= i, True), Predicate(lambda h, i, j: j - 2 <= i, True)
    assert torch.equal(in_place.multiplicity(13, 1), plain.multiplicity(13, 1))
    assert torch.equal(in_place.blocks(13, 1, None, 4).columns, plain.blocks(13, 1, None, 4).columns)


def test_long_work_shows_progress(capsys, monkeypatch):
    clock = iter(range(0, 1000, 1))
    monkeypatch.setattr(base.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr("workbench.patterns.base.TILE", 13)
    monkeypatch.setattr(base, "TILE", 13)
    Predicate(FUNCTIONS["window"]).pairs(13, 1)
    *lines, line, blank, rest = capsys.readouterr().err.split("\r")
    assert line.endswith(": 13 of 13 tiles") and blank == " " * len(line) and rest == ""
