"""The one door: what it refuses and how it says so, what it accepts that is unusual, and which backend it takes."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests import tools
from workbench import BlockSparse, Dense, Dilated, Neighborhood, Predicate, attention, distributed, layouts
from workbench.analysis.mass import captured_mass
from workbench.engines import dispatch
from workbench.engines.dispatch import explain
from workbench.engines.reference import reference

PATTERNS = [
    Dense(), Dense(True), Dilated([4, 8], [1, 2]), Dilated([4, 8], [1, 2], causal=True, heads="partition"),
    BlockSparse(layouts.local(1), 4), Predicate(tools.every_third, causal=True),
]  # fmt: skip
every_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)


def tensors(b=1, nq=6, n=6, heads=2, kv_heads=None, d=4, dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    of_k = (b, n, heads if kv_heads is None else kv_heads, d)
    return [torch.randn(s, generator=random).to(dtype) for s in ((b, nq, heads, d), of_k, of_k)]


def bad(q=None, k=None, v=None, pattern=None, **options):
    """A call's arguments: tensors of (1, 6, 2, 4) and a dilated pattern where not said otherwise."""
    q_, k_, v_ = tensors()
    k = k_ if k is None else k
    given = [q_ if q is None else q, k, (k if k is not k_ else v_) if v is None else v]
    return given, Dilated([4], [2]) if pattern is None else pattern, options


def t(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


half = torch.float16
REFUSED = {
    "no-pattern": (bad(pattern="dense"), "pattern='dense': want a pattern"),
    "no-tensor": (bad(q=t(1, 6, 2, 4).numpy()), "q is a ndarray: want a tensor"),
    "another-batch": (bad(q=t(3, 6, 2, 4)), "q (3, 6, 2, 4), k (1, 6, 2, 4)"),
    "another-head-dim": (bad(q=t(1, 6, 2, 5)), "q (1, 6, 2, 5), k (1, 6, 2, 4)"),
    "v-of-another-length": (bad(v=t(1, 7, 2, 4)), "v (1, 7, 2, 4): want one batch"),
    "head-dim-0": (bad(q=t(1, 6, 2, 0), k=t(1, 6, 2, 0)), "head_dim is 0"),
    "6-heads-on-4": (bad(q=t(1, 6, 6, 4), k=t(1, 6, 4, 4)), "4 key heads do not divide 6 query heads"),
    "heads-on-none": (bad(k=t(1, 6, 0, 4)), "0 key heads do not divide 2 query heads"),
    "more-queries-than-keys": (bad(k=t(1, 5, 2, 4)), "6 queries on 5 keys; queries are the last ones, Nq <= N"),
    "float16-on-q-only": (bad(q=t(1, 6, 2, 4, dtype=half)), "dtypes float16, float32, float32 of q (1, 6, 2, 4)"),
    "integers": (bad(*[t(1, 6, 2, 4, dtype=torch.int64)] * 3), "want one of float64, float32, bfloat16, float16"),
    "another-device": (bad(q=t(1, 6, 2, 4).to("meta")), "devices meta, cpu, cpu"),
    "scale-0": (bad(scale=0), "scale=0: want a finite number above 0"),
    "unknown-backend": (bad(backend="cuda"), "backend='cuda': want one of 'auto', 'reference', 'torch', 'triton'"),
    "causal": (bad(causal=True), "causal=True: attention has no such option; the pattern says it, e.g. Dense(causal"),
    "dropout": (bad(dropout_p=0.0), "dropout_p=0.0: attention has no such option; the weights are not dropped out"),
    "misspelled": (bad(scales=1.0), "scales=1.0: attention has no such option; see its help"),
    "return-lse-by-a-word": (bad(return_lse="yes"), "return_lse='yes': want True or False"),
    "another-neighborhood": (bad(pattern=Neighborhood((3, 3), 1)), "n=6 on a neighborhood of shape (3, 3): want n=9"),
    "a-layout-of-3-sequences": (bad(pattern=BlockSparse(tools.batch_layout(3, 2, 2, 2), 4)),
                                "the layout is for a batch of 3, but q (1, 6, 2, 4)"),
    "a-layout-of-4-heads": (bad(pattern=BlockSparse(tools.batch_layout(1, 4, 2, 2), 4)), "4 heads, want 2"),
    "a-predicate-of-numbers": (bad(pattern=Predicate(lambda h, i, j: i - j)), "want a bool tensor"),
}  # fmt: skip


@pytest.mark.parametrize("call, message", REFUSED.values(), ids=list(REFUSED))
def test_bad_input_is_refused_with_the_value_and_what_would_do(call, message):
    given, pattern, options = call
    tools.refused(re.escape(message), attention, *given, pattern, **options)


@pytest.mark.parametrize("run", [reference, explain])
@pytest.mark.parametrize("id", ["6-heads-on-4", "more-queries-than-keys", "no-tensor", "no-pattern"])
def test_the_reference_and_explain_refuse_what_attention_refuses(run, id):
    (given, pattern, _), message = REFUSED[id]
    tools.refused(re.escape(message), run, *given, pattern)


def test_every_function_of_q_and_k_refuses_an_option_by_name():
    for run in (attention, reference, explain, captured_mass, distributed.attention):
        x = [t(1, 6, 2, 4)] * (2 if run is captured_mass else 3)
        tools.refused(f"causal=True: {run.__name__} has no such option; the pattern", run, *x, Dense(), causal=True)


def test_a_backend_asked_for_by_name_never_falls_back(monkeypatch):
    q, k, v = tensors()
    tools.refused("backend='fa4': the kernels are for CUDA, not cpu", attention, q, k, v, Dense(), backend="fa4")
    ran = []
    monkeypatch.setattr(dispatch, "run", lambda backend, q, *_: (ran.append(backend), (q, None))[1])
    for name in ("reference", "torch"):
        attention(q, k, v, Dense(), backend=name)
    assert ran == ["reference", "torch"]


@every_pattern
def test_explain_names_the_backend_that_runs_and_gives_a_reason(pattern, monkeypatch):
    ran, run = [], dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda *x: (ran.append(x[0]), run(*x))[1])
    q, k, v = tensors()
    backend, reason = explain(q, k, v, pattern).split(": ", 1)
    attention(q, k, v, pattern)
    assert ran == [backend] and len(reason.split()) > 5


