"""The suite that measures a card: groups of alternatives, interleaved, each with a dense baseline of its own sizes.

A group's rows say `suite` (its name), `label` (the alternative), and `against` (the one that `speedup` is over).
Rates are over attended pairs. `run` measures all groups, or some, and records every row.

Dimensions: N tokens, H heads, D head_dim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pandas as pd
import torch

from workbench.fit import estimate
from workbench.harness import records
from workbench.harness.outcome import attempt
from workbench.patterns import BlockSparse, Dense, Dilated, Neighborhood, checks, layouts
from workbench.patterns.dilated import PAPER
from workbench.probes import baselines, memory, roofline
from workbench.probes.case import Case
from workbench.probes.timing import compare

LONGNET = {  # name: (dilation rates, heads, head_dim)
    "paper 12x64": ((1, 2, 4, 6, 12), 12, 64),
    "pow2 16x64": ((1, 2, 4, 8, 16), 16, 64),
    "pow2 16x128": ((1, 2, 4, 8, 16), 16, 128),
}
LONG = (131_072, 1_048_576)
MODES = ("fwd", "fwdbwd")
BLOCK_MASK = "block mask"  # a group of one row, of `block_mask`


@dataclass(frozen=True)
class Graphed:
    """A case whose call is replayed from a CUDA graph."""

    case: Case


def run(only: Iterable[str] = (), *, profile="gpu", samples=9, seconds=8.0, folder=None, say=print) -> pd.DataFrame:
    """Measure the groups whose name begins with one of `only` (default: all) on this CUDA card; their rows.

    seconds: about what a group may take. An alternative that cannot run is a row with its status.
    RuntimeError without a CUDA card: notebook 05 measures what a CPU can do.
    """
    only = checks.listed("only", only)
    if not torch.cuda.is_available():
        raise RuntimeError("the suite is of a CUDA card, and torch finds none here; notebook 05 measures a CPU, too")
    recorder, rows = records.start("timing", profile, folder), []
    for name, make in groups().items():
        if only and not name.startswith(tuple(only)):
            continue
        if say:
            say(name, flush=True)
        rows += measure(name, make, recorder, samples, seconds)
    if not only or BLOCK_MASK.startswith(tuple(only)):
        rows.append(recorder.row(**block_mask()))
    return pd.DataFrame(rows)


def measure(name: str, make: Callable[[], dict], recorder, samples=9, seconds=8.0) -> list[dict]:
    """One group: every alternative prepared, all timed interleaved, then the memory of each above its inputs."""
    calls, rows, cases = {}, [], make()
    for label, case in cases.items():
        outcome = attempt(lambda case=case: prepare(case))
        if outcome.status == "ok":
            calls[label] = outcome.result
        else:
            rows.append(recorder.row(suite=name, label=label, status=outcome.status, error=outcome.error,
                                     **fields(case)))  # fmt: skip
    outcome = attempt(lambda: compare({x: f for x, (f, _) in calls.items()}, samples=samples, seconds=seconds))
    if outcome.status != "ok":
        return rows + [recorder.row(suite=name, label=name, status=outcome.status, error=outcome.error)]
    first = next(iter(calls))
    for label, line in outcome.result.iterrows():
        of = first if label == "A/A" else label
        row = fields(cases[of]) | {"backend": calls[of][1], "suite": name, "label": label, "against": first}
        row |= line.to_dict() | {"status": "ok", "extra_bytes": None}
        if label != "A/A" and not row["graph"]:  # a graph took its memory when it was captured
            row["extra_bytes"] = memory.measure(calls[of][0], "cuda").extra_bytes
        rows.append(recorder.row(**row))
    return rows


def prepare(case: Case | Graphed) -> tuple[Callable, str]:
    """(the call, its backend); the call ran once, so that what cannot run raises here."""
    graph = isinstance(case, Graphed)
    call, backend = (case.case if graph else case).prepare()
    call()
    torch.cuda.synchronize()
    if not graph:
        return call, backend
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = call()

    def replay():  # holds what the graph reads and writes: its inputs, which are `call`'s, and the result
        captured.replay()
        return call, result

    return replay, backend


def fields(case: Case | Graphed) -> dict:
    """The record's fields of a case; `graph`: whether it is replayed from a CUDA graph."""
    graph = isinstance(case, Graphed)
    case = case.case if graph else case
    found = case.fields() | {"graph": graph, "measured": True, "pairs": case.pattern.pairs(case.n, case.heads, case.nq)}
    if isinstance(case.pattern, Neighborhood):
        found["block_pairs"] = estimate.block_pairs(case)
    return found


