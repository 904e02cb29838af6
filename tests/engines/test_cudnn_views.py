"""Branches by fused attention on strided views: every view, merge and sum, with plain products in cuDNN's place."""

import pytest
import torch

from tests import tools
from workbench import Dilated

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu/test_triton.py has cuDNN itself", allow_module_level=True)

CASES = [
    tools.Case("residues", lambda: Dilated([16, 32], [1, 2]), 64, heads=6, head_dim=16),
    tools.Case("one-after-another", lambda: Dilated([16, 32], [4, 8]), 64, heads=4, head_dim=16),
    tools.Case("uneven", lambda: Dilated([16, 24], [3, 7]), 72, heads=8, head_dim=16),
    tools.Case("ragged-end", lambda: Dilated([16, 64], [1, 2]), 75, heads=4, head_dim=16),
    tools.Case("last-queries", lambda: Dilated([16, 32], [1, 2]), 75, nq=50, heads=4, head_dim=16),
    tools.Case("causal", lambda: Dilated([16, 32, 64], [1, 2, 5], causal=True), 72, heads=4, head_dim=16),
    tools.Case("blocked", lambda: Dilated([16, 32], [2, 4], offsets="blocked"), 64, heads=6, head_dim=16),
    tools.Case("partition", lambda: Dilated([16, 32], [2, 4], heads="partition"), 64, heads=5, head_dim=16),
    tools.Case("batch", lambda: Dilated([16, 32], [1, 2]), 64, heads=4, head_dim=16, batch=2),
    tools.Case("wider-than-a-segment", lambda: Dilated([2, 16], [4, 1]), 32, heads=4, head_dim=16),
]


@pytest.fixture
def products(monkeypatch):
    """Plain products instead of cuDNN, wherever it could be taken; gives the views that were computed."""
    from workbench.engines.triton import cudnn_views

    taken = []

    def scores(q, k, causal, scale):
        s = q.float() @ k.float().mT * scale
        return s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf) if causal else s

    def attend(q, k, v, causal, scale):
        taken.append(q.shape)
        s = scores(q, k, causal, scale)
        return (s.softmax(-1) @ v.float()).to(q.dtype), s.logsumexp(-1)

    def attend_backward(grad, q, k, v, out, lse, causal, scale):
        grad, out = grad.float(), out.float()
        p = (scores(q, k, causal, scale) - lse[..., None]).exp()
        ds = p * (grad @ v.float().mT - (grad * out).sum(-1, keepdim=True)) * scale
        return (ds @ k.float()).to(q.dtype), (ds.mT @ q.float()).to(q.dtype), (p.mT @ grad).to(q.dtype)

    for name, new in {"attend": attend, "attend_backward": attend_backward, "usable": lambda *x: True}.items():
        monkeypatch.setattr(cudnn_views, name, new)
    tools.take_strided_views(monkeypatch, room=4096)
    return taken


EACH = [(case.id, through_lse) for case in CASES for through_lse in (False, True)]
DAILY = [("residues", True), ("uneven", False), ("last-queries", True), ("causal", False), ("partition", True)]


@pytest.mark.parametrize("of", tools.tiers(EACH, DAILY), ids=lambda of: of[0] + "-lse" * of[1])
def test_agrees_with_the_oracle(of, products):
    (case,) = (case for case in CASES if case.id == of[0])
    tools.check(case, torch.float32, backend="triton", through_lse=of[1])
    assert products
