import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from tests.patterns.test_definitions import radius_of
from workbench.patterns import Neighborhood, orderings, swin

MEGAPIXEL = (1024, 1024)
NATTEN = json.loads(Path(__file__).with_name("natten.json").read_text())["rows"]


def test_pairs_of_a_large_grid_have_a_closed_form():
    axis = sum(min(1023, x + 16) - max(0, x - 16) + 1 for x in range(1024))
    assert Neighborhood(MEGAPIXEL, 16, orderings.hilbert(MEGAPIXEL)).pairs(1 << 20, 12) == 12 * axis**2


def test_an_ordering_that_leaves_out_every_cell_has_no_token():
    empty = orderings.row_major((1,)).restrict(torch.zeros(1) > 0)
    assert Neighborhood((1,), 0, empty).pairs(0, 2) == 0 and len(Neighborhood((1,), 0, empty).curve) == 0


@pytest.mark.parametrize("shape, windows, stride, dilation, counts", NATTEN, ids=lambda x: "x".join(map(str, x[:3])))
def test_nattens_own_shapes(shape, windows, stride, dilation, counts):
    n = math.prod(shape)
    i, j = torch.arange(0, n, 1 + n // 128)[:, None], torch.arange(n)
    for causal, want in zip(itertools.product([False, True], repeat=len(shape)), counts, strict=True):
        options = {"causal": causal, "dilation": dilation, "stride": stride, "border": "shift"}
        pattern = Neighborhood(shape, radius_of(windows, causal), **options)
        keys, total = pattern.keys(), (pattern.count(0, i, j, n, 1) * (i + 1) * (j + 1)).sum()
        assert [pattern.pairs(n, 1), *keys.aminmax(), total] == want


def test_swin_is_the_windows_of_a_shifted_partition():
    """Swin's own way: the grid is turned by the shift, cut into windows, and what was not adjacent is masked."""
    shape, window, shift = (8, 12), 4, 2
    region = [torch.tensor([0] * (side - window) + [1] * (window - shift) + [2] * shift) for side in shape]
    label = region[0][:, None] * 3 + region[1]
    row, col = torch.arange(8)[:, None] // window, torch.arange(12)[None] // window
    label = (label + 9 * (row * 3 + col)).roll((shift, shift), (0, 1)).flatten()
    assert torch.equal(swin(shape, window, shift).multiplicity(96, 1)[0] > 0, label[:, None] == label)
    assert swin(shape, window, shift).name == "neighborhood-1.5-stride-4-offset-2-of-8x12"
    by_tiles = swin((64, 64), 8, 0, orderings.tiles((64, 64), (8, 8))).blocks(4096, 1, block_size=64)
    assert by_tiles.full.all() and by_tiles.columns.tolist() == [*range(64)]


@pytest.mark.parametrize("options, message", [
    ({"radius": 2.5, "causal": True}, "radius=.* want an int on axis 0, which is causal"),
    ({"stride": 4}, "on axis 0 want at most the window of 3 and an offset below the stride"),
    ({"stride": 2, "offset": 2}, "an offset below the stride"), ({"causal": [True]}, "True or False, or 2 of them"),
    ({"border": "shift", "dilation": 3}, "on axis 0 of 8 windows of 3 cells with dilation 3 do not fit"),
    ({"border": "wrap"}, "want one of 'clip', 'shift'"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Neighborhood((8, 8), **{"radius": 1} | options)
