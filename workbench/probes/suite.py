"""The suite that measures a card: groups of alternatives, interleaved, each with a dense baseline of its own sizes.

A group's rows say `suite` (its name), `label` (the alternative), and `against` (the one that `speedup` is over).
Rates are over attended pairs. `run` measures all groups, or some, and records every row.

Dimensions: N tokens, H heads, D head_dim.
"""

from collections.abc import Callable, Iterable, Mapping

import pandas as pd
import torch

from workbench.harness import records
from workbench.harness.outcome import attempt
from workbench.patterns import Neighborhood
from workbench.probes import catalog, memory, roofline
from workbench.probes.case import Case
from workbench.probes.timing import AA, compare


def run(only: Iterable[str] = (), *, profile="gpu", samples=9, seconds=8.0, folder=None, say=print) -> pd.DataFrame:
    """Measure the groups whose name begins with one of `only` (default: all) on this CUDA card; their rows.

    seconds: about what a group may take. An alternative that cannot run is a row with its status.
    RuntimeError without a CUDA card: notebook 05 measures what a CPU can do.
    """
    groups = catalog.chosen(catalog.one_card(), only or ["all"])
    if not torch.cuda.is_available():
        raise RuntimeError("the suite is of a CUDA card, and torch finds none here; notebook 05 measures a CPU, too")
    recorder, rows = records.start("timing", profile, folder), []
    for name, make in groups.items():
        if say:
            say(name, flush=True)
        rows += measure(make(), recorder, samples, seconds, suite=name)
    return pd.DataFrame(rows)


def measure(cases: Mapping[str, Case], recorder, samples=9, seconds=8.0, **more) -> list[dict]:
    """Every case prepared, all timed interleaved, then the memory of each above its inputs; a row each, and "A/A".

    more: fields of every row. What cannot run is a row with its status.
    """
    calls, rows, fields = {}, {}, {label: fields_of(case) | {"label": label} | more for label, case in cases.items()}
    for label, case in cases.items():
        outcome = attempt(lambda case=case: _ready(case))
        if outcome.status == "ok":
            calls[label] = outcome.result
        else:
            rows[label] = fields[label] | {"status": outcome.status, "error": outcome.error}
    outcome = attempt(lambda: compare({x: f for x, (f, _) in calls.items()}, samples=samples, seconds=seconds))
    if outcome.status != "ok":
        rows |= {x: fields[x] | {"status": outcome.status, "error": outcome.error} for x in calls}
        return [recorder.row(**rows[label]) for label in cases]
    first = next(iter(calls))
    for label, line in outcome.result.to_dict("index").items():
        of = first if label == AA else label
        rows[label] = fields[of] | {"label": label, "backend": calls[of][1], "against": first} | line
        rows[label] |= {"status": "ok", "error": None, "extra_bytes": None}
        if label != AA and cases[of].device != "cpu" and not fields[of]["graph"]:  # which took its memory before
            rows[label]["extra_bytes"] = memory.measure(calls[of][0], cases[of].device).extra_bytes
    return [recorder.row(**rows[label]) for label in (*cases, AA)]


def fields_of(case: Case) -> dict:
    """The record's fields of a case, with the pairs that its rates are over."""
    found = attempt(lambda: {"pairs": case.pattern.pairs(case.n, case.heads, case.nq)}).result or {}
    if isinstance(case.pattern, Neighborhood):
        found |= attempt(lambda: {"block_pairs": roofline.block_pairs(case)}).result or {}
    return {"graph": False, "measured": True} | case.fields() | found


def _ready(case: Case) -> tuple[Callable, str]:
    """(the call, its backend); the call ran once, so that what cannot run raises here."""
    call, backend = case.prepare()
    call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return call, backend


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
    rows["tflops"] = roofline.rates(rows)
    base = rows[rows["label"] == rows["against"]].set_index("suite")["tflops"]
    rows["of_dense"] = rows["tflops"] / rows["suite"].map(base)
    if "block_pairs" in rows:
        rows["block_tflops"] = roofline.rates(rows, "block_pairs").fillna(rows["tflops"])
    return rows
