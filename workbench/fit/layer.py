"""A layer: projections and attention, one forward and backward pass; patterns against the first of them.

Dimensions: B batch, N tokens, E embed_dim, H heads, D = E / H head_dim.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import pandas as pd
import torch

from workbench.engines.layers import MultiheadAttention
from workbench.harness import records
from workbench.harness.narrate import times, title
from workbench.patterns import checks
from workbench.probes import suite
from workbench.probes.case import Case, case_of
from workbench.probes.speed import fastest_dense

ALONE = ", attention alone"


@dataclass(frozen=True)
class Layer(Case):
    """A pass of MultiheadAttention(E, H, pattern) on x (B, N, E), with gradients of x and the parameters."""

    def fields(self) -> dict:
        return super().fields() | {"mode": "fwdbwd", "embed_dim": self.heads * self.head_dim}

    def prepare(self) -> tuple[Callable[[], tuple], str]:
        width = self.heads * self.head_dim
        if self.nq != self.n:
            raise ValueError(f"nq={self.nq}, n={self.n}: want as many queries as keys of a layer")
        to = {"device": self.device, "dtype": self.dtype}
        random = torch.Generator(self.device).manual_seed(self.seed)
        x, upstream = (torch.randn(self.batch, self.n, width, generator=random, **to) for _ in range(2))
        with torch.random.fork_rng([x.device] if x.is_cuda else []):  # the same weights for all
            torch.manual_seed(self.seed)
            layer = MultiheadAttention(width, self.heads, self.pattern, num_kv_heads=self.kv_heads, **to)
        q, k = (torch.empty(1, self.n, h, self.head_dim, requires_grad=True, **to) for h in (self.heads, self.kv_heads))
        layer.attend, backend = self.function(q, k, k)
        wanted = (x.requires_grad_(), *layer.parameters())
        return lambda: torch.autograd.grad(layer(x), wanted, upstream), backend


def measure(cases: Mapping[str, Case], *, samples=9, seconds=60.0, profile="quick", folder=None) -> pd.DataFrame:
    """Time the `Layer` of each case, and its attention alone ("<label>, attention alone"), forward and backward, all
    interleaved; see `suite.measure` for the rows, which are recorded. cases: {label: case}."""
    layers = {}
    for label, case in checks.named("cases", cases, "a Case").items():
        alone = fastest_dense(replace(case_of(case), mode="fwdbwd"))  # whose kernel is the layer's, too
        layer = Layer(**{x.name: getattr(alone, x.name) for x in fields(Case)})
        layers |= {label: layer, label + ALONE: alone}
    recorder = records.start("layer", profile, folder)
    return recorder.frame(suite.measure(layers, recorder, samples, seconds))


def recorded(kind: str = "h100x1") -> pd.DataFrame:
    """The rows of the newest run committed for a machine kind; empty where there is none."""
    rows = records.committed(kind, "layer")
    return rows[rows["run"] == rows["run"].iloc[-1]] if len(rows) else rows


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """The table of a layer benchmark: a line for what ran; speeds are relative to the first's, and those of layers."""
    out = rows[(rows["label"] != "A/A") & (rows["status"] == "ok")]
    layers = ~out["label"].str.endswith(ALONE)
    return pd.DataFrame({
        "layer": out["label"].map(title), "backend": out["backend"].map(title), "n": out["n"].astype(int),
        "median_ms": out["median_ms"], "speed relative to dense": out["speedup"].where(layers),
        "speedup_low": out["speedup_low"].where(layers), "speedup_high": out["speedup_high"].where(layers),
        "extra (GiB)": out["extra_bytes"].astype(float) / 2**30,
    }).set_index("layer")  # fmt: skip


def answer(rows: pd.DataFrame) -> list[str]:
    """What of attention's gain is left in a layer, and why what is not in `summary` did not run."""
    done = rows[(rows["status"] == "ok") & (rows["label"] != "A/A")].set_index("label")
    lost = [f"{title(x.label)}, did not run ({x.status}): `{x.error}`" for x in rows.itertuples() if x.status != "ok"]
    if not {"dense", "longnet"} <= set(done.index):
        return lost
    ms, ratio, by = done["median_ms"], times(done.loc["longnet", "speedup"]), title(done.loc["dense", "backend"])
    said = f"A layer with LongNet's pattern is {ratio} fast as one with dense attention by {by}"
    if {"dense" + ALONE, "longnet" + ALONE} <= set(done.index):
        said += f"; attention alone is {times(ms['dense' + ALONE] / ms['longnet' + ALONE])} fast"
    return [f"{said} (N = {int(done.loc['longnet', 'n']):,}, forward + backward).", *lost]
