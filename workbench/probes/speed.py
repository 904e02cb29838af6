"""Speed: patterns timed over lengths, each row a record; and the sparsity from which sparse attention pays."""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import pandas as pd

from workbench.harness import records
from workbench.harness.narrate import MODES, counted, first_mode, listed, number, spread, times, title
from workbench.patterns import BlockSparse, Dense, Dilated, Neighborhood, checks, layouts, orderings
from workbench.probes import catalog, roofline, timing
from workbench.probes.case import Case, case_of

Lengths = Callable[[int], Case]
BUSY = 1.25  # processes a processor; a measurement's own threads are at most one each
KEY = ("pattern", "n", "heads", "head_dim", "dtype", "causal", "mode", "batch", "kv_heads", "nq")


def lineup(segments, rates, sparsity: float, radius: int, block_size: int = 128, **sizes) -> dict[str, Lengths]:
    """Name -> the `Case` at N, for the four kinds of pattern that are timed against each other.

    The neighborhood is on the squarest grid of N = rows x cols, its tokens along a Hilbert curve. sizes: what else a
    `Case` takes (heads, head_dim, dtype, device).
    """
    makers = {
        "dense": lambda n: Dense(),
        "dilated": lambda n: Dilated(segments, rates),
        "block-sparse": lambda n: BlockSparse(layouts.random(1 - sparsity), block_size),
        "neighborhood": lambda n: Neighborhood(catalog.grid(n), radius, orderings.hilbert(catalog.grid(n))),
    }
    return {name: lambda n, make=make: Case(make(n), n, **sizes) for name, make in makers.items()}


def sweep(
    cases: Mapping[str, Lengths], lengths: Iterable[int], modes=("fwd",), *, samples=9, seconds=10.0, profile="quick",
    resume=False, folder=None,
) -> pd.DataFrame:  # fmt: skip
    """Time every case at every length, forward ("fwd") and with gradients ("fwdbwd"); see `table` for the columns.

    cases: {label: a function of N that gives the case}. Where its backend is "auto", dense attention runs by each of
    `dense_backends`. Each row is in the journal when it is measured; with resume, what the journal already has is not
    measured again: the same pattern, inputs, samples and seconds, on the same device, by the same code and versions.
    seconds: about what a row may take. ValueError for what cannot be timed.
    """
    cases = checks.named("cases", cases, "a function of N that gives a Case")
    lengths = [checks.whole("length", n, 1) for n in checks.listed("lengths", lengths)]
    rounds = {"samples": checks.whole("samples", samples, 1), "seconds": checks.number("seconds", seconds)}
    wanted = []
    for n, (label, at) in itertools.product(lengths, cases.items()):
        case = case_of(checks.callable_(f"cases[{label!r}]", at)(n))
        usual = isinstance(case.pattern, Dense) and case.backend == "auto"
        for mode in checks.listed("modes", modes):
            for backend in dense_backends(case.device) if usual else (case.backend,):
                wanted.append((label, replace(case, mode=mode, backend=backend)))
    recorder, rows = records.start("timing", profile, folder), []
    for label, case in wanted:
        fields = case.fields()
        asked = {"asked": fields.pop("backend"), "label": label} | rounds
        known = recorder.settled(**fields, **asked) if resume else None
        rows.append(known or recorder.row(**timing.time(case, warmup=1, **rounds) | asked))
    return table(recorder.frame(rows))


