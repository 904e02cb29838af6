"""Streams through a real card: results, copies from pageable and pinned memory, in place, and the predicted peak."""

import pytest
import torch

import workbench as wb
from workbench import streaming
from workbench.streaming import measure

N = 1 << 16
PATTERNS = {
    "longnet": wb.Dilated([1024, 1 << 14, N], [1, 4, 16]), "causal": wb.Dilated([1024, 1 << 14, N], [1, 4, 16], True),
    "dense": wb.Dense(causal=True), "window": wb.Neighborhood(N, 200),
    "blocks": wb.BlockSparse(wb.layouts.local(4) | wb.layouts.strided(64), 128),
}  # fmt: skip


@pytest.mark.parametrize(("name", "pinned"), [*((x, x != "causal") for x in PATTERNS), ("blocks", False)])
def test_a_stream_gives_what_memory_gives_and_takes_what_was_planned(name, pinned):
    torch.manual_seed(0)
    q, k, v, grad, out, *got = (torch.randn(N, 2, 32).half() for _ in range(8))
    got[1:] = [x.float() for x in got[1:]] if name in ("dense", "blocks") else got[1:]  # chunks add to them
    lse = torch.empty(N, 2)
    if pinned:
        q, k, v, grad, out, lse, *got = (x.pin_memory() for x in (q, k, v, grad, out, lse, *got))
    pattern, leaves = PATTERNS[name], [x.cuda()[None].requires_grad_() for x in (q, k, v)]
    want, its_lse = wb.attention(*leaves, pattern, return_lse=True)
    dq, dk, dv = torch.autograd.grad(want, leaves, grad.cuda()[None])
    rows = [streaming.attention((q, k, v), pattern, (out, lse), chunk=1 << 13)]
    assert (lse - its_lse[0].T.cpu()).abs().max() < 1e-3
    rows += [streaming.gradients((q, k, v), pattern, grad, (out, lse), got, chunk=1 << 13)]
    assert all(abs(row["peak_bytes"] / row["planned_bytes"] - 1) < 0.01 for row in rows)
    for x, y in zip([out, *got], (want, dq, dk, dv), strict=True):
        same(x, y)


def same(got, want):
    assert (got - want[0].cpu()).float().norm() < 5e-3 * want.float().norm()


def test_a_layer_in_place_is_that_of_memory():
    torch.manual_seed(0)
    module = wb.MultiheadAttention(64, 2, PATTERNS["causal"], device="cuda", dtype=torch.float16).eval()
    x = torch.randn(N, 64).half().pin_memory()
    want = module(x.cuda()[None]).detach()
    streaming.layer(module, x, chunk=1 << 13)
    same(x, want)


def test_what_is_measured_is_right(tmp_path):
    rows = measure.measure({"fwd": [1 << 20], "layer": [1 << 20], "fwdbwd": [1 << 19]}, 8, folder=tmp_path)
    assert rows["valid"].all() and (rows["status"] == "ok").all() and len(rows) == 5
    assert ((rows["peak_bytes"] / rows["planned_bytes"]).dropna() <= 1.01).all()
