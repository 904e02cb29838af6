"""Every pattern beside its definition, written down pair by pair: drawn ones, combinations of them, and odd ones."""

import json
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import BlockSparse, Dense, Dilated, Neighborhood, PerHead, Predicate, Window, layouts, orderings
from workbench.patterns import Combined, base, from_spec, listed

FUNCTIONS = {
    "window": lambda h, i, j: (i - j).abs() < 4, "per-head": lambda h, i, j: (i - j).abs() <= 3 * h,
    "keys-only": lambda h, i, j: j < 3, "queries-only": lambda h, i, j: i % 2 == 0,
    "heads-only": lambda h, i, j: h > 0, "everything": lambda h, i, j: True,
    "thirds": lambda h, i, j: (i - j + h) % 3 > 0,
}  # fmt: skip
KINDS = ["window", "window", "dilated", "dilated", "blocks", "grid", "grid", "function", "dense"]


def leaf(draw, n: int):
    kind, causal = draw.choice(KINDS), draw.random() < 0.5
    if kind == "window":
        steps, sinks = draw.choice([1, 1, 2, 3, 7, 13, 60]), draw.choice([0, 0, 1, 4, 5, 50])
        return Window(draw.randint(1, n + 10), causal, steps, sinks)
    if kind == "dilated":
        branches = [(draw.randint(1, n + 6), draw.randint(1, 12)) for _ in range(draw.randint(1, 4))]
        rule = draw.choice([{}, {"offsets": "blocked"}, {"heads": "partition"}])
        return Dilated(*zip(*branches, strict=True), causal, **rule)
    if kind == "blocks":
        some = layouts.random(draw.choice([0.1, 0.3, 1.0]), draw.randint(0, 9), per_head=draw.random() < 0.5)
        layout = draw.choice([some, some - layouts.local(0), layouts.local(1), layouts.strided(3)])
        return BlockSparse(layout, draw.choice([1, 2, 3, 4, (2, 4), (3, 5), (8, 4), 64]), causal)
    if kind == "grid":
        return grid(draw, n)
    return Dense(causal) if kind == "dense" else Predicate(draw.choice([*FUNCTIONS.values()]), causal)


