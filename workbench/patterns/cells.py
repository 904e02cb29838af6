"""Exact counting for dilated attention, without looking at pairs.

Two positions are in one segment of every branch of a subset exactly when they are in one cell of the common refinement
of those segmentations. Within a cell, what all these branches keep is one congruence class (the Chinese remainder
theorem), so a cell with m kept positions holds m * m pairs, or m (m + 1) / 2 causal ones. Inclusion and exclusion over
the subsets gives what at least one branch sees.
"""

import itertools
import math

import numpy as np

CHUNK = 1 << 18  # cells held at once, over all offsets: a few MB
INT64 = 1 << 31  # positions up to which no product of two of them overflows; beyond, arrays hold Python ints


def count(branches, offsets: np.ndarray, n: int, nq: int, causal: bool) -> dict[str, list[int]]:
    """What ALL the branches [(w, r), ...] see; queries are the last nq of n.

    For each row of offsets, (rows, branches): "queries" that are kept, and "pairs" of a kept query and a kept key in
    one cell. Python ints: they do not overflow.
    """
    offsets = offsets.astype(_dtype(n))
    branches = [(min(w, n), min(r, n)) for w, r in branches]  # beyond n they change nothing
    period = math.lcm(*(w for w, _ in branches))  # the cells repeat, and with them what is kept
    first = n - nq
    start = first // period * period
    spans = [(start, min(n, start + period), first, 1)]  # from, to, first query, how often
    whole = max(0, n // period - start // period - 1)
    if whole:
        spans.append((0, period, 0, whole))
    if start + (1 + whole) * period < n:
        spans.append((n // period * period, n, 0, 1))
    seen = {"queries": [0] * len(offsets), "pairs": [0] * len(offsets)}
    for low, high, query, times in spans:
        for begin, end in _cells([w for w, _ in branches], low, high, query, max(1, CHUNK // len(offsets))):
            step, position, possible = _congruence(branches, offsets, begin, n)
            kept = _kept(end, position, step) * possible
            kept_queries = kept - _kept(np.minimum(end, np.maximum(begin, query)), position, step) * possible
            pairs = kept_queries * kept
            if causal:  # the queries are the last of the kept positions
                pairs = pairs - kept_queries * (kept_queries - 1) // 2
            for what, values in (("queries", kept_queries), ("pairs", pairs)):
                for row, value in enumerate(np.broadcast_to(values, (len(offsets), len(begin))).sum(1).tolist()):
                    seen[what][row] += times * value
    return seen


def _dtype(n: int):
    return np.int64 if n < INT64 else object


def _kept(end: np.ndarray, position: np.ndarray, step: int) -> np.ndarray:
    """How many of position, position + step, ... are below end."""
    return np.maximum((end - position + step - 1) // step, 0)


def _cells(lengths, low: int, high: int, query: int, chunk: int):
    """Yield (starts, ends) of the cells in [low, high) that reach past `query`; low is a cell border."""
    w = min(lengths)
    low = max(low, max(query // length * length for length in lengths))  # the cell that holds the first query
    step = max(1, chunk // len(lengths)) * w
    edges = [low, *range((low // step + 1) * step, high, step), high]
    for a, b in itertools.pairwise(edges):
        # the multiples of each length between a and b
        inner = (np.arange(a // length + 1, -(-b // length)) * length for length in lengths)
        borders = np.append(np.unique(np.concatenate([[a], *inner])), b).astype(_dtype(high))
        yield borders[:-1], borders[1:]


def _congruence(branches, offsets: np.ndarray, begin: np.ndarray, n: int):
    """What all branches keep in each cell: (step, first kept position >= begin, whether there can be one)."""
    step, residue, possible = 1, np.zeros((1, 1), dtype=begin.dtype), np.ones((1, 1), dtype=bool)
    for b, (w, r) in enumerate(branches):
        want = offsets[:, b, None]  # (rows, 1)
        possible = possible & (want < r)
        if w % r:
            want = want + begin // w * w
        if step >= n:  # one candidate a cell: test it (and keep every product below 2^63)
            residue = begin + (residue - begin) % step
            possible = possible & ((residue - want) % r == 0)
            continue
        common = math.gcd(step, r)
        possible = possible & ((want - residue) % common == 0)
        turns = (want - residue) // common % (r // common) * pow(step // common, -1, r // common) % (r // common)
        residue = residue + step * turns
        step = step // common * r
        residue = residue % step
    return step, begin + (residue - begin) % step, possible
