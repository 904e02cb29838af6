"""Step by step: what a cache gives is what attention of the whole sequence gives, and it holds no more than it says."""

import copy
import pickle
import re
import time

import pytest
import torch

from tests import tools
from workbench import BlockSparse, Cache, Dense, Dilated, Neighborhood, PerHead, Predicate, Window, layouts, reference
from workbench.engines import triton_backend
from workbench.patterns.dilated import geometric

N = 61
PATTERNS = {
    "dense": Dense(True), "window": Window(5, True), "window-of-itself": Window(1, True),
    "window-dilated-sinks": Window(4, True, dilation=3, sinks=2), "window-sinks-longer-than-n": Window(9, True, 1, 99),
    "window-longer-than-n": Window(99, True, sinks=7), "longnet": Dilated([4, 8, 16], [1, 2, 4], True),
    "dilated-prime-segments": Dilated([7, 13], [3, 5], True), "dilated-no-row-kept": Dilated([2, 999], [5, 2], True),
    "dilated-partition": Dilated([8, 16, 32], [1, 2, 4], True, heads="partition"),
    "dilated-blocked": Dilated([8, 16], [2, 3], True, offsets="blocked"),
    "window-far": Window(3, True, dilation=10**12, sinks=2),
    "local": BlockSparse(layouts.local(1), 4, True), "strided": BlockSparse(layouts.strided(3), 4, True),
    "local-global-uneven": BlockSparse(layouts.local(1) | layouts.global_(1), (4, 8), True),
    "blocks-and-predicate": BlockSparse(layouts.local(1), 8, True) & Predicate(tools.some_rows_only),
    "predicate": Predicate(tools.every_third, True), "union": Window(3, True) | Dilated([8, 16], [2, 4], True),
    "per-head": PerHead([Dense(True), Window(5, True), *[Dilated([4, 8, 8], [1, 2, 1], True)] * 3, Window(5, True)]),
    "random-by-head": BlockSparse(layouts.random(0.3, 1, per_head=True), 4, True),
    "neighborhood": Neighborhood((N,), 6, causal=True),
}  # fmt: skip
BY_LENGTH = PATTERNS["random-by-head"], PATTERNS["neighborhood"]
STEPS = {
    "ones": [1] * N,
    "threes": [3] * 20 + [1],
    "odd": [17, 1, 1, 20, 2, 5, 15],
    "prompt": [40, *[1] * 21],
    "whole": [N],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=list(STEPS))
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=list(PATTERNS))
def test_steps_are_the_whole(pattern, steps):
    """In float32 single tokens of dilated patterns are the kernel's where it is interpreted, which takes its time."""
    for dtype in (torch.float64, torch.float32)[: 1 + (isinstance(pattern, Dilated) and steps is not STEPS["ones"])]:
        q, k, v, *_ = tools.Case("", None, N, heads=6, kv_heads=2, batch=2).inputs(dtype)
        v = v[..., :5] if pattern is PATTERNS["longnet"] else v
        want, want_lse = reference(q, k, v, pattern)
        for max_len in (N,) if pattern in BY_LENGTH else (None,) if dtype == torch.float32 else (None, N):
            cache = Cache(pattern, max_len)
            parts = zip(*(x.split(steps, 1) for x in (q, k, v)), strict=True)
            out, lse = zip(*(cache.step(*part, return_lse=True) for part in parts), strict=True)
            assert tools.relative(torch.cat(out, 1), want) < tools.RELATIVE[dtype] and out[0].dtype == dtype
            assert tools.lse_error(torch.cat(lse, 2), want_lse) < tools.LSE[dtype]
            assert cache.rows(N, 6, 2) * 2 * 2 * 8 * dtype.itemsize <= cache.nbytes
            assert cache.fast == (dtype == torch.float32 and triton_backend.interpreted())


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["deep", "pickle"]
)
def test_a_copy_and_its_original_go_on_apart(copied):
    """By the kernel too, which is told where rows are; no room grows meanwhile."""
    pattern, before = Dilated([4, 8, 64], [1, 2, 4], True), [torch.randn(1, 36, h, 8) for h in (4, 2, 2)]
    cache = Cache(pattern)
    [cache.step(*x) for x in zip(*(x.split(1, 1) for x in before), strict=True)]
    caches, more = (cache, copied(cache)), [[torch.randn(1, 12, x.shape[2], 8) for x in before] for _ in "ab"]
    steps = zip(*(zip(*(x.split(1, 1) for x in own), strict=True) for own in more), strict=True)
    out = [[cache.step(*x) for cache, x in zip(caches, both, strict=True)] for both in steps]
    for got, own in zip(zip(*out, strict=True), more, strict=True):
        want = reference(*(torch.cat(x, 1) for x in zip(before, own, strict=True)), pattern)[0][:, 36:]
        assert tools.relative(torch.cat(got, 1), want) < 1e-6


SCORES = {
    "longnet": {"alibi_slopes": torch.rand(6)}, "local": {"softcap": 0.7},
    "window": {"softcap": 2.0, "relative_bias": torch.randn(6, 9)},
}  # fmt: skip