def grid(draw, n: int):
    """A neighborhood of n tokens, on all cells of a grid or on some, plain or with NATTEN's options."""
    sides = [draw.choice([x for x in range(1, n + 1) if n % x == 0])]
    sides.append(draw.choice([x for x in range(1, n + 1) if n // sides[0] % x == 0]))
    shape = draw.choice([(n,), (sides[0], n // sides[0]), (*sides, n // math.prod(sides))])
    order, shift = draw.choice([None, orderings.morton, orderings.random, orderings.row_major]), draw.random() < 0.5
    if order and draw.random() < 0.5:
        shape = shape[0] + draw.randint(0, 3), *shape[1:]
        cells = torch.randperm(math.prod(shape), generator=torch.Generator().manual_seed(1))
        order = order(shape).restrict((cells < n).view(shape))
    elif order:
        order = order(shape)
    if draw.random() < 0.5:
        return Neighborhood(shape, [draw.randint(0, side + 2) for side in shape], order)
    causal, dilation = [draw.random() < 0.5 for _ in shape], [draw.randint(1, 3) if x > 3 else 1 for x in shape]
    windows = [draw.randint(1, side // d) for side, d in zip(shape, dilation, strict=True)]
    stride = [draw.randint(1, w) for w in windows]
    options = {"causal": causal, "dilation": dilation, "stride": stride, "offset": [draw.randrange(s) for s in stride]}
    return Neighborhood(shape, radius_of(windows, causal), order, **options, border="shift" if shift else "clip")


def tree(draw, n: int, depth: int):
    if not depth or draw.random() < 0.2:
        return leaf(draw, n)
    left, right = tree(draw, n, depth - 1), tree(draw, n, depth - 1)
    return draw.choice([left | right, left | right, left & right, left - right])


def definition(pattern, n: int, heads: int) -> torch.Tensor:
    """int64 (heads, n, n): how often each query sees each key."""
    if isinstance(pattern, PerHead):
        return torch.stack([definition(x, n, heads)[h] for h, x in enumerate(pattern.of)])
    if isinstance(pattern, Combined):
        first, *rest = (definition(x, n, heads) for x in pattern.of)
        for x in rest:
            first = {"|": first + x, "&": first * x, "-": first * (x == 0)}[pattern.kind]
        return first.clamp(max=1)
    count = DEFINED[type(pattern)](pattern, n, heads).long().expand(heads, n, n)
    return count.tril() if pattern.causal else count


def of_window(pattern, n, heads):
    seen = torch.zeros(n, n)
    for i in range(n):
        back = pattern.width - 1 if pattern.causal else pattern.width // 2
        keys = {i - m * pattern.dilation for m in range(0 if pattern.causal else -back, back + 1)}
        seen[i, [j for j in keys | {*range(pattern.sinks)} if 0 <= j < n]] = 1
    return seen


def of_branches(pattern, n, heads):
    total, t, many = torch.zeros(heads, n, n), torch.arange(n), len(pattern.segment_lengths)
    owner = [b for b in range(many) for _ in range(b, heads, many)]  # heads are dealt to branches one by one
    for b, (w, r) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)):
        for h in range(heads):
            offset = h // -(-heads // r) if pattern.offsets == "blocked" else h % r
            if pattern.heads == "partition":
                offset = b % r if owner[h] == b else -1
            kept = t % w % r == offset
            total[h] += kept[:, None] & kept & (t[:, None] // w == t // w)
    return total


def of_blocks(pattern, n, heads):
    (bq, bk), t = pattern.block_size, torch.arange(n)
    h, i, j = (torch.arange(x).view(s) for x, s in ((heads, (-1, 1, 1)), (-(-n // bq), (-1, 1)), (-(-n // bk), (-1,))))
    blocks = pattern.layout.visible(h, i, j, (len(i), len(j))).expand(heads, len(i), len(j))
    return blocks[:, t // bq][:, :, t // bk]


def of_function(pattern, n, heads):
    """One pair at a time."""
    each = torch.cartesian_prod(*map(torch.arange, (heads, n, n))).view(-1, 3)
    return torch.tensor([bool(pattern.fn(*where)) for where in each]).view(heads, n, n)


def radius_of(windows, causal):
    return [w - 1 if c else (w // 2 if w % 2 else (w - 1) / 2) for w, c in zip(windows, causal, strict=True)]


def of_grid(pattern, n, heads):
    """By the windows of each axis."""
    curve = torch.arange(n) if pattern.ordering is None else pattern.ordering.curve
    seen = torch.ones(n, n, dtype=torch.bool)
    each = zip(pattern.shape, pattern.radius, pattern.causal_axes, pattern.dilation, pattern.stride, pattern.offset,
               torch.unravel_index(curve, pattern.shape), strict=True)  # fmt: skip
    for side, radius, causal, *options, place in each:
        window, shift = int((1 if causal else 2) * radius) + 1, pattern.border == "shift"
        axis = [[seen_on_an_axis(x, y, side, window, causal, *options, shift) for y in range(side)]
                for x in range(side)]  # fmt: skip
        seen &= torch.tensor(axis)[place[:, None], place]
    return seen


def seen_on_an_axis(x, y, side, window, causal, dilation, stride, offset, shift):
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


DEFINED = {
    Dense: lambda pattern, n, heads: torch.ones(n, n), Window: of_window, Dilated: of_branches,
    BlockSparse: of_blocks, Predicate: of_function, Neighborhood: of_grid,
}  # fmt: skip


def agree(pattern, want, nq=None, block_sizes=(4, (3, 5), 128), exact=True):
    """want: int (heads, n, n), how often each query of all n sees each key. exact: every full block is called full."""
    heads, n, _ = want.shape
    want = want[:, n - nq :] if nq is not None else want
    assert torch.equal(pattern.multiplicity(n, heads, nq).long(), want.long())
    seen = want > 0
    assert pattern.pairs(n, heads, nq) == int(want.sum())
    assert pattern.distinct(n, heads, nq) == int(seen.sum())
    assert pattern.uncovered(n, heads, nq) == int((~seen.any(-1)).sum())
    covered = seen.any(-1).double().mean(-1) if want.shape[1] else torch.ones(heads, dtype=torch.float64)
    torch.testing.assert_close(pattern.coverage(n, heads, nq), covered)
    if want.numel():
        assert pattern.density(n, heads, nq) == pytest.approx(int(seen.sum()) / want.numel(), rel=1e-15)
    for block_size in block_sizes:
        agree_on_blocks(pattern.blocks(n, heads, nq, block_size), want, exact)


def agree_on_blocks(blocks, want, exact):
    heads, nq, n = want.shape
    bq, bk = blocks.block_size
    assert blocks.layouts in (1, heads)
    assert blocks.columns.dtype == torch.int32 and blocks.full.dtype == torch.bool
    assert len(blocks.starts) == blocks.layouts * blocks.rows + 1
    for h in range(heads):
        for x in range(blocks.rows):
            line = x + blocks.rows * (h if blocks.layouts > 1 else 0)
            span = slice(*blocks.starts[line : line + 2].tolist())
            found = dict(zip(blocks.columns[span].tolist(), blocks.full[span].tolist(), strict=True))
            assert list(found) == sorted(found)
            low, high = (max((blocks.first + x + d) * bq - (n - nq), 0) for d in (0, 1))
            for y in range(blocks.cols):
                block = want[h, low:high, y * bk : (y + 1) * bk]
                assert (y in found) == bool((block > 0).any()), (h, x, y)
                full = bool((block == 1).all())
                assert found.get(y, False) == full or (full and not exact), (h, x, y)


def held(pattern, n, queries, heads):
    own, want = getattr(pattern, "block_size", None), definition(pattern, n, heads)
    sizes = (None, (2 * own[0], 3 * own[1])) if own else (4, (3, 5), 128)
    several = isinstance(pattern, PerHead) or isinstance(pattern, Dilated) and len(pattern.segment_lengths) > 1
    agree(pattern, want, queries, sizes, exact=not several)
    assert not pattern.causal or not want.triu(1).any()
    if "fn" not in json.dumps(pattern.spec()):
        through = from_spec(json.loads(json.dumps(pattern.spec())))
        assert through.name == pattern.name and torch.equal(through.multiplicity(n, heads).long(), want)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_any_pattern_is_its_definition(seed):
    draw = random.Random(seed)
    depth = draw.choice([0, 0, 0, 1, 2, 3])
    n, heads = draw.randint(1, 24 if depth else 40), draw.randint(1, 3 if depth else 7)
    pattern = tree(draw, n, depth)
    if draw.random() < 0.1:
        of = [pattern, tree(draw, n, 1)]
        pattern = PerHead([draw.choice([x for x in of if x.divisor(heads) == 1] or [Dense()]) for _ in range(heads)])
    held(pattern, n, draw.choice([None, draw.randint(0, n)]), heads)


@pytest.mark.parametrize("pattern, n, queries, heads", [
    (Dilated([2, 4, 8, 16, 32], [1, 2, 4, 6, 12]), 32, 32, 12),  # LongNet's own, over 1,024
    (Dilated([4, 4, 4], [2, 2, 1], True), 19, 10, 2), (Dilated([1000, 64], [7, 50], True), 13, 1, 60),
    (Dilated([3], [2]), 0, 0, 2), *((Dense(c), *sizes, 2) for c in (False, True) for sizes in ((0, 0), (29, 0))),
    (Predicate(FUNCTIONS["everything"]), 0, 0, 2), (Predicate(FUNCTIONS["everything"]), 5, 5, 0),
], ids=str)  # fmt: skip
def test_odd_sizes(pattern, n, queries, heads):
    held(pattern, n, queries, heads)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_by_tiles(monkeypatch, name, causal):
    for n, nq, tile in ((13, 13, 1 << 22), (13, 5, 50), (1, 1, 50), (13, 0, 50)):
        monkeypatch.setattr(base, "TILE", tile)
        monkeypatch.setattr(listed, "TILE", 4 * tile)  # a few pairs a tile: rows and columns are both cut
        held(Predicate(FUNCTIONS[name], causal), n, nq, 2)


def test_numbers_of_any_size():
    agree(Window(1 << 80, True, sinks=1 << 80), definition(Window(9, True, 1, 9), 9, 1))
    agree(Window(1 << 80, dilation=1 << 80), definition(Window(1), 9, 1))
