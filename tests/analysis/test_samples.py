import pytest
import torch

from tests.tools import refused
from workbench.analysis import samples


def test_patches_put_together_are_the_photograph():
    whole = samples.photograph((1, 1))  # one patch
    rows, cols = 3, 4
    patches = samples.photograph((rows, cols))
    high, wide = 300 // rows, 256 // cols
    again = patches.view(rows, cols, high, wide, 3).transpose(1, 2).reshape(rows * high, cols * wide, 3)
    assert torch.equal(again, whole.view(300, 256, 3))
    assert 0 <= float(patches.min()) < 0.1 and 0.9 < float(patches.max()) <= 1


def test_more_patches_than_pixels_are_refused():
    refused("want at most", samples.photograph, (301, 10))


@pytest.mark.parametrize("source", [samples.field((8, 10)), samples.photograph((8, 10))], ids=["field", "photograph"])
def test_tokens_are_normalised_and_like_their_neighbours(source):
    q = samples.tokens(source, heads=3, head_dim=16)
    assert q.shape == (1, 80, 3, 16)
    assert torch.allclose(q.square().mean(-1), torch.ones(1, 80, 3), atol=1e-3)
    grid = q.view(8, 10, 3, 16)
    near = (grid[:, 1:] * grid[:, :-1]).sum(-1).mean((0, 1))
    far = (grid[:, 5:] * grid[:, :-5]).sum(-1).mean((0, 1))
    assert (near > far).all()
    assert near[2] > near[0]  # a later head sees a more blurred grid


def test_more_dimensions_than_channels_are_refused():
    refused("head_dim=9: want at most 8", samples.tokens, samples.field((4, 4), 8), heads=1, head_dim=9)
