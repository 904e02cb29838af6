"""The check of sampled rows: it knows which pairs there are, catches what is wrong, and leaves alone what is right."""

import itertools
import math
import re

import pytest
import torch

from tests import tools
from workbench import BlockSparse, Dense, Dilated, Neighborhood, Predicate, attention, layouts, reference
from workbench.patterns.dilated import PAPER
from workbench.probes import memory, validity, visible
from workbench.probes.validity import check

every_case = pytest.mark.parametrize("case", tools.TABLE.values(), ids=list(tools.TABLE))


def near(h, i, j):
    return (i - j).abs() < 24


PATTERNS = {
    "dense": Dense(), "dense-causal": Dense(True), "dilated": Dilated([16, 48], [1, 2]),
    "dilated-causal": Dilated([16, 48], [1, 2], causal=True), "window": Neighborhood((96,), 9),
    "partition": Dilated([16, 48], [1, 2], heads="partition"), "neighborhood": Neighborhood((8, 12), 2),
    "blocks": BlockSparse(layouts.local(1) | layouts.global_(1), 16), "predicate": Predicate(near, causal=True),
    "blocks-by-head": BlockSparse(layouts.random(0.4, 1, per_head=True), 16, causal=True),
}  # fmt: skip
every_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=list(PATTERNS))


