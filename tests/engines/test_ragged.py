"""Padded and packed sequences: the same as a call for each document, padding aside, and no dearer."""

import functools
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests import tools
from workbench import BlockSparse, Dense, Dilated, Neighborhood, attention, distributed, explain, layouts, reference
from workbench.engines import dispatch, ragged
from workbench.patterns.window import Window

IDS = torch.tensor([[7, 7, 7, 7, 7, 2, 2, 2, 0, 0, 0, 0, 0], [0, 0, 0, 3, 3, 3, 3, 3, 3, 3, 3, 1, 1]])
RAGGED = {  # (option, batch, N, the documents as (row, first, end) written down by hand)
    "padded": ({"lengths": torch.tensor([5, 13, 1])}, 3, 13, [(0, 0, 5), (1, 0, 13), (2, 0, 1)]),
    "equal-lengths-apart": ({"lengths": torch.tensor([5, 0, 5, 12])}, 4, 13, [(0, 0, 5), (2, 0, 5), (3, 0, 12)]),
    "no-padding": ({"lengths": torch.tensor([13, 13], dtype=torch.int32)}, 2, 13, [(0, 0, 13), (1, 0, 13)]),
    "padding-alone": ({"lengths": torch.tensor([0, 0])}, 2, 13, []),
    "ids": ({"documents": IDS}, 2, 13, [(0, 0, 5), (0, 5, 8), (0, 8, 13), (1, 0, 3), (1, 3, 11), (1, 11, 13)]),
    "packed": ({"documents": torch.tensor([0, 4, 4, 10, 14, 21])}, 1, 21,
               [(0, 0, 4), (0, 4, 10), (0, 10, 14), (0, 14, 21)]),
    "one-document": ({"documents": torch.tensor([0, 21], dtype=torch.int32)}, 1, 21, [(0, 0, 21)]),
}  # fmt: skip
PATTERNS = {
    "dense": Dense(), "dense-causal": Dense(True), "dilated": Dilated([4, 8], [1, 2], True, heads="partition"),
    "blocks-by-head": BlockSparse(layouts.random(0.5, per_head=True), 4),
    "window": Window(3, True, dilation=2, sinks=1),
}  # fmt: skip


def alone(documents, q, k, v, pattern):
    """(out, lse) by a call of the oracle for each document."""
    out, lse = 0 * (q + k.sum() + v.sum()), 0 * q.sum(-1).transpose(1, 2) - torch.inf
    for x, first, end in documents:
        here = slice(x, x + 1), slice(first, end)
        out[here], some = reference(q[here], k[here], v[here], pattern)
        lse[here[0], :, here[1]] = some
    return out, lse


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=list(PATTERNS))
@pytest.mark.parametrize("option, batch, n, documents", RAGGED.values(), ids=list(RAGGED))
def test_documents_are_as_calls_of_their_own(option, batch, n, documents, pattern):
    for dtype, backend in ((torch.float64, "auto"), (torch.float32, "auto"), (torch.float64, "reference")):
        inputs = tools.Case("", None, n, heads=4, kv_heads=2, batch=batch).inputs(dtype)
        want = tools.differentiate(functools.partial(alone, documents), [x.double() for x in inputs], pattern)
        run = functools.partial(attention, **option, return_lse=True, backend=backend)
        got = tools.differentiate(run, inputs, pattern)
        assert tools.lse_error(got.pop("lse"), want["lse"]) < tools.LSE[dtype]
        for name, x in got.items():
            assert tools.relative(x, want[name], inputs[3]) < tools.RELATIVE[dtype], name
    torch.testing.assert_close(attention(*inputs[:3], pattern, **option), want["out"])


def test_no_tokens_are_no_documents():
    q, nothing = torch.zeros(2, 0, 4, 8), torch.zeros(2, 0, dtype=torch.int64)
    out, lse = attention(q, q, q, Dense(), documents=nothing, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 4, 0)


EMPTY = {  # as RAGGED, with documents that have no tokens, among those of the one length that a pattern is for
    "padded": ({"lengths": torch.tensor([0, 9, 0])}, 3, 9, [(1, 0, 9)]),
    "packed": ({"documents": torch.tensor([0, 0, 9, 9, 18, 18])}, 1, 18, [(0, 0, 9), (0, 9, 18)]),
    "nothing-else": ({"lengths": torch.tensor([0, 0])}, 2, 9, []),
}  # fmt: skip


