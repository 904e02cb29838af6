"""What an order of a grid's cells does to attention: measures that compare orderings, one tidy DataFrame each.

Grids are as in `workbench.patterns.orderings`. A distance on the grid is the largest of the axes' differences, which is
what the radius of a neighborhood bounds; a distance along the order is in tokens.
"""

import itertools
import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workbench.analysis.reach import field
from workbench.distributed import Shards, plan
from workbench.engines.dispatch import attention, choose
from workbench.engines.triton_backend import block_size_of
from workbench.harness.narrate import title
from workbench.patterns import Dilated, Neighborhood, Pattern, Predicate, orderings
from workbench.patterns.neighborhood import swin
from workbench.patterns.orderings import Ordering


def orders(shape, tile=(8, 16), seed: int | None = None, mask=None) -> list[Ordering]:
    """row_major, tiles, morton, hilbert and, with a seed, snake and random; with a mask (bool, grid) its True cells."""
    made = [orderings.row_major(shape), orderings.tiles(shape, tile), orderings.morton(shape), orderings.hilbert(shape)]
    made += [] if seed is None else [orderings.snake(shape), orderings.random(shape, seed)]
    return made if mask is None else [order.restrict(mask) for order in made]


def region(shape, share: float = 0.5, seed: int = 0) -> Tensor:
    """bool (H, W): an irregular region like tissue on a slide, `share` of the cells, by thresholding smooth noise."""
    height, width = shape
    noise = np.fft.rfft2(np.random.default_rng(seed).normal(size=(height, width)))
    frequency = np.hypot(np.fft.fftfreq(height)[:, None] * height, np.fft.rfftfreq(width)[None] * width)
    field = np.fft.irfft2(noise * np.exp(-((frequency / 4) ** 2)), s=(height, width))
    y, x = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    field = field / max(field.std(), 1e-12) - 2.5 * (x**2 + y**2)  # away from the border, as tissue mostly is
    return torch.from_numpy(field >= np.quantile(field, 1 - share))


def project(features: Tensor, heads: int, head_dim: int, seed: int = 0) -> list[Tensor]:
    """(rows, cols, C) -> q, k, v, each (1, rows * cols, heads, head_dim), row-major: the cells, projected at random."""
    x = features.flatten(0, 1)
    x = (x - x.mean(0)) / x.std()
    weights = torch.randn(3, x.shape[1], heads * head_dim, generator=torch.Generator().manual_seed(seed))
    return [(x @ w / math.sqrt(x.shape[1])).view(1, len(x), heads, head_dim) for w in weights]


def steps(compared: list[Ordering]) -> pd.DataFrame:
    """grid, order, jumps (steps to a cell that is no neighbour), longest and mean step, in cells summed over axes."""
    return pd.DataFrame([
        {"grid": " x ".join(map(str, order.shape)), "order": order.name, "jumps": order.jumps,
         "longest": int(order.steps.max()), "mean": float(order.steps.double().mean())} for order in compared
    ])  # fmt: skip