def called(pattern, dtype=torch.float32, n=96, nq=None, heads=4, kv_heads=2, d=8, batch=2, run=None):
    """(q, k, v and the upstream gradient, what a right call returns by name): tensors that a test may spoil."""
    case = tools.Case("", None, n, nq, heads, kv_heads, d, batch)
    q, k, v, upstream, _ = case.inputs(dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    run = run or (lambda *x: attention(*x, pattern, backend="torch", return_lse=True))
    out, lse = run(*leaves)
    grads = [x.clone() for x in torch.autograd.grad(out, leaves, upstream.to(out.dtype))]
    returned = dict(zip(tools.NAMES, (out.detach().to(dtype), lse.detach(), *grads), strict=True))
    return [*leaves, upstream], returned


@every_case
def test_rows_see_the_pairs_of_the_pattern_and_keys_are_seen_by_them(case):
    pattern, n, nq = case.pattern(), case.n, case.n if case.nq is None else case.nq
    one = pattern.for_batch(case.batch - 1) if getattr(pattern, "batch", None) else pattern
    want, i = one.multiplicity(n, case.heads, nq), torch.arange(n - nq, n)
    for h in {0, case.heads - 1}:
        count = torch.zeros(nq, n, dtype=torch.int32)
        for part in visible.parts(one, h, i, n, case.heads):
            j = visible.tensor(part.keys)
            seen = 1 if part.seen is None else part.seen(i[part.rows][:, None], j[None]).int()
            count[part.rows[:, None], j[None]] += seen
        assert torch.equal(count, want[h])
        for j in {0, n // 3, n - 1}:
            found = torch.cat([i[:0], *visible.queries(one, h, j, n, case.heads, nq, 7)])
            assert torch.equal(torch.bincount(found - (n - nq), minlength=nq).int(), want[h, :, j])


def test_a_row_of_a_hundred_million_tokens_lists_its_own_keys_only():
    n, i = 10**8, torch.tensor([10**8 - 1])
    for w, r in zip(PAPER, (1, 2, 4, 6, 12), strict=True):
        (part,) = visible.parts(Dilated([w], [r]), (n - 1) % w % r, i, n, 12)
        assert part.keys == range((n - 1) // w * w + (n - 1) % w % r, n, r)
    (dense,) = visible.parts(Dense(), 0, i, n, 1)
    assert dense.keys == range(n)
    (blocks,) = visible.parts(BlockSparse(layouts.local(1), 128), 0, i, n, 1)
    assert blocks.keys.tolist() == list(range((n // 128 - 2) * 128, n))


IN_TURN = [pytest.param(case, dtype, id=f"{case.id}-{tools.name_of(dtype)}")
           for case, dtype in zip(tools.TABLE.values(), itertools.cycle(tools.DTYPES), strict=False)]  # fmt: skip


@pytest.mark.parametrize("case, dtype", IN_TURN)
def test_no_false_alarm(case, dtype):
    pattern = case.pattern()
    inputs, returned = called(pattern, dtype, case.n, case.nq, case.heads, case.kv_heads, case.head_dim, case.batch)
    found = check(pattern, returned, inputs)
    assert found.ok and found.note is None, found
    assert set(found.errors) == set(found.allowed) == {"out", "lse", "dq", "dk", "dv"}
    assert found.rows and found.keys and str(found) == f"right at {found.rows} rows and {found.keys} keys"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=tools.name_of)
def test_rounding_is_no_error_where_the_terms_cancel(dtype):
    (q, k, v, _), _ = called(Dense(), dtype, heads=1, kv_heads=1, batch=1)
    with torch.no_grad():
        weights = (q[0, 5, 0].double() @ k[0, :, 0].double().T / math.sqrt(8)).softmax(0)
        v[0, -1, 0] = -(weights[:-1] @ v[0, :-1, 0].double() / weights[-1]).to(dtype)  # out of row 5 is next to nothing
        out = attention(q, k, v, Dense(), backend="torch")
    assert out[0, 5, 0].norm() < 0.1 * out[0, 6, 0].norm()
    found = check(Dense(), {"out": out}, (q, k, v), rows=[(0, 5, 0)])
    assert found.ok and found.errors["out"] > 0, found


@every_pattern
def test_the_exact_rows_are_the_oracles(pattern):
    inputs, returned = called(pattern, torch.float64, nq=70, run=lambda *x: reference(*x, pattern))
    found = check(pattern, returned, inputs)
    assert found.ok and max(found.errors.values()) < 1e-13, found


def test_what_is_not_given_is_not_checked():
    pattern = PATTERNS["dilated"]
    inputs, returned = called(pattern)
    only_out = check(pattern, {"out": returned["out"]}, inputs[:3])
    assert set(only_out.errors) == {"out"} and only_out.keys == 0
    only_grads = check(pattern, {name: returned[name] for name in ("dq", "dk", "dv")}, inputs)
    assert set(only_grads.errors) == {"dq", "dk", "dv"} and only_grads.ok and only_grads.note is None


SPOILED = [(name, how) for name in tools.NAMES for how in ("nothing", "neighbour", "nan")]


@every_pattern
@pytest.mark.parametrize("dtype", tools.tiers([torch.float64, torch.bfloat16], [torch.bfloat16]), ids=tools.name_of)
def test_one_wrong_row_is_caught_and_described(pattern, dtype):
    inputs, returned = called(pattern, dtype)
    for name, how in SPOILED:
        x, (b, row, h) = returned[name], (1, 61, 1)
        at, other = ((b, h, row), (b, h, row + 7)) if name == "lse" else ((b, row, h), (b, row + 7, h))
        kept = x[at].clone()
        x[at] = {"nothing": 0.0, "neighbour": x[other].clone(), "nan": math.nan}[how]
        found = check(pattern, returned, inputs, rows=[(0, 3, 0), (b, row, h)], keys=[(0, 3, 0), (b, row, h)])
        x[at] = kept
        element = ((b * 4 + h) * 96 + row) if name == "lse" else ((b * 96 + row) * x.shape[2] + h) * 8
        assert len(found.wrong) == 1, (name, how, found)
        where = f"{name} of sequence 1, row 61, head 1 (from element {element:,} on)"
        assert found.wrong[0].startswith(f"{where} is off by")
        assert not found.ok and found.errors[name] > found.allowed[name]
        assert str(found).startswith(f"wrong: {found.wrong[0]}; compared 2 rows and 2 keys")
    assert check(pattern, returned, inputs).ok


LESS = {
    "dilated-without-a-branch": (Dilated([16, 48], [1, 2]), Dilated([16], [1])),
    "dilated-with-another-offset": (Dilated([16, 48], [1, 2]), Dilated([16, 48], [1, 2], offsets="blocked")),
    "blocks-without-the-first": (PATTERNS["blocks"], BlockSparse(layouts.local(1), 16)),
    "window-one-less": (Neighborhood((96,), 9), Neighborhood((96,), 8)),
    "predicate-one-less": (Predicate(near), Predicate(lambda h, i, j: (i - j).abs() < 23)),
}  # fmt: skip


@pytest.mark.parametrize("asked, computed", LESS.values(), ids=list(LESS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=tools.name_of)
def test_another_pattern_is_caught(asked, computed, dtype):
    inputs, returned = called(computed, dtype)
    del returned["lse"]
    found = check(asked, returned, inputs)
    assert {"out", "dq", "dk", "dv"} == {text.split()[0] for text in found.wrong}, found
    worst = [float(re.search(r"off by ([\d.e+-]+|inf) ", text)[1]) for text in found.wrong]
    assert worst == sorted(worst, reverse=True) and f"and {len(worst) - 1} more" in str(found)


def test_keys_counted_once_that_count_twice_show_in_lse():
    inputs, returned = called(Dilated([48], [2]))
    found = check(Dilated([48, 48], [2, 2]), returned, inputs)  # every weight twice: the same out
    assert {text[:3] for text in found.wrong} == {"lse"}


def test_a_row_that_sees_nothing_has_to_be_nothing():
    pattern = Predicate(tools.some_rows_only)  # rows 5, 12, 19, ... see nothing
    inputs, returned = called(pattern, torch.float16, n=23)
    places = [(0, 12, 1), (1, 5, 0)]
    assert check(pattern, returned, inputs, rows=places, keys=[]).errors == {"out": 0.0, "lse": 0.0, "dq": 0.0}
    returned["out"][0, 12, 1, 3] = 1e-3
    returned["lse"][1, 0, 5] = 0
    returned["dq"][1, 5, 0] = 1e-3
    found = check(pattern, returned, inputs, rows=places, keys=[])
    assert {text[:3] for text in found.wrong} == {"out", "lse", "dq "}, found


def test_samples_lie_on_both_sides_of_where_offsets_no_longer_fit():
    shape = (1025 * 2, 4096, 8, 64)  # 2^32 elements and one sequence of 2^21 more
    for d in (64, 48):
        found = validity.sample((*shape[:3], d), Dense())
        flat = [((b * 4096 + i) * 8 + h) * d for b, i, h in found]
        assert all(0 <= b < shape[0] and 0 <= i < 4096 and 0 <= h < 8 for b, i, h in found)
        for place in (x for x in validity.ELEMENTS if x < math.prod(shape[:3]) * d):
            assert any(x <= place < x + d for x in flat), "the row that holds the first element past it"
            assert any(x < place and place - x <= 2 * d for x in flat), "the row before"
            assert sum(x >= place for x in flat) >= validity.RANDOM
        assert 0 in flat and math.prod(shape[:3]) * d - d in flat
        assert len(found) == len(set(found)) and found == validity.sample((*shape[:3], d), Dense())
        assert found != validity.sample((*shape[:3], d), Dense(), seed=1)
        assert {h for _, _, h in found} == set(range(8))
    pairs = {b * 3 + h for b, _, h in validity.sample((30_000, 16, 3, 8), Dense())}
    assert {65_534, 65_535} <= pairs  # the last sequence and head of a grid, and the first one past it
    assert validity.sample((0, 16, 3, 8), Dense()) == []


def test_samples_lie_on_both_sides_of_edges():
    rows = {i for _, i, _ in validity.sample((1, 100, 2, 8), Dilated([16, 48], [1, 2]), shift=10)}
    assert {x - 10 for x in (15, 16, 47, 48, 95, 96)} <= rows  # and 111, 112 do not exist
    assert validity.edges(Dilated([16, 200], [1, 2]), 110) == [15, 16, 95, 96]
    assert validity.edges(BlockSparse(layouts.local(1), (16, 32)), 70) == [15, 16, 31, 32, 63, 64]
    assert validity.edges(Dense(), 110) == []


def test_what_is_wrong_only_past_an_offset_is_caught(monkeypatch):
    past = 2 * 96 * 4 * 8 - 96 * 8  # elements; 24 tokens of 192 lie past it
    pattern = PATTERNS["dilated"]
    inputs, returned = called(pattern, kv_heads=4)
    monkeypatch.setattr(validity, "ELEMENTS", (past, 1 << 32))
    for name in ("out", "dq", "dk", "dv"):
        x, kept = returned[name], returned[name].clone()
        x.view(-1)[past:] = x.view(-1)[: x.numel() - past]  # as where the offset wrapped
        found = check(pattern, returned, inputs)
        x.copy_(kept)
        elements = [int(re.search(r"element ([\d,]+)", text)[1].replace(",", "")) for text in found.wrong]
        assert min(elements) == past and len(elements) > validity.RANDOM // 2
        assert all(text.startswith(name) for text in found.wrong)


def test_past_the_budget_keys_are_left_out_and_that_is_said():
    pattern = PATTERNS["dilated-causal"]
    inputs, returned = called(pattern)
    alone = check(pattern, returned, inputs, pairs=0)
    assert alone.keys == 0 and set(alone.errors) == {"out", "lse", "dq"}
    assert re.fullmatch(r"\d+ keys left out: the softmaxes of their queries are too many pairs", alone.note)
    assert not alone.ok and not alone.wrong and alone.unchecked == ("dk", "dv")
    assert str(alone).startswith(f"dk and dv not checked; right at {alone.rows} rows (")


def test_a_check_of_nothing_is_not_ok():
    """Not even a row of what was given was compared; but a tensor without rows is right."""
    pattern = PATTERNS["dilated"]
    inputs, returned = called(pattern)
    found = check(pattern, returned, inputs, rows=[])
    assert not found.ok and found.unchecked == ("out", "lse", "dq") and found.keys
    found = check(pattern, returned, inputs, keys=[])
    assert not found.ok and found.unchecked == ("dk", "dv") and found.note is None
    inputs, returned = called(pattern, nq=0)
    assert check(pattern, returned, inputs).ok


def test_the_budget_is_spent_on_the_first_keys():
    pattern = Dense()
    inputs, returned = called(pattern, kv_heads=4)
    found = check(pattern, returned, inputs, pairs=3 * 96 * 96, keys=[(0, x, 0) for x in range(5)])
    assert found.keys == 3 and found.note.startswith("2 keys left out")


def test_nothing_as_large_as_an_input_is_held(monkeypatch):
    monkeypatch.setattr(validity, "CHUNK", 1 << 14)
    monkeypatch.setattr(validity, "ROWS", 64)
    n, pattern = 1 << 18, Dilated([64, 256], [1, 4])
    x = torch.zeros(1, n, 2, 8, dtype=torch.float16)  # 8 MB, and 32 in float64
    returned = dict.fromkeys(("out", "dq", "dk", "dv"), x)
    spent = lambda p, **kept: check(p, returned, [x] * 4, **kept)  # noqa: E731
    assert memory.measure(lambda: spent(pattern)) < 4 << 20
    few = {"rows": [(0, n - 1, 0)], "keys": [(0, n - 1, 1)]}
    assert memory.measure(lambda: spent(Dense(True), **few)) < 4 << 20


def test_bad_input_is_refused():
    pattern = PATTERNS["dilated"]
    inputs, returned = called(pattern)
    out, dq = returned["out"], returned["dq"]
    for given, want in (
        ({}, "nothing to check"), ({"out": out[:, 1:]}, r"out of shape \(2, 95, 4, 8\): want \(2, 96, 4, 8\)"),
        (returned | {"dk": dq}, r"dk of shape \(2, 96, 4, 8\): want \(2, 96, 2, 8\)"), ({"dq": dq}, "gradients: want"),
    ):  # fmt: skip
        tools.refused(want, check, pattern, given, inputs)
    for upstream in ([], [out[:1]]):
        tools.refused("gradients: want", check, pattern, returned, [*inputs[:3], *upstream])
    tools.refused("want a pattern", check, "dense", returned, inputs)
