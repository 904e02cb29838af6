import json

import pytest
import torch

from workbench import BlockSparse, Dense, Dilated, PerHead, Predicate, Window, layouts
from workbench.patterns import from_spec

LONGFORMER = Window(512) | BlockSparse(layouts.global_(1))


def test_operators_join_and_have_names():
    a, b, c = Window(512, True), BlockSparse(layouts.global_(1)), Dense(True)
    assert (a | b | c).of == (a, b, c) == (a | (b | c)).of and (a & b & c).of == (a, b, c)
    assert LONGFORMER.name == "window-512 | global-1" and (a - b).name == "window-512-causal - global-1"
    assert (a | (b & c)).short_name == "window-512 | (global-1 & dense)"
    assert repr(a - (b | c)).startswith("Window(width=512, causal=True, dilation=1, sinks=0) - (BlockSparse(")
    assert PerHead([a, a, c]).name == "per-head[2 x window-512-causal, 1 x dense-causal]"
    assert PerHead([Window(4), Window(4)]).name == "per-head[2 x window-4]"  # two objects, as a spec may have them
    assert [(a | c).causal, (a | b).causal, (a & b).causal, (a - b).causal, (b - a).causal] == [1, 0, 1, 1, 0]
    with pytest.raises(TypeError):
        a | 3


def test_a_spec_keeps_which_heads_have_the_same_pattern():
    pattern = PerHead([Window(4), Window(4) | Dense(), Window(4)])
    made = from_spec(json.loads(json.dumps(pattern.spec())))
    assert made.of[0] is made.of[2] and made.spec() == pattern.spec() and len(made.groups) == 2


def test_a_function_is_asked_only_inside_the_blocks_and_the_sequence():
    limits = torch.arange(143)  # indexing it with 143 raises
    pairs = BlockSparse(layouts.local(1), 16, causal=True).pairs(143, 1, 99)

    class Asked:  # what a class holds is not copied
        far = []

    def seen(h, i, j):
        Asked.far.append(int((i // 16 - j // 16).abs().max()))
        return limits[i] >= limits[j]

    assert (BlockSparse(layouts.local(1), 16) & Predicate(seen)).pairs(143, 1, 99) == pairs
    assert max(Asked.far[1:]) <= 1  # the first asks whether it depends on the head


def test_each_sequence_of_a_batch_has_its_own():
    keep = torch.rand(2, 2, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    blocks = BlockSparse(layouts.explicit(keep), 4)
    for pattern in (blocks | Window(3), PerHead([blocks, Dense()])):
        assert pattern.batch == 2 and pattern.check(20, 2) == (20, 2, 20)
        for b, one in enumerate(pattern.each()):
            assert one.batch is None and one.of[0].spec() == pattern.of[0].for_batch(b).spec()


def test_pairs_of_a_long_sequence_are_counted_without_looking_at_all():
    n, first, window = 1 << 15, BlockSparse(layouts.global_(1)), Window(512)
    near = [range(max(0, i - 256), min(n, i + 257)) for i in range(n)]
    both = sum(len(x) if i < 128 else max(0, 128 - x.start) for i, x in enumerate(near))
    assert (window | first).pairs(n, 3) == 3 * (first.pairs(n, 1) + window.pairs(n, 1) - both)
    assert (window | first).uncovered(n, 3) == 0 and (window & first).uncovered(n, 1) == n - 128 - 256
    nested = Dilated([64, 128], [1, 2])
    assert (nested | nested).pairs(n, 2) == nested.distinct(n, 2) < nested.pairs(n, 2)
