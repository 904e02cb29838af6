"""Scores that are changed before the softmax: every pattern against the reference."""

import functools

import pytest
import torch

from tests import tools
from workbench import BlockSparse, Dense, Dilated, Neighborhood, Window, attention, explain, layouts, reference
from workbench.engines import scores

IDS = (
    "dense-1-token", "dense-prime", "dense-last-9-queries-causal", "dilated-same-branch-thrice-causal",
    "dilated-partition", "dilated-uncovered-rows", "random-by-head-grouped-causal", "layout-of-each-sequence-causal",
    "predicate-by-head-empty-rows", "window-last-queries", "window-last-queries-causal", "neighborhood-hilbert",
    "neighborhood-3d",
)  # fmt: skip


def options(case, pattern, dtype) -> dict[str, dict]:
    """Each alone and all together; a bias where the pattern has a table for it."""
    random = torch.Generator().manual_seed(1)
    given = {"alibi_slopes": torch.rand(case.heads, generator=random, dtype=torch.float64), "softcap": 1.5}
    try:
        shape = case.heads, *scores.shape_of(pattern)
        given["relative_bias"] = torch.randn(shape, generator=random, dtype=torch.float64)
    except ValueError:
        pass
    given = {name: x.to(dtype) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    return {name: {name: x} for name, x in given.items()} | {"all": given}


def answers(run, inputs, pattern, given) -> list[torch.Tensor]:
    """out, lse and the gradients of q, k, v and the tensors of the options."""
    *leaves, grad, grad_lse = inputs
    leaves = [x.clone().requires_grad_() for x in leaves]
    given = {name: x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    out, lse = run(*leaves, pattern, **given)
    seen = lse > -torch.inf
    leaves += [x for x in given.values() if isinstance(x, torch.Tensor)]
    found = torch.autograd.grad((out, lse), leaves, (grad.to(out.dtype), (grad_lse * seen).to(lse.dtype)))
    return [x.detach() for x in (out, lse.masked_fill(~seen, 0), *found)]


BY_TORCH = functools.partial(attention, backend="torch", return_lse=True)


@pytest.mark.parametrize("id", IDS)
def test_agrees_with_the_reference(id):
    case, pattern = tools.TABLE[id], tools.TABLE[id].pattern()
    for dtype, limit in ((torch.float64, 1e-10), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        inputs = case.inputs(dtype)
        for name, given in options(case, pattern, dtype).items():
            got, wide = answers(BY_TORCH, inputs, pattern, given), [x.double() for x in inputs]
            given = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
            want = answers(reference, wide, pattern, given)
            worst = max(tools.relative(x, y, inputs[3]) for x, y in zip(got, want, strict=True))
            assert worst < limit, (dtype, name)


def test_a_bias_on_a_grid_is_found_by_the_place_of_the_key_seen_from_the_query():
    pattern, bias = Neighborhood((3, 4), (1, 2)), torch.zeros(2, 3, 5)
    bias[1, 0, 4] = 50.0  # one row up, two columns to the right
    q = torch.zeros(1, 12, 2, 2)
    v = torch.arange(12.0).view(1, 12, 1, 1).expand(1, 12, 2, 2)
    out = attention(q, q, v, pattern, relative_bias=bias)[0, :, 1, 0]
    assert torch.equal(out[[4, 5, 8, 9]].round(), torch.tensor([2.0, 3.0, 6.0, 7.0]))


def test_scores_are_made_in_bounded_memory():
    from workbench.probes import memory

    n, q = 8192, torch.randn(1, 8192, 2, 8)
    used = memory.measure(lambda: attention(q, q, q, Dense(True), alibi_slopes=torch.rand(2)))
    assert used < n * n  # bytes: a quarter of the scores of one head


def test_one_compiled_graph_gives_the_same():
    case, pattern = tools.TABLE["window-last-queries"], tools.TABLE["window-last-queries"].pattern()
    inputs, given = case.inputs(torch.float32), options(case, pattern, torch.float32)["all"]
    want = answers(BY_TORCH, inputs, pattern, given)
    got = answers(torch.compile(BY_TORCH, fullgraph=True, backend="aot_eager"), inputs, pattern, given)
    torch.testing.assert_close(got, want)


def test_what_cannot_be_is_refused_by_name():
    q, local = torch.randn(1, 6, 2, 4), BlockSparse(layouts.local(1), 4)
    words = explain(q, q, q, local, softcap=3)
    assert words.startswith("torch: ") and "softcap" in words
    for pattern, given, words in (
        (Dense(), {"softcap": 0}, "softcap=0: want a number above 0"),
        (Dense(), {"alibi_slopes": torch.rand(3)}, r"want a tensor of floats of shape \(2,\)"),
        (Dense(), {"alibi_slopes": [0.1, 0.2]}, "want a tensor of floats"),
        (Dense(), {"relative_bias": torch.rand(2, 3)}, "relative_bias with dense: want a Window without sinks"),
        (Window(3, sinks=1), {"relative_bias": torch.rand(2, 3)}, "want a Window without sinks"),
        (Window(3), {"relative_bias": torch.rand(2, 5)}, r"of shape \(2, 3\)"),
        (Dilated([4], [1]), {"softcap": 1.0, "backend": "fa4"}, "backend='fa4': its kernels have no softcap; .*torch"),
        (Dense(), {"attn_bias": q}, "alibi_slopes and relative_bias"),
    ):  # fmt: skip
        tools.refused(words, attention, q, q, q, pattern, **given)