def groups() -> dict[str, Callable[[], dict]]:
    """Name -> a function that makes {label: Case or Graphed}, the first of which is the baseline."""
    found = {}

    def case(pattern, n, heads, d, mode="fwd", backend="auto"):
        return Case(pattern, n, heads, d, "bfloat16", backend, mode, "cuda")

    for name, (rates, h, d) in LONGNET.items():
        for n in LONG:
            for causal in (False, True):
                for mode in MODES:
                    words = f"longnet {name}{' causal' if causal else ''} {mode} {n}"
                    found[words] = lambda rates=rates, h=h, d=d, n=n, c=causal, mode=mode: {
                        "dense cudnn 16K": case(Dense(c), 16_384, h, d, mode, "cudnn"),
                        "workbench": case(Dilated(PAPER, rates, c), n, h, d, mode),
                    }
    rates, h, d = LONGNET["paper 12x64"]
    for name in (name for name, missing in baselines.available().items() if name == "torchscale" and not missing):
        for n in LONG:
            for mode in MODES:
                found[f"peers {mode} {n}"] = lambda name=name, n=n, mode=mode: {
                    "dense cudnn 16K": case(Dense(), 16_384, h, d, mode, "cudnn"),
                    "workbench": case(Dilated(PAPER, rates, offsets="blocked"), n, h, d, mode),
                    name: case(Dilated(PAPER, rates, offsets="blocked"), n, h, d, mode,
                               baselines.longnet(name, PAPER, rates)),
                }  # fmt: skip
    found["short"] = lambda: {
        "dense cudnn": case(Dense(), 32_768, h, d, "fwd", "cudnn"),
        "workbench": case(Dilated(PAPER, rates), 32_768, h, d),
        "workbench, CUDA graph": Graphed(case(Dilated(PAPER, rates), 32_768, h, d)),
    }
    for n in (4096, 16_384):
        found[f"shorter {n}"] = lambda n=n: {
            "dense cudnn": case(Dense(), n, h, d, "fwd", "cudnn"),
            "workbench": case(Dilated(PAPER, rates), n, h, d),
            "workbench, CUDA graph": Graphed(case(Dilated(PAPER, rates), n, h, d)),
        }
    for mode in MODES:
        found[f"window {mode}"] = lambda mode=mode: masked(Neighborhood((32_768,), 1024), 32_768, 16, 128, mode)
        found[f"random {mode}"] = lambda mode=mode: masked(BlockSparse(layouts.random(0.1)), 65_536, 16, 128, mode)

    def masked(pattern, n, h, d, mode):
        dense = {"dense cudnn": case(Dense(), n, h, d, mode, "cudnn")}
        return dense | {name: case(pattern, n, h, d, mode, name) for name in ("triton", "flex")}

    def neighborhoods():
        from workbench.patterns import orderings

        shape = (256, 256)
        orders = {"row_major": None, "hilbert": orderings.hilbert(shape), "morton": orderings.morton(shape),
                  "tiles 8x16": orderings.tiles(shape, (8, 16))}  # fmt: skip
        dense = {"dense cudnn 16K": case(Dense(), 16_384, 12, 64, "fwd", "cudnn")}
        ours = {name: case(Neighborhood(shape, 16, order), 65_536, 12, 64) for name, order in orders.items()}
        flex = case(Neighborhood(shape, 16, orders["hilbert"]), 65_536, 12, 64, backend="flex")
        return dense | ours | {"flex, hilbert": flex}

    found["neighborhood"] = neighborhoods
    for mode in MODES:
        found[f"others {mode}"] = lambda mode=mode: others(mode)
    return found


def others(mode: str) -> dict[str, Case]:
    """The executions that "auto" does not choose for 16-bit inputs, and float32: how much slower they are.

    `estimate` models their time from these rows.
    """
    longnet, window = Dilated(PAPER, (1, 2, 4, 6, 12)), Neighborhood((65_536,), 1024)

    def case(pattern, n, h, d, backend, dtype="bfloat16"):
        return Case(pattern, n, h, d, dtype, backend, mode, "cuda")

    return {
        "dense cudnn 16K": case(Dense(), 16_384, 12, 64, "cudnn"),
        "dense flash x128": case(Dense(), 32_768, 8, 128, "flash"),
        "dense efficient": case(Dense(), 32_768, 8, 64, "efficient"),
        "dense efficient x128": case(Dense(), 32_768, 8, 128, "efficient"),
        "dense eager": case(Dense(), 16_384, 8, 64, "eager"),
        "dense float32": case(Dense(), 16_384, 8, 64, "efficient", "float32"),
        "dense float32 x128": case(Dense(), 16_384, 8, 128, "efficient", "float32"),
        "longnet torch x128": case(longnet, 131_072, 8, 128, "torch"),
        "longnet torch 1M": case(longnet, 1_048_576, 12, 64, "torch"),
        "longnet float32": case(longnet, 131_072, 12, 64, "torch", "float32"),
        "random torch": case(BlockSparse(layouts.random(0.1)), 65_536, 8, 64, "torch"),
        "window x64": case(window, 65_536, 12, 64, "triton"),
        "window torch": case(window, 65_536, 8, 64, "torch"),
        "window flex float32": case(window, 65_536, 8, 64, "flex", "float32"),
        "random flex float32": case(BlockSparse(layouts.random(0.1)), 32_768, 8, 64, "flex", "float32"),
    }


