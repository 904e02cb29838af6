"""The torch operators among torch's machinery: autograd, compilation, checkpointing, fake tensors; what they hold."""

import gc
import itertools
import operator
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests import tools
from tests.tools import TABLE
from workbench import BlockSparse, Dilated, Neighborhood, Predicate, attention, layouts, reference
from workbench.engines import fa4_backend, torch_backend
from workbench.engines.operators import handle_of
from workbench.engines.torch import block_sparse, fused
from workbench.patterns import Dense, PerHead, Window
from workbench.probes import memory

PATTERNS = {
    "dense": lambda: TABLE["dense-prime-causal"].pattern(),
    "dilated": lambda: Dilated([4, 8], [1, 2], causal=True),
    "dilated-uncovered": lambda: Dilated([4, 6], [2, 3]),
    "blocks": lambda: BlockSparse(layouts.local(1), 4),
    "predicate": lambda: Predicate(tools.some_rows_only),
}
every_pattern = pytest.mark.parametrize("pattern", [make() for make in PATTERNS.values()], ids=list(PATTERNS))


def inputs(n=13, nq=None, heads=2, kv_heads=None, batch=1, d=4, dtype=torch.float64, grad=True):
    case = tools.Case("", None, n, nq, heads, kv_heads, d, batch)
    return [x.requires_grad_(grad) for x in case.inputs(dtype)[:3]]


def run(q, k, v, pattern):
    return attention(q, k, v, pattern, backend="torch", return_lse=True)


def same(one, other):
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def close(one, other):  # compiled, an unused lse has a gradient of zeros and not none, which takes another path
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_a_gradient_of_one_input_only(which):
    leaves = inputs()
    pattern = PATTERNS["dilated"]()
    want = torch.autograd.grad(run(*leaves, pattern)[0].sum(), leaves)[which]
    alone = [x.detach().requires_grad_(y == which) for y, x in enumerate(leaves)]
    run(*alone, pattern)[0].sum().backward()
    assert torch.equal(alone[which].grad, want)
    assert all(x.grad is None for y, x in enumerate(alone) if y != which)


def test_the_pattern_lives_until_the_backward():
    q, k, v = inputs()
    want = torch.autograd.grad(run(q, k, v, Dilated([4, 8], [1, 2]))[0].sum(), (q, k, v))
    pattern = Dilated([4, 8], [1, 2])
    out, alive = run(q, k, v, pattern)[0], weakref.ref(pattern)
    del pattern
    gc.collect()
    assert same(torch.autograd.grad(out.sum(), (q, k, v)), want)
    del out
    gc.collect()
    assert alive() is None  # and no longer


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
@every_pattern
def test_checkpointing(pattern, reentrant):
    q, k, v = inputs()
    want = torch.autograd.grad(run(q, k, v, pattern)[0].square().sum(), (q, k, v))
    out = checkpoint(lambda *x: run(*x, pattern)[0], q, k, v, use_reentrant=reentrant)
    out.square().sum().backward()
    assert same([x.grad for x in (q, k, v)], want)


@pytest.mark.parametrize("name", ["dilated", "blocks"])
def test_the_operators_pass_opcheck(name):
    pattern, (q, k, v) = PATTERNS[name](), inputs(nq=7)
    torch.library.opcheck(torch_backend.attend, (q, k, v, handle_of(pattern), 0.5))
    out, lse = (x.detach() for x in torch_backend.attend(q, k, v, handle_of(pattern), 0.5))
    q, k, v = (x.detach() for x in (q, k, v))
    arguments = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, handle_of(pattern), 0.5)
    torch.library.opcheck(torch_backend.attend_backward, arguments)


@pytest.mark.parametrize("dtype", tools.tiers(tools.DTYPES, [torch.bfloat16]), ids=tools.name_of)
@every_pattern
def test_meta_and_fake_tensors_have_the_shapes_of_real_ones(pattern, dtype):
    q, k, v = inputs(nq=7, heads=4, kv_heads=2, batch=3, dtype=dtype)
    real = [*run(q, k, v, pattern)]
    real += torch.autograd.grad(real[0].sum(), (q, k, v))
    leaves = [x.detach() for x in (q, k, v)]
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x).requires_grad_() for x in leaves]
        fake = [*run(*fake, pattern), *torch.autograd.grad(run(*fake, pattern)[0].sum(), fake)]
    meta = [x.to("meta") for x in leaves]
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in real]
    assert [(x.shape, x.dtype) for x in run(*meta, pattern)] == [(x.shape, x.dtype) for x in real[:2]]


@pytest.fixture
def compiled():
    """A function that compiles in one graph without generating code, and counts its graphs."""
    torch._dynamo.reset()

    def compile(fn, dynamic=None, backend="aot_eager"):
        counter = CompileCounterWithBackend(backend)
        return torch.compile(fn, backend=counter, fullgraph=True, dynamic=dynamic), counter

    yield compile
    torch._dynamo.reset()


