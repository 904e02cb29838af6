"""Whether a strategy's results are right: each rank's rows against those of one device or, if it cannot, float64.

Dimensions: B batch, N positions, H heads, D head_dim.
"""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.distributed.shards import Rows, Shards, as_tensor
from workbench.harness.outcome import attempt
from workbench.probes.case import Case
from workbench.probes.error import RELATIVE
from workbench.probes.validity import Exact, edges, sample
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

    outcome = attempt(work) if rank == 0 else None
    why = [outcome and outcome.error]
    dist.broadcast_object_list(why, src=0, device=torch.device("cpu"))
    if why[0] is not None:
        return None, f"no one-device result to compare with: {why[0]}"
    found = outcome.result if rank == 0 else {}
    for name in names:
        heads = case.kv_heads if name in ("dk", "dv") else case.heads
        shape = case.batch, len(at[name]), heads, case.head_dim
        found.setdefault(name, torch.empty(shape, dtype=torch.float64))
        dist.broadcast(found[name], 0)
    return found, None


def with_one_device(work: Work, results: dict[str, Tensor], expected: dict[str, Tensor], world: int) -> dict:
    """errors, compared and compared_with of `on_ranks.facts`, against the one-device call.

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
    return {"errors": errors, "compared": compared, "compared_with": "one device"}


class _Drawn(Exact):
    """The definition in float64, for inputs that no device can hold: their rows are drawn again as needed."""

    def __init__(self, case: Case):
        sizes = {"q": (case.nq, case.heads), "k": (case.n, case.kv_heads), "v": (case.n, case.kv_heads)}
        shapes = [(case.batch, *sizes[name], case.head_dim) for name in "qkv"]
        super().__init__(case.pattern, *(torch.empty(shape, device="meta") for shape in shapes))
        self.case, self.device = case, torch.device(case.device)

    def take(self, x: Tensor, b: int, at: range | Tensor, h: int) -> Tensor:
        name = next(name for name in "qkv" if x is getattr(self, name))
        rows = as_tensor(at).cpu()
        return strategies.remake(self.case, name, rows)[b, :, h].double()


def with_float64(work: Work, results: dict[str, Tensor]) -> dict:
    """errors, compared and compared_with of `on_ranks.facts`, against float64, of some of this rank's rows of out.

    In each run of rows that the rank has, these are the ones of `validity.sample` (at both sides of edges and of where
    offsets no longer fit into 32 bits, and random ones) and, for each dilated branch and head, the last row it keeps.
    """
    case, exact, at = work.case, _Drawn(work.case), defaultdict(list)
    branches = [getattr(case.pattern, x, ()) for x in ("segment_lengths", "dilation_rates")]
    shift, place = case.n - case.nq, 0
    for rows in work.share.rows("out", case) if results else ():
        shape = (len(work.share.batch), len(rows), case.heads, case.head_dim)
        first = rows.start + shift
        for b, i, h in sample(shape, case.pattern, first, case.seed):
            at[work.share.batch.start + b, h].append((place + i, first + i))
        last = rows.stop - 1 + shift
        for branch, (w, r) in enumerate(zip(*branches, strict=True)):
            for h in range(case.heads):
                o = case.pattern.offset(branch, h, case.heads)
                kept = None if o is None else last // w * w + (last % w - o) // r * r + o
                if kept is not None and kept >= first:
                    at[work.share.batch.start, h].append((place + kept - first, kept))
        place += len(rows)
    absolute, relative, compared = 0.0, 0.0, 0
    allowed = RELATIVE.get(case.dtype, 2 * torch.finfo(case.dtype).eps)
    for (b, h), rows in at.items():
        here, positions = (torch.tensor(x) for x in zip(*sorted(set(rows)), strict=True))
        want, size = exact.rows(b, h, positions)["out"]
        off = results["out"][b - work.share.batch.start, here.to(want.device), h].double() - want
        absolute, compared = max(absolute, _largest(off.abs())), compared + len(here)
        relative = max(relative, _largest(off.norm(dim=1) / size.clamp(min=torch.finfo(case.dtype).tiny)))
    errors = {"out": [absolute, relative / allowed]} if compared else {}
    return {"errors": errors, "compared": compared, "compared_with": "float64, keys drawn again"}


def _largest(x: Tensor) -> float:
    """The maximum, inf if there is a NaN, 0 if x is empty."""
    return float(x.nan_to_num(nan=torch.inf).max()) if x.numel() else 0.0