def extent(compared: list[Ordering], lengths) -> pd.DataFrame:
    """order, length, extent: the longer side of the box around `length` consecutive tokens, in cells, on average."""
    rows = []
    for order, length in itertools.product(compared, lengths):
        runs = order.coordinates.unfold(0, length, max(1, length // 8))  # (runs, axes, length)
        sides = runs.amax(2) - runs.amin(2) + 1
        rows.append({"order": order.name, "length": length, "extent": float(sides.amax(1).double().mean())})
    return pd.DataFrame(rows)


def within(compared: list[Ordering], lags) -> pd.DataFrame:
    """order, lag, share: of the pairs of cells that share a side, those at most `lag` apart along the order."""
    rows = []
    for order in compared:
        rank = order.rank.view(order.shape)
        apart = []
        for axis, side in enumerate(order.shape):
            a, b = rank.narrow(axis, 0, side - 1), rank.narrow(axis, 1, side - 1)
            apart.append((a - b).abs()[(a >= 0) & (b >= 0)])
        apart = torch.cat(apart)
        rows += [{"order": order.name, "lag": lag, "share": float((apart <= lag).double().mean())} for lag in lags]
    return pd.DataFrame(rows)


def similarity(features: Tensor, compared: list[Ordering], longest: int) -> pd.DataFrame:
    """order, lag, similarity, run: how alike the cells' features (..grid.., C) are, read along the order.

    similarity: the autocorrelation at this lag: 1 for equal features, 0 for two cells taken at random.
    run: its mean over the lags up to this one, so how alike a token is to the `lag` tokens before it.
    """
    cells = features.double().flatten(0, -2)
    frames = []
    for order in compared:
        x = cells[order.curve]
        x = x - x.mean(0)
        power = torch.fft.rfft(x, 2 * len(x), dim=0).abs().square().sum(1)  # zero-padded: no wrapping around
        product = torch.fft.irfft(power, 2 * len(x))[: longest + 1] / (len(x) - torch.arange(longest + 1))
        value = (product[1:] / product[0]).numpy()
        lag = np.arange(1, longest + 1)
        frames.append(pd.DataFrame({"order": order.name, "lag": lag, "similarity": value, "run": value.cumsum() / lag}))
    return pd.concat(frames, ignore_index=True)


def falls_below(frame: pd.DataFrame, value: str, level: float) -> dict[str, int | None]:
    """order -> the first lag at which `value` is below the level; None where it never is."""
    low = frame[frame[value] < level].groupby("order")["lag"].min()
    return {order: int(low[order]) if order in low else None for order in frame["order"].unique()}


def table(frame: pd.DataFrame, value: str, *rows: str) -> pd.DataFrame:
    """`value` with one column an order and one line for each combination of the columns `rows`, as they come."""
    wide = frame.set_index([*rows, "order"])[value].unstack("order")
    lines = frame.set_index(list(rows)).index.unique()
    return wide.reindex(index=lines, columns=frame["order"].unique()).rename_axis(columns=None)


def touched(pattern: Pattern, n: int, block: int = 128) -> np.ndarray:
    """bool (ceil(n / block), same): the blocks of one head's (query, key) matrix that hold a visible pair."""
    blocks = pattern.blocks(n, 1, block_size=block)
    seen = torch.zeros(blocks.rows, blocks.cols, dtype=torch.bool)
    seen[blocks.line, blocks.columns.long()] = True
    return seen.numpy()


def computed_in(x: Tensor, pattern: Pattern) -> int:
    """The tokens of a block of the kernel that computes the pattern for q, k and v like x (1, cells, heads, D)."""
    return (block_size_of(pattern) if choose("auto", x, x, x, pattern)[0] == "triton" else pattern.block_of())[0]


def along_a_curve(side: int) -> pd.DataFrame:
    """Percent of the blocks of 128 that a window touches, by order: on a sequence of side^2 tokens, and on a grid of 16
    times as many."""
    n, grid, window = side**2, (4 * side, 4 * side), Neighborhood((side**2,), side)
    curve = orderings.hilbert((side, side)).curve
    seen = [("sequence", "as it is", n, window), ("sequence", "Hilbert", n, reordered(window, curve))]
    for order in (orderings.row_major(grid), orderings.hilbert(grid)):
        seen.append(("grid", title(order.name), 16 * n, Neighborhood(grid, 8, order)))
    found = [(*x, n, 100 * float(touched(pattern, n).mean())) for *x, n, pattern in seen]
    return pd.DataFrame(found, columns=["tokens", "order", "n", "percent of the blocks"])


def blocks_touched(windows, tile=(8, 16), block: int = 128) -> pd.DataFrame:
    """grid, window, side, order, percent of the blocks that are touched.

    windows: [(height, width, "sliding" or "aligned", side), ...].
    A sliding window has its token in the middle and is clipped at the border; aligned ones cut the grid into squares.
    """
    rows = []
    for height, width, kind, side in windows:
        radius, sliding = side // 2 if side % 2 else (side - 1) / 2, kind == "sliding"
        for order in orders((height, width), tile):
            pattern = Neighborhood(order.shape, radius, order) if sliding else swin(order.shape, side, 0, order)
            percent = 100 * float(touched(pattern, len(order), block).mean())
            rows.append((f"{height} x {width}", f"{kind} {side} x {side}", side, order.name, percent))
    return pd.DataFrame(rows, columns=["grid", "window", "side", "order", "percent"])


def reordered(pattern: Pattern, curve: Tensor, heads: int = 1) -> Predicate:
    """The pattern, of positions in time, for tokens of which the i-th in memory has position curve[i] in time."""
    n = len(curve)
    return Predicate(lambda h, i, j: pattern.count(h, curve[i], curve[j], n, heads) > 0)


def borders(compared: list[Ordering], radius: int, shards) -> pd.DataFrame:
    """shards, order, cells: how many cells of others the windows of a shard need, for the shard that needs most.

    The tokens are cut into so many equal runs, as sequence parallelism does; a window reaches `radius` to each side.
    """
    rows = []
    for many, order in itertools.product(shards, compared):
        needs = plan(Neighborhood(order.shape, radius, order), Shards.even(len(order), many), 1).units.sum(0)
        rows.append({"shards": many, "order": order.name, "cells": int(needs.max())})
    return pd.DataFrame(rows)


def moving(qkv: list[Tensor], order: Ordering):
    """A function of nothing: q, k, v put in `order`, and a result put back on the grid: what a permutation costs."""
    return lambda: order.restore([order.arrange(x) for x in qkv][-1])


def neighborhood_call(qkv: list[Tensor], order: Ordering, radius: int):
    """A function of nothing: neighborhood attention of q, k, v (1, cells, heads, D), row-major, with tokens in `order`.

    The tokens are arranged once, here, as a network would do at its input; `order.restore` un-permutes the result.
    """
    pattern = Neighborhood(order.shape, radius, order)
    arranged = [order.arrange(x) for x in qkv]
    return lambda: attention(*arranged, pattern)


def neighbours(compared: list[Ordering], pattern: Dilated, heads: int, radius: int = 1) -> pd.DataFrame:
    """order, branch, inside, seen: the part of a token's spatial neighbours that a branch has in the token's segment,
    and the part that the token sees there in some head; the last branch is "any" of them.

    A token's neighbours are the occupied cells within `radius`, without itself; the mean is over tokens that have any.
    pattern: every head in every branch, and not causal.
    """
    lengths, rates, h = pattern.segment_lengths, pattern.dilation_rates, torch.arange(heads)[:, None]
    lines = {f"{w} / {r}": ([w], [r]) for w, r in zip(lengths, rates, strict=True)} | {"any": (lengths, rates)}
    rows = []
    for order in compared:
        token, other = _neighbour_pairs(order, radius)
        many = torch.bincount(token, minlength=len(order))
        for name, (lengths, rates) in lines.items():
            row = {"order": order.name, "branch": name}
            for what, kept in (("inside", [1] * len(rates)), ("seen", rates)):
                count = Dilated(lengths, kept, offsets=pattern.offsets).count(h, token, other, len(order), heads)
                hit = torch.bincount(token[(count > 0).any(0)], minlength=len(many))
                row[what] = float((hit / many)[many > 0].mean())
            rows.append(row)
    return pd.DataFrame(rows)


def field_on_grid(order: Ordering, pattern: Pattern, heads: int, cell, layers: int) -> np.ndarray:
    """float (grid): the `reach.field` of the token at `cell` of the grid; NaN where no token is."""
    token = int(order.rank.view(order.shape)[tuple(cell)])
    known = field(pattern, len(order), heads, token, layers).double()
    return order.restore(known, dim=0, fill=math.nan).view(order.shape).numpy()


def typical_cell(mask: Tensor) -> tuple[int, ...]:
    """The occupied cell nearest to two fifths along every axis: off the middle, where a Hilbert curve has its seams."""
    cells = mask.nonzero()
    goal = torch.tensor(mask.shape, dtype=torch.float64) * 0.4
    return tuple(cells[(cells - goal).square().sum(1).argmin()].tolist())


def _neighbour_pairs(order: Ordering, radius: int) -> tuple[Tensor, Tensor]:
    """int64 twice: the tokens of every pair of different cells, both occupied, within `radius` on every axis."""
    rank = order.rank.view(order.shape)
    pad = torch.nn.functional.pad(rank, [radius] * (2 * rank.ndim), value=-1)
    pairs = []
    for shift in itertools.product(range(2 * radius + 1), repeat=rank.ndim):
        if any(x != radius for x in shift):
            other = pad[tuple(slice(x, x + side) for x, side in zip(shift, order.shape, strict=True))]
            both = (rank >= 0) & (other >= 0)
            pairs.append(torch.stack([rank[both], other[both]]))
    return tuple(torch.cat(pairs, 1))