def on_card(*shape, grad=True, dtype=torch.bfloat16):
    """A tensor without memory that says it is on a card; inside FakeTensorMode."""
    return torch.empty(shape, device="cuda", dtype=dtype).requires_grad_(grad)


SEGMENTS = 4096, 8, 64  # 1,024 of these are 2^31 elements


def test_explain_says_where_cudnn_and_flash_are_left_out():
    with FakeTensorMode():
        past, before = on_card(1025, *SEGMENTS), on_card(1023, *SEGMENTS)
        words = "; by memory-efficient attention, since cuDNN's gradients are wrong past 2^31"
        assert words in explain(past, past, past, Dense())
        assert "cuDNN" not in explain(before, before, before, Dense())
        with torch.no_grad():
            assert "cuDNN" not in explain(past, past, past, Dense())
        quiet = past.detach()
        assert "cuDNN" not in explain(quiet, quiet, quiet, Dense())
        assert words in explain(quiet, quiet, past, Dense())
        wide = on_card(1025, *SEGMENTS, dtype=torch.float32)
        assert "cuDNN" not in explain(wide, wide, wide, Dilated([4096], [2]))


def test_what_counts_is_the_last_offset():
    with FakeTensorMode():
        small, one = on_card(1, *SEGMENTS), on_card(1, *SEGMENTS, grad=False)
        assert not dispatch.gradients_past_2_31(small, one)
        assert dispatch.gradients_past_2_31(small, one.expand(1025, -1, -1, -1))  # its gradient is dense
        half, packed = on_card(512, *SEGMENTS, grad=False), on_card(512, 4096, 3, 8, 64, grad=False)
        assert not dispatch.gradients_past_2_31(small, half)
        assert dispatch.gradients_past_2_31(small, packed.select(2, 1))  # as a projection to q, k and v gives it
        assert not dispatch.gradients_past_2_31(on_card(2**31 - 1)) and dispatch.gradients_past_2_31(on_card(2**31))
    assert not dispatch.gradients_past_2_31(torch.empty(2**32, device="meta", requires_grad=True))


