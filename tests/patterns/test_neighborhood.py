import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.patterns import Neighborhood, from_spec, orderings, swin

MEGAPIXEL = (1024, 1024)
NATTEN = json.loads(Path(__file__).with_name("natten.json").read_text())["rows"]


@pytest.mark.parametrize("question", ["pairs", "density", "coverage", "uncovered"])
def test_a_million_tokens_take_less_than_a_second(one_core_seconds, question):
    pattern = Neighborhood(MEGAPIXEL, 16, orderings.hilbert(MEGAPIXEL))
    assert one_core_seconds(lambda: getattr(pattern, question)(1 << 20, 12)) < 1


UNUSUAL = {"radius": 7.5, "dilation": 2, "stride": 4, "border": "shift"}


@pytest.mark.parametrize("side, seconds, options", [(256, 0.5, {}), (1024, 5, {}), (256, 1, UNUSUAL)])
def test_blocks_are_found_without_looking_at_pairs(one_core_seconds, side, seconds, options):
    pattern = Neighborhood((side, side), **{"radius": 16, "ordering": orderings.hilbert((side, side))} | options)
    assert one_core_seconds(lambda: pattern.blocks(side * side, 1)) < seconds


def test_pairs_of_a_large_grid_have_a_closed_form():
    axis = sum(min(1023, x + 16) - max(0, x - 16) + 1 for x in range(1024))
    assert Neighborhood(MEGAPIXEL, 16, orderings.hilbert(MEGAPIXEL)).pairs(1 << 20, 12) == 12 * axis**2


def test_an_ordering_that_leaves_out_every_cell_has_no_token():
    empty = orderings.row_major((1,)).restrict(torch.zeros(1) > 0)
    assert Neighborhood((1,), 0, empty).pairs(0, 2) == 0 and len(Neighborhood((1,), 0, empty).curve) == 0


def seen_on_an_axis(x, y, side, window, causal=False, dilation=1, stride=1, offset=0, shift=True):
    """Whether cell x sees cell y, as NATTEN's documentation says it, among the cells that a dilation connects."""
    if (x - y) % dilation:
        return False
    many, (x, y) = len(range(x % dilation, side, dilation)), (x // dilation, y // dilation)
    row = range((x - offset) // stride * stride + offset, (x - offset) // stride * stride + offset + stride)
    if causal:
        leader = min(row[-1], many - 1) if shift else row[-1]
        return leader - window < y <= x
    leader = min(row[stride // 2], many - 1) if shift else row[stride // 2]
    first = leader - window // 2
    first = max(0, min(first, many - window)) if shift else first
    return first <= y < first + window


def radius_of(windows, causal):
    return [w - 1 if c else (w // 2 if w % 2 else (w - 1) / 2) for w, c in zip(windows, causal, strict=True)]


def count_with(shape, curve, windows, shift, **options):
    """int32 (1, N, N): the definition, by the windows of each axis."""
    tables = []
    for axis, (side, window) in enumerate(zip(shape, windows, strict=True)):
        its = {name: value[axis] for name, value in options.items()}
        tables.append(torch.tensor([[seen_on_an_axis(x, y, side, window, **its, shift=shift) for y in range(side)]
                                    for x in range(side)]))  # fmt: skip
    places = torch.unravel_index(curve, shape)
    return torch.stack([t[x[:, None], x] for t, x in zip(tables, places, strict=True)]).all(0)[None].int()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_configuration(agree, data):
    draw = data.draw
    shape = draw(st.sampled_from([(13,), (29,), (7, 9), (8, 8), (12, 5), (1, 6), (4, 5, 3), (6, 2, 4), (2, 3, 2, 3)]))
    if draw(st.booleans()):
        shift, causal = draw(st.booleans()), [draw(st.booleans()) for _ in shape]
        dilation = [draw(st.integers(1, 3)) if side > 3 else 1 for side in shape]
        windows = [draw(st.integers(1, side // d)) for side, d in zip(shape, dilation, strict=True)]
        stride = [draw(st.integers(1, w)) for w in windows]
        offset = [draw(st.integers(0, s - 1)) for s in stride]
    else:  # none, of any radius
        shift, causal, dilation = False, [False] * len(shape), [1] * len(shape)
        windows = [2 * draw(st.integers(0, side + 2)) + 1 for side in shape]
        stride, offset = dilation, [0] * len(shape)
    radius = radius_of(windows, causal)
    order = draw(st.sampled_from([None, "morton", "random", "row_major"]))
    ordering = None if order is None else getattr(orderings, order)(shape)
    if ordering is not None and draw(st.booleans()):
        ordering = ordering.restrict(torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6)
    options = {"causal": causal, "dilation": dilation, "stride": stride, "offset": offset}
    pattern = Neighborhood(shape, radius, ordering, **options, border="shift" if shift else "clip")
    curve = torch.arange(math.prod(shape)) if ordering is None else ordering.curve
    want = count_with(shape, curve, windows, shift, **options)
    agree(pattern, want.expand(2, -1, -1), round(draw(st.floats(0, 1)) * len(curve)), (4, (3, 5)))
    through = from_spec(json.loads(json.dumps(pattern.spec())))
    assert through.name == pattern.name and torch.equal(through.multiplicity(len(curve), 1), want)
    assert not pattern.causal or not want.triu(1).any()


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
