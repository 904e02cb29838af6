"""The link between ranks: how fast it moves data, measured, and what many ranks would do with it, predicted.

Dimensions: N positions, B batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch

from workbench.fit.frontier import Lengths
from workbench.harness import records
from workbench.harness.outcome import attempt
from workbench.harness.ranks import Pool
from workbench.patterns import checks
from workbench.probes.case import Case
from workbench.scaling import strategies as ways

MESSAGES = tuple(1 << x for x in range(16, 29, 2))  # bytes: 64 KiB to 256 MiB
WORLDS = tuple(1 << x for x in range(1, 13))


def measure(
    nproc: int = 2, sizes: Iterable[int] = MESSAGES, *, device: str | None = None, samples: int = 9, profile="quick",
    folder=None,
) -> pd.DataFrame:  # fmt: skip
    """Measure all-to-alls in which each rank sends `size` bytes, equally to each other rank: a row and record by size.

    device: "cpu" (gloo) or "cuda" (NCCL); by default "cuda" if there is one. A row: message_bytes (what a rank sends,
    rounded down to equal parts), samples_ms and median_ms of the slowest rank, bytes_per_second that a rank sends at
    the median. ValueError for another device, for fewer than two ranks, or for less than a byte to each other rank.
    """
    device = device or ("cuda" if torch.cuda.device_count() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: want 'cpu' or 'cuda', on which each rank has a card")
    nproc, samples = checks.whole("nproc", nproc, 2), checks.whole("samples", samples, 1)
    sizes = checks.wholes("sizes", checks.listed("sizes", sizes), nproc - 1)  # a byte for each other rank
    sizes = [size // (nproc - 1) * (nproc - 1) for size in sizes]
    with Pool(nproc, "nccl" if device == "cuda" else "gloo") as pool:
        recorder, rows = records.start("scaling", profile, folder), []
        outcome = pool.attempt("workbench.scaling.on_ranks:link", [sizes, samples, device])
    for x, size in enumerate(sizes):
        row = {"stage": "link", "world": nproc, "message_bytes": size, "status": outcome.status, "error": outcome.error}
        row |= {"backend": pool.backend, "samples_ms": None, "median_ms": None, "bytes_per_second": None}
        if outcome.status == "ok":
            row["samples_ms"] = np.max([rank[x] for rank in outcome.result], axis=0).tolist()
            row["median_ms"] = float(np.median(row["samples_ms"]))
            row["bytes_per_second"] = 1000 * size / row["median_ms"]
        rows.append(recorder.row(**row))
    return pd.DataFrame(rows)


def modelled(
    case: Case, pairs_per_second: float, bytes_per_second: float, worlds: Iterable[int] = WORLDS, *,
    at: Lengths | None = None, strategy: str = "sequence", scaling: str = "strong",
) -> pd.DataFrame:  # fmt: skip
    """Predict forwards on many ranks from measured rates: a row for each number of ranks, with `measured` False.

    pairs_per_second: (head, query, key) that one card computes; bytes_per_second: what one card sends. scaling:
    "strong", the case's N on all ranks together, or "weak", the case's N on each rank; at: the case at any N, if its
    pattern depends on N. strategy: "sequence" or "heads".
    A row: world; n; seconds with the exchange hidden behind the computation (see `Plan.seconds`); speedup over one card
    at the same N; efficiency, the speedup over the number of ranks; least, the efficiency with none of the exchange
    hidden; bytes_per_rank, the most that one sends; balance of pairs, max over mean. Messages have no latency.
    ValueError for another scaling or strategy; a number of ranks that the case does not allow is a row with a status.
    """
    if scaling not in ("strong", "weak") or strategy not in ways.OURS:
        raise ValueError(f"scaling={scaling!r}, strategy={strategy!r}: want 'strong' or 'weak', 'sequence' or 'heads'")
    if not isinstance(case, Case):
        raise ValueError(f"case={case!r}: want a Case")
    checks.number("pairs_per_second", pairs_per_second)
    checks.number("bytes_per_second", bytes_per_second)
    worlds = checks.wholes("worlds", checks.listed("worlds", worlds), 1)
    at, rows = at or case.at, []
    for world in worlds:
        one = at(case.n * world) if scaling == "weak" else case
        row = one.fields() | {"stage": "modelled", "strategy": strategy, "world": world, "scaling": scaling}
        outcome = attempt(lambda one=one, world=world: ways.plan(strategy, one, world))
        row |= {"mode": "fwd", "status": outcome.status, "error": outcome.error, "measured": False}
        if outcome.status == "ok":
            plan, sizes = outcome.result, (one.dtype.itemsize, one.head_dim, one.batch)
            seconds, most = (plan.seconds(pairs_per_second, bytes_per_second, *sizes, overlap=x) for x in (True, False))
            alone = one.batch * float(sum(plan.pairs)) / pairs_per_second
            row |= {"seconds": seconds, "speedup": alone / seconds, "efficiency": alone / seconds / world}
            row |= {"least": alone / most / world, "balance": plan.balance}
            row |= {"bytes_per_rank": int(plan.bytes(*sizes).sum(1).max())}
        rows.append(row)
    return pd.DataFrame(rows)
