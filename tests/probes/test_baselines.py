import pickle
import sys

import pytest
import torch

from tests import tools
from workbench import Dilated, reference
from workbench.probes import baselines
from workbench.probes.case import Case

REASON = baselines.missing()
needs_torchscale = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def inputs(n, heads, dtype):
    return tools.Case("", None, n, heads=heads, batch=2).inputs(dtype)[:3]


def test_what_is_not_here_is_refused(monkeypatch):
    assert REASON is None or "cannot be imported" in REASON
    tools.refused("one rate for each segment length", baselines.longnet, [4], [1, 2])
    for name in [x for x in sys.modules if x.startswith("torchscale")] or ["torchscale"]:
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    tools.refused("peer 'torchscale': torchscale.* cannot be imported", baselines.longnet, [4], [1])


@pytest.mark.parametrize("causal", [False, True])
def test_the_flash_attention_that_peers_are_given_is_attention(causal):
    q, k, v = inputs(37, 3, torch.float64)
    out, lse = baselines.flash(q, k, v, is_causal=causal)
    want, want_lse = reference(q, k, v, Dilated([37], [1], causal))
    assert tools.relative(out, want) < 1e-10 and tools.relative(lse, want_lse) < 1e-6 and lse.shape == (2, 3, 37)
    tools.refused("bias", baselines.flash, q, k, v, bias=torch.zeros(37, 37))


CASES = [  # segments, rates, N, heads, causal
    ([16, 32, 64], [1, 2, 4], 128, 12, False),
    ([16, 32, 128], [1, 2, 4], 64, 4, False),  # a segment longer than the sequence
    ([16, 32], [2, 8], 64, 3, False),  # rows that no branch reaches, more rates than heads
    ([16, 48], [1, 6], 101, 5, True),  # causal, what it pads with comes after every query
]


@needs_torchscale
@pytest.mark.parametrize("dtype", tools.RELATIVE, ids=str)
@pytest.mark.parametrize(("segments", "rates", "n", "heads", "causal"), CASES)
def test_torchscale_is_the_oracle_with_blocked_offsets(segments, rates, n, heads, causal, dtype):
    q, k, v = inputs(n, heads, dtype)
    out = baselines.longnet(segments, rates, causal)(q, k, v)
    assert out.shape == q.shape and out.dtype == dtype
    want, _ = reference(q, k, v, Dilated(segments, rates, causal, offsets="blocked"))
    assert tools.relative(out, want) < tools.RELATIVE[dtype]


@needs_torchscale
def test_torchscale_takes_the_shares_of_branches_for_constants():
    q, k, v = (x.requires_grad_() for x in inputs(64, 4, torch.float64))
    upstream = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pattern = Dilated([16, 32], [1, 2], offsets="blocked")
    got = torch.autograd.grad(baselines.longnet([16, 32], [1, 2])(q, k, v), (q, k, v), upstream)
    want = torch.autograd.grad(reference(q, k, v, pattern)[0], (q, k, v), upstream)
    dq, dk, dv = (tools.relative(x, y) for x, y in zip(got, want, strict=True))
    assert dv < 1e-10 and dq > 0.01 and dk > 0.01


@needs_torchscale
def test_a_peer_is_a_backend_of_a_case():
    pattern, call = Dilated([16, 32], [1, 2], offsets="blocked"), baselines.longnet([16, 32], [1, 2])
    assert pickle.loads(pickle.dumps(call)).__name__ == "torchscale"  # it goes to fresh processes
    run, name = Case(pattern, 64, 4, 8, backend=call, mode="fwdbwd").prepare()
    assert name == "torchscale" and [x.shape for x in run()] == [(1, 64, 4, 8)] * 3