@every_pattern
def test_one_graph_serves_every_length(pattern, compiled):
    fast, counter = compiled(lambda q, k, v: run(q, k, v, pattern), dynamic=True)
    for n in (12, 13, 29, 40):
        q, k, v = inputs(n, batch=2)
        want = run(q, k, v, pattern)
        got = fast(q, k, v)
        assert same(got, want)
        g = torch.randn_like(want[0])
        close(torch.autograd.grad(got[0], (q, k, v), g), torch.autograd.grad(want[0], (q, k, v), g))
    assert counter.frame_count == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_function_asks_each_pattern_about_each_length(dynamic):
    torch._dynamo.reset()

    def asked(x, pattern):
        return x + (1 if pattern.answer(fa4_backend.in_its_order, operator.index(x.shape[1])) else 0)

    compiled = torch.compile(asked, backend="eager", dynamic=dynamic, fullgraph=True)
    patterns = Dilated([512], [1]), Dilated([1024], [1])
    for n, pattern in itertools.product((1024, 1000, 1536), patterns):
        assert compiled(torch.zeros(1, n), pattern)[0, 0] == fa4_backend.in_its_order(pattern, n)


@pytest.mark.parametrize("grad", [True, False], ids=["with-gradients", "without"])
def test_a_compiled_function_takes_one_pattern_after_another(compiled, grad):
    fast, _ = compiled(run)
    patterns = [Dilated([4, 8], [1, 2]), Dilated([8, 4], [2, 3]), BlockSparse(layouts.local(1), 4), Dilated([2], [1])]
    q, k, v = inputs(grad=grad)
    for pattern in patterns + patterns[::-1]:
        got, want = fast(q, k, v, pattern), run(q, k, v, pattern)
        assert same(got, want)
        if grad:
            close(torch.autograd.grad(got[0].sum(), (q, k, v)), torch.autograd.grad(want[0].sum(), (q, k, v)))


KEPT = Window(3)
WRITTEN = {
    "window": lambda: Window(5, sinks=1), "dense": lambda: Dense(True), "dilated": lambda: Dilated([4, 8], [1, 2]),
    "neighborhood": lambda: Neighborhood((3, 4), 1), "blocks": lambda: BlockSparse(layouts.local(1), 4, causal=True),
    "combined": lambda: KEPT | BlockSparse(layouts.global_(1) - layouts.local(0), 4) | Dilated([12], [5]),
}  # fmt: skip


@pytest.mark.parametrize("make", WRITTEN.values(), ids=list(WRITTEN))
def test_a_pattern_may_be_written_in_the_function_that_is_compiled(make, compiled):
    fast, counter = compiled(lambda q, k, v: run(q, k, v, make()), backend="eager")
    for _ in range(3):
        q, k, v = inputs(12)
        got, want = fast(q, k, v), run(q, k, v, make())
        assert same(got, want)
        close(torch.autograd.grad(got[0].sum(), (q, k, v)), torch.autograd.grad(want[0].sum(), (q, k, v)))
        gc.collect()
    assert counter.frame_count == 1


def test_a_pattern_in_a_compiled_function_may_be_made_of_what_changes(compiled):
    fast, counter = compiled(lambda q, k, v, w: run(q, k, v, Window(w, sinks=w - 2)), dynamic=True)
    for width in (5, 6, 7):
        assert same(fast(*inputs(), width), run(*inputs(), Window(width, sinks=width - 2)))
    assert counter.frame_count == 3


def test_a_pattern_that_leaves_a_compiled_function_is_a_whole_one(compiled):
    fast, _ = compiled(lambda x: (x + 1, Window(5)))
    (_, pattern), (q, k, v) = fast(torch.zeros(2)), inputs()
    assert same(run(q, k, v, pattern), run(q, k, v, Window(5))) and pattern.pairs(13, 2) == Window(5).pairs(13, 2)
    with pytest.raises(AttributeError, match="width of Window.*: a Window does not change"):
        pattern.width = 6
    with pytest.raises(AttributeError, match="'Window' object has no attribute 'length'"):
        _ = pattern.length


class Other(Window):
    """Means what it likes: it is not the window that its spec says."""


@pytest.mark.parametrize("make", [
    lambda: Predicate(tools.every_third), lambda: PerHead([KEPT, KEPT]), lambda: Other(3), lambda: KEPT | Other(3),
    lambda: BlockSparse(layouts.explicit(torch.ones(4, 4) > 0), 4),
    lambda: BlockSparse(layouts.local(0) | layouts.Layout("mine", {}, lambda h, i, j, grid: i > j), 4),
])  # fmt: skip
def test_what_no_numbers_say_is_to_be_made_outside_of_a_compiled_function(make, compiled):
    fast, _ = compiled(lambda *x: run(*x, make()), backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="in a function that torch.compile compiles: make it"):
        fast(*inputs(grad=False))


def test_a_pattern_serves_sizes_in_turn():
    pattern = BlockSparse(layouts.local(1), 4)
    for n, nq, heads in ((13, 13, 2), (29, 29, 2), (13, 5, 2), (13, 13, 3), (13, 13, 2)):
        tools.check(tools.Case("sizes in turn", lambda: pattern, n, nq, heads), torch.float64)