@pytest.mark.parametrize("pattern", [
    Neighborhood((3, 3), 1), BlockSparse(layouts.explicit(torch.arange(9).view(3, 3) % 2 > 0), 3),
])  # fmt: skip
@pytest.mark.parametrize("option, batch, n, documents", EMPTY.values(), ids=list(EMPTY))
def test_an_empty_document_is_refused_by_no_pattern(option, batch, n, documents, pattern):
    inputs = tools.Case("", None, n, batch=batch).inputs(torch.float64)
    want = tools.differentiate(functools.partial(alone, documents), inputs, pattern)
    for backend in ("auto", "reference")[: 1 + bool(documents)]:
        run = functools.partial(attention, **option, return_lse=True, backend=backend)
        torch.testing.assert_close(tools.differentiate(run, inputs, pattern), want)


def test_explain_says_it_of_each_kind_of_document(monkeypatch):
    x = torch.randn(2, 13, 4, 8)
    said = explain(x, x, x, Dense())
    assert explain(x, x, x, Dense(), documents=IDS) == f"{said} (documents of 2 to 8 tokens)"
    monkeypatch.setattr(dispatch, "choose", lambda name, q, *_: ("torch" if q.shape[1] > 4 else "triton", "it is so"))
    both = "torch: it is so (documents of 5 to 8 tokens); triton: it is so (documents of 2 to 3 tokens)"
    assert explain(x, x, x, Dense(), documents=IDS) == both
    assert explain(x, x, x, Dense(), lengths=torch.tensor([0, 3])) == "triton: it is so (documents of 3 to 3 tokens)"


def test_what_is_in_the_padding_is_never_read_and_gets_no_gradient():
    q, k, v, g, _ = tools.Case("", None, 9, batch=2).inputs(torch.float64)
    lengths = torch.tensor([4, 6])
    padding = torch.arange(9) >= lengths[:, None]
    leaves = [x.masked_fill(padding[..., None, None], torch.nan).requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, Dense(), lengths=lengths)
    for x in (out, *torch.autograd.grad(out, leaves, g)):
        assert not x[padding].any() and x.isfinite().all()
    narrow = attention(q, k, v[..., :5], Dense(), lengths=lengths)
    torch.testing.assert_close(narrow, attention(q, k, v, Dense(), lengths=lengths)[..., :5])


def test_a_layout_for_each_sequence_and_one_for_all_heads_of_each():
    inputs = tools.Case("", None, 8, heads=3, batch=2).inputs(torch.float64)[:3]
    blocks = torch.tensor([[[[1, 0], [1, 1]]], [[[0, 1], [1, 0]]]]).bool()
    pattern, by_head = (BlockSparse(layouts.explicit(x), 4) for x in (blocks, blocks.expand(-1, 3, -1, -1)))
    assert pattern.same_heads and pattern.for_batch(0).pairs(8, 3) == 3 * 48
    torch.testing.assert_close(attention(*inputs, pattern), reference(*inputs, by_head)[0])
    out = attention(*inputs, pattern, lengths=torch.tensor([7, 5]))
    for x, size in enumerate((7, 5)):
        want = reference(*(t[x : x + 1, :size] for t in inputs), by_head.for_batch(x))[0]
        torch.testing.assert_close(out[x : x + 1, :size], want)


def test_calls_are_as_many_as_lengths_and_nothing_is_copied_where_equal_ones_are_neighbours(monkeypatch):
    shapes, moved, one = [], [], dispatch._natural
    monkeypatch.setattr(dispatch, "_natural", lambda q, *x, **o: shapes.append(tuple(q.shape[:2])) or one(q, *x, **o))
    monkeypatch.setattr(ragged, "_moved", lambda x, to: x if to is None else moved.append(1) or x[to])
    x = torch.randn(1, 1200, 2, 8)
    attention(x, x, x, Dense(), documents=torch.arange(0, 1201, 100))
    attention(x, x, x, Dense(), documents=torch.tensor([0, 300, 600, 1200]))
    assert shapes == [(12, 100), (2, 300), (1, 600)] and not moved
    shapes.clear()
    attention(x, x, x, Dense(), documents=torch.tensor([0, 300, 900, 1200]))
    assert shapes == [(2, 300), (1, 600)] and len(moved) == 4  # q, k, v and out


