"""How far a backend is from the float64 oracle, beside how far it may be.

The budget of float64 and float32 is a fixed relative error. That of bfloat16 and float16 comes from data: twice what
torch's own attention of that dtype makes of the same inputs and mask, plus one rounding of the right answer.

Dimensions: B batch, N keys, Nq queries, H query heads, Hkv key heads, D head_dim.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

import pandas as pd
import torch
from torch import Tensor

from workbench.engines.check import DTYPES
from workbench.engines.dispatch import BACKENDS, attention
from workbench.engines.merge import merge
from workbench.engines.reference import reference
from workbench.harness.outcome import attempt
from workbench.patterns import BlockSparse, Dense, checks, layouts
from workbench.probes.case import Case, case_of

RELATIVE = {torch.float64: 1e-10, torch.float32: 2e-6}
LSE = {torch.float64: 1e-10, torch.float32: 1e-6, torch.bfloat16: 1e-4, torch.float16: 1e-4}
GRADIENTS = ("dq", "dk", "dv")


def table(patterns: Iterable, *, n: int, backends=BACKENDS, dtypes=DTYPES, heads=2, head_dim=32, **sizes):
    """Every backend x pattern x dtype against the oracle, values and gradients: a DataFrame of the rows of `of`.

    Where a backend refuses the gradients, the refusal is one row and the values alone (mode "fwd"), if it takes those,
    the next. Where it refuses those too, the one row has their reason: it holds whatever is asked for.
    dtypes: torch's, or their names. sizes: what else a `Case` takes (device, batch, kv_heads, nq, seed).
    """
    backends, dtypes = checks.listed("backends", backends), checks.listed("dtypes", dtypes)
    rows = []
    for pattern, backend, dtype in itertools.product(checks.listed("patterns", patterns), backends, dtypes):
        case = Case(pattern, n, heads, head_dim, dtype, backend, "fwdbwd", **sizes)
        rows.append(of(case))
        if rows[-1]["status"] == "refused":
            values = of(replace(case, mode="fwd"))
            if values["status"] == "ok":
                rows.append(values)
            else:
                rows[-1]["error"] = values["error"]
    return pd.DataFrame(rows)


def of(case: Case) -> dict:
    """The errors of one call on random inputs, a record's row: error_X and budget_X for X in out, lse and, in mode
    "fwdbwd", dq, dk, dv; and `worst`, the largest error / budget, at most 1 where all are right.

    Errors are ||got - want|| / ||want||, for gradients with the norm of the upstream gradient where that is larger, and
    for lse the largest |got - want| / max(1, |want|). A quantity that the backend does not return is left out. A
    status other than "ok" has its reason in `error`. A function of yours of q, k and v is the case's `backend`.
    """
    row = {"probe": "error"} | case_of(case).fields()
    checks.device(case.device, here=True)
    random = torch.Generator().manual_seed(case.seed)
    pattern, backward = case.pattern, case.mode == "fwdbwd"
    of_q, of_k = (case.nq, case.heads), (case.n, case.kv_heads)
    drawn = (torch.randn(case.batch, *x, case.head_dim, generator=random) for x in (of_q, of_k, of_k, of_q))
    q, k, v, upstream = (x.to(case.device, case.dtype) for x in drawn)
    leaves = [x.requires_grad_(backward) for x in (q, k, v)]
    with torch.set_grad_enabled(backward):
        outcome = attempt(lambda: case.function(*leaves, return_lse=True))
        if outcome.status != "ok":
            return row | {"status": outcome.status, "error": outcome.error}
        run, row["backend"] = outcome.result
        exact = [x.detach().double().requires_grad_(backward) for x in leaves]
        want = _quantities(lambda *x: reference(*x, pattern), exact, upstream, backward)
        got = _quantities(run, leaves, upstream, backward)
        budget = _budgets(want, leaves, upstream, pattern, backward)
    errors = {name: _error(name, got[name], want[name], upstream) for name in got}
    row |= {f"error_{name}": e for name, e in errors.items()} | {f"budget_{name}": budget[name] for name in errors}
    return row | {"status": "ok", "worst": max(_share(e, budget[name]) for name, e in errors.items())}


def _quantities(run, leaves, upstream: Tensor, backward: bool) -> dict[str, Tensor]:
    """out (B, Nq, H, D), lse (B, H, Nq) where there is one, and the gradients, like q, k, v, of sum(out * upstream)."""
    out, lse = run(*leaves)
    named = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    if backward:
        named |= zip(GRADIENTS, torch.autograd.grad(out, leaves, upstream.to(out.dtype)), strict=True)
    return named


def relative(got: Tensor, want: Tensor, upstream: Tensor | None = None) -> float:
    """||got - want|| over the larger of ||want|| and ||upstream||, absolute where both are 0; infinite for a NaN."""
    scale = max(float(x.double().norm()) for x in (want, upstream) if x is not None)
    error = float((got.double() - want.double()).norm()) / (scale or 1.0)
    return math.inf if math.isnan(error) else error


def lse_error(got: Tensor, want: Tensor) -> float:
    """The largest |got - want| / max(1, |want|); infinite for a NaN, and where only one of them is -inf."""
    got, want = got.double(), want.double()
    distance = ((got - want).abs() / want.abs().clamp(min=1)).nan_to_num(math.inf, math.inf)
    distance = torch.where(got == want, 0.0, distance)  # -inf on both sides is no difference
    return float(distance.max()) if want.numel() else 0.0


def _error(name: str, got: Tensor, want: Tensor, upstream: Tensor) -> float:
    return lse_error(got, want) if name == "lse" else relative(got, want, upstream if name in GRADIENTS else None)


def _share(error: float, budget: float) -> float:
    """error / budget; an exact result needs no budget (bfloat16 gradients that are 0 have none)."""
    if not budget:
        return math.inf if error else 0.0
    return error / budget


def _budgets(want: dict[str, Tensor], leaves, upstream: Tensor, pattern, backward: bool) -> dict[str, float]:
    dtype = upstream.dtype
    if dtype in RELATIVE:
        return dict.fromkeys(want, RELATIVE[dtype]) | {"lse": LSE[dtype]}
    torch_own = _quantities(lambda *x: (_torch_own(*x, pattern), None), leaves, upstream, backward)
    return {"lse": LSE[dtype]} | {
        name: 2 * sum(_error(name, x, want[name], upstream) for x in (own, want[name].to(dtype)))
        for name, own in torch_own.items()
    }


def _torch_own(q: Tensor, k: Tensor, v: Tensor, pattern) -> Tensor:
    """out (B, Nq, H, D) by torch's attention with the pattern as a mask; a key that counts twice is there twice."""
    heads = q.shape[2]
    count = torch.stack([x.multiplicity(k.shape[1], heads, q.shape[1]) for x in pattern.each()]).to(q.device)
    mask = torch.cat([count > x for x in range(max(1, int(count.max())))], -1).expand(len(q), -1, -1, -1)
    seen, copies = mask.any(-1, keepdim=True), mask.shape[-1] // k.shape[1]
    k, v = (x.repeat(1, copies, 1, 1).repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask | ~seen)
    return out.masked_fill(~seen, 0).transpose(1, 2) / pattern.divisor(heads)


def of_parts(n: int = 512) -> pd.DataFrame:
    """The relative errors of three ways to add attention over two parts of the keys, against all keys."""
    q, k, v = torch.randn(3, 1, n, 2, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    halves = (BlockSparse(x, 64) for x in (layouts.local(1), ~layouts.local(1)))
    one, other = ((out.transpose(1, 2), lse) for out, lse in (attention(q, k, v, x, return_lse=True) for x in halves))
    ways = {"one softmax, parts weighted by their denominators": merge(one, other)[0]}
    ways |= {"the sum of both": one[0] + other[0], "their mean": (one[0] + other[0]) / 2}
    want = reference(q, k, v, Dense())[0].transpose(1, 2)
    errors = [(x, float((out - want).norm() / want.norm())) for x, out in ways.items()]
    return pd.DataFrame(errors, columns=["two parts added as", "relative error"])
