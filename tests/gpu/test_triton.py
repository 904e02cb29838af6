"""The Triton kernels and torch's on a CUDA card: the tables of tests/tools.py, and what only large sizes can get wrong.

For memory errors: `compute-sanitizer python -m pytest tests/gpu/test_triton.py -k "bfloat16 and window"` or the like.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import workbench as wb
from tests import tools
from workbench import BlockSparse, Dense, Dilated, Neighborhood, Predicate, Window, attention, explain, layouts
from workbench.engines.triton.block_lists import kind_of
from workbench.engines.triton_backend import block_size_of
from workbench.patterns import orderings

DTYPES, WIDE = (torch.float32, torch.bfloat16, torch.float16), (torch.float32, torch.float64)


def edge(c):
    return BlockSparse(layouts.local(1) | layouts.global_(1), 128, c)


LARGE = [
    *tools.nested(128),
    tools.Case("longnet", tools.longnet(16), 2000, None, 12, 4, 64, 2),
    tools.Case("longnet-causal-last-queries", tools.longnet(16, True), 2000, 777, 12, None, 64),
    tools.Case("head-dim-16", lambda: Dilated([300, 700], [1, 3], True), 1111, None, 4, 2, 16),
    tools.Case("head-dim-80", lambda: Dilated([300, 700], [1, 3]), 1111, None, 4, None, 80),
    tools.Case("head-dim-128", lambda: Dilated([300, 700], [1, 3], True), 1111, None, 4, None, 128),
    tools.Case("head-dim-256", lambda: Dilated([300, 700], [1, 3], True), 1111, None, 2, None, 256),
    tools.Case("head-dim-128-of-float32", lambda: Dilated([300, 700], [1, 3]), 1111, 777, 4, None, 128),
    tools.Case("no-branch-keeps-all", lambda: Dilated([512, 900], [2, 5], True), 1999, 1500, 6, 3, 64),
    tools.Case("dense-causal", lambda: Dense(True), 1000, 300, 4, 2, 64),
    tools.Case("edge-causal", lambda: edge(True), 1111, None, 4, 2, 64, 2),
    tools.Case("edge-head-dim-128", lambda: edge(False), 1111, 500, 4, 2, 128),
    tools.Case("edge-head-dim-256", lambda: edge(True), 700, None, 2, None, 256),
    tools.Case("random-by-head", lambda: BlockSparse(layouts.random(0.3, 1, per_head=True), (64, 128)), 1024, None, 4,
               None, 128),
    tools.Case("window", lambda: Neighborhood((1500,), 300), 1500, None, 2, None, 128),
    tools.Case("window-causal", lambda: Window(300, True), 1500, 1111, 4, 2, 64),
    tools.Case("dilated-window-sinks", lambda: Window(100, dilation=3, sinks=7), 1111, 777, 4, 2, 64, 2),
    tools.Case("dilated-window-128", lambda: Window(100, True, 3), 1500, None, 2, None, 128),
    tools.Case("predicate-by-head", lambda: Predicate(tools.some_rows_only, True), 700, 500, 4, 2, 128),
    tools.Case("neighborhood", lambda: Neighborhood((40, 40), (5, 3), orderings.hilbert((40, 40))), 1600, 1000, 2, 1,
               64),
]  # fmt: skip
FROM_TABLE = [
    replace(case, head_dim=16 if case.head_dim == 8 else case.head_dim) for id, case in tools.TABLE.items()
    if id.startswith(("dilated", "dense", "predicate", "window", "neighborhood", "swin")) and case.head_dim <= 256
]  # fmt: skip


def compiled_apart(case: tools.Case):
    """What the kernels are compiled for, beside the dtype: which they are first."""
    pattern, of = case.pattern(), (case.head_dim, case.heads // (case.kv_heads or case.heads))
    if isinstance(pattern, (Dense, Dilated)):
        return "nested" if case.id.startswith("nested") else "dilated", pattern.causal, *of
    return kind_of(pattern), pattern.causal, block_size_of(pattern), *of


def grouped():
    """{the id of the first case and a dtype: (cases that share what is compiled, the dtype)}: each dtype in turn, for
    each kind of masks, and for the tiles of large head_dims. Nested branches run in one pass in 16 bits."""
    groups, places, found = {}, {}, {}
    for case in (*FROM_TABLE, *tools.TILED, *LARGE):
        groups.setdefault(compiled_apart(case), []).append(case)
    for (kind, *_), cases in groups.items():
        turn, dtypes = (kind, DTYPES[kind == "nested" :]) if cases[0].head_dim <= 64 else (kind == "dilated", DTYPES)
        places[turn] = places.get(turn, -1) + 1
        dtype = dtypes[places[turn] % len(dtypes)]
        found[f"{cases[0].id}-{tools.name_of(dtype)}"] = cases, dtype
    return found


GROUPS = grouped()


@pytest.mark.parametrize("group", GROUPS)
def test_agrees_with_the_oracle(group, subtests):
    cases, dtype = GROUPS[group]
    for case in cases:
        with subtests.test(case.id):
            tools.check(case, dtype, device="cuda", backend="triton")


BY_VIEWS = [
    tools.Case("residues", lambda: Dilated([256, 512], [1, 2]), 1024, heads=6, head_dim=64),
    tools.Case("one-after-another", lambda: Dilated([512, 1024], [4, 16], True), 2048, heads=16, head_dim=64),
    tools.Case("uneven", lambda: Dilated([500, 1000], [3, 12]), 2000, heads=12, head_dim=128),
    tools.Case("causal", lambda: Dilated([256, 512], [1, 2], True), 1024, heads=4, head_dim=128),
    tools.Case("ragged-end", lambda: Dilated([256, 512], [1, 2], True), 1900, heads=4, head_dim=64),
    tools.Case("last-queries", lambda: Dilated([256, 512], [1, 2]), 1900, 1111, heads=4, head_dim=80),
    tools.Case("blocked", lambda: Dilated([256, 512], [1, 4], offsets="blocked"), 1024, heads=6, head_dim=64, batch=2),
    tools.Case("partition", lambda: Dilated([256, 512], [1, 2], heads="partition"), 1024, heads=5, head_dim=64),
]


@pytest.mark.parametrize("case", BY_VIEWS, ids=lambda case: case.id)
def test_agrees_with_the_oracle_where_cudnn_takes_the_branches(case, monkeypatch):
    from workbench.engines import triton_backend
    from workbench.engines.triton import cudnn_views

    taken = []
    for name in ("attend", "attend_backward"):
        right = getattr(cudnn_views, name)
        monkeypatch.setattr(cudnn_views, name, lambda *x, right=right, name=name: taken.append(name) or right(*x))
    monkeypatch.setattr(triton_backend, "ONCE", {})  # up to its head_dims one pass takes nested branches
    tools.take_strided_views(monkeypatch, room=1 << 19)
    dtype = DTYPES[1 + BY_VIEWS.index(case) % 2]
    tools.check(case, dtype, device="cuda", backend="triton", through_lse=False)
    assert set(taken) == {"attend", "attend_backward"}


MAKERS = {
    "dilated": lambda: Dilated([512, 2048], [1, 3], causal=True),
    "edge": lambda: edge(True),
    "neighborhood": lambda: Neighborhood((50, 80), 6, orderings.hilbert((50, 80))),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
def test_two_runs_are_equal_by_the_bit_also_through_checkpointing(make):
    q, k, v, g, _ = tools.Case("", None, 4000, heads=6, kv_heads=2, head_dim=64, batch=2).inputs(torch.bfloat16, "cuda")
    pattern, leaves = make(), [x.requires_grad_() for x in (q, k, v)]

    def call(q, k, v):
        return attention(q, k, v, pattern, backend="triton")

    def run(through):
        out = through(*leaves)
        return out, *torch.autograd.grad(out, leaves, g)

    want = run(call)
    for got in (run(call), run(lambda *x: checkpoint(call, *x, use_reentrant=False))):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_strided_inputs_are_not_copied_and_give_the_same_numbers():
    n, h, d = 8192, 8, 64
    packed = torch.randn(1, n, 3, h, d, device="cuda", dtype=torch.bfloat16)
    views, pattern = packed.unbind(2), Dilated([1024, 4096], [1, 4])
    want = attention(*(x.contiguous() for x in views), pattern, backend="triton")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = attention(*views, pattern, backend="triton")
    extra = torch.cuda.max_memory_allocated() - before
    assert torch.equal(got, want)
    assert extra <= 1.6 * got.numel() * got.element_size()  # the second branch's part is a quarter
    wide = packed.transpose(1, 3).contiguous().transpose(1, 3)  # heads before positions
    assert torch.equal(attention(*wide.unbind(2), pattern, backend="triton"), want)


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_holds_nothing_beside_its_results(mode):
    n, h, d = 1_048_576, 12, 64
    q, k, v, g = (torch.randn(1, n, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves, pattern = [x.requires_grad_(mode == "backward") for x in (q, k, v)], tools.longnet(1)()
    out = attention(*leaves, pattern, backend="triton")
    before, size = torch.cuda.memory_allocated(), out.numel() * 2
    torch.cuda.reset_peak_memory_stats()
    if mode == "forward":
        allowed, kept = 1.05 * (size + 4 * n * h), attention(*leaves, pattern, backend="triton")
    else:
        allowed, kept = 1.10 * (3 * size + 8 * n * h), torch.autograd.grad(out, leaves, g)
    assert torch.cuda.max_memory_allocated() - before <= allowed
    del kept


def test_compiles_as_one_graph_with_lengths_that_change():
    pattern = Dilated([256, 512], [1, 2])

    @torch.compile(fullgraph=True, dynamic=True)
    def layer(q, k, v):
        return attention(q * 2, k, v, pattern, backend="triton") + 1

    for n in (512, 700):
        q, k, v = (torch.randn(1, n, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        out = layer(q, k, v)
        want = attention(q * 2, k, v, pattern, backend="triton") + 1
        torch.testing.assert_close(out, want)
        grads = (torch.autograd.grad(x.float().sum(), (q, k, v)) for x in (out, want))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
def test_replays_from_a_cuda_graph(make):
    pattern = make()
    q, k, v = (torch.randn(1, 4000, 6, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    attention(q, k, v, pattern, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, pattern, backend="triton")
    for x in (q, k, v):
        x.normal_()
    graph.replay()
    assert torch.equal(out, attention(q, k, v, pattern, backend="triton"))


def test_auto_takes_the_kernels_for_16_bits():
    q, k, v = tools.Case("", None, 256, head_dim=64).inputs(torch.bfloat16, "cuda")[:3]
    for pattern in (Dilated([64], [2]), BlockSparse(layouts.local(1))):
        words = explain(q, k, v, pattern)
        assert words.startswith("triton: ")
        with torch.autocast("cuda", torch.bfloat16):
            assert explain(q.float(), k.float(), v.float(), pattern) == words
    assert explain(q, k, v, BlockSparse(layouts.local(1), 24)).startswith("torch: ")
    local, (single, double) = BlockSparse(layouts.local(1)), ([x.to(y) for x in (q, k, v)] for y in WIDE)
    assert explain(*single, Dilated([64], [2])).startswith("torch: ") and explain(*double, local).startswith("torch: ")
    assert explain(*single, local).startswith("triton: ")


BY_KIND = {}
for case in (*tools.TABLE.values(), *LARGE):
    BY_KIND.setdefault(type(case.pattern()).__name__, []).append(case)


@pytest.mark.parametrize("dtype", tools.DTYPES, ids=tools.name_of)
@pytest.mark.parametrize("kind", BY_KIND)
def test_torchs_kernels_agree_with_the_oracle(kind, dtype, subtests):
    for case in BY_KIND[kind]:
        with subtests.test(case.id):
            tools.check(case, dtype, device="cuda")


def test_strided_inputs_and_upstream_gradients_give_the_same_numbers_by_torch():
    case = tools.Case("strided", lambda: Dilated([64, 128], [1, 2]), 200, heads=4, head_dim=64)

    def run(q, k, v, pattern):
        views = (x.repeat_interleave(2, -1)[..., ::2] for x in (q, k, v))
        out, lse = attention(*views, pattern, backend="torch", return_lse=True)
        return out.repeat_interleave(2, -1)[..., ::2], lse  # its gradient arrives strided

    for dtype in tools.DTYPES:
        tools.check(case, dtype, device="cuda", run=run)


@torch.no_grad()
@pytest.mark.parametrize("heads, kv_heads, head_dim, dtype", [
    (12, 12, 64, torch.bfloat16), (8, 2, 128, torch.bfloat16), (4, 4, 80, torch.float16), (4, 2, 256, torch.float32),
])  # fmt: skip
def test_tokens_one_by_one_are_the_whole(heads, kv_heads, head_dim, dtype):
    qkv = [torch.randn(2, 1300, h, head_dim, dtype=dtype, device="cuda") for h in (heads, kv_heads, kv_heads)]
    pattern = Dilated([64, 256, 1024], [1, 2, 4], True)
    cache, steps = wb.Cache(pattern), [700, *[1] * 340, 60, *[1] * 200]
    out = torch.cat([cache.step(*x) for x in zip(*(x.split(steps, 1) for x in qkv), strict=True)], 1)
    want = wb.reference(*qkv, pattern)[0]
    assert cache.fast and tools.relative(out, want) < (1e-5 if dtype == torch.float32 else 0.005)
