"""Whether a strategy's results are right: each rank's rows against those of one device.

Dimensions: B batch, N positions, H heads, D head_dim.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.distributed.shards import Rows, Shards
from workbench.harness.outcome import attempt
from workbench.probes.case import Case
from workbench.probes.error import RELATIVE
from workbench.probes.validity import edges
from workbench.scaling import strategies
from workbench.scaling.strategies import ONE, Work

SMALL = 1 << 20  # elements of a result up to which all of its rows are compared
DRAWN = 32  # random rows that are compared in a larger result, beside those at edges


def places(case: Case, name: str, world: int) -> Tensor:
    """int64, ascending: the rows of a result to compare, all of a small one, else those at edges of shards and of the
    pattern, the first and the last, and DRAWN random ones."""
    of_keys = name in ("dk", "dv")
    length, heads, shift = (case.n, case.kv_heads, 0) if of_keys else (case.nq, case.heads, case.n - case.nq)
    if case.batch * length * heads * case.head_dim <= SMALL:
        return torch.arange(length)
    borders = {x for parts in (world, 2 * world) for x in Shards.even(case.n, parts).starts}
    found = {y for x in borders for y in (x - 1, x)} | {*edges(case.pattern, case.n)} | {shift, case.n - 1}
    drawn = torch.randint(shift, case.n, (DRAWN,), generator=torch.Generator().manual_seed(case.seed))
    found |= set(drawn.tolist())
    return torch.tensor(sorted(x - shift for x in found if shift <= x < case.n))


def one_device(case: Case, rank: int, world: int) -> tuple[dict[str, Tensor] | None, str | None]:
    """({result: float64 (B, rows compared, heads, D)} of the one-device call, None) on all ranks, or (None, why) if
    rank 0 could not do it."""
    names = ("dq", "dk", "dv", "out") if case.mode == "fwdbwd" else ("out",)
    at = {name: places(case, name, world) for name in names}

    def work():
        results = strategies.prepare(ONE, case, 0, world)(out=True)
        return {x: results[x][:, at[x].to(results[x].device)].double().cpu().contiguous() for x in names}

    outcomes = [attempt(work) if rank == 0 else None]
    dist.broadcast_object_list(outcomes, src=0, device=torch.device("cpu"))
    why = f"no one-device result to compare with: {outcomes[0].error or outcomes[0].status}"
    return outcomes[0].result, why if outcomes[0].status != "ok" else None


def with_one_device(work: Work, results: dict[str, Tensor], expected: dict[str, Tensor], world: int) -> dict:
    """errors and compared of `on_ranks.facts`.

    A row's error is ||got - want|| over its size, ||want||. In the dq of a query that sees few keys, or the dk of a key
    that few see, nearly everything cancels; so ||out||, or ||dv||, which for inputs N(0, 1) are of the same scale, is
    added to the size. Allowed is four times the error that one float32 (float64) result may have, or four roundings of
    a 16-bit one: on both sides weights and results are rounded.
    """
    case, errors, compared = work.case, {}, 0
    allowed = 4 * RELATIVE.get(case.dtype, torch.finfo(case.dtype).eps)
    batch = slice(work.share.batch.start, work.share.batch.stop)
    for name, got in results.items():
        at = places(case, name, world)
        rows = Rows.of(work.share.rows(name, case)).positions
        here = torch.isin(rows, at).nonzero().flatten()
        index = torch.searchsorted(at, rows[here])
        want = expected[name][batch, index]
        off = got[:, here.to(got.device)].double().cpu() - want
        size = want.norm(dim=-1)
        if beside := {"dq": "out", "dk": "dv"}.get(name):
            size = size + expected[beside][batch, index].norm(dim=-1)
        relative = off.norm(dim=-1) / size.clamp(min=torch.finfo(case.dtype).tiny)
        errors[name] = [_largest(off.abs()), _largest(relative) / allowed]
        compared = max(compared, len(here)) if name in ("out", "dq") else compared
    return {"errors": errors, "compared": compared}


def _largest(x: Tensor) -> float:
    """The maximum, inf if there is a NaN, 0 if x is empty."""
    return float(x.nan_to_num(nan=torch.inf).max()) if x.numel() else 0.0
