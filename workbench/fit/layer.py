"""A layer: projections and attention, one forward and backward pass; patterns and peers against the first of them.

Dimensions: N tokens, E embed_dim, H heads, D = E / H head_dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import pandas as pd
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from workbench.engines import dispatch
from workbench.engines.layers import MultiheadAttention
from workbench.harness import records
from workbench.harness.narrate import number, title
from workbench.harness.outcome import Outcome, attempt
from workbench.patterns import Dense, Dilated, checks
from workbench.probes import baselines as others
from workbench.probes import memory, timing
from workbench.probes.case import FUSED, Case, case_of

NOT_MEASURED = dict.fromkeys((
    "against", "samples_ms", "median_ms", "speedup", "speedup_low", "speedup_high", "pairs", "peak_bytes",
    "extra_bytes",
))  # fmt: skip


def measure(
    cases: Mapping[str, Case], *, peers: Iterable[str] = (), samples=9, seconds=60.0, profile="quick", folder=None
) -> pd.DataFrame:
    """Time MultiheadAttention(E, H, pattern) of each case on one x (1, N, E), with gradients of x and parameters.

    cases: {label: case}, all of one N, heads, head_dim, dtype and device; E = H x D. On CUDA Dense by "auto" is torch's
        attention by cuDNN.
    peers: names that `baselines.longnet` takes. Each is one more layer for every Dilated pattern with heads="all", of
        the same branches and the same projections, labelled "<label>, <peer>".

    Returns a row each, recorded, and one labelled "A/A", the first layer measured against itself. `speedup` is over the
    first layer that runs, named in `against`, in the same round (see `timing.compare`). A layer that cannot run is a
    row with its status.
    given_bytes: x, the upstream gradient and the layer's parameters; extra_bytes: the peak above what was allocated
        before the pass, each layer alone, gradients included, and peak_bytes the sum of both. None on a CPU.
    """
    checks.whole("samples", samples, 1)
    checks.number("seconds", seconds)
    cases = _cases(cases, tuple(checks.listed("peers", peers)))
    recorder, rows, calls, known = records.start("layer", profile, folder), {}, {}, {}

    def record(label: str, of: str, outcome: Outcome, **found) -> None:
        row = cases[of].fields() | NOT_MEASURED | {"label": label, "embed_dim": _width(cases[of])}
        rows[label] = recorder.row(**row | {"status": outcome.status, "error": outcome.error} | found)

    inputs = attempt(partial(_inputs, next(iter(cases.values()))))
    for label, case in cases.items():
        outcome = inputs if inputs.status != "ok" else attempt(partial(_prepare, case, *inputs.result))
        if outcome.status == "ok":
            calls[label], known[label] = outcome.result
        else:
            record(label, label, outcome)
    compared = attempt(lambda: timing.compare(calls, samples=samples, seconds=seconds).to_dict("index"))
    first = next(iter(calls), None)
    for label in calls if compared.status != "ok" else compared.result:
        of = first if label == timing.AA else label
        found = known[of]
        if compared.status == "ok":
            peak = _peak(calls[of], cases[of].device, found["given_bytes"]) if label != timing.AA else {}
            found = compared.result[label] | found | peak | {"against": first}
        record(label, of, compared, **found)
    return pd.DataFrame([rows[label] for label in (*cases, timing.AA) if label in rows])


def _width(case: Case) -> int:
    return case.heads * case.head_dim


class Around(MultiheadAttention):
    """The projections of MultiheadAttention around a function of q, k and v (B, N, H, D)."""

    def __init__(self, function: Callable, *sizes, **options):
        super().__init__(*sizes, **options)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q, self.k, self.v))  # (B, N, H, D)
        return self.out(self.function(q, k, v).flatten(-2))


def _cases(given: Mapping[str, Case], peers: tuple[str, ...]) -> dict[str, Case]:
    """Label -> what is measured, a peer's name being its backend; ValueError for what cannot be meant."""
    given = checks.named("cases", given, "a Case")
    if timing.AA in given:
        raise ValueError(f"cases={list(given)}: want none named 'A/A'")
    for peer in peers:
        if peer not in others.MODULES:
            raise ValueError(f"peer {peer!r}: want one of {', '.join(map(repr, others.MODULES))}")
    if len({(x.n, x.heads, x.head_dim, x.dtype, x.device) for x in map(case_of, given.values())}) > 1:
        raise ValueError(f"cases={given}: want all of the same n, heads, head_dim, dtype and device")
    cases = {}
    for label, case in given.items():
        if (case.batch, case.kv_heads, case.nq) != (1, case.heads, case.n):
            raise ValueError(f"case={case}: want one sequence, as many key heads as heads, and as many queries as keys")
        fused = isinstance(case.pattern, Dense) and case.backend == "auto" and case.device.startswith("cuda")
        cases[label] = replace(case, mode="fwdbwd", backend="cudnn" if fused else case.backend)
        if isinstance(case.pattern, Dilated) and case.pattern.heads == "all":
            branches = case.pattern.segment_lengths, case.pattern.dilation_rates, case.pattern.causal
            theirs = replace(cases[label], pattern=Dilated(*branches, offsets="blocked"))
            cases |= {f"{label}, {peer}": replace(theirs, backend=peer) for peer in peers}
    if peers and len(cases) == len(given):
        raise ValueError(f"peers={list(peers)}: want a Dilated pattern with heads='all' to compare them with")
    return cases


