import pytest
import torch

from workbench.patterns import Dense


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n, nq", [(0, 0), (1, 1), (7, 7), (29, 29), (29, 5), (29, 0), (12, 11)])
def test_against_brute_force(agree, n, nq, causal):
    want = torch.tensor([[[int(not causal or j <= i) for j in range(n)] for i in range(n)]] * 2).view(2, n, n)
    agree(Dense(causal), want, nq)
