"""What notebook 08 asks: what a stream takes at each length, planned, and what was measured of one."""

import math

import pandas as pd
import torch

from workbench import streaming
from workbench.fit import cards
from workbench.harness import records
from workbench.harness.narrate import MODES, counted, duration, listed, times
from workbench.patterns import Dense, Pattern, from_spec
from workbench.patterns.dilated import geometric
from workbench.streaming import measure

LESS = " Where it takes less, the branches of a chunk run in one pass, as those of the whole sequence do not."
MORE = " Where it takes longer, the run is too short to hide what a stream does once, at its start."
GIB, WORK = 1 << 30, {"fwd": 1.0, "bwd": 2.5, "fwdbwd": 3.5}  # products, of those of a forward


def planned(lengths, card: str, first: int) -> pd.DataFrame:
    """A row a length: LongNet, one head of 32, float16: GiB on the card in memory and streamed, modelled seconds."""
    return pd.DataFrame([_row("LongNet", geometric(n, first=first), n, card) for n in lengths])


def beside_dense(plans: pd.DataFrame, card: str) -> pd.DataFrame:
    """The plan of dense attention of the last length of `planned`, and that one."""
    last = plans.iloc[-1].to_dict()
    return pd.DataFrame([_row("dense", Dense(), last["n"], card), last])


def _row(name: str, pattern: Pattern, n: int, card: str) -> dict:
    x = torch.empty(n, 1, 32, dtype=torch.float16, device="meta")
    plan = streaming.explain((x, x, x), pattern, card=card)
    held = 4 * x.nbytes  # q, k, v and out
    return {
        "pattern": name, "n": n, "chunk": plan.calls.chunk, "in_memory_gib": held / GIB,
        "streamed_gib": plan.peak / GIB, "fits_in_memory": held < cards.find(card).total_bytes,
        "traffic_s": plan.traffic_ms / 1000, "products_s": (plan.products_ms or math.nan) / 1000,
    }  # fmt: skip


def live(lengths, first: int, gib: float, profile="quick") -> tuple[pd.DataFrame, pd.DataFrame]:
    """`streaming.measure` here: (a layer as it ran, at most eight stretches and their rates; `table` of what ran)."""
    at = []
    ran = measure.measure(lengths, gib, first, profile, watch=lambda *done: at.append(done))
    progress = pd.DataFrame([(0, 0.0), *at[:: -max(2, -(-len(at) // 8))][::-1]], columns=["positions", "seconds"])
    rates = progress["positions"].diff() / progress["seconds"].diff() / 1e6  # the last two chunks end together
    return progress.assign(million_tokens_per_second=rates)[1:], table(ran)


def measured(machine: str) -> pd.DataFrame:
    """`table` of what is on record, the newest of each."""
    found = records.committed(machine, "streaming")
    return found if found.empty else table(found[found["status"] == "ok"])


def table(found: pd.DataFrame) -> pd.DataFrame:
    """A row a run: its id, what ran and of what, its time and that beside the same in memory, TFLOP/s over attended
    pairs, GB/s, the peak and the plan's, and how many rows were checked, with the largest error."""
    columns = ("bytes_in", "bytes_out", "peak_bytes", "planned_bytes", "error_sampled", "rows_sampled")
    found = found.reindex(columns=[*found.columns, *(x for x in (*columns, "valid") if x not in found)])
    found = found.drop_duplicates(["execution", "mode", "n"], keep="last").sort_values(["n", "mode"])
    specs = zip(found["pattern_spec"], found["n"], found["heads"], strict=True)
    patterns = [(from_spec(x) if isinstance(x, dict) else geometric(int(n)), int(n), int(h)) for x, n, h in specs]
    pairs = [pattern.pairs(n, heads) for pattern, n, heads in patterns]
    sizes = zip(found["heads"], found["head_dim"], found["dtype"], strict=True)
    seconds, operations = found["median_ms"] / 1000, 4 * found["head_dim"] * pairs * found["mode"].map(WORK)
    beside = found[found["execution"] == "in memory"].set_index(["run", "mode", "n"])["median_ms"]
    keys = found[["run", "mode", "n"]].itertuples(index=False, name=None)
    of_in_memory = found["median_ms"] / [beside.get(key, math.nan) for key in keys]
    return pd.DataFrame({
        "run": found["run"], "of": [f"LongNet, {counted(int(h), 'head')} x {d:.0f}, {dtype}" for h, d, dtype in sizes],
        "n": found["n"], "execution": found["execution"], "mode": found["mode"], "status": found["status"],
        "seconds": seconds, "of_in_memory": of_in_memory.where(found["execution"] != "layer"),
        "tflops": operations / seconds / 1e12, "gb_s": found[["bytes_in", "bytes_out"]].max(axis=1) / seconds / 1e9,
        "peak_gib": found["peak_bytes"] / GIB, "of_planned_bytes": found["peak_bytes"] / found["planned_bytes"],
        "sampled_rows": found["rows_sampled"], "relative_error": found["error_sampled"],
        "right": found["valid"].astype("boolean"),
    }).reset_index(drop=True)  # fmt: skip


def answer(beside: pd.DataFrame, plans: pd.DataFrame, runs: pd.DataFrame, took: pd.DataFrame) -> tuple[list[str], str]:
    """(the page's sentences, its headline)."""
    said, headline, (dense, last) = [], "", beside.to_dict("records")
    where = "measured here" if len(runs) and runs["run"].isin(took["run"]).any() else "from the records"
    layers = runs[runs["execution"] == "layer"] if len(runs) else runs
    if len(layers):
        best = layers.loc[layers["n"].idxmax()]
        headline = f"A layer of {int(best['n']):,} tokens on one card in {best['seconds']:.1f} s ({best['of']})"
        said.append(f"**{headline}**, at {best['tflops']:.0f} TFLOP/s, {where}.")
    if len(long := plans[~plans["fits_in_memory"]]):
        most = plans.loc[plans["fits_in_memory"], "n"].max()
        fit = f", {most:,.0f} do" * bool(most > 0)
        said.append(f"{int(long['n'].min()):,} tokens do not fit on the card at once{fit}; "
                    f"streamed, {last['n']:,} take {last['streamed_gib']:.2f} GiB of it (planned).")  # fmt: skip
    names = {"dense attention": dense["products_s"], "LongNet": last["products_s"], "its copies": last["traffic_s"]}
    each = listed(f"{name} {duration(s)}" for name, s in names.items() if pd.notna(s))
    said.append(f"Modelled for {last['n']:,} tokens: {each} (at the same time).")
    streamed = runs[runs["of_in_memory"].notna() & (runs["execution"] == "streamed")] if len(runs) else runs
    if len(streamed):
        long = {mode: [f"{times(x.of_in_memory, '.2f')} long at {x.n:,} tokens" for x in rows.itertuples()]
                for mode, rows in streamed.groupby("mode")}  # fmt: skip
        ratios = "; ".join(f"{MODES[mode]}, {listed(each)}" for mode, each in long.items())
        why = LESS * bool(streamed["of_in_memory"].min() < 1) + MORE * bool(streamed["of_in_memory"].max() > 1)
        said.append(f"Streamed attention beside the same in memory, {where}: {ratios}.{why}")
    checked = took[took["right"].notna()]
    right = "all right" if checked["right"].all() else "not all right"
    right += f"; {len(took) - len(checked)} did not run" * (len(checked) < len(took))
    ran = f"{counted(len(checked), 'run')} of up to {took['n'].max():,} tokens"
    said.append(f"Sampled rows of {ran} were checked here: {right}.")
    return said, headline or f"{last['n']:,} tokens planned on one card"