def test_lists_of_blocks_are_made_once_for_all_numbers_of_heads_that_see_the_same(monkeypatch):
    """As by one device and by heads in turn; a predicate may ask for the head."""
    made = []
    for kind in (BlockSparse, Neighborhood, Predicate):
        real = kind.blocks
        monkeypatch.setattr(kind, "blocks", lambda self, *sizes, real=real: made.append(sizes[1]) or real(self, *sizes))
    same, by_head = (BlockSparse(layouts.local(1), 8), Neighborhood((8, 8), 1)), Predicate(tools.every_third)
    for pattern, want in (*((x, [1]) for x in same), (by_head, [4, 2])):
        made.clear()
        for heads in (4, 2, 4):
            q, k, v = torch.randn(3, 1, 64, heads, 8, dtype=torch.float64).unbind()
            out = attention(q, k, v, pattern, backend="torch")
            assert tools.relative(out, reference(q, k, v, pattern)[0]) < 1e-12
        assert made == want


def quiet(n, heads=2, d=8, dtype=torch.float64):
    return inputs(n, None, heads, None, 1, d, dtype, False)


def computed(monkeypatch, call) -> list[int]:
    """Scores (query, key, head) in each fused call of a forward."""
    scores, forward = [], fused.forward

    def spy(q, k, *rest):
        scores.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
        return forward(q, k, *rest)

    monkeypatch.setattr(fused, "forward", spy)
    call()
    return scores


@pytest.mark.parametrize("density", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "by-head"])
def test_the_density_asked_for_is_the_density_computed(density, per_head, monkeypatch):
    n, heads = 640, 4
    pattern = BlockSparse(layouts.random(density, 0, per_head), 16)
    scores = computed(monkeypatch, lambda: run(*quiet(n, heads), pattern))
    assert sum(scores) == pattern.pairs(n, heads) == round(density * 40 * 40) * 16 * 16 * heads


def test_fused_calls_are_few_and_of_bounded_size(monkeypatch):
    monkeypatch.setattr(block_sparse, "ELEMENTS", 16 * 8 * 2 * 20)  # 20 key blocks of 16 positions, 2 heads, head_dim 8
    pattern = BlockSparse(layouts.random(0.1), 16)
    scores = computed(monkeypatch, lambda: run(*quiet(1600), pattern))
    assert max(scores) <= 20 * 16 * 16 * 2
    assert len(scores) <= 2 * sum(scores) / max(scores)


def test_a_predicate_is_never_asked_about_positions_that_do_not_exist():
    n = 143

    class Asked:  # what a class holds is not copied
        places = []

    def seen(h, i, j):
        Asked.places.append((int(i.min()), int(i.max()), int(j.min()), int(j.max())))
        return (i - j).abs() < 30

    for pattern in (Predicate(seen), BlockSparse(layouts.local(1), 64) & Predicate(seen)):
        run(*quiet(n), pattern)
    low_i, high_i, low_j, high_j = zip(*Asked.places, strict=True)
    assert min(low_i + low_j) >= 0 and max(high_i + high_j) < n


def test_a_forward_holds_at_most_three_times_its_output():
    q, k, v = quiet(16384, 12, 64, torch.float32)
    pattern, output = tools.longnet(8)(), q.numel() * q.element_size()
    with torch.no_grad():
        peak = memory.measure(lambda: attention(q, k, v, pattern, backend="torch"))
    assert output <= peak <= 3 * output


def test_few_queries_of_a_batch_copy_no_keys_that_they_do_not_see():
    q, k = torch.randn(8, 1, 2, 8), torch.randn(8, 1 << 16, 2, 8)
    with torch.no_grad():
        assert memory.measure(lambda: attention(q, k, k, Window(5, True), backend="torch")) < k.nbytes / 2


def test_queries_count_in_how_many_sequences_go_together():
    q, k = torch.randn(32, 128, 64, 16), torch.randn(32, 128, 1, 16)  # 16 MB of queries on few keys
    with torch.no_grad():
        assert memory.measure(lambda: attention(q, k, k, Window(5), backend="torch")) < 2.5 * q.nbytes


def test_blocks_longer_than_the_sequence_take_no_memory_of_their_own():
    q, far = torch.randn(1, 50, 2, 8), BlockSparse(layouts.local(0), 1 << 40)
    for pattern in (far, far & Predicate(lambda h, i, j: i != j)):
        want = reference(q, q, q, pattern)[0]
        torch.testing.assert_close(attention(q, q, q, pattern, backend="torch").double(), want, atol=1e-5, rtol=1e-5)


def test_short_sequences_of_a_batch_share_their_masks(monkeypatch):
    pattern, asked, right = Neighborhood((8, 8), 2), [], Neighborhood.count
    monkeypatch.setattr(Neighborhood, "count", lambda *x: asked.append(x) or right(*x))
    run(*inputs(64, grad=False), pattern)
    once = len(asked)
    run(*inputs(64, batch=7, grad=False), pattern)
    assert len(asked) == 2 * once > 0
