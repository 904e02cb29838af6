"""What is ours of the engine, on the CPU: lists, orders, masks, copies and gradients, with its kernels emulated."""

import math

import pytest
import torch

from tests.engines.fa4 import emulation
from tests.tools import refused
from workbench import BlockSparse, Dense, Dilated, Neighborhood, Predicate, Window, attention, layouts, reference
from workbench.distributed.views import some_heads
from workbench.engines import dispatch, fa4_backend
from workbench.engines.dispatch import explain
from workbench.engines.fa4 import engine, places, plans
from workbench.patterns import tile_order

pytest.importorskip("triton")

RATES = [512, 1024, 2048], [1, 2, 4]
SHORT = [256, 512, 1024], [1, 2, 2]  # where rates do not matter, at a quarter of the emulation's time


def blocks(heads: int = 1, empty: bool = False, causal: bool = False) -> BlockSparse:
    torch.manual_seed(3)
    layout = torch.rand(*([heads] if heads > 1 else []), 8, 8) < 0.4
    if empty:
        layout[..., 3, :] = False
    return BlockSparse(layouts.explicit(layout), 128, causal=causal)


CASES = {  # pattern, batch, queries, keys, heads, key heads
    "nested": (Dilated(*RATES), 1, 2048, 2048, 4, 4),
    "two-sequences": (Dilated(*SHORT), 2, 1024, 1024, 4, 4),
    "short-last-segment": (Dilated(*SHORT), 2, 950, 950, 4, 2),
    "causal": (Dilated(*RATES, causal=True), 1, 2048, 2048, 4, 4),
    "causal-short": (Dilated(*SHORT, causal=True), 2, 750, 750, 4, 4),
    "grouped-heads": (Dilated(*RATES), 1, 1024, 1024, 8, 2),
    "last-queries": (Dilated(*RATES, causal=True), 2, 512, 2048, 4, 4),
    "empty-rows": (Dilated([1024, 2048], [2, 4]), 1, 2048, 2048, 4, 4),
    "blocked": (Dilated(*RATES, offsets="blocked"), 1, 1024, 1024, 8, 8),
    "partition": (Dilated(*RATES, heads="partition"), 1, 1024, 1024, 4, 4),
    "some-heads": (some_heads(Dilated(*RATES), 1, 3, 4), 1, 1024, 1024, 3, 3),
    "some-heads-partition": (some_heads(Dilated(*RATES, heads="partition"), 1, 3, 4), 1, 1024, 1024, 3, 3),
    "one-segment": (Dilated([512, 99_999], [1, 4]), 1, 1024, 1024, 4, 4),
    "all-one-segment": (Dilated([5000, 99_999], [1, 2]), 1, 700, 700, 2, 2),
    "some-without-order": (Dilated([256, 512, 350], [1, 2, 3]), 1, 512, 512, 3, 3),
    "blocks": (blocks(), 2, 1024, 1024, 2, 2),
    "blocks-of-heads-empty": (blocks(4, True), 1, 1024, 1024, 4, 2),
    "blocks-causal-ragged": (blocks(causal=True), 2, 1000, 1000, 2, 2),
    "blocks-last-queries": (blocks(causal=True), 1, 512, 1024, 2, 2),
    "window": (Neighborhood((1000,), 150), 2, 1000, 1000, 2, 1),
    "window-back": (Window(150, True), 2, 1000, 1000, 2, 1),
    "window-back-last-queries": (Window(300, True), 1, 488, 1000, 2, 2),
    "window-both-wide": (Window(5000), 1, 300, 300, 2, 2),
    "window-back-sinks": (Window(150, True, sinks=5), 2, 1000, 1000, 2, 1),
    "window-sinks-last-queries": (Window(200, sinks=140), 1, 488, 1000, 2, 2),
    "window-of-one": (Window(1, True), 1, 300, 300, 2, 2),
    "dense": (Dense(), 2, 200, 200, 2, 1),
    "dense-causal-last": (Dense(causal=True), 1, 100, 300, 2, 2),
}  # fmt: skip


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(engine, "kernels", lambda: emulation)
    monkeypatch.setattr(engine, "places", emulation)


def close(got, want, limit=2e-5):
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        infinite = y == -math.inf
        assert torch.equal(x == -math.inf, infinite)
        x, y, most = x.masked_fill(infinite, 0).double(), y.masked_fill(infinite, 0), y[~infinite].abs().max()
        torch.testing.assert_close(x, y, rtol=limit, atol=limit * most)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_reference(case, emulated):
    pattern, b, nq, n, h, g = CASES[case]
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(b, x, y, 16) for x, y in ((nq, h), (n, g), (n, g), (nq, h)))
    grad_lse = torch.randn(b, h, nq)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = reference(*wide, pattern, 0.3)
    out = out * pattern.divisor(h)
    loss = (out * grad).sum() + (lse.masked_fill(lse == -math.inf, 0) * grad_lse).sum()
    want = out, lse, *torch.autograd.grad(loss, wide)
    found = engine.forward(q, k, v, pattern, 0.3)
    found = *found, *engine.backward(grad, grad_lse, q, k, v, *found, pattern, 0.3)
    close(found, [x.detach() for x in want])
    if isinstance(pattern, Dilated) and n == nq and plans.plan_of(pattern, q, n).rest is None:
        order = tile_order.of(pattern, n)
        if order.padded == n:  # tokens that lie in tile order
            at = tile_order.tile_order(pattern, n)
            q, k, v, grad = (x[:, at] for x in (q, k, v, grad))
            found = engine.forward(q, k, v, pattern, 0.3, False)
            found = *found, *engine.backward(grad, grad_lse[..., at], q, k, v, *found, pattern, 0.3, False)
            close(found, [x.detach()[..., at] if i == 1 else x.detach()[:, at] for i, x in enumerate(want)])


