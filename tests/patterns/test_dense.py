import pytest
import torch

from workbench.patterns import Dense


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n, nq", [(0, 0), (1, 1), (7, 7), (29, 29), (29, 5), (29, 0), (12, 11)])
def test_against_brute_force(agree, n, nq, causal):
    want = torch.tensor([[[int(not causal or j <= i) for j in range(n)] for i in range(n)]] * 2).view(2, n, n)
    agree(Dense(causal), want, nq)


def test_no_head_sees_nothing():
    assert Dense().pairs(5, 0) == 0
    assert Dense().density(5, 0) == 0


def test_counts_are_exact_beyond_64_bits():
    n = 2**33
    assert Dense().pairs(n, 12) == 12 * n * n
    assert Dense(causal=True).pairs(n, 12) == 12 * n * (n + 1) // 2
    assert Dense().density(n, 12) == 1


@pytest.mark.parametrize("causal", [1, None, "yes"])
def test_causal_is_a_bool(causal):
    with pytest.raises(ValueError, match=r"causal=.*want True or False"):
        Dense(causal)


def test_more_queries_than_keys_are_refused():
    with pytest.raises(ValueError, match="nq=6 queries on n=5 keys"):
        Dense().pairs(5, 1, 6)


@pytest.mark.parametrize("sizes", [(1e6, 8), ("64", 8), (64, None), (64, 8, 32.0)], ids=str)
def test_sizes_are_ints(sizes):
    with pytest.raises(ValueError, match=r"(n|heads|nq)=.*: want an int >= 0"):
        Dense().pairs(*sizes)
