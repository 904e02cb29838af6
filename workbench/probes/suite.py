"""The suite that measures a card: groups of alternatives, interleaved, each with a dense baseline of its own sizes.

A group's rows say `suite` (its name), `label` (the alternative), and `against` (the one that `speedup` is over).
Rates are over attended pairs. `run` measures all groups, or some, and records every row.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd
import torch

from workbench.harness import machine, records
from workbench.harness.machine import short_name
from workbench.harness.narrate import MODES, listed, number, spread, title
from workbench.harness.outcome import attempt
from workbench.patterns import Neighborhood, checks
from workbench.probes import catalog, memory, roofline
from workbench.probes.case import Case
from workbench.probes.speed import fastest_dense
from workbench.probes.timing import AA, compare

CALL = ["run_device", "batch", "n", "heads", "kv_heads", "head_dim", "dtype", "mode", "causal"]


def run(
    only: Iterable[str] = (), *, profile="gpu", samples=9, seconds=8.0, known: pd.DataFrame | None = None,
    within_s=math.inf, folder=None, say=print,
) -> pd.DataFrame:  # fmt: skip
    """Measure the groups whose name begins with one of `only` (default: all) on this CUDA card; their rows.

    seconds: about what a group may take. An alternative that cannot run is a row with its status.
    known: rows of `recorded`; a group that they have is not measured. within_s: no group begins after so long.
    RuntimeError without a CUDA card: notebook 05 measures what a CPU can do.
    """
    only, begin = checks.listed("only", only), time.monotonic()
    if not torch.cuda.is_available():
        raise RuntimeError("the suite is of a CUDA card, and torch finds none here; notebook 05 measures a CPU, too")
    recorder, rows, groups = records.start("timing", profile, folder), [], catalog.one_card()
    known = set() if known is None or known.empty else set(known["suite"])
    for name in [x for x in groups if x not in known and (not only or x.startswith(tuple(only)))]:
        if time.monotonic() - begin > within_s:
            break
        if say:
            say(name, flush=True)
        rows += measure(groups[name](), recorder, samples, seconds, suite=name)
    return recorder.frame(rows)


def measure(cases: Mapping[str, Case], recorder, samples=9, seconds=8.0, **more) -> list[dict]:
    """Every case prepared, all timed interleaved, then the memory of each above its inputs; a row each, and "A/A".

    Dense by "auto" is by its fastest kernel. more: fields of every row. What cannot run is a row with its status.
    """
    cases = {label: fastest_dense(case) for label, case in cases.items()}
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
            rows[label]["extra_bytes"] = memory.measure(calls[of][0], cases[of].device)
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


def gathered(groups: Iterable[str], kinds: Iterable[str], **options) -> pd.DataFrame:
    """The rows of `recorded` for machine kinds, this machine's first; where groups are named, those that begin so and
    that its records have not are measured before (`run`, which takes the options)."""
    kinds = list(dict.fromkeys([machine.kind(), *kinds]))
    if not checks.listed("groups", groups):
        return recorded(*kinds)
    new, rest = run(groups, known=recorded(kinds[0]), **options), recorded(*kinds)
    if new.empty or rest.empty:
        return rest if new.empty else rates(new)
    return pd.concat([rates(new), rest[~rest["suite"].isin(new["suite"])]], ignore_index=True)


def recorded(*kinds: str) -> pd.DataFrame:
    """The rows committed for machine kinds, with their rates: of each group the newest run's of the first kind that has
    it; empty if none has any."""
    frames = [records.committed(kind, "timing").dropna(subset="suite") for kind in kinds]
    newest = {suite: run for frame in reversed(frames) for suite, run in zip(frame["suite"], frame["run"], strict=True)}
    rows = pd.concat([x for x in frames if len(x)] or frames, ignore_index=True)
    return rates(rows[rows["run"] == rows["suite"].map(newest)]) if newest else pd.DataFrame()


def rates(rows: pd.DataFrame) -> pd.DataFrame:
    """Suite rows with tflops over attended pairs, and `of_dense`: that over dense attention's, of the same group or,
    where another group timed the same by another kernel, which is faster, of that one; dense_by: that kernel.

    what: the pattern and sizes in words; who: the alternative. in_noise: its interval is not beyond dense attention
    against itself.
    """
    rows = rows[rows["status"] == "ok"].copy()
    rows["tflops"] = roofline.rates(rows)
    base = rows[rows["label"] == rows["against"]].sort_values("tflops").set_index("suite")
    best = base.groupby(CALL, dropna=False)[["tflops", "backend"]].transform("last")
    best = best.where(best["backend"] != base["backend"], base[best.columns]).reindex(rows["suite"])
    rows["of_dense"], rows["dense_by"] = rows["tflops"] / best["tflops"].to_numpy(), best["backend"].to_numpy()
    if "block_pairs" in rows:
        rows["block_tflops"] = roofline.rates(rows, "block_pairs").fillna(rows["tflops"])
    again = rows[rows["label"] == "A/A"].set_index("suite").reindex(rows["suite"])
    above = rows["speedup_low"].to_numpy() > np.fmax(again["speedup_high"].to_numpy(float), 1)
    below = rows["speedup_high"].to_numpy() < np.fmin(again["speedup_low"].to_numpy(float), 1)
    rows["in_noise"] = ~(above | below)
    rows["who"] = [_who(row) for row in rows.to_dict("records")]
    others = rows[(rows["label"] != rows["against"]) & (rows["label"] != "A/A")].groupby("suite")["pattern"]
    patterns = others.first()[others.nunique() == 1].to_dict()
    sizes = [f", {r.heads:g} x {r.head_dim:g}" + ", causal" * (r.causal is True) if r.heads == r.heads else ""
             for r in rows.itertuples()]  # fmt: skip
    names = rows["suite"].map(patterns | {"neighborhood": "neighborhood-16"}).fillna(rows["pattern"])
    rows["what"] = [title(str(name)) + size for name, size in zip(names, sizes, strict=True)]
    return rows


def _who(row: dict) -> str:
    if row["label"] == row.get("against"):
        return f"dense, {title(row['backend'])}"
    if str(row["suite"]).startswith("others"):
        return title(row["backend"]) + (", float32" if row["dtype"] == "float32" else "")
    return title(row["label"]) + (f" ({title(row['backend'])})" if str(row["label"]).startswith("workbench") else "")


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """The table of a suite: a line an alternative; its speed relative to dense only where the baseline has the same N.

    extra / output: bytes that the call needs at once beside its inputs, results included, over the output's.
    """
    out = rows[(rows["label"] != "A/A") & rows["pairs"].notna()].sort_values(["what", "mode", "n"], kind="stable")
    sizes = ["n", "heads", "head_dim", "dtype"]
    base = out[out["label"] == out["against"]].set_index("suite").reindex(out["suite"])
    same = (out[sizes].to_numpy() == base[sizes].to_numpy()).all(axis=1) & (out["label"] != out["against"])
    lent = out["dense_by"].ne(base["backend"].to_numpy()) & out["dense_by"].notna()
    output = 2 * out["batch"].astype(float) * out["n"] * out["heads"] * out["head_dim"]
    words = [f"{r.speedup:.2f} ({r.speedup_low:.2f} to {r.speedup_high:.2f})" for r in out.itertuples()]
    return pd.DataFrame({
        "pattern": out["what"], "mode": out["mode"].map(MODES), "kernel": out["who"], "n": out["n"].astype(int),
        "card": [short_name(str(x)).upper() for x in out["run_device"]], "median_ms": out["median_ms"],
        "tflops": out["tflops"], "rate relative to dense": out["of_dense"],
        "dense of another group": out["dense_by"].where(lent).map(title, na_action="ignore"),
        "speed relative to dense": pd.Series(words, out.index).where(same),
        "extra / output": out["extra_bytes"].astype(float) / output,
    }).set_index("pattern").dropna(axis="columns", how="all")  # fmt: skip


def orders(rows: pd.DataFrame) -> pd.DataFrame:
    """The neighborhood group: an order a line, how many pairs its blocks hold for each that attends, its speed and
    rates."""
    out = rows[(rows["label"] != "A/A") & rows["block_pairs"].notna()].sort_values("median_ms")
    base = rows.loc[rows["label"] == rows["against"], "tflops"].mean()  # NaN where it was not timed, as is `plain`
    plain = out.loc[out["label"] == "row_major", "median_ms"].mean()
    return pd.DataFrame({
        "order": out["who"], "median_ms": out["median_ms"], "speed relative to row-major": plain / out["median_ms"],
        "pairs of blocks / pairs": out["block_pairs"] / out["pairs"], "tflops": out["tflops"],
        "TFLOP/s of blocks": out["block_tflops"], "of dense": out["block_tflops"] / base,
    }).set_index("order")  # fmt: skip


def devices(rows: pd.DataFrame, dated=False) -> str:
    """The cards that rows are from, in words; dated: with the day and the commit of each run."""
    named = rows["run_device"].map(lambda x: short_name(str(x)).upper())
    if dated:
        named += [f" ({x[:10]}, commit {y[:7]})" for x, y in rows[["run_utc", "run_commit"]].fillna("not known").values]
    return listed(named.unique())


def apart(sweep: pd.DataFrame, rows: pd.DataFrame, much=0.1) -> list[str]:
    """Calls that a sweep (`speed.table`) and a group timed by one kernel, at rates that differ by more than `much`."""
    groups = rows[(rows["label"] != AA) & rows["graph"].ne(True)]
    both = sweep.merge(groups, on=[*CALL, "pattern", "pairs", "backend"], suffixes=("", "_here"))
    both = both[(both["tflops_here"] / both["tflops"] - 1).abs() > much]
    each = [f"{title(x.pattern)} by {title(x.backend)}, {x.heads:g} x {x.head_dim:g}, {MODES[x.mode]}, N = {x.n:,.0f} "
            f"({number(x.tflops)} TFLOP/s there, {number(x.tflops_here)} here)" for x in both.itertuples()]  # fmt: skip
    return [f"These were timed over N, too, at rates more than {much:.0%} apart: {'; '.join(each)}."] if each else []


def baseline(rows: pd.DataFrame) -> str:
    """What the rows of groups are relative to, in words: dense attention, by which kernel."""
    kernels = rows.loc[rows["label"] == rows["against"], "backend"].unique()
    return f"dense attention by {listed(map(title, kernels))}"


def per_pair(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """What LongNet makes of dense attention's rate over attended pairs, a sentence per mode; where least and most."""
    ours = rows[(rows["label"] == "workbench") & rows["suite"].str.startswith("longnet")]
    said = []
    for mode in [mode for mode in MODES if mode in set(ours["mode"])]:
        some = ours[ours["mode"] == mode].sort_values("of_dense")
        low, high = (f"{x['what']}, N = {int(x['n']):,}" for _, x in some.iloc[[0, -1]].iterrows())
        ratio, by = spread(some["of_dense"].min(), some["of_dense"].max()), map(title, some["dense_by"].unique())
        said.append((f"{MODES[mode].capitalize()}, LongNet on {devices(some)} computes its pairs at **{ratio} times** "
                     f"the rate of dense attention by {listed(by)}.", f"Least: {low}; most: {high}."))  # fmt: skip
    return said


def times_longer(rows: pd.DataFrame) -> list[str]:
    """How much longer LongNet's own code takes than this package, a sentence per mode."""
    said, theirs = [], rows[~rows["label"].isin(["A/A", "workbench"]) & (rows["label"] != rows["against"])]
    ours = theirs["suite"].map(rows[rows["label"] == "workbench"].set_index("suite")["median_ms"])
    for (name, mode), group in theirs.assign(longer=theirs["median_ms"] / ours).groupby(["who", "mode"], sort=False):
        each = listed(f"{x.longer:.1f} at N = {int(x.n):,}" for x in group.sort_values("n").itertuples())
        ends = spread(group["longer"].min(), group["longer"].max(), ".1f")
        said.append(f"{MODES[mode].capitalize()}, {name} takes **{ends} times** as long as this package ({each}; "
                    f"{devices(group)}).")  # fmt: skip
    return said