@pytest.mark.parametrize(("n", "nq", "segment", "rate"), [(50, 50, 16, 4), (64, 64, 32, 2), (40, 24, 48, 3)])
def test_rows_move_into_their_order_and_back(n, nq, segment, rate):
    order = tile_order.TileOrder(n, segment, rate)
    assert torch.equal(order.place(order.position(torch.arange(order.padded))), torch.arange(order.padded))
    x = torch.randn(2, n, 3, 5)
    moved = places.into(x, order)
    assert torch.equal(moved, emulation.into(x, order))
    apart = x.transpose(1, 2).contiguous().transpose(1, 2)  # the heads of a token are no run of memory
    assert torch.equal(places.into(apart, order), moved)
    back = torch.zeros(2, n, 4, 5)
    places.out_of(moved, back[:, :, 1:], order)
    assert torch.equal(back[:, :, 1:], x) and not back[:, :, 0].any()
    grad, out, lse = torch.randn(2, n, 3, 5), torch.randn(2, n, 3, 5), torch.randn(2, 3, n)
    lse[:, 1, ::3] = -math.inf
    grad_lse = torch.randn(2, 3, n).masked_fill(lse == -math.inf, math.nan)
    for given in (None, grad_lse):
        want = emulation.rows(grad, given, out, lse, order)
        for one in (lse, lse.transpose(1, 2).contiguous().transpose(1, 2)):
            torch.testing.assert_close(places.rows(grad, given, out, one, order), want)


def test_tokens_in_tile_order_stay_in_it_where_it_is_the_kernels_own(monkeypatch, emulated):
    """Causal branches of large rates are left to kernels that know natural order alone: these tokens are moved back."""
    monkeypatch.setattr(fa4_backend, "why_not", lambda *_: None)
    ran = []
    for name in ("forward", "backward"):
        run = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda *x, run=run: ran.append(x[-1]) or run(*x))
    for pattern, n, natural in (
        (Dilated([512, 1024], [1, 4]), 1024, False), (Dilated([512, 1024], [1, 4]), 900, True),
        (Dilated([1024, 2048], [1, 8], causal=True), 2048, True),
    ):  # fmt: skip
        q, k, v = torch.randn(3, 1, n, 2, 16)
        order = tile_order.tile_order(pattern, n)
        found = attention(*(x[:, order] for x in (q, k, v)), pattern, tokens="tile order", backend="fa4")
        torch.testing.assert_close(found, reference(q, k, v, pattern)[0][:, order].float(), rtol=1e-4, atol=1e-5)
        assert ran.pop() is natural and not ran
        with monkeypatch.context() as chosen:
            chosen.setattr(dispatch, "choose", lambda *_: ("fa4", "it is"))
            said = explain(q, k, v, pattern, tokens="tile order")
        copied = "tokens are copied into natural order, and the result back"
        assert said == f"fa4: it is; {copied if natural else 'tokens are taken as they lie'}"
    refused("tokens='tile order' with 1 queries on 2048 keys", explain, q[:, :1], k, v, pattern, tokens="tile order")
    refused("has no tile order at n=2048", explain, q, k, v, Window(9), tokens="tile order")
    refused("tokens='tiles': want one of 'natural', 'tile order'", explain, q, k, v, pattern, tokens="tiles")


def test_results_of_documents_are_written_where_they_belong(monkeypatch, emulated):
    monkeypatch.setattr(fa4_backend, "why_not", lambda *_: None)
    run, written = engine.forward, []
    monkeypatch.setattr(engine, "forward", lambda *x, out=None: written.append(out) or run(*x, out=out))
    q, k, v = torch.randn(3, 1, 1100, 2, 16)
    for pattern in (Window(150, True), Dilated([256, 512], [1, 2])):
        found = attention(q, k, v, pattern, backend="fa4", documents=torch.tensor([0, 512, 600, 1100]))
        pieces = ((x[:, a:b] for x in (q, k, v)) for a, b in ((0, 512), (512, 600), (600, 1100)))
        want = torch.cat([reference(*x, pattern)[0] for x in pieces], 1).float()
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
        whole = {x.untyped_storage().data_ptr() for x in written}
        assert whole == {found.untyped_storage().data_ptr()} and len(written) == 3
        written.clear()


@pytest.mark.parametrize(("pattern", "nq", "words"), [
    (Dilated([1000], [8]), 2048, "no branch has a tile order: want segment lengths that are multiples of 128 times"),
    (Dilated([1024], [8], causal=True), 2048, "a causal one at most 4"),
    (Dilated([1024] * 200, [1] * 200), 2048, "fewer than 128 branches, not 200"),
    (Dilated([1024], [1]), 2000, "begin at a multiple of 1,024 positions, not at 48"),
    (BlockSparse(layouts.local(1), 64), 2048, "blocks of a multiple of 128"),
    (Window(64, sinks=4), 2048, None), (Window(64, dilation=2), 2048, "without dilation"),
    (Window(64, True), 2000, "begin at a multiple of 128"), (Window(64, True), 1920, None),
    (Neighborhood((32, 64), 3), 2048, "windows on a line"),
    (Predicate(lambda h, i, j: i > j), 2048, "the kernels know"),
    (Dilated([1024], [8]), 2048, None), (Dense(causal=True), 5, None),
])  # fmt: skip
def test_what_the_kernels_do_not_run_is_said(pattern, nq, words):
    found = fa4_backend.unfit(pattern, 2048, nq)
    assert found is None if words is None else words in found
