"""What notebook 08 asks: what a stream takes at each length, planned, and what was measured of one."""

import pandas as pd
import torch

from workbench import streaming
from workbench.fit import cards
from workbench.fit.virtual_card import VirtualCard
from workbench.harness import records
from workbench.patterns import Dense, Pattern
from workbench.patterns.dilated import geometric
from workbench.probes import validity

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
    plan = streaming.explain((x, x, x), pattern, heads=1, head_dim=32, dtype=x.dtype, card=card)
    products = None if plan.products_ms is None else plan.products_ms / 1000
    held = 4 * x.nbytes  # q, k, v and out
    return {
        "pattern": name, "n": n, "chunk": plan.calls.chunk, "in_memory_gib": held / GIB,
        "streamed_gib": plan.peak / GIB, "fits_in_memory": held < cards.find(card).total_bytes,
        "traffic_s": plan.traffic_ms / 1000, "products_s": products,
    }  # fmt: skip


def live(n: int, first: int, gib: float, heads: int = 1, head_dim: int = 32) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Attention streamed here in eight chunks, on a card in software of so many GiB where there is none.

    (tokens a second as it runs, what it took and whether sampled rows are right)
    """
    options = {"heads": heads, "head_dim": head_dim, "dtype": torch.float32, "chunk": n // 8}
    rows, pattern = [], geometric(n, first=first)
    q, k, v = (torch.randn(n, heads, head_dim, generator=torch.Generator().manual_seed(x)) for x in range(3))
    out = torch.empty_like(q)

    def watch(done: int, seconds: float) -> None:
        rows.append({"positions": done, "seconds": seconds, "tokens_a_second": done / seconds})

    with VirtualCard(gib) as card:
        took = streaming.attention((q, k, v), pattern, out, **options, watch=watch)
    found = validity.check(pattern, {"out": out[None]}, [x[None] for x in (q, k, v)])
    if took["peak_bytes"] is None:
        took["peak_bytes"] = card.peak_requested_bytes
    names = ("n", "chunk", "kept", "bytes_in", "bytes_out", "planned_bytes", "peak_bytes")
    last = {"seconds": took["median_ms"] / 1000, "sampled_rows": found.rows, "right": found.ok}
    return pd.DataFrame(rows), pd.DataFrame([{name: took[name] for name in names} | last])


def measured(machine: str) -> pd.DataFrame:
    """A row a run on record: what ran, ns a token, TFLOP/s over attended pairs, GB/s, the peak over the plan's, and how
    many rows were checked, with the largest error."""
    found = records.committed(machine, "streaming")
    if found.empty:
        return found
    found = found.drop_duplicates(["execution", "mode", "n", "budget_bytes"], keep="last").sort_values(["n", "mode"])
    pairs = [geometric(int(n)).pairs(int(n), int(heads)) for n, heads in zip(found["n"], found["heads"], strict=True)]
    seconds, operations = found["median_ms"] / 1000, 4 * found["head_dim"] * pairs * found["mode"].map(WORK)
    return pd.DataFrame({
        "n": found["n"], "execution": found["execution"], "mode": found["mode"], "seconds": seconds,
        "ns_a_token": 1e9 * seconds / found["n"], "tflops": operations / seconds / 1e12,
        "gb_s": found[["bytes_in", "bytes_out"]].max(axis=1) / seconds / 1e9,
        "of_planned_bytes": found["peak_bytes"] / found["planned_bytes"],
        "sampled_rows": found["rows_sampled"], "relative_error": found["error_sampled"],
    }).reset_index(drop=True)  # fmt: skip


def answer(beside: pd.DataFrame, plans: pd.DataFrame, runs: pd.DataFrame, took: pd.DataFrame) -> tuple[list[str], str]:
    """(the page's sentences, its headline)."""
    said, headline, (dense, last), here = [], "", beside.to_dict("records"), took.iloc[0]
    layers = runs[runs["execution"] == "layer"] if len(runs) else runs
    if len(layers):
        best = layers.loc[layers["n"].idxmax()]
        headline = f"{int(best['n']):,} tokens on one card in {best['seconds']:.1f} s"
        said.append(f"**{headline}**, {best['tflops']:.0f} TFLOP/s, on record.")
    if len(long := plans[~plans["fits_in_memory"]]):
        said.append(f"{int(long['n'].min()):,} tokens do not fit on the card at once; streamed, {last['n']:,} take "
                    f"{last['streamed_gib']:.2f} GiB of it.")  # fmt: skip
    if dense["products_s"]:
        both = [_figure(x["products_s"]) for x in (dense, last)]
        said.append(f"Modelled: {last['n']:,} tokens take {both[0]} s of dense attention, {both[1]} s of LongNet.")
    said.append(f"Their copies to the card and back take {_figure(last['traffic_s'])} s, during the computation.")
    right = "right" if here["right"] else "wrong"
    said.append(f"Here {here['n']:,} tokens took at most {here['peak_bytes']:,} bytes, planned were "
                f"{here['planned_bytes']:,}; {here['sampled_rows']} sampled rows are {right}.")  # fmt: skip
    return said, headline or f"{last['n']:,} tokens planned on one card"


def _figure(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