def dense_backends(device: str) -> tuple[str, ...]:
    """Exact dense attention to compare with: torch's choice on a CPU, on CUDA its fast kernels and the fa4 engine."""
    return ("cudnn", "flash", "fa4") if str(device).startswith("cuda") else ("sdpa",)


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Timing rows with what is derived from them: family (the pattern's class) and tflops over attended pairs.

    label: the name to show, the pattern's own where the row has none.
    """
    rows = rows[rows["probe"] == "timing"].copy()
    rows["label"] = rows["label"].fillna(rows["pattern"]) if "label" in rows else rows["pattern"]
    rows["family"] = [spec.get("pattern") if isinstance(spec, dict) else None for spec in rows["pattern_spec"]]
    rows["tflops"] = roofline.rates(rows)
    return rows


def shown(rows: pd.DataFrame) -> pd.DataFrame:
    """The table of a sweep, a line per row that ran; its speed relative to the fastest dense kernel at that length."""
    done = _ran(rows)
    dense = done[done["family"] == "Dense"].groupby(["n", "mode"])["median_ms"].min()
    relative = dense.reindex(pd.MultiIndex.from_frame(done[["n", "mode"]])).to_numpy() / done["median_ms"]
    low, high = (done["samples_ms"].map(lambda s, q=q: float(pd.Series(s).quantile(q))) for q in (0.1, 0.9))
    return pd.DataFrame({
        "pattern": done["label"], "backend": done["backend"].map(title), "mode": done["mode"].map(MODES),
        "n": done["n"], "median_ms": done["median_ms"], "q10_ms": low, "q90_ms": high, "tflops": done["tflops"],
        "speed relative to dense": relative,
    }).set_index("pattern")  # fmt: skip


def _ran(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["status"] == "ok") & rows["median_ms"].notna()]


def _sides(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """(all, dense, others), the fastest first."""
    rows = rows.sort_values("median_ms")
    return rows, rows[rows["family"] == "Dense"], rows[rows["family"] != "Dense"]


def headline(rows: pd.DataFrame) -> str:
    """The fastest pattern at the longest N, forward, in times of dense attention's speed: a few words."""
    done = first_mode(_ran(rows))
    done, dense, others = _sides(done[done["n"] == done["n"].max()])
    if dense.empty or others.empty:
        return ""
    ratio, by = number(dense["median_ms"].iloc[0] / others["median_ms"].iloc[0]), title(dense["backend"].iloc[0])
    return f"{others['label'].iloc[0]}: {ratio} times dense ({by}) at {int(done['n'].iloc[0]):,}"


def gain(rows: pd.DataFrame, n: int, mode: str = "fwd") -> str:
    """Which pattern is the fastest at length n, against the fastest dense kernel, in a sentence.

    The ratio is of the medians; in parentheses that of the extreme samples against each other, so all that was seen.
    """
    done, dense, others = _sides(_ran(rows[(rows["n"] == n) & (rows["mode"] == mode)]))
    at = f"At N = {n:,}, {MODES[mode]}, "
    if dense.empty or others.empty:
        ran = f"only **{listed(dict.fromkeys(done['label']))}** ran" if len(done) else "nothing ran"
        return f"{at}{ran}: there is nothing to compare."
    fast, slow = done.iloc[0], others.iloc[0] if done["family"].iloc[0] == "Dense" else dense.iloc[0]
    low, high = min(slow["samples_ms"]) / max(fast["samples_ms"]), max(slow["samples_ms"]) / min(fast["samples_ms"])
    seen = f"({spread(low, high)} between the extreme samples)"
    if low <= 1:
        return f"{at}**{fast['label']}** is not ahead of {slow['label']} beyond the noise {seen}."
    ratio, by = times(slow["median_ms"] / fast["median_ms"]), f"attention by {title(dense['backend'].iloc[0])}"
    if fast["family"] == "Dense":
        return f"{at}**dense** {by} is the fastest; {slow['label']}, the next, takes {ratio} long {seen}."
    return f"{at}**{fast['label']}** is the fastest here, {ratio} fast as dense {by} {seen}."


def falling(rows: pd.DataFrame) -> list[str]:
    """A warning for each line of `table` on which a longer sequence with more pairs took clearly less time."""
    said = []
    for (label, backend, mode), line in _ran(rows).sort_values("n").groupby(["label", "backend", "mode"], sort=False):
        for before, after in itertools.pairwise(line.to_dict("records")):
            if after["pairs"] > before["pairs"] and after["median_ms"] < 0.9 * before["median_ms"]:
                took = " and ".join(f"{number(x['median_ms'])} ms at N = {int(x['n']):,}" for x in (before, after))
                said.append(f"**Doubtful:** {label} ({title(backend)}), {MODES[mode]}, took {took}, with more to do: "
                            "something else may have run, or launching took longer than running.")  # fmt: skip
    return said


def busy(rows: pd.DataFrame) -> list[str]:
    """A warning where more ran on the processors than they are, when these rows were measured (of runs on a CPU)."""
    loads = rows[rows["run_cuda"].isna() | (rows["device"] == "cpu")]
    loads = loads[loads["run_load"].astype(float) > BUSY * loads["run_processors"].astype(float)]
    worst = loads.sort_values("run_load")[["run_load", "run_processors"]].tail(1).to_numpy()
    return [f"**This machine was busy** (load {number(load)} on {counted(int(cores), 'processor')}): times are upper "
            "bounds." for load, cores in worst]  # fmt: skip


def settings(*frames: pd.DataFrame | None) -> pd.DataFrame:
    """What was timed where, in words: a column a device, a line for the inputs and one a pattern, at the longest N."""
    columns = {}
    for frame in (x for x in frames if x is not None and len(x)):
        last = frame[frame["n"] == frame.groupby("label")["n"].transform("max")].sort_values("median_ms")
        last = last.drop_duplicates("label").to_dict("records")  # of several kernels the fastest
        inputs = f"{last[0]['dtype']}, {int(last[0]['heads'])} heads x {int(last[0]['head_dim'])}"
        patterns = {row["label"]: f"{title(row['pattern'])} ({title(row['backend'])})" for row in last}
        columns[last[0]["run_device"]] = {"inputs": inputs} | patterns
    return pd.DataFrame(columns)


def top(rows: pd.DataFrame, ceilings: dict) -> tuple[float, str]:
    """(TFLOP/s that nothing here exceeds, what reached it): a product of matrices of the rows' dtype, or the fastest
    attention, whichever is faster; (nan, "") where nothing ran."""
    done = rows[rows["status"] == "ok"].sort_values("tflops")
    reached = [(ceilings["matmul_tflops"].get(dtype), f"{dtype} matrix products") for dtype in set(rows["dtype"])]
    reached += [(row["tflops"], f"{row['label']}, {MODES[row['mode']]}") for row in done.tail(1).to_dict("records")]
    return max(((x, words) for x, words in reached if x), default=(float("nan"), ""))


def against_ceiling(rows: pd.DataFrame, ceilings: dict) -> pd.DataFrame:
    """One line a (label, backend, mode), at its longest length: its rate, that over `top`, and its intensity."""
    done = rows[rows["status"] == "ok"].sort_values("n").drop_duplicates(["label", "backend", "mode"], keep="last")
    out = done[["label", "backend", "mode", "n", "median_ms", "pairs", "tflops"]].copy()
    out["share"] = done["tflops"] / top(rows, ceilings)[0]
    out["intensity"] = roofline.intensities(done)
    return out.sort_values(["mode", "median_ms"]).reset_index(drop=True)


def break_even(
    dense: Case, sparsities: Iterable[float], *, block_size=128, samples=5, seconds=60.0, profile="quick", folder=None
) -> pd.DataFrame:
    """Random block layouts against dense attention of the same sizes, interleaved in one run: a row a sparsity, and
    "A/A".

    dense: a case of `Dense`; by backend "auto" it is the fastest kernel. Columns: sparsity (achieved), speedup with its
    95% interval (speedup_low, speedup_high), ideal (dense pairs over attended pairs), median_ms. The row "A/A" is dense
    measured against itself: what noise alone does. All are recorded.
    """
    sparsities, n = checks.listed("sparsities", sparsities), case_of(dense).n
    patterns = [BlockSparse(layouts.random(1 - sparsity), block_size) for sparsity in sparsities]
    cases = {"dense": fastest_dense(dense)} | {x.name: replace(dense, pattern=x, backend="auto") for x in patterns}
    calls = {name: case.prepare() for name, case in cases.items()}
    frame = timing.compare({x: call for x, (call, _) in calls.items()}, warmup=1, samples=samples, seconds=seconds)
    recorder, rows, total = records.start("break_even", profile, folder), [], n * n * dense.heads
    for name, line in frame.iterrows():
        of = "dense" if name == timing.AA else name
        pairs = cases[of].pattern.pairs(n, dense.heads)
        row = cases[of].fields() | {"backend": calls[of][1]} | line.to_dict()
        row |= {"name": name, "pairs": pairs, "sparsity": 1 - pairs / total, "ideal": total / pairs, "status": "ok"}
        rows.append(recorder.row(**row))
    return pd.DataFrame(rows)


def ceiling(rows: pd.DataFrame, ceilings: dict) -> list[str]:
    """What the ceiling is (`top`), and what comes closest to it at any length in `first_mode`."""
    done = first_mode(rows[(rows["status"] == "ok") & rows["tflops"].notna()])
    if done.empty:
        return ["Nothing ran: there is no rate to compare with the ceiling."]
    close = done.sort_values("tflops").iloc[-1]
    (most, what), dtype = top(rows, ceilings), rows["dtype"].iloc[0]
    product, ceiling = ceilings["matmul_tflops"].get(dtype), "The ceiling is"
    if not product or product < most:
        reached = f"reach {number(product)}" if product else "could not be measured"
        ceiling = f"{dtype} matrix products {reached}, so the ceiling is the fastest attention here:"
    of = f"Of the patterns timed over N, {MODES[close['mode']]}, **{close['label']}** by {title(close['backend'])}"
    said = f"{of} comes closest to the ceiling: {close['tflops'] / most:.0%} of it at N = {int(close['n']):,}."
    return [f"{ceiling} {number(most)} TFLOP/s, by {what}.", said]


def pays(rows: pd.DataFrame) -> str:
    """From which sparsity on it pays to leave blocks out, and what the most gains, in a sentence (see `break_even`)."""
    sparse = rows[~rows["name"].isin(["dense", "A/A"]) & rows["speedup"].notna()]
    if sparse.empty:
        return "No sparse layout ran: there is nothing to compare."
    at, since, top = f"At N = {int(sparse['n'].iloc[0]):,}, ", pays_from(rows), sparse.loc[sparse["speedup"].idxmax()]
    by = title(rows.loc[rows["name"] == "dense", "backend"].iloc[0])
    most = f"at {top['sparsity']:.0%} sparsity it is {times(top['speedup'], '.2f')} fast as dense attention by {by}"
    ends = top["speedup_low"], top["speedup_high"]
    if top["speedup"] < 1:
        most = f"at best, at {top['sparsity']:.0%}, it takes {times(1 / top['speedup'], '.2f')} long as dense by {by}"
        ends = 1 / top["speedup_high"], 1 / top["speedup_low"]
    most = f"{most} (95% interval {spread(*ends)})"
    if since is not None:
        ideal = f"the pairs alone would allow {top['ideal']:.1f} times"
        return f"{at}leaving blocks out pays **from {since:.0%}** sparsity on: {most}; {ideal}."
    return f"{at}leaving blocks out pays **from no sparsity tried here** on, beyond the noise: {most}."


def pays_from(rows: pd.DataFrame) -> float | None:
    """The least sparsity from which on every layout is faster than dense, its whole interval above 1 and above that of
    dense against itself; or None."""
    sparse = rows[~rows["name"].isin(["dense", "A/A"])].sort_values("sparsity", ascending=False)
    noise = max([1, *rows[rows["name"] == "A/A"].get("speedup_high", ())])
    won = sparse.loc[(sparse["speedup_low"] > noise).cummin(), "sparsity"] if len(sparse) else sparse
    return won.iloc[-1] if len(won) else None


def fastest_dense(case: Case) -> Case:
    """The case, Dense by "auto" by the backend that is fastest at its size on its device, if one runs."""
    if not isinstance(case.pattern, Dense) or case.backend != "auto":
        return case
    rows = [timing.time(replace(case, backend=x), warmup=1, samples=3, seconds=5) for x in dense_backends(case.device)]
    took = {row["backend"]: row["median_ms"] for row in rows if row["status"] == "ok"}
    return replace(case, backend=min(took, key=took.get)) if took else case


def ceilings(device: str = "cpu", seconds: float = 2.0, profile: str = "quick", known=None, folder=None) -> dict:
    """`roofline.ceilings`, recorded beside what is compared with it; the better of it and `known` (an earlier one)."""
    found = roofline.ceilings(device, seconds)
    if known:  # something else may have used the device at one of the two times
        rates, earlier = found["matmul_tflops"], known["matmul_tflops"]
        found["matmul_tflops"] = {name: max(rates[name], earlier.get(name, 0)) for name in rates}
        found["copy_gbs"] = max(found["copy_gbs"], known["copy_gbs"])
    records.start("roofline", profile, folder).row(status="ok", **found)
    return found


def recorded(kind: str = "h100x1") -> tuple[pd.DataFrame, dict | None]:
    """(rows of sweeps, ceilings or None) committed for a machine kind, newest of each; empty where there are none."""
    best = records.committed(kind, "roofline").tail(1).to_dict("records")
    rows = table(records.committed(kind, "timing").dropna(subset="asked"))  # by `sweep`
    same = rows.assign(spec=rows["pattern_spec"].map(json.dumps)).duplicated([*KEY, "asked", "spec"], keep="last")
    return rows[~same], best[0] if best else None