def block_mask(n: int = 1_048_576, device="cuda") -> dict:
    """A row: milliseconds and bytes that the kernels' lists of a local, global and strided layout take for N tokens."""
    from workbench.engines.triton.block_sparse import make_plan

    pattern = BlockSparse(layouts.local(4) | layouts.global_(1) | layouts.strided(64), 128)
    taken = []
    for _ in range(4):
        begin = time.perf_counter()
        plan = make_plan([pattern.blocks(n, 1)], pattern, device)
        if str(device).startswith("cuda"):
            torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - begin))
    held = sum(x.numel() * x.element_size() for x in (*plan.by_queries, *plan.by_keys))
    row = {"suite": BLOCK_MASK, "label": pattern.short_name, "n": n, "status": "ok", "samples_ms": taken[1:],
           "median_ms": sorted(taken[1:])[1], "bytes": held, "measured": True, "pattern": pattern.short_name,
           "pattern_spec": pattern.spec()}  # fmt: skip
    return row


def recorded(kind: str = "h100x1") -> pd.DataFrame:
    """The rows committed for a machine kind, of each group the newest run's, with their rates; empty if none."""
    rows = records.committed(kind)
    if "suite" not in rows:
        return pd.DataFrame()
    rows = rows[rows["suite"].notna()].sort_values("run_utc", kind="stable")
    newest = rows.groupby("suite")["run"].transform("last")
    return rates(rows[rows["run"] == newest].reset_index(drop=True))


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """The table of a suite: a line an alternative; times faster only where the baseline has the same N."""
    out = rows[rows["label"] != "A/A"].copy()
    base = out[out["label"] == out["against"]].set_index("suite")["n"]
    same = (out["n"] == out["suite"].map(base)) & (out["label"] != out["against"])
    words = [f"{r.speedup:.2f} ({r.speedup_low:.2f} to {r.speedup_high:.2f})" for r in out.itertuples()]
    output = 2 * out["batch"] * out["n"] * out["heads"] * out["head_dim"]
    return pd.DataFrame({
        "group": out["suite"].str.replace(r" \d+$", "", regex=True), "": out["label"],
        "N": out["n"].astype(int), "ms": out["median_ms"],
        "TFLOP/s": out["tflops"], "of dense": out["of_dense"], "times faster": pd.Series(words, out.index).where(same),
        "extra / output": out["extra_bytes"].astype(float) / output.astype(float),
    }).reset_index(drop=True)  # fmt: skip


def orders(rows: pd.DataFrame) -> pd.DataFrame:
    """The neighborhood group: an order a line, how many pairs its blocks hold for each that attends, and the rates."""
    out = rows[(rows["label"] != "A/A") & rows["block_pairs"].notna()].sort_values("median_ms")
    base = rows.loc[rows["label"] == rows["against"], "tflops"]
    return pd.DataFrame({
        "order": out["label"], "ms": out["median_ms"], "block pairs / pairs": out["block_pairs"] / out["pairs"],
        "TFLOP/s": out["tflops"], "block TFLOP/s": out["block_tflops"],
        "of dense": out["block_tflops"] / (base.iloc[0] if len(base) else float("nan")),
    })  # fmt: skip


def rates(rows: pd.DataFrame) -> pd.DataFrame:
    """Suite rows with tflops over attended pairs, and `of_dense`: that over the baseline's of the same group."""
    rows = rows[rows["status"] == "ok"].copy()
    per_pair = 2 * rows["head_dim"] * rows["mode"].map(roofline.PASSES) * rows["batch"]  # as `roofline.flops`
    rows["tflops"] = per_pair * rows["pairs"].astype(float) / rows["median_ms"].astype(float) / 1e9
    base = rows[rows["label"] == rows["against"]].set_index("suite")["tflops"]
    rows["of_dense"] = rows["tflops"] / rows["suite"].map(base)
    if "block_pairs" in rows:
        blocks = per_pair * rows["block_pairs"].astype(float) / rows["median_ms"].astype(float) / 1e9
        rows["block_tflops"] = blocks.fillna(rows["tflops"])
    return rows
