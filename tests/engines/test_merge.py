import pytest
import torch

from workbench.engines.merge import merge, merge_


def part(seed, *shape, d=5):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(*x, generator=random, dtype=torch.float64) for x in ((*shape, d), shape)]


def nothing(*shape, d=5):
    return torch.zeros(*shape, d, dtype=torch.float64), torch.full(shape, -torch.inf, dtype=torch.float64)


def equal(one, other):
    return all(map(torch.equal, one, other))


def test_rows_that_see_nothing_are_independent_of_their_neighbours():
    one, other = part(0, 4), part(1, 4)
    for x, row in ((one, 0), (one, 1), (other, 1), (other, 2)):
        x[0][row], x[1][row] = 0, -torch.inf
    out, lse = merge(one, other)
    assert torch.equal(out[0], other[0][0]) and lse[0] == other[1][0]
    assert torch.equal(out[1], torch.zeros(5)) and lse[1] == -torch.inf
    assert torch.equal(out[2], one[0][2]) and lse[2] == one[1][2]
    assert out.isfinite().all()


@pytest.mark.parametrize("distance", [800.0, -800.0])
def test_parts_of_very_different_size(distance):
    out, lse = part(0, 3)
    other = (torch.ones_like(out), lse + distance)
    want = other if distance > 0 else (out, lse)
    assert equal(merge((out, lse), other), want)


def test_merge_leaves_its_arguments_and_merge_in_place_does_not():
    a, b = part(0, 3), part(1, 3)
    kept = a[0].clone(), a[1].clone()
    merged = merge(a, b)
    assert equal(a, kept)
    merge_(*a, *b)
    assert equal(a, merged)


def test_parts_of_one_softmax_make_it_whole():
    random = torch.Generator().manual_seed(3)
    s, v = (torch.randn(x, generator=random, dtype=torch.float64) for x in ((4, 9), (9, 5)))
    total = nothing(4)
    for keys in (slice(0, 2), slice(2, 3), slice(3, 9)):
        total = merge(total, (torch.softmax(s[:, keys], -1) @ v[keys], s[:, keys].logsumexp(-1)))
    torch.testing.assert_close(total[0], torch.softmax(s, -1) @ v, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(total[1], s.logsumexp(-1), rtol=1e-14, atol=1e-14)


def test_sixteen_bit_parts_into_a_float32_sum():
    out, lse = (x.float() for x in nothing(3))
    x = part(0, 3)
    merge_(out, lse, x[0].bfloat16(), x[1].float())
    assert out.dtype == torch.float32 and torch.equal(out, x[0].bfloat16().float())
