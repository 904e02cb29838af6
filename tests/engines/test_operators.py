"""The operators in other processes and under torch's transforms: the right numbers or a sentence, never a zero."""

import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tests import tools
from workbench import (
    BlockSparse,
    Dense,
    Dilated,
    MultiheadAttention,
    Neighborhood,
    Predicate,
    attention,
    layouts,
    reference,
)
from workbench.engines import operators
from workbench.patterns import orderings

PATTERNS = {
    "dense": Dense(True), "dilated": Dilated([4, 8], [1, 2], causal=True),
    "partition": Dilated([4, 8], [1, 2], heads="partition"), "blocks": BlockSparse(layouts.local(1), 4),
    "layouts": BlockSparse(tools.batch_layout(2, 2, 3, 3), 4), "predicate": Predicate(tools.some_rows_only),
}  # fmt: skip


def call(pattern, lse, run=attention, **options):
    """A function of q, k, v whose result is finite and depends on all that is asked for."""

    def both(q, k, v):
        if not lse:
            out = run(q, k, v, pattern, **options)
            return out[0] if isinstance(out, tuple) else out
        out, its = run(q, k, v, pattern, **({"return_lse": True} if run is attention else {}), **options)
        return out + torch.where(its == -torch.inf, 0, its).transpose(1, 2)[..., None]

    return both


def some(many=5):
    random = torch.Generator().manual_seed(0)
    return torch.randn(many, 2, 11, 2, 3, generator=random, dtype=torch.float64).unbind()


def sum_of(function, k, v):
    return lambda q: function(q, k, v).square().sum()


REVERSE = {
    "grad": lambda f, q, k, v, t: grad(sum_of(f, k, v))(q),
    "vmap": lambda f, q, k, v, t: vmap(f, (0, None, 1))(torch.stack([q, t]), k, torch.stack([v, t], 1)),
    "vmap-of-none": lambda f, q, k, v, t: vmap(f, (0, None, None))(torch.stack([q, t])[:0], k, v).sum((0, 1)) + q,
    "vmap-of-grad": lambda f, q, k, v, t: vmap(grad(sum_of(f, k, v)))(torch.stack([q, t])),
    "jacrev": lambda f, q, k, v, t: jacrev(lambda x: f(q, x, v)[0, -1])(k),
    "not-of-attention": lambda f, q, k, v, t: jvp(lambda x: f(q, k, v) * x, (t,), (q,))[1],
}
OTHER = {
    "jvp": lambda f, q, k, v, t: jvp(lambda x: f(x, k, v), (q,), (t,))[1],
    "jvp-of-vjp": lambda f, q, k, v, t: jvp(lambda u: vjp(lambda x: f(x, k, v), q)[1](u)[0], (v,), (t,))[1],
    "jacfwd": lambda f, q, k, v, t: jacfwd(lambda x: f(torch.cat([q[:, :-1], x], 1), k, v))(q[:, -1:]),
    "hessian": lambda f, q, k, v, t: hessian(lambda x: f(x, k, v).square().sum())(q),
    "grad-of-grad": lambda f, q, k, v, t: grad(lambda x: (grad(sum_of(f, k, v))(x) * t).sum())(q),
    "dual": lambda f, q, k, v, t: of_dual(f, q, k, v, t),
}


def of_dual(f, q, k, v, t):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(q, forward_ad.make_dual(k, t), v)).tangent


def in_turn(transforms):
    """Each transform of each pattern, of out and of lse in turn; `make test-all` has both of each."""
    every = [(x, y, lse) for x in transforms for y in PATTERNS for lse in (False, True)]
    places = {x: place for place, x in enumerate((*transforms, *PATTERNS))}
    return tools.tiers(every, [x for x in every if (places[x[0]] + places[x[1]] + x[2]) % 2])