def test_autocast_checkpoints_and_compile():
    x = torch.randn(2, 24, 2, 8, requires_grad=True)
    run = functools.partial(attention, pattern=Dense(True), lengths=torch.tensor([9, 24]))
    with torch.autocast("cpu", torch.bfloat16):
        assert run(x, x, x).dtype == torch.bfloat16
    out = checkpoint(run, x, x, x, use_reentrant=False)
    (want,) = torch.autograd.grad(run(x, x, x).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], want)
    compiled = torch.compile(lambda x: run(2 * x, x, x) + 1, backend="eager")
    torch.testing.assert_close(compiled(x), run(2 * x, x, x) + 1)


def bad(call=attention, pattern=Dense(), nq=6, batch=2, **option):  # noqa: B008
    q, k = torch.zeros(batch, nq, 2, 4), torch.zeros(batch, 6, 2, 4)
    return lambda: call(q, k, k, pattern, **option)


two = torch.tensor([6, 3])
REFUSED = {
    "both": (bad(lengths=two, documents=two), "lengths and documents: want one of them"),
    "a-list": (bad(lengths=[6, 3]), "lengths=[6, 3]: want an int32 or int64 tensor"),
    "floats": (bad(lengths=two / 2), "lengths=torch.float32 (2,): want an int32 or int64 tensor"),
    "too-long": (bad(lengths=two + 1), "lengths=[7, 4]: want 2 of them, from 0 to 6, padding on the right"),
    "too-many": (bad(lengths=torch.tensor([1, 2, 3])), "lengths=[1, 2, 3]: want 2 of them"),
    "fewer-queries": (bad(nq=2, lengths=two), "lengths with 2 queries on 6 keys: want all the queries, Nq == N"),
    "in-two-places": (bad(documents=torch.tensor([[0] * 6, [0, 5, 5, 1, 1, 5]])), "documents[1]: id 5 is in several"),
    "not-from-0": (bad(batch=1, documents=torch.tensor([1, 6])), "documents=torch.int64 (2,) in a batch of 1 with N=6"),
    "not-to-n": (bad(batch=1, documents=torch.tensor([0, 5])), "want ids (B, N), or for a batch of 1 the cumulative"),
    "falling": (bad(batch=1, documents=torch.tensor([0, 4, 3, 6])), "or for a batch of 1 the cumulative lengths"),
    "empty": (bad(batch=1, documents=torch.tensor([], dtype=torch.int64)), "documents=torch.int64 (0,)"),
    "packed-batch": (bad(documents=torch.tensor([0, 6])), "or for a batch of 1 the cumulative lengths"),
    "pattern-of-n": (bad(lengths=two, pattern=Neighborhood((6,), 1)), "n=3 on a neighborhood of shape (6,): want n=6"),
    "key-padding": (bad(key_padding_mask=two > 0), "padding on the right is attention's lengths=(B,); on the left:"),
    "mask": (bad(attn_mask=two > 0), "e.g. Predicate(lambda h, i, j: seen[i, j]); padding on the right is"),
    "of-flash": (bad(cu_seqlens=two), "packed sequences are attention's documents="),
    "explained": (bad(explain, lengths=two + 1), "lengths=[7, 4]: want 2 of them, from 0 to 6, padding on the right"),
    "on-ranks": (bad(distributed.attention, lengths=two), "call it for each document, or, over ranks, give"),
}  # fmt: skip


@pytest.mark.parametrize("call, message", REFUSED.values(), ids=list(REFUSED))
def test_refused_before_any_work(call, message, monkeypatch):
    monkeypatch.setattr(ragged, "attend", None)
    tools.refused(f"(?s){re.escape(message)}", call)


def test_a_default_device_is_not_where_lengths_are_worked_out():
    q = torch.randn(2, 16, 2, 4)
    calls = [lambda: attention(q, q, q, Dense(True), lengths=lengths)]
    calls += [lambda: attention(q[:1], q[:1], q[:1], Dense(True), documents=cuts)]
    lengths, cuts = torch.tensor([16, 5]), torch.tensor([0, 3, 9, 16])
    for call in calls:
        want = call()
        with torch.device("meta"):
            assert torch.equal(call(), want)


def test_the_reference_is_mapped_over_keys():
    q, k, v = torch.randn(3, 1, 12, 2, 4)
    run = functools.partial(attention, pattern=Window(5), lengths=torch.tensor([9]), backend="reference")
    mapped = torch.vmap(lambda k: run(q, k, v))(torch.stack([k, 2 * k]))
    torch.testing.assert_close(mapped, torch.stack([run(q, k, v), run(q, 2 * k, v)]))
