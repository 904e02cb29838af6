import pytest
import torch

from workbench.engines.merge import merge, merge_


def part(seed, n=4):
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, generator=random, dtype=torch.float64) for size in ((n, 5), (n,)))


def equal(one, other):
    return all(map(torch.equal, one, other))


def test_rows_that_see_nothing_change_nothing_and_arguments_stay():
    one, other = part(0), part(1)
    for x, row in ((one, 0), (one, 1), (other, 1), (other, 2)):
        x[0][row], x[1][row] = 0, -torch.inf
    kept = one[0].clone(), one[1].clone()
    out, lse = merge(one, other)
    assert equal(one, kept) and out.isfinite().all()
    assert torch.equal(out[:3], torch.stack([other[0][0], torch.zeros(5, dtype=torch.float64), one[0][2]]))
    assert lse[:3].tolist() == [other[1][0], -torch.inf, one[1][2]]
    merge_(*one, *other)
    assert equal(one, (out, lse))


@pytest.mark.parametrize("distance", [800.0, -800.0])
def test_parts_of_very_different_size(distance):
    out, lse = part(0)
    other = (torch.ones_like(out), lse + distance)
    assert equal(merge((out, lse), other), other if distance > 0 else (out, lse))


def test_parts_of_one_softmax_make_it_whole_and_sixteen_bit_parts_are_summed_wider():
    s, v = torch.randn(4, 9, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    total = torch.zeros(4, 5, dtype=torch.float64), torch.full((4,), -torch.inf, dtype=torch.float64)
    for keys in (slice(0, 2), slice(2, 3), slice(3, 9)):
        total = merge(total, (torch.softmax(s[:, keys], -1) @ v[keys], s[:, keys].logsumexp(-1)))
    torch.testing.assert_close(total, (torch.softmax(s, -1) @ v, s.logsumexp(-1)), rtol=1e-14, atol=1e-14)
    out, narrow = torch.zeros(4, 5), v[:4].bfloat16()
    merge_(out, torch.full((4,), -torch.inf), narrow, torch.zeros(4))
    assert torch.equal(out, narrow.float())
