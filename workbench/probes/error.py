"""How far a backend is from the float64 oracle, beside how far it may be.

The budget of float64 and float32 is a fixed relative error. That of bfloat16 and float16 comes from data: twice what
torch's own attention of that dtype makes of the same inputs and mask, plus one rounding of the right answer.

Dimensions: B batch, N keys, Nq queries, H query heads, Hkv key heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import torch
from torch import Tensor

from workbench.engines.dispatch import BACKENDS, DTYPES, attention, why_not
from workbench.engines.reference import reference
from workbench.patterns import checks
from workbench.probes.case import Case

RELATIVE = {torch.float64: 1e-10, torch.float32: 2e-6}
LSE = {torch.float64: 1e-10, torch.float32: 1e-6, torch.bfloat16: 1e-4, torch.float16: 1e-4}
GRADIENTS = ("dq", "dk", "dv")


def table(patterns: Iterable, *, n: int, backends=BACKENDS, dtypes=DTYPES, **sizes) -> pd.DataFrame:
    """Every backend x pattern x dtype against the oracle: the rows of `measure`, values and gradients.

    Where a backend refuses the gradients, the refusal is one row and the values alone (mode "fwd"), if it takes those,
    the next. Where it refuses those too, the one row has their reason: it holds whatever is asked for.
    dtypes: torch's, or their names. sizes: what else `measure` takes (heads, head_dim, device, batch, kv_heads, nq,
    seed).
    """
    backends, dtypes = checks.listed("backends", backends), checks.listed("dtypes", dtypes)
    rows = []
    for pattern in checks.listed("patterns", patterns):
        for backend in backends:
            for dtype in dtypes:
                rows.append(measure(pattern, n=n, backend=backend, dtype=dtype, **sizes))
                if rows[-1]["status"] == "refused":
                    values = measure(pattern, n=n, backend=backend, dtype=dtype, mode="fwd", **sizes)
                    if values["status"] == "ok":
                        rows.append(values)
                    else:
                        rows[-1]["error"] = values["error"]
    return pd.DataFrame(rows)


def measure(
    pattern, *, n, heads=2, head_dim=32, dtype=torch.float32, backend="torch", mode="fwdbwd", device="cpu", batch=1,
    kv_heads=None, nq=None, seed=0,
) -> dict:  # fmt: skip
    """One flat row: error_X and budget_X for X in out, lse and, in mode "fwdbwd", dq, dk, dv; and `worst`.

    `worst` is the largest error / budget.
    Errors are ||got - want|| / ||want||, for gradients with the norm of the upstream gradient where that is larger, and
    for lse the largest |got - want| / max(1, |want|). A quantity that the backend does not return is left out. The
    status is "ok" or "refused", then with the reason in `error`.
    """
    case = Case(pattern, n, heads, head_dim, dtype, backend, mode, device, batch, kv_heads, nq, seed)
    checks.device(case.device, here=True)
    dtype, nq, kv_heads = case.dtype, case.nq, case.kv_heads
    random = torch.Generator().manual_seed(seed)
    shapes = [(batch, nq, heads, head_dim), *[(batch, n, kv_heads, head_dim)] * 2, (batch, nq, heads, head_dim)]
    q, k, v, upstream = (torch.randn(s, generator=random).to(device, dtype) for s in shapes)
    backward = mode == "fwdbwd"
    leaves = [x.requires_grad_(backward) for x in (q, k, v)]
    row = {
        "probe": "error", "pattern": pattern.short_name, "backend": backend, "n": n, "nq": nq, "batch": batch,
        "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": str(dtype).removeprefix("torch."),
        "mode": mode, "causal": pattern.causal, "seed": seed,
    }  # fmt: skip
    with torch.set_grad_enabled(backward):
        reason = why_not(backend, *leaves, pattern)
        if reason:
            return row | {"status": "refused", "error": reason}
        exact = [x.detach().double().requires_grad_(backward) for x in leaves]
        want = _quantities(lambda *x: reference(*x, pattern), exact, upstream, backward)
        if why_not(backend, *leaves, pattern, return_lse=True):
            got = _quantities(lambda *x: (attention(*x, pattern, backend=backend), None), leaves, upstream, backward)
        else:
            run = lambda *x: attention(*x, pattern, backend=backend, return_lse=True)  # noqa: E731
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


def _error(name: str, got: Tensor, want: Tensor, upstream: Tensor) -> float:
    got, want = got.double(), want.double()
    if name == "lse":
        difference = torch.where(got == want, 0, (got - want).abs())  # -inf on both sides is no difference
        return float((difference / want.abs().clamp(min=1)).max()) if want.numel() else 0.0
    scale = max(float(want.norm()), float(upstream.double().norm()) if name in GRADIENTS else 0.0)
    error = float((got - want).norm())
    return error / scale if scale else error


def _share(error: float, budget: float) -> float:
    """error / budget; an exact result needs no budget (bfloat16 gradients that are 0 have none)."""
    if not budget:
        return float("inf") if error else 0.0
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
    """out (B, Nq, H, D) by torch's attention with the pattern's multiplicities as a mask, (H, Nq, N)."""
    heads = q.shape[2]
    count = pattern.multiplicity(k.shape[1], heads, q.shape[1]).to(q.device)
    mask = count > 0 if count.max() <= 1 else count.to(torch.float32).log().to(q.dtype)
    q, k, v = (x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[None].expand(len(q), -1, -1, -1))
    out = torch.where((count > 0).any(-1, keepdim=True), out, 0).transpose(1, 2)
    return out / pattern.divisor(heads)
