"""The table of cases over shards: shapes in which shards cut segments and blocks, odd ones first; and all cases of
`tests.tools.TABLE`, over random shards.
"""

import random

import torch

from tests import tools
from tests.tools import TABLE, Case
from workbench import BlockSparse, Dense, Dilated, Neighborhood, PerHead, Predicate, Window, layouts
from workbench.patterns import orderings

HALF = torch.zeros(15, 8, dtype=torch.bool)  # a block of queries that sees keys of two ranks, amid a block of keys
HALF[8, [0, 4]] = HALF[14, [3, 7]] = HALF[2, [0, 1]] = True

EDGE, FEW = layouts.local(1) | layouts.global_(1), layouts.local(1) | layouts.strided(3)
BY_HEAD, MIXED = layouts.random(0.2, 3, per_head=True), layouts.global_(1) | layouts.random(0.3, 5)
EVEN = (32, 32), (16, 16, 16, 16)  # 64 positions on two ranks and on four


def geometric(n, causal=False):
    return lambda: Dilated([n // 8, n // 4, n // 2, n], [1, 2, 3, 4], causal=causal)


def _odd(c):
    """(id, pattern, sizes, (lengths of the shards of two ranks, of four))."""
    return [
        ("segment-shorter-than-shard", lambda: Dilated([8], [2], c), {"n": 64}, EVEN),
        ("segment-longer-than-shard", lambda: Dilated([64, 40], [4, 1], c), {"n": 64}, EVEN),
        ("rate-does-not-divide-start", lambda: Dilated([60], [7], c), {"n": 60, "heads": 9},
         ((31, 29), (5, 13, 21, 21))),
        ("geometric", geometric(96, c), {"n": 96, "heads": 8, "kv_heads": 4, "batch": 2},
         ((48, 48), (24, 24, 24, 24))),
        ("rates-that-share-no-divisor", lambda: Dilated([90, 50, 33], [5, 3, 4], c),
         {"n": 90, "heads": 6, "kv_heads": 2}, ((41, 49), (3, 40, 0, 47))),
        ("last-queries", lambda: Dilated([64, 20], [2, 3], c), {"n": 64, "nq": 37, "heads": 4},
         ((32, 32), (20, 20, 20, 4))),
        ("partition", lambda: Dilated([8, 40, 64], [1, 2, 4], c, heads="partition"),
         {"n": 64, "heads": 6, "kv_heads": 3}, ((30, 34), (16, 16, 16, 16))),
        ("blocked", lambda: Dilated([40, 64], [3, 4], c, offsets="blocked"), {"n": 64, "heads": 8},
         ((30, 34), (1, 2, 60, 1))),
        ("dense", lambda: Dense(c), {"n": 64, "heads": 4, "kv_heads": 2}, EVEN),
        ("dense-one-holds-all", lambda: Dense(c), {"n": 23, "heads": 3}, ((0, 23), (0, 23, 0, 0))),
        ("dense-two-queries", lambda: Dense(c), {"n": 23, "nq": 2}, ((11, 12), (20, 1, 1, 1))),
        ("dense-empty", lambda: Dense(c), {"n": 0}, ((0, 0), (0, 0, 0, 0))),
        ("blocks-cut", lambda: BlockSparse(FEW, 8, c), {"n": 77, "heads": 4, "kv_heads": 2},
         ((37, 40), (3, 30, 1, 43))),
        ("blocks-whole", lambda: BlockSparse(EDGE, 8, c), {"n": 64}, EVEN),
        ("blocks-whole-at-both-ends", lambda: BlockSparse(layouts.local(1), (4, 8), c),
         {"n": 128, "heads": 4, "kv_heads": 2}, ((48, 80), (40, 48, 0, 40))),
        ("blocks-whole-for-all", lambda: BlockSparse(FEW, (8, 4), c), {"n": 96, "nq": 61, "heads": 3, "batch": 2},
         ((40, 56), (24, 40, 24, 8))),
        ("blocks-seen-to-the-middle-of-one", lambda: BlockSparse(layouts.explicit(HALF), (4, 8), c), {"n": 60},
         ((32, 28), (16, 16, 16, 12))),
        ("blocks-of-16", lambda: BlockSparse(FEW, 16, c), {"n": 96}, ((48, 48), (32, 16, 16, 32))),
        ("blocks-whole-by-head", lambda: BlockSparse(BY_HEAD, 8, c), {"n": 96, "heads": 6, "kv_heads": 3},
         ((48, 48), (24, 24, 24, 24))),
        ("blocks-whole-by-sequence", lambda: BlockSparse(tools.batch_layout(2, 4, 8, 8), 8, c),
         {"n": 64, "heads": 4, "kv_heads": 2, "batch": 2}, ((40, 24), (8, 32, 0, 24))),
        ("blocks-wide-and-ragged", lambda: BlockSparse(MIXED, (4, 6), c), {"n": 64},
         ((25, 39), (10, 20, 30, 4))),
        ("blocks-by-head", lambda: BlockSparse(BY_HEAD, 8, c), {"n": 93, "heads": 6, "kv_heads": 3},
         ((48, 45), (24, 24, 24, 21))),
        ("blocks-longer-than-all", lambda: BlockSparse(~layouts.local(0), (128, 1), c), {"n": 61, "heads": 2},
         ((30, 31), (10, 20, 30, 1))),
        ("union-longer-than-all", lambda: Predicate(tools.every_third, c) | BlockSparse(EDGE, (128, 2), c),
         {"n": 61, "nq": 50, "heads": 2}, ((30, 31), (20, 0, 40, 1))),
        ("window-near", lambda: Window(9, c), {"n": 160, "heads": 3}, ((80, 80), (40, 40, 2, 78))),
        ("window-far", lambda: Window(40, c, dilation=2), {"n": 93, "nq": 70, "heads": 4, "kv_heads": 2},
         ((50, 43), (30, 0, 40, 23))),
        ("window-sinks", lambda: Window(7, c, sinks=11), {"n": 77, "heads": 2, "batch": 2}, ((5, 72), (30, 4, 3, 40))),
        ("predicate", lambda: Predicate(tools.every_third, c), {"n": 300, "heads": 4, "kv_heads": 2},
         ((150, 150), (130, 0, 1, 169))),
        ("predicate-by-head", lambda: Predicate(lambda h, i, j: (i - j).abs() < 5 + 20 * h, c),
         {"n": 290, "nq": 161, "heads": 6, "kv_heads": 3, "batch": 2}, ((128, 162), (50, 90, 100, 50))),
        ("grid-with-options", lambda: Neighborhood((15, 19), 2, None, c, 2, border="shift"),
         {"n": 285, "heads": 4, "kv_heads": 2}, ((140, 145), (100, 0, 128, 57))),
        ("union-of-blocks", lambda: BlockSparse(FEW, 16, c) | Window(9, c), {"n": 205, "heads": 4, "kv_heads": 2},
         ((100, 105), (48, 0, 60, 97))),
        ("difference", lambda: Window(90, c) - BlockSparse(BY_HEAD, (8, 16)),
         {"n": 190, "nq": 120, "heads": 4, "batch": 2}, ((96, 94), (70, 90, 10, 20))),
        ("some-of-blocks-by-sequence",
         lambda: BlockSparse(tools.batch_layout(2, 4, 9, 9), 8) & Predicate(tools.every_third, c),
         {"n": 69, "heads": 4, "batch": 2}, ((40, 29), (8, 30, 0, 31))),
        ("by-head", lambda: PerHead([Window(9, c, sinks=2), Dense(c), BlockSparse(EDGE, 16, c), Window(9, c, sinks=2)]),
         {"n": 210, "heads": 4, "kv_heads": 2}, ((100, 110), (64, 64, 0, 82))),
        ("blocks-by-sequence", lambda: BlockSparse(tools.batch_layout(2, 4, 9, 9), 8, c),
         {"n": 69, "heads": 4, "kv_heads": 2, "batch": 2}, ((40, 29), (8, 30, 0, 31))),
    ]  # fmt: skip


def _cases():
    for c in (False, True):
        for id, pattern, sizes, (two, four) in _odd(c):
            yield Case(id + "-causal" * c, pattern, **sizes), {2: two, 4: four}
    orders = {"rows": None, "hilbert": orderings.hilbert((8, 9))}
    for name, order in orders.items():
        grid = Case(f"grid-{name}", lambda o=order: Neighborhood((8, 9), (1, 2), o), 72, heads=4, kv_heads=2)
        yield grid, {2: (36, 36), 4: (18, 17, 0, 37)}
    near = {"near-rows": None, "near-hilbert": orderings.hilbert((8, 24))}
    for name, order in near.items():
        grid = Case(f"grid-{name}", lambda o=order: Neighborhood((8, 24), 1, o), 192, heads=4, kv_heads=2)
        yield grid, {2: (96, 96), 4: (3, 64, 0, 125)}
    tall = Case("grid-near-last-queries", lambda: Neighborhood((48, 4), 1), 192, 101, heads=3, batch=2)
    yield tall, {2: (90, 102), 4: (60, 40, 0, 92)}
    yield Case("line", lambda: Neighborhood((160,), 3), 160, heads=3), {2: (80, 80), 4: (40, 40, 2, 78)}
    part = orderings.hilbert((8, 8)).restrict((torch.arange(64) % 5 > 0).view(8, 8))
    yield Case("grid-of-some-cells", lambda: Neighborhood((8, 8), 2, part), 51, 40), {2: (26, 25), 4: (1, 9, 20, 21)}
    for case in TABLE.values():
        yield case, {world: drawn(case.n, world, case.id) for world in (2, 4)}


def drawn(n: int, world: int, seed) -> tuple[int, ...]:
    """Lengths of shards, some of them 0."""
    rng = random.Random(str(seed))
    cuts = [0, *sorted(rng.randint(0, n) for _ in range(world - 1)), n]
    return tuple(b - a for a, b in zip(cuts, cuts[1:], strict=False))


CASES = {case.id: (case, shards) for case, shards in _cases()}