@pytest.mark.parametrize("of", in_turn(REVERSE), ids=str)
def test_reverse_mode_and_vmap_go_through(of):
    transform, pattern, lse = REVERSE[of[0]], PATTERNS[of[1]], of[2]
    q, k, v, t, _ = some()
    want = transform(call(pattern, lse, reference), q, k, v, t)
    assert bool(want.any())
    torch.testing.assert_close(transform(call(pattern, lse), q, k, v, t), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("of", in_turn(OTHER), ids=str)
def test_other_derivatives_are_refused_in_a_sentence_and_right_by_the_reference(of):
    name, pattern, lse = of[0], PATTERNS[of[1]], of[2]
    q, k, v, t, _ = some()
    want = OTHER[name](call(pattern, lse, reference), q, k, v, t)
    assert bool(want.any())
    torch.testing.assert_close(OTHER[name](call(pattern, lse, backend="reference"), q, k, v, t), want)
    with pytest.raises(ValueError, match="derivatives .*backend='reference' only"):
        OTHER[name](call(pattern, lse), q, k, v, t)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_second_derivative_by_autograd_is_refused_in_the_same_sentence(name):
    for lse in (False, True):
        q, k, v = (x.requires_grad_() for x in some(3))
        once = torch.autograd.grad(call(PATTERNS[name], lse)(q, k, v).square().sum(), (q, k, v), create_graph=True)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        want = torch.autograd.grad(call(PATTERNS[name], lse, reference)(q, k, v).square().sum(), (q, k, v))
        torch.testing.assert_close(once, want, rtol=1e-9, atol=1e-9)
        for first in once:
            with pytest.raises(ValueError, match=f"^{operators.SECOND}$"):
                first.sum().backward(retain_graph=True)


def test_flex_refuses_what_it_would_detach():
    q, k, v, t, _ = (x.float() for x in some())
    for name, transform in (REVERSE | OTHER).items():
        with pytest.raises(ValueError, match="backend='flex'"):
            transform(call(Dense(), False, backend="flex"), q, k, v, t)
            pytest.fail(name)


@pytest.mark.skipif("workbench.engines.triton.tile_ops" not in sys.modules, reason="the kernels need Triton")
@pytest.mark.parametrize("name", tools.tiers(["dilated", "blocks"], ["dilated"]))
def test_the_kernels_too(name):
    pattern = {"dilated": Dilated([16], [1]), "blocks": BlockSparse(layouts.local(1), 16)}[name]
    q, k, v, t, _ = torch.randn(5, 1, 20, 2, 16).unbind()
    for name in ("grad", "vmap-of-grad"):
        want = REVERSE[name](call(pattern, True, reference), q, k, v, t).float()
        got = REVERSE[name](call(pattern, True, backend="triton"), q, k, v, t)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for name in ("jvp", "dual", "jvp-of-vjp", "grad-of-grad"):
        with pytest.raises(ValueError, match="derivatives .*backend='reference' only"):
            OTHER[name](call(pattern, False, backend="triton"), q, k, v, t)


def test_the_gradient_of_each_sample_of_a_layer():
    torch.manual_seed(0)
    layer = MultiheadAttention(8, 2, PATTERNS["dilated"], dtype=torch.float64)
    x, parameters = torch.randn(3, 11, 8, dtype=torch.float64), dict(layer.named_parameters())
    each = vmap(grad(lambda p, x: functional_call(layer, p, (x[None],)).square().sum()), (None, 0))(parameters, x)
    for entry in range(3):
        layer.zero_grad()
        layer(x[entry : entry + 1]).square().sum().backward()
        for name, parameter in parameters.items():
            torch.testing.assert_close(each[name][entry], parameter.grad, rtol=1e-9, atol=1e-12)


# --- the pattern in other processes ----------------------------------------------------------------------------------

SAVED = {
    "dilated": lambda: Dilated([8], [1]),
    "layout": lambda: BlockSparse(layouts.explicit(torch.eye(4) > 0) | layouts.global_(1), 8, causal=True),
    "neighborhood": lambda: Neighborhood((4, 8), 1, orderings.hilbert((4, 8))),
    "predicate": lambda: Predicate(tools.every_third),
}
LOADED = """
import sys, torch
from workbench import Dilated, attention
other = [Dilated([4], [2]) for _ in range(200)]  # whose numbers are those that the saved ones had
x = torch.randn(1, 32, 2, 8)
for pattern in other:
    attention(x, x, x, pattern)
for name in sys.argv[2:]:
    x, want = torch.load(f"{sys.argv[1]}/{name}.pt")
    try:
        got = torch.export.load(f"{sys.argv[1]}/{name}.pt2").module()(x)
        print(name, torch.equal(got, want))
    except ValueError as error:
        print(name, error)
"""


def test_an_exported_program_has_its_pattern_in_another_process(tmp_path):
    x = torch.randn(1, 32, 16)
    for name, make in SAVED.items():
        layer = MultiheadAttention(16, 2, make())
        torch.export.save(torch.export.export(layer, (x,)), tmp_path / f"{name}.pt2")
        torch.save((x, layer(x).detach()), tmp_path / f"{name}.pt")
    ran = subprocess.run([sys.executable, "-c", LOADED, str(tmp_path), *SAVED], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    *lines, last = ran.stdout.strip().splitlines()
    assert lines == [f"{name} True" for name in SAVED if name != "predicate"]
    assert last.startswith("predicate the pattern Predicate(every_third) of this program is gone: a Python function")


def test_a_handle_finds_the_living_pattern_or_makes_an_equal_one():
    for make in (*SAVED.values(), lambda: BlockSparse(layouts.explicit(torch.rand(500, 500) < 0.5), 8)):
        pattern = make()
        handle, words = operators.handle_of(pattern), repr(pattern)
        assert operators.living(handle) is pattern and operators.handle_of(make()) != handle
        assert len(handle) < operators.LONGEST + 64
        rebuilt = "{" in handle
        del pattern
        if rebuilt:
            assert repr(operators.living(handle)) == words
        else:
            with pytest.raises(ValueError, match="of this program is gone"):
                operators.living(handle)