@pytest.fixture
def wrong(monkeypatch):
    """Every call is one that cuDNN would get wrong; a list of what is allowed as torch's attention starts."""
    cuda, seen, real = torch.backends.cuda, [], torch.nn.functional.scaled_dot_product_attention

    def watched(*args, **kwargs):
        allowed = {"flash": cuda.flash_sdp_enabled(), "efficient": cuda.mem_efficient_sdp_enabled(),
                   "unfused": cuda.math_sdp_enabled(), "cudnn": cuda.cudnn_sdp_enabled()}  # fmt: skip
        seen.append([name for name, on in allowed.items() if on])
        return real(*args, **kwargs)

    monkeypatch.setattr(dispatch, "gradients_past_2_31", lambda *tensors: True)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    return seen


@pytest.mark.parametrize("past", [False, True], ids=["before", "past-2^31"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=tools.name_of)
def test_memory_efficient_attention_gets_as_many_key_heads_as_query_heads(dtype, past, monkeypatch):
    """It refuses grouped heads, and torch then takes the kernel that holds all scores."""
    taken = []

    def sdpa(q, k, v, **options):
        taken.append((k.shape[1], v.shape[1], options.get("enable_gqa", False)))
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(dispatch, "gradients_past_2_31", lambda *tensors: past)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with FakeTensorMode():
        q, k = (on_card(1, 64, heads, 64, grad=False, dtype=dtype) for heads in (8, 2))
        assert attention(q, k, k, Dense(True)).shape == q.shape
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
        attention(q, k, k, Dense(True))
    grouped, repeated = (2, 2, True), (8, 8, False)
    newer = repeated if past or dtype == torch.float32 else grouped
    assert taken == [newer, repeated if dtype == torch.float16 else newer]


def test_the_order_of_torchs_kernels_is_left_alone(wrong):
    """Set within a block, it would be flash before cuDNN behind it. Neither is taken where they are wrong."""
    order, was_set, (q, k, v) = torch._C._get_sdp_priority_order(), [], tensors(dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_set_sdp_priority_order", was_set.append)
        out = attention(q.requires_grad_(), k, v, Dense(True)).detach()
    assert tools.relative(out, reference(q, k, v, Dense(True))[0].detach()) < 1e-10
    assert wrong == [["efficient", "unfused"]] and was_set == []
    assert torch.backends.cuda.cudnn_sdp_enabled()  # again
    assert order.index(SDPBackend.EFFICIENT_ATTENTION.value) < order.index(SDPBackend.MATH.value)


def test_a_kernel_that_the_user_switched_off_stays_off(wrong):
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        attention(*tensors(), Dense())
    assert wrong == [["unfused"]]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(ValueError, match="allows none but cuDNN's and flash"):
        attention(*tensors(), Dense())


def test_a_call_past_2_31_compiles_in_one_graph(monkeypatch):
    monkeypatch.setattr(dispatch, "gradients_past_2_31", lambda *tensors: True)
    (q, k, v), pattern = tensors(), Dense()
    fast = torch.compile(lambda *x: attention(*x, pattern), backend="eager", fullgraph=True)
    torch.testing.assert_close(fast(q.requires_grad_(), k, v), reference(q, k, v, pattern)[0].float())


def test_more_sequences_than_a_grid_takes_are_several_calls(wrong, monkeypatch):
    monkeypatch.setattr(dispatch, "GRID", 2)
    given = [x.requires_grad_() for x in tensors(b=5, heads=4, kv_heads=2, dtype=torch.float64)]
    out = attention(*given, Dense(True))
    want = reference(*given, Dense(True))[0]
    assert len(wrong) == 3
    torch.testing.assert_close(out, want)
    g = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, given, g), torch.autograd.grad(want, given, g))


def assert_right(q, k, v, pattern, tolerance=1e-10, **options):
    out, lse = attention(q, k, v, pattern, return_lse=True, **options)
    want, want_lse = reference(q, k, v, pattern, options.get("scale"))
    assert out.shape == q.shape and out.dtype == q.dtype and lse.shape == want_lse.shape
    assert tools.relative(out, want) < tolerance and tools.lse_error(lse, want_lse) < tolerance
    alone = attention(q, k, v, pattern, **options)  # without lse another path may run
    assert tools.relative(alone, want) < tolerance


@every_pattern
@pytest.mark.parametrize("sizes", [{"b": 0}, {"heads": 0}, {"nq": 0}, {"nq": 0, "n": 0}], ids=str)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_nothing_to_do(pattern, sizes, backend):
    q, k, v = (x.requires_grad_() for x in tensors(**sizes))
    alone, both = (attention(q, k, v, pattern, backend=backend, return_lse=lse) for lse in (False, True))
    for out in (alone, *both):
        assert out.numel() == 0
        grads = torch.autograd.grad(out.sum(), (q, k, v), allow_unused=backend == "reference", retain_graph=True)
        assert all(g is None or not g.any() for g in grads)
    assert attention(q, k, v, pattern).shape == q.shape


