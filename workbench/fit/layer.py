"""A layer: projections and attention, one forward and backward pass; patterns and peers against the first of them.

Dimensions: B batch, N tokens, E embed_dim, H heads, D = E / H head_dim.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace

import pandas as pd
import torch

from workbench.engines.layers import MultiheadAttention
from workbench.harness import records
from workbench.harness.narrate import times, title
from workbench.patterns import Dilated, checks
from workbench.probes import baselines, suite
from workbench.probes.case import Case, case_of
from workbench.probes.speed import fastest_dense

ALONE = ", attention alone"


@dataclass(frozen=True)
class Layer(Case):
    """A pass of MultiheadAttention(E, H, pattern) on x (B, N, E), with gradients of x and the parameters.

    backend: as a case's or, in the same projections, a peer that `baselines.longnet` takes.
    """

    def fields(self) -> dict:
        return super().fields() | {"mode": "fwdbwd", "embed_dim": self.heads * self.head_dim}

    def prepare(self) -> tuple[Callable[[], tuple], str]:
        width, pattern, backend = self.heads * self.head_dim, self.pattern, self.backend
        if self.nq != self.n:
            raise ValueError(f"nq={self.nq}, n={self.n}: want as many queries as keys of a layer")
        to = {"device": self.device, "dtype": self.dtype}
        random = torch.Generator(self.device).manual_seed(self.seed)
        x, upstream = (torch.randn(self.batch, self.n, width, generator=random, **to) for _ in range(2))
        with torch.random.fork_rng([x.device] if x.is_cuda else []):  # the same weights for all
            torch.manual_seed(self.seed)
            layer = MultiheadAttention(width, self.heads, pattern, num_kv_heads=self.kv_heads, **to)
        if backend == baselines.PEER:
            layer.attend = baselines.longnet(pattern.segment_lengths, pattern.dilation_rates, pattern.causal)
        else:
            heads = self.heads, self.kv_heads
            q, k = (torch.empty(1, self.n, h, self.head_dim, requires_grad=True, **to) for h in heads)
            layer.attend, backend = self.function(q, k, k)
        wanted = (x.requires_grad_(), *layer.parameters())
        return lambda: torch.autograd.grad(layer(x), wanted, upstream), backend


def measure(
    cases: Mapping[str, Case], *, peers: Iterable[str] = (), samples=9, seconds=60.0, profile="quick", folder=None
) -> pd.DataFrame:
    """Time the `Layer` of each case, and its attention alone ("<label>, attention alone"), forward and backward, all
    interleaved; see `suite.measure` for the rows, which are recorded.

    cases: {label: case}. peers: names that `baselines.longnet` takes; each is one more layer for every Dilated pattern
    with heads="all", of the same branches and the same projections, labelled "<label>, <peer>".
    """
    layers = {}
    for label, case in checks.named("cases", cases, "a Case").items():
        alone = fastest_dense(replace(case_of(case), mode="fwdbwd"))  # whose kernel is the layer's, too
        layer = Layer(**{x.name: getattr(alone, x.name) for x in fields(Case)})
        layers |= {label: layer, label + ALONE: alone}
        if isinstance(case.pattern, Dilated) and case.pattern.heads == "all":
            branches = case.pattern.segment_lengths, case.pattern.dilation_rates, case.pattern.causal
            theirs = replace(layers[label], pattern=Dilated(*branches, offsets="blocked"))
            layers |= {f"{label}, {peer}": replace(theirs, backend=peer) for peer in checks.listed("peers", peers)}
    return pd.DataFrame(suite.measure(layers, records.start("layer", profile, folder), samples, seconds))


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
    said = f"{said} (N = {int(done.loc['longnet', 'n']):,}, forward + backward)."
    theirs = ms[ms.index.str.startswith("longnet, ") & ~ms.index.str.endswith(ALONE)]
    peers = [f"With {title(name.removeprefix('longnet, '))} for the attention the layer takes "
             f"{times(x / ms['longnet'])} long as with this package." for name, x in theirs.items()]  # fmt: skip
    return [said, *peers, *lost]