@pytest.mark.parametrize("steps", [STEPS["ones"], STEPS["prompt"]], ids=["ones", "prompt"])
@pytest.mark.parametrize("name", SCORES)
def test_steps_with_changed_scores_are_the_whole(name, steps):
    q, k, v, *_ = tools.Case("", None, N, heads=6, kv_heads=2).inputs(torch.float64)
    cache, parts = Cache(PATTERNS[name], N), zip(*(x.split(steps, 1) for x in (q, k, v)), strict=True)
    out = torch.cat([cache.step(*part, **SCORES[name]) for part in parts], 1)
    assert tools.relative(out, reference(q, k, v, PATTERNS[name], **SCORES[name])[0]) < tools.RELATIVE[torch.float64]
    tools.refused("want the first step's", cache.step, q[:, :1], k[:, :1], v[:, :1])


@pytest.mark.parametrize("before", [0, 30])
def test_the_last_of_a_chunk_alone(before):
    q, k, v, *_ = tools.Case("", None, N, heads=4).inputs(torch.float64)
    for pattern in (PATTERNS["window-dilated-sinks"], PATTERNS["longnet"], PATTERNS["strided"]):
        cache = Cache(pattern)
        if before:
            cache.step(*(x[:, :before] for x in (q, k, v)))
        out = cache.step(q[:, -2:], k[:, before:], v[:, before:])
        torch.testing.assert_close(out, reference(q, k, v, pattern)[0][:, -2:], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name, extra", [("dense", 0), ("window", 4), ("window-dilated-sinks", 12), ("longnet", 0)])
def test_what_is_held_is_what_is_visible_later(name, extra):
    """A window keeps the oldest of each residue until the next one comes, and each branch a copy of its own."""
    pattern, heads, later = PATTERNS[name], 4, 20
    each = [pattern.of_branches([b]) for b in range(3)] if name == "longnet" else [pattern]
    for n in (1, 8, 23, 40, 47, 50):
        seen = [(one.multiplicity(n + later, heads, later)[..., :n] > 0).any(1) for one in each]
        assert sum(map(torch.sum, seen)) <= Cache(pattern).rows(n, heads) <= sum(map(torch.sum, seen)) + heads * extra


def test_a_window_takes_the_same_room_however_long_it_runs():
    x = torch.zeros(1, 1, 2, 8)
    for pattern, rows in ((Window(16, True, dilation=2, sinks=3), 35), (BlockSparse(layouts.local(1), 8, True), 32)):
        cache = Cache(pattern, 300)
        room = [(cache.step(x, x, x), cache.nbytes)[1] for _ in range(300)]
        assert max(room) == max(room[:60]) <= rows * 2 * 2 * 8 * 4


def test_a_step_reads_what_it_sees():
    k, took = torch.zeros(1, 1 << 18, 2, 64, dtype=torch.float64), {}
    few = Window(256, True), geometric(1 << 17, True, 256), BlockSparse(layouts.local(1), 128, True)
    for pattern in (Dense(True), *few):
        cache, x, times = Cache(pattern), k[:, :1], []
        cache.step(x, x, x)
        cache.step(x, k, k)
        for _ in range(10):
            begin = time.process_time()
            cache.step(x, x, x)
            times.append(time.process_time() - begin)
        took[pattern.name] = min(times)
    assert took.pop("dense-causal") > 2 * max(took.values())


x = torch.zeros(1, 1, 2, 4)
again = Cache(Dense(True), 2)
again.step(x, x, x)
REFUSED = {
    "not-causal": (lambda: Cache(Dense()), "pattern=Dense(causal=False): want a causal one"),
    "by-entry": (lambda: Cache(BlockSparse(tools.batch_layout(2, 1, 2, 2), 4, True)), "the same for the batch"),
    "by-length": (lambda: Cache(PATTERNS["random-by-head"] | Dense(True)), "it differs by length; want max_len"),
    "max-len": (lambda: Cache(Dense(True), 0), "max_len=0: want an int >= 1"),
    "too-long": (lambda: again.step(*[x.expand(-1, 2, -1, -1)] * 3), "3 positions, where max_len=2: want no more"),
    "another-batch": (lambda: again.step(*[x.expand(2, -1, -1, -1)] * 3), "want the first step's, (1, 2, 4, 2, 4,"),
    "more-queries": (lambda: again.step(x.expand(-1, 2, -1, -1), x, x), "2 queries on 1 keys"),
    "gradients": (lambda: again.step(x.clone().requires_grad_(), x, x), "call it under torch.no_grad()"),
    "a-mask": (lambda: again.step(x, x, x, attn_mask=x), "Cache.step has no such option; which pairs attend is"),
}


@pytest.mark.parametrize("call, message", REFUSED.values(), ids=list(REFUSED))
def test_refused(call, message):
    tools.refused(f"(?s){re.escape(message)}", call)
    assert again.n == 1