def _inputs(case: Case) -> tuple[Tensor, Tensor]:
    """x (1, N, E), which wants its gradient, and the upstream gradient (1, N, E)."""
    random = torch.Generator(case.device).manual_seed(case.seed)
    to = {"generator": random, "device": case.device, "dtype": case.dtype}
    x, upstream = (torch.randn(1, case.n, _width(case), **to) for _ in range(2))
    return x.requires_grad_(), upstream


def _prepare(case: Case, x: Tensor, upstream: Tensor) -> tuple[Callable[[], tuple], dict]:
    """(one forward and backward pass, its backend, pairs and how many bytes it is given); it ran once."""
    pattern, backend = case.pattern, case.backend
    make, kernel = MultiheadAttention, contextlib.nullcontext
    if backend in others.MODULES:
        if reason := others.available()[backend]:
            raise NotImplementedError(reason)
        branches = pattern.segment_lengths, pattern.dilation_rates, pattern.causal
        make = partial(Around, others.longnet(backend, *branches))
    elif backend in FUSED:
        kernel = partial(sdpa_kernel, getattr(SDPBackend, FUSED[backend]))
    else:
        q = torch.empty(1, case.n, case.heads, case.head_dim, device=x.device, dtype=x.dtype, requires_grad=True)
        backend = dispatch.choose(backend, q, q, q, pattern)[0]
        del q
    with torch.random.fork_rng([x.device] if x.is_cuda else []):  # the same weights for all
        torch.manual_seed(case.seed)
        layer = make(_width(case), case.heads, pattern, device=x.device, dtype=x.dtype)
    wanted = (x, *layer.parameters())

    def call() -> tuple[Tensor, ...]:
        with kernel():
            y = layer(x)
        return torch.autograd.grad(y, wanted, upstream)

    call()
    given = sum(t.nbytes for t in (*wanted, upstream))
    return call, {"backend": backend, "pairs": pattern.pairs(case.n, case.heads), "given_bytes": given}


def _peak(call: Callable, device: str, given: int) -> dict:
    """extra_bytes and peak_bytes of one pass; nothing on a CPU."""
    outcome = attempt(lambda: memory.measure(call, device).extra_bytes) if device.startswith("cuda") else None
    if outcome is None or outcome.status != "ok":
        return {}
    return {"extra_bytes": outcome.result, "peak_bytes": outcome.result + given}


def recorded(kind: str = "h100x1") -> pd.DataFrame:
    """The rows of the newest run committed for a machine kind; empty where there is none."""
    rows = records.committed(kind, "layer").sort_values("run_utc", kind="stable")
    return rows[rows["run"] == rows["run"].iloc[-1]] if len(rows) else rows


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """The table of a layer benchmark: a line per layer, its time, its speed relative to the first's, its memory."""
    out = rows[rows["label"] != "A/A"]
    return pd.DataFrame({
        "layer": out["label"].map(title), "backend": out["backend"].map(title), "n": out["n"].astype(int),
        "status": out["status"], "median_ms": out["median_ms"], "speed relative to dense": out["speedup"],
        "speedup_low": out["speedup_low"], "speedup_high": out["speedup_high"],
        "extra (GiB)": out["extra_bytes"].astype(float) / 2**30,
    }).set_index("layer")  # fmt: skip


def answer(rows: pd.DataFrame, alone: pd.DataFrame) -> list[str]:
    """What of attention's gain is left in a layer. alone: rows of `speed.table`, attention alone on the same device."""
    done = rows[(rows["status"] == "ok") & (rows["label"] != "A/A")].set_index("label")
    if not {"dense", "longnet"} <= set(done.index):
        return []
    one, n = done.loc["longnet"], int(done.loc["longnet", "n"])
    said = f"A layer with LongNet's pattern is **{number(one['speedup'])} times** as fast as one with dense attention"
    alone = alone[(alone["n"] == n) & (alone["mode"] == "fwdbwd") & (alone["run_device"] == one["run_device"])]
    took = alone[alone["status"] == "ok"].groupby("family")["median_ms"].min()
    if {"Dense", "Dilated"} <= set(took.index):
        said += f"; attention alone, timed in another run, {number(took['Dense'] / took['Dilated'])} times"
    said = [f"{said} (N = {n:,}, forward + backward)."]
    theirs = done[done.index.str.startswith("longnet, ")]
    said += [f"With {title(name.removeprefix('longnet, '))} for the attention the layer takes "
             f"{number(ms / one['median_ms'])} times as long as with this package."
             for name, ms in theirs["median_ms"].items()]  # fmt: skip
    return said