def strided(x, how):
    """The same numbers in other strides."""
    if how == "last-stride-2":
        return x.repeat_interleave(2, -1)[..., ::2]
    if how == "heads-outside":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "last-dimension-outside":
        return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    return torch.cat([x, x], 2)[:, :, : x.shape[2]]  # part of a wider projection


@every_pattern
@pytest.mark.parametrize("how", ["last-stride-2", "heads-outside", "last-dimension-outside", "part-of-a-projection"])
def test_strided_inputs_give_the_same_numbers(pattern, how):
    given = [x.requires_grad_() for x in tensors(b=2, nq=5, heads=4, kv_heads=2, dtype=torch.float64)]
    views = [strided(x, how) for x in given]
    assert not any(x.is_contiguous() for x in views)
    g = torch.randn_like(given[0])
    for lse in (False, True):
        one, other = (attention(*x, pattern, return_lse=lse) for x in (given, views))
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        one, other = (x[0] if lse else x for x in (one, other))
        for upstream in (g, strided(g, how)):
            want = torch.autograd.grad(one, given, g, retain_graph=True)
            got = torch.autograd.grad(other, given, upstream, retain_graph=True)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@every_pattern
def test_broadcast_inputs(pattern):
    q, k, v = tensors(dtype=torch.float64)
    k, v = (x[:, :, :1].expand(-1, -1, 2, -1) for x in (k, v))
    assert_right(q, k, v, pattern)
    assert_right(q.expand(3, -1, -1, -1), *(x.expand(3, -1, -1, -1) for x in (k, v)), pattern)
    assert_right(q[..., :1].expand(-1, -1, -1, 4), k, v, pattern)


@every_pattern
def test_a_scale_of_ones_own(pattern):
    q, k, v = tensors(dtype=torch.float64)
    for scale in (1, 0.3, 30.0, np.float32(0.5)):
        assert_right(q, k, v, pattern, scale=scale)
    torch.testing.assert_close(attention(q, k, v, pattern), attention(q, k, v, pattern, scale=0.5))


@every_pattern
def test_autocast_comes_before_the_checks_and_casts_all_but_float64(pattern):
    """As with float32 q and k from a rotary embedding beside a 16-bit v; torch's attention casts them too."""
    q, k, v = tensors(nq=5)
    q, k, v = q, k.half(), v.bfloat16()
    narrow = [q.bfloat16(), k.bfloat16(), v]
    mass = captured_mass(*narrow[:2], pattern)
    for options in ({}, {"return_lse": True}, {"backend": "reference"}):
        want = attention(*narrow, pattern, **options)
        with torch.autocast("cpu", torch.bfloat16):
            got = attention(q, k, v, pattern, **options)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*(x.double() for x in (q, k, v)), pattern).dtype == torch.float64
        assert explain(q, k, v, pattern) == explain(q, q[:, :1].expand_as(k), v, pattern)
        assert torch.equal(captured_mass(q, k, pattern), mass)
        for dtype, name in ((torch.float64, "float64"), (torch.int64, "int64")):
            tools.refused(f"dtypes {name}, bfloat16, bfloat16", attention, q.to(dtype), k, v, pattern)
    tools.refused("dtypes float32, float16, bfloat16", attention, q, k, v, pattern)


def test_autocast_leaves_what_is_wide_inside_wide(monkeypatch):
    """The unfused fallback multiplies float32 matrices of its own, which autocast would round to 16 bit."""
    from workbench.engines.torch import fused

    monkeypatch.setattr(fused, "kernel", lambda q, mask=None: "unfused")
    q, k, v = (x.bfloat16() for x in tensors(n=24, nq=24, d=16))
    pattern = Dilated([8, 24], [1, 2])
    _, want = reference(q, k, v, pattern)
    with torch.autocast("cpu", torch.bfloat16):
        _, lse = attention(q, k, v, pattern, return_lse=True)
    assert tools.lse_error(lse, want) < 1e-6


def test_the_package_leaves_the_compiler_alone():
    """Importing torch._dynamo takes two seconds, of every process."""
    code = "import sys, workbench; workbench.attention; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
