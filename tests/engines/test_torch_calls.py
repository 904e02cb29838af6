"""What the torch backend's fused calls compute and hold."""

import pytest
import torch

from tests import tools
from workbench import BlockSparse, Predicate, attention, layouts, reference
from workbench.engines.torch import block_sparse, fused
from workbench.probes import memory


def inputs(n, heads=2, d=8, dtype=torch.float64):
    return tools.Case("", None, n, heads=heads, head_dim=d).inputs(dtype)[:3]


def run(q, k, v, pattern):
    return attention(q, k, v, pattern, backend="torch", return_lse=True)


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
    scores = computed(monkeypatch, lambda: run(*inputs(n, heads), pattern))
    assert sum(scores) == pattern.pairs(n, heads) == round(density * 40 * 40) * 16 * 16 * heads


def test_fused_calls_are_few_and_of_bounded_size(monkeypatch):
    monkeypatch.setattr(block_sparse, "ELEMENTS", 16 * 8 * 2 * 20)  # 20 key blocks of 16 positions, 2 heads, head_dim 8
    pattern = BlockSparse(layouts.random(0.1), 16)
    scores = computed(monkeypatch, lambda: run(*inputs(1600), pattern))
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
        run(*inputs(n), pattern)
    low_i, high_i, low_j, high_j = zip(*Asked.places, strict=True)
    assert min(low_i + low_j) >= 0 and max(high_i + high_j) < n


def test_a_forward_holds_at_most_three_times_its_output():
    q, k, v = inputs(16384, 12, 64, torch.float32)
    pattern, output = tools.longnet(8)(), q.numel() * q.element_size()
    with torch.no_grad():
        peak = memory.measure(lambda: attention(q, k, v, pattern, backend="torch"))
    assert output <= peak <= 3 * output


def test_blocks_longer_than_the_sequence_take_no_memory_of_their_own():
    q, far = torch.randn(1, 50, 2, 8), BlockSparse(layouts.local(0), 1 << 40)
    for pattern in (far, far & Predicate(lambda h, i, j: i != j)):
        want = reference(q, q, q, pattern)[0]
        torch.testing.assert_close(attention(q, q, q, pattern, backend="torch").double(), want, atol=1e-5, rtol=1e-5)
