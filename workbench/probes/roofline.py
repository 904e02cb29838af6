"""Roofline: what this device can do at best, measured, so that a rate can be given as a share of it."""

import functools
import math

import pandas as pd
import torch

from workbench.harness.outcome import attempt
from workbench.patterns import Neighborhood, checks
from workbench.probes.case import Case
from workbench.probes.timing import Timing, measure

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CPU_COPY_BYTES, GPU_COPY_BYTES = 1 << 27, 1 << 30  # several times the last cache
TENSORS = {"fwd": 4, "fwdbwd": 12}  # q, k, v and out; the backward reads them and out's gradient, and writes three
PASSES = {"fwd": 2, "fwdbwd": 7}  # matrix products of 2 x pairs x head_dim operations: q k' and p v; backward has five


def ceilings(device: str = "cpu", seconds: float = 2.0) -> dict:
    """Measured ceilings of a device, in about `seconds`: the best sample counts, all are kept.

    matmul_tflops: {dtype: 10^12 operations/s of a square matrix product}, a dtype that cannot be multiplied left out;
    matmul_size: {dtype: its side}; copy_gbs: 10^9 bytes/s, read and written ones both counted, copy_bytes: of the
    tensor copied; samples_ms: {dtype or "copy": list}.
    """
    device = checks.device(device, here=True)
    share = checks.number("seconds", seconds) / (len(DTYPES) + 1)
    found = {str(x).removeprefix("torch."): attempt(lambda x=x: _matmul(x, device, share)).result for x in DTYPES}
    found = {name: result for name, result in found.items() if result}
    size = CPU_COPY_BYTES if device == "cpu" else GPU_COPY_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    copy = measure(lambda: target.copy_(source), samples=20, seconds=share)
    return {
        "device": device, "matmul_size": {name: side for name, (side, _) in found.items()}, "copy_bytes": size,
        "matmul_tflops": {name: 2 * side**3 / min(took.samples_ms) / 1e9 for name, (side, took) in found.items()},
        "copy_gbs": 2 * size / min(copy.samples_ms) / 1e6,
        "samples_ms": {name: took.samples_ms for name, (_, took) in found.items()} | {"copy": copy.samples_ms},
    }  # fmt: skip


def rates(rows: pd.DataFrame, pairs: str = "pairs") -> pd.Series:
    """TFLOP/s of records' rows over the pairs in a column: operations over median_ms; nan where something is absent."""
    known = rows[["head_dim", "batch", pairs, "median_ms"]].astype(float)
    passes = rows["mode"].map(PASSES).astype(float)
    return 2 * passes * known["head_dim"] * known["batch"] * known[pairs] / known["median_ms"] / 1e9


def intensities(rows: pd.DataFrame) -> pd.Series:
    """Operations over attended pairs a byte that records' rows must move at least: TENSORS of (B, N, H, D), once."""
    known = rows[["head_dim", "batch", "n", "heads", "pairs"]].astype(float)
    size = rows["dtype"].map(lambda name: getattr(torch, name).itemsize)
    done = 2 * rows["mode"].map(PASSES) * known["pairs"]
    return (done / (rows["mode"].map(TENSORS) * size * known["n"] * known["heads"])).astype(float)


def operations(case: Case) -> int:
    """Operations of the matrix products over what pairs are computed: 4 x pairs x head_dim forward, 14 with backward.

    The pairs are those that attend; of a neighborhood all pairs of its blocks. Two products forward and five backward
    (the scores once again, dv, dp, dq, dk), of 2 operations a pair and channel.
    """
    pairs = block_pairs(case) if isinstance(case.pattern, Neighborhood) else None
    pairs = case.pattern.pairs(case.n, case.heads, case.nq) if pairs is None else pairs
    return PASSES[case.mode] * 2 * pairs * case.head_dim * case.batch


def block_pairs(case: Case) -> int:
    """(head, query, key) in the blocks that the kernels visit, of a neighborhood."""
    from workbench.engines.triton_backend import block_size_of

    pattern, size = case.pattern, block_size_of(case.pattern)
    blocks = lambda: int(pattern.blocks(case.n, 1, case.nq, size).row_counts()[0].sum())  # noqa: E731
    return pattern.kept("block pairs", (case.n, case.nq), blocks) * math.prod(size) * case.heads


def _matmul(dtype: torch.dtype, device: str, seconds: float) -> tuple[int, Timing]:
    """(side, timing) of a matrix product large enough to be at its ceiling, small enough for the time there is."""
    side = 512
    while True:
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        product = functools.partial(torch.mm, a, b, out=torch.empty_like(a))
        once = min(measure(product, warmup=1, samples=3, seconds=seconds / 8).samples_ms)
        if side >= 8192 or 8 * once > 1000 * seconds / 3:  # the next one takes eight times as long
            return side, measure(product, warmup=0, samples=100, seconds=seconds)
        side *= 2
