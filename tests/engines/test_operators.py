"""Derivatives that the operators do not have: refused in a sentence, never a zero, and right by the reference."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from tests import tools
from workbench import BlockSparse, Dense, Dilated, MultiheadAttention, Predicate, attention, layouts, reference
from workbench.engines import operators

PATTERNS = {
    "dense": Dense(True), "dilated": Dilated([4, 8], [1, 2], causal=True),
    "partition": Dilated([4, 8], [1, 2], heads="partition"), "blocks": BlockSparse(layouts.local(1), 4),
    "layouts": BlockSparse(tools.batch_layout(2, 2, 3, 3), 4), "predicate": Predicate(tools.some_rows_only),
}  # fmt: skip


def some(many=4):
    random = torch.Generator().manual_seed(0)
    return torch.randn(many, 2, 11, 2, 3, generator=random, dtype=torch.float64).unbind()


def of_dual(f, q, k, v, t):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(q, forward_ad.make_dual(k, t), v)).tangent


TRANSFORMS = {
    "grad": lambda f, q, k, v, t: grad(lambda x: f(x, k, v).square().sum())(q),
    "vmap": lambda f, q, k, v, t: vmap(f, (0, None, 1))(torch.stack([q, t]), k, torch.stack([v, t], 1)),
    "jvp": lambda f, q, k, v, t: jvp(lambda x: f(x, k, v), (q,), (t,))[1],
    "dual": of_dual,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_those_of_the_reference(transform):
    run, given = TRANSFORMS[transform], some()
    for pattern in PATTERNS.values():
        if transform != "vmap":  # inside which all sequences are one batch
            want = run(lambda *x, pattern=pattern: reference(*x, pattern)[0], *given)
            got = run(lambda *x, pattern=pattern: attention(*x, pattern, backend="reference"), *given)
            assert bool(want.any()) and torch.equal(got, want)
        for backend in ("auto", "torch"):
            with pytest.raises(ValueError, match=operators.TRANSFORMED):
                run(lambda *x, pattern=pattern, b=backend: attention(*x, pattern, backend=b), *given)


@pytest.mark.parametrize("name", [x for x in PATTERNS if x != "dense"])
def test_a_second_derivative_is_refused(name):
    q, k, v = (x.requires_grad_() for x in some(3))
    once = torch.autograd.grad(attention(q, k, v, PATTERNS[name]).square().sum(), (q, k, v), create_graph=True)
    want = torch.autograd.grad(reference(q, k, v, PATTERNS[name])[0].square().sum(), (q, k, v))
    torch.testing.assert_close(once, want, rtol=1e-9, atol=1e-9)
    for first in once:
        tools.refused(f"^{operators.SECOND}$", first.sum().backward, retain_graph=True)


def test_a_second_derivative_of_torchs_own_attention_is_refused_by_torch():
    q, k, v = (x.requires_grad_() for x in some(3))
    (once,) = torch.autograd.grad(attention(q, k, v, Dense()).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative for aten::.* is not implemented"):
        once.sum().backward()


def test_a_program_with_a_pattern_is_not_exported():
    with pytest.raises(ValueError, match="a pattern is: use torch.compile"):
        torch.export.export(MultiheadAttention(16, 2, Dilated([8], [1])), (torch.randn(1, 32, 16),))
