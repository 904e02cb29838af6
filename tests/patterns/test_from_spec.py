import json

import pytest
import torch

from workbench.patterns import BlockSparse, Dense, Dilated, Neighborhood, Predicate, from_spec, layouts


@pytest.mark.parametrize("pattern", [
    Dense(causal=True), Dilated([4, 8], [1, 2], heads="partition"),
    BlockSparse(layouts.local(1) | layouts.random(0.2, 1), (4, 8), causal=True), Neighborhood((4, 5), 1),
], ids=lambda p: p.name)  # fmt: skip
def test_a_pattern_survives_json(pattern):
    other = from_spec(json.loads(json.dumps(pattern.spec())))
    assert type(other) is type(pattern)
    assert other.spec() == pattern.spec()
    assert other.name == pattern.name
    assert type(pattern).__name__ in repr(pattern)


@pytest.mark.parametrize(
    "spec, message",
    [
        ({}, "pattern=None: want one of Dense, Dilated"),
        ("dense", "pattern='dense': want one of Dense, Dilated"),
        ({"pattern": ["Dense"]}, r"pattern=\['Dense'\]: want one of Dense, Dilated"),
        ({"pattern": "BlockSparse", "layout": {"layout": "explicit"}}, "blocks=None: want what `pack` makes"),
        ({"pattern": "Sparse"}, "pattern='Sparse': want one of Dense, Dilated"),
        ({"pattern": "Dense", "window": 3}, "unexpected keyword argument 'window'"),
        ({"pattern": "Dilated", "segment_lengths": [4], "dilation_rates": [0]}, r"dilation_rates\[0\]=0"),
    ],
)
def test_a_spec_that_is_not_understood_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        from_spec(spec)


def test_patterns_that_differ_have_names_that_differ():
    blocks = torch.eye(4) > 0
    patterns = [
        Dense(), Dense(True), *(Dilated([4, 8], [1, 2], x, y) for x in (False, True) for y in ("all", "partition")),
        Dilated([4, 8], [1, 2], offsets="blocked"), *(Neighborhood(x, 1) for x in ((2, 8), (8, 2), (4, 4), (2, 2, 4))),
        Neighborhood((4, 4), (2, 1)), *(BlockSparse(layouts.explicit(x), 4) for x in (blocks, ~blocks, blocks[None])),
        BlockSparse(layouts.local(1), 4), BlockSparse(layouts.local(1), 4, True), BlockSparse(layouts.local(1), (4, 8)),
        *(BlockSparse(layouts.random(x), 4) for x in (0.1, 0.10001, 0.10004)), Predicate(len), Predicate(len, True),
    ]  # fmt: skip
    names = [pattern.name for pattern in patterns]
    assert len(set(names)) == len(names), names
    assert Dense(True).short_name == "dense" and Dense(True).name == "dense-causal"
