import json

import pytest

from workbench.patterns import BlockSparse, Dense, Dilated, Neighborhood, from_spec, layouts


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


@pytest.mark.parametrize("spec, message", [
    ({}, "pattern=None: want one of Dense, Dilated"),
    ({"pattern": "Sparse"}, "pattern='Sparse': want one of Dense, Dilated"),
    ({"pattern": "Dense", "window": 3}, "unexpected keyword argument 'window'"),
    ({"pattern": "Dilated", "segment_lengths": [4], "dilation_rates": [0]}, r"dilation_rates\[0\]=0"),
])  # fmt: skip
def test_a_spec_that_is_not_understood_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        from_spec(spec)
