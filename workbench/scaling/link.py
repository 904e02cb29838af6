"""The link between ranks: how fast it moves data and what a call costs, measured; and what many ranks would do with
them, predicted.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from workbench.fit.frontier import Lengths
from workbench.harness import records
from workbench.harness.ranks import Pool
from workbench.patterns import Dense, checks
from workbench.probes.case import Case, case_of
from workbench.scaling import strategies as ways

CALL_S = 5.0  # seconds after which no further round of the small call is begun
MESSAGES = tuple(1 << x for x in range(16, 29, 2))  # bytes: 64 KiB to 256 MiB
WORLDS = tuple(1 << x for x in range(1, 13))
# (tokens of each rank, heads) of the call whose cost beside its work is measured. On a card it computes for longer than
# the host takes to launch it, as the calls do that are worth dividing.
COSTED = {"cpu": (64, 2), "cuda": (32_768, 8)}


class Rates(NamedTuple):
    """What a link moves, and what a call costs before it computes or moves much.

    latency_s: seconds of a message of no bytes; bytes_per_second: beyond these, what a rank sends; call_s: seconds that
    a call on the ranks takes beside computing and moving: they agree, pack, and merge
    """

    latency_s: float
    bytes_per_second: float
    call_s: float

    def message_s(self, size):
        """Seconds of a message of so many bytes."""
        return self.latency_s + size / self.bytes_per_second


def measure(
    nproc: int = 2, sizes: Iterable[int] = MESSAGES, *, samples: int = 9, profile="quick", folder=None
) -> pd.DataFrame:
    """Measure all-to-alls in which each rank sends `size` bytes, equally to each other rank: a row and record by size
    (stage "link"); and one of a call of dense attention on the ranks, over its share of the time on one device (stage
    "cost": samples_ms are these differences, message_bytes what it sends, exchanges in how many messages).

    By NCCL where there is a CUDA card, else by gloo. A row: message_bytes (what a rank sends, rounded down to equal
    parts), samples_ms and median_ms of the slowest rank, bytes_per_second that a rank sends at the median. ValueError
    for fewer than two ranks, or for less than a byte to each other rank.
    """
    device = "cuda" if torch.cuda.device_count() else "cpu"
    nproc, samples = checks.whole("nproc", nproc, 2), checks.whole("samples", samples, 1)
    sizes = checks.wholes("sizes", checks.listed("sizes", sizes), nproc - 1)  # a byte for each other rank
    sizes = [size // (nproc - 1) * (nproc - 1) for size in sizes]
    tokens, heads = COSTED[device]
    costed = Case(Dense(), tokens * nproc, heads, 64, "bfloat16" if device == "cuda" else "float32", device=device)
    with Pool(nproc, "nccl" if device == "cuda" else "gloo") as pool:
        recorder, rows = records.start("scaling", profile, folder), []
        sent = pool.attempt("workbench.scaling.on_ranks:link", [sizes, samples, device])
        names = [ways.ONE, "sequence"]
        called = pool.attempt("workbench.scaling.on_ranks:times", [costed, names, samples, CALL_S])
    plan = ways.plan("sequence", costed, nproc)
    size = int(plan.bytes(costed.dtype.itemsize, 64).sum(1).max())
    asked = [("link", size, sent, x) for x, size in enumerate(sizes)] + [("cost", size, called, "sequence")]
    for stage, size, outcome, x in asked:
        row = {"stage": stage, "world": nproc, "message_bytes": size, "status": outcome.status, "error": outcome.error}
        row |= {"exchanges": len(plan.stages) if stage == "cost" else 1, "backend": pool.backend}
        row |= dict.fromkeys(("samples_ms", "median_ms", "bytes_per_second"))
        if outcome.status == "ok":
            took = np.max([rank[x] for rank in outcome.result], axis=0)
            if stage == "cost":
                took = took - np.max([rank[ways.ONE] for rank in outcome.result], axis=0) / nproc
            row["samples_ms"] = took.tolist()
            row["median_ms"] = float(np.median(row["samples_ms"]))
            row["bytes_per_second"] = 1000 * size / row["median_ms"] if stage == "link" else None
        rows.append(recorder.row(**row))
    return pd.DataFrame(rows)


def fit(rows: pd.DataFrame, call=True) -> Rates | None:
    """The latency and the bandwidth nearest to all messages of `measure`, by least squares of relative errors, and the
    cost of a call; None where there are not two messages and, unless call is False, a call."""
    done = rows[rows["status"].eq("ok")] if len(rows) else rows
    if not len(done) or done["stage"].ne("link").all() or call and done["stage"].ne("cost").all():
        return None
    sent, costs = (done[done["stage"].eq(x)] for x in ("link", "cost"))
    size, seconds = (sent[x].to_numpy(float) for x in ("message_bytes", "median_ms"))
    seconds = seconds / 1000
    if len(set(size)) < 2:
        return None
    per_byte, latency = np.polyfit(size, seconds, 1, w=1 / seconds)  # each message's time is 1 in units of itself
    if latency <= 0 or per_byte <= 0:  # noise, or a link whose small messages are free: the largest one tells
        latency, most = float(seconds.min()), seconds[size.argmax()]
        latency = latency if latency < most else 0.0
        per_byte = (most - latency) / size.max()
    beside = [x["median_ms"] / 1000 - per_byte * x["message_bytes"] - latency * (x["exchanges"] - 1)
              for x in costs.tail(1).to_dict("records")]  # fmt: skip
    return Rates(float(latency), float(1 / per_byte), float(max([0.0, *beside])))


def modelled(
    case: Case, pairs_per_second: float, rates: Rates, worlds: Iterable[int] = WORLDS, *,
    at: Lengths | None = None, scaling: str = "strong",
) -> pd.DataFrame:  # fmt: skip
    """Predict forwards on many ranks from measured rates: a row for each number of ranks, with `measured` False.

    pairs_per_second: (head, query, key) that one card computes; rates: of `fit`. scaling: "strong", the
    case's N on all ranks together, or "weak", the case's N on each rank; at: the case at any N, if its pattern depends
    on N.
    A row: world; n; seconds: the call's cost, a latency for each exchange after the first, and of the slowest rank what
    it computes and then moves; speedup over one card at the same N; efficiency, the speedup over
    the number of ranks; most, the efficiency if what moves is hidden behind what is computed; exchanges;
    bytes_per_rank, the most that one sends; balance of pairs, max over mean.
    ValueError for another scaling.
    """
    checks.choice("scaling", scaling, "strong", "weak")
    checks.number("pairs_per_second", pairs_per_second)
    worlds = checks.wholes("worlds", checks.listed("worlds", worlds), 1)
    at, rows = at or case_of(case).at, []
    for world in worlds:
        one = at(case.n * world) if scaling == "weak" else case
        plan = ways.plan("sequence", one, world)
        bytes_ = plan.bytes(one.dtype.itemsize, one.head_dim, one.batch)
        sent = bytes_.sum(1)
        moving = torch.maximum(sent, bytes_.sum(0)).numpy() / rates.bytes_per_second  # whichever is more, by rank
        computing = one.batch * plan.pairs.astype(float) / pairs_per_second
        fixed = rates.call_s + rates.latency_s * (len(plan.stages) - 1)
        seconds, hidden = (fixed + float(x.max()) for x in (computing + moving, np.maximum(computing, moving)))
        alone = float(computing.sum())
        row = one.fields() | {"strategy": "sequence", "world": world, "scaling": scaling, "measured": False}
        row |= {"seconds": seconds, "speedup": alone / seconds, "efficiency": alone / seconds / world}
        row |= {"most": alone / hidden / world, "balance": plan.balance, "exchanges": len(plan.stages)}
        rows.append(row | {"bytes_per_rank": int(sent.max())})
    return pd.DataFrame(rows)
