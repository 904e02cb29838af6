"""Bad input is named: the argument, its value, and what would be accepted."""

import numpy as np
import pytest
import torch

from workbench.patterns import BlockSparse, Dense, Dilated, Neighborhood, Predicate, Window, from_spec
from workbench.patterns.algebra import Combined, PerHead
from workbench.patterns.layouts import explicit, global_, hierarchical, local, random, strided, top_k
from workbench.patterns.orderings import Ordering, hilbert, morton, tiles
from workbench.patterns.orderings import random as shuffled

ONES, MASK, NEAR = torch.ones(1, 8, 2, 4), torch.ones(2, 4, 4, dtype=torch.bool), local(1)


def dilated(lengths=(4, 8, 16), rates=(1, 2, 4), **more):
    return lambda: Dilated(lengths, rates, **more)


def predicate(returned):
    return lambda: Predicate(lambda h, i, j: returned).pairs(9, 1)


def order(*curve):
    return Ordering("mine", (2, 2), torch.tensor(curve))


REFUSED = [
    (lambda: Dense("yes"), "causal='yes': want True or False"),
    (lambda: Dense().pairs(5, 1, 6), "nq=6 queries on n=5 keys"),
    (lambda: Dense().pairs(1e6, 8), "n=1000000.0: want an int >= 0"),
    (lambda: Dense().pairs(64, None), "heads=None: want an int >= 0"),
    (lambda: Dense().pairs(64, 8, 32.0), "nq=32.0: want an int >= 0"),
    (dilated([]), r"segment_lengths=\[\]: want a non-empty list of ints >= 1"),
    (dilated([4, 8]), r"segment_lengths=\(4, 8\).*one rate for each segment length, got 3 for 2"),
    (dilated([4, 8.0, 8]), r"segment_lengths\[1\]=8.0: want an int >= 1"),
    (dilated("4,8"), r"segment_lengths='4,8': want a non-empty list"),
    (dilated(4), r"segment_lengths=4: want a non-empty list"),
    (dilated(rates=[1, 2, -4]), r"dilation_rates\[2\]=-4: want an int >= 1"),
    (dilated(rates=[1, 2, 2**63]), r"dilation_rates\[2\]=9223372036854775808: want an int <= 9,007,199,254,740,992"),
    (lambda: from_spec({"pattern": "BlockSparse", "layout": {"layout": "|"}}), "spec=.*KeyError 'of'"),
    (dilated(causal="no"), r"causal='no': want True or False"),
    (dilated(heads="some"), r"heads='some': want one of 'all', 'partition'"),
    (dilated(offsets=0), r"offsets=0: want one of 'interleaved', 'blocked'"),
    (dilated(heads="partition", offsets="blocked"), r"offsets='blocked'.*want offsets='interleaved'"),
    (lambda: BlockSparse("local"), "layout='local': want a layout"),
    (lambda: BlockSparse(NEAR, 0), r"block_size=0: want an int >= 1"),
    (lambda: BlockSparse(NEAR, (8, 8, 8)), r"block_size=\(8, 8, 8\): want an int >= 1, or 2 of them"),
    (lambda: BlockSparse(NEAR, causal=1), "causal=1: want True or False"),
    (lambda: Combined("|", [Dense(), 3]), "3 among the parts of a pattern: want patterns"),
    (lambda: PerHead([Dense(), Dense(True)]).pairs(9, 3), "heads=3 with patterns for 2 heads: want 2"),
    (lambda: PerHead([]), r"of=\[\]: want patterns, e.g."),
    (lambda: PerHead([Dense(), Dilated([4, 4], [1, 2], heads="partition")]).pairs(9, 2), "divided by different num"),
    (lambda: (BlockSparse(NEAR, 4) | Window(9)).blocks(9, 1, block_size=6), r"want \(4, 4\), the pattern's own"),
    (lambda: BlockSparse(explicit(MASK[0, :3]), 8).pairs(32, 1), r"\(3, 4\): its last .* \(3, 4\), want \(4, 4\) bl"),
    (lambda: BlockSparse(explicit(MASK) | NEAR, 8).pairs(32, 3), r"shape \(2, 4, 4\): it has 2 heads, want 3"),
    (lambda: BlockSparse(NEAR, 8).blocks(32, 1, None, 12), r"block_size=12: want \(8, 8\), the pattern's own"),
    (lambda: (BlockSparse(NEAR, 8) & Predicate(lambda h, i, j: i - j)).pairs(32, 1), "predicate returned torch.int64"),
    (lambda: Predicate("i == j"), r"fn='i == j': want a function of \(h, i, j\)"),
    (lambda: Predicate(len, causal=None), "causal=None: want True or False"),
    (predicate(None), "predicate returned None: want a bool tensor"),
    (predicate("no"), "predicate returned 'no': want a bool tensor"),
    (predicate(MASK[0, 0]), r"predicate returned shape \(4,\): want one that broadcasts with \(1, 9, 9\)"),
    (predicate(torch.ones(2, 1, 9, 9) > 0), r"predicate returned shape \(2, 1, 9, 9\)"),
    (lambda: Neighborhood((8, 8), 1.2), "radius=1.2: want an int >= 0"),
    (lambda: Neighborhood((8, 8), (1, -2)), r"radius\[1\]=-2: want an int >= 0"),
    (lambda: Neighborhood((8, 8), (1, 2, 3)), r"radius=\(1, 2, 3\): want an int >= 0, or 2 of them"),
    (lambda: Neighborhood((8, 0), 1), r"shape\[1\]=0: want an int >= 1"),
    (lambda: Neighborhood((), 1), r"shape=\(\): want a non-empty list"),
    (lambda: Neighborhood("8x8", 1), r"shape='8x8': want an int >= 1"),
    (lambda: Neighborhood((2, 2), 1, order(0, 1, 1, 2)).pairs(4, 1), "curve of mine: a cell is visited twice"),
    (lambda: Neighborhood((2, 2), 1, order(0, 1, 2, -1)).pairs(4, 1), "curve of mine: cells outside the grid"),
    (lambda: Neighborhood((8, 8), 1, "hilbert"), r"ordering='hilbert': want an ordering"),
    (lambda: Neighborhood((8, 8), 1, hilbert((8, 4))), r"ordering=hilbert of shape \(8, 4\).*\(8, 8\)"),
    (lambda: Neighborhood((8, 8), 1).pairs(63, 1), r"n=63 on a neighborhood of shape \(8, 8\): want n=64"),
    (lambda: hilbert((2, 2, 2, 2)), "one, two or three axes"),
    (lambda: morton((4, 2.5)), r"shape\[1\]=2.5"),
    (lambda: tiles((4, 4), (2, 2, 2)), r"tile=\(2, 2, 2\)"),
    (lambda: shuffled((4, 4), -1), "seed=-1"),
    (lambda: hilbert((4, 4)).restrict(torch.ones(4, 3)), r"mask=torch.float32 .*torch.bool \(4, 4\)"),
    (lambda: hilbert((4, 4)).arrange(torch.zeros(1, 15)), "15 cells along dim 1: want 16"),
    (lambda: hilbert((4, 4)).restore(torch.zeros(1, 15)), "15 tokens along dim 1: want 16"),
    (lambda: local(-1), "k=-1: want an int >= 0"),
    (lambda: global_(True), "k=True: want an int >= 0"),
    (lambda: strided(0), "s=0: want an int >= 1"),
    (lambda: hierarchical(0, 2), "window=0: want an int >= 1"),
    (lambda: hierarchical(1, 32), "levels=32: want 1 to 31"),
    (lambda: random(0), r"density=0: want a number in \(0, 1\]"),
    (lambda: random("0.5"), "density='0.5': want a number"),
    (lambda: random(0.5, seed=-1), "seed=-1: want an int >= 0"),
    (lambda: random(0.5, per_head=1), "per_head=1: want True or False"),
    (lambda: explicit([[True]]), r"blocks=\[\[True\]\]: want a bool tensor"),
    (lambda: explicit(torch.ones(2, 2)), r"blocks=torch.float32 \(2, 2\): want a bool tensor"),
    (lambda: explicit(MASK[0, 0]), r"blocks=torch.bool \(4,\): want a bool tensor"),
    (lambda: explicit(MASK.new_ones(0, 1, 2, 2)), r"blocks=torch.bool \(0, 1, 2, 2\): .* B at least 1"),
    (lambda: top_k(ONES, ONES, 4, 3), "count=3: want at most the 2 key blocks"),
    (lambda: top_k(ONES, ONES, 4, 0), "count=0: want an int >= 1"),
    (lambda: top_k(torch.ones(1, 8, 3, 4), ONES, 4, 1), r"q \(1, 8, 3, 4\).*Hkv dividing H"),
    (lambda: top_k(torch.ones(1, 9, 2, 4), ONES, 4, 1), r"want Nq <= N"),
    (lambda: top_k(ONES[0], ONES, 4, 1), r"q \(8, 2, 4\).*want \(B, Nq, H, D\)"),
    (lambda: top_k(np.ones((1, 8, 2, 4)), ONES, 4, 1), r"q=float64 \(1, 8, 2, 4\), .*want tensors"),
]


@pytest.mark.parametrize("make, message", REFUSED, ids=range(len(REFUSED)))
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
