"""What notebook 04 models: forwards on many ranks, from rates that were measured, held against all that was measured.

The model (`scaling.link.modelled`) lets each rank compute its pairs at the rate of one device and move its bytes at the
rate of the link, one after the other, and adds what every call and every exchange cost.
"""

from collections.abc import Iterable

import pandas as pd

from workbench.analysis.multicard import MODELLED, at, ok, one_thread
from workbench.harness.narrate import counted, number, title
from workbench.patterns import from_spec
from workbench.probes.case import Case
from workbench.probes.timing import speedup
from workbench.scaling import link
from workbench.scaling.strategies import ONE

LONGEST = 1 << 20  # positions of block-sparse attention up to which a weak curve is drawn: it lists visible blocks
GAIN = ("speedup", "speedup_low", "speedup_high")
WRONG = 10  # percent of a measured time: a model that is off by more says so


def efficiency(rows: pd.DataFrame) -> pd.DataFrame:
    """The efficiency of measured forwards, pairs a second of a rank over those of one device, with its 95% interval.

    A row: kind, scaling, world, n, efficiency, low, high. scaling: "strong", at the longest N, against one device at
    the same N; or "weak", at `world` times the shortest N, against one device at the shortest, which was timed in other
    rounds. It counts pairs, since a longer sequence of dense attention has more pairs for each position.
    """
    done, found = ok(rows[rows["mode"] == "fwd"]), []
    for (kind, world), group in done.groupby(["kind", "nproc"], sort=False):
        one = group[group["strategy"] == ONE].sort_values("n").head(1).to_dict("records")
        for row in group[group["strategy"] == "sequence"].to_dict("records"):
            ratios = [("strong", row, world)] if row["n"] == group["n"].max() else []
            if one and one[0]["n"] * world == row["n"]:
                ratio = speedup(one[0]["samples_ms"], row["samples_ms"])
                ratios.append(("weak", ratio, world * one[0]["pairs"] / row["pairs"]))
            found += [[kind, x, world, row["n"], *(y[z] / of for z in GAIN)] for x, y, of in ratios]
    return pd.DataFrame(found, columns=["kind", "scaling", "world", "n", "efficiency", "low", "high"])


def together(every: pd.DataFrame, world: int) -> float:
    """The share of its own speed that a rank keeps while all compute: of DDP with a sequence for each, which moves
    nothing. At least that of ranks that take turns; 1 where it was not measured, and where there is no such loss."""
    whole = every["strategy"].eq("distributed data parallel") & every["mode"].eq("fwd") & every["nproc"].eq(world)
    some = ok(every[whole & every["batch"].mod(world).eq(0) & every["batch"].gt(0)])
    return min(1.0, max(1.0, float(some["speedup"].max())) / world) if len(some) and world > 1 else 1.0


@one_thread()
def curves(rows: pd.DataFrame, rates: link.Rates, worlds: Iterable[int], first: int, least: int) -> pd.DataFrame:
    """`link.modelled` for each kind, strong from its longest forward and weak from its shortest, with the rate that one
    device had there: rows with `kind`. first: the shortest segment, as in `multicard.at`. least: the tokens of a
    rank; where there would be fewer, nothing is modelled."""
    alone, found = ok(rows[rows["mode"].eq("fwd") & rows["strategy"].eq(ONE) & rows["kind"].isin(MODELLED)]), []
    for kind, group in alone.groupby("kind", sort=False):
        group = group.sort_values("n")
        for scaling_, one in (("strong", group.iloc[-1]), ("weak", group.iloc[0])):
            n, sizes = int(one["n"]), {"heads": int(one["heads"]), "head_dim": int(one["head_dim"])}
            make = at(kind, first, dtype=one["dtype"], **sizes)
            weak, listed = scaling_ == "weak", kind == "block-sparse" and scaling_ == "weak"
            some = [x for x in worlds if n >= least * (1 if weak else x) and not (listed and n * x > LONGEST)]
            pairs = one["pairs"] / one["median_ms"] * 1000
            if some:
                found.append(link.modelled(make(n), pairs, rates, some, at=make, scaling=scaling_).assign(kind=kind))
    columns = ["kind", "scaling", "world", "n", "efficiency", "most", "pattern_spec"]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=columns)


@one_thread()
def checked(every: pd.DataFrame, rates: link.Rates) -> pd.DataFrame:
    """The model against each forward of one sequence that was measured by "sequence", of every pattern: a row for each,
    with the times in ms, and by how many percent of the measured one the model is off.

    One device's rate is that at the same N, less where ranks that compute at once slow each other (`together`)."""
    done, found = ok(every[every["mode"].eq("fwd") & every["batch"].eq(1)]), []
    for (kind, n, world), group in done.groupby(["kind", "n", "nproc"], sort=False):
        by = group.drop_duplicates("strategy", keep="last").set_index("strategy")
        if not {ONE, "sequence"} <= set(by.index) or world < 2:
            continue
        one, took = by.loc[ONE], float(by.loc["sequence", "median_ms"])
        case = Case(from_spec(one["pattern_spec"]), int(n), int(one["heads"]), int(one["head_dim"]), one["dtype"])
        pairs = one["pairs"] / one["median_ms"] * 1000 * together(every, world)
        ms = 1000 * float(link.modelled(case, pairs, rates, [int(world)])["seconds"].iloc[0])
        line = {"pattern": title(kind), "N": int(n), "ranks": int(world), "one device (ms)": float(one["median_ms"])}
        found.append(line | {"measured (ms)": took, "modelled (ms)": ms, "off by (%)": 100 * abs(ms / took - 1)})
    return pd.DataFrame(found).set_index("pattern") if found else pd.DataFrame()


def model_error(points: pd.DataFrame, what: str = "card") -> list[str]:
    """`checked` in sentences: the largest error and the median, and whether the model can be trusted to a tenth."""
    if points.empty:
        return ["No time of the model was measured here."]
    off = points["off by (%)"]
    worst = points.iloc[off.argmax()]
    model = f"The model of many ranks (rates of the link and of one {what})"
    errors = f"largest error **{number(off.max())}%**, half of them within {number(sorted(off)[len(off) // 2])}%"
    at = f"{worst.name}, N = {worst['N']:,.0f}, {counted(int(worst['ranks']), what)}"
    took = f"modelled {number(worst['modelled (ms)'])} ms, measured {number(worst['measured (ms)'])} ms"
    said = f"{model} against {counted(len(points), 'measured forward')}: {errors}. The worst: {at}: {took}."
    many = int((off > WRONG).sum())
    warning = f"**Off by more than {WRONG}% in {many} of {len(points)}**: do not read the curves closer than that."
    return [said, *[warning] * bool(many)]


def rates_in_words(rates: link.Rates, rows: pd.DataFrame, what: str = "card") -> str:
    """What the link and a call cost, as fitted and measured. rows: those of `link.measure` that were fitted."""
    sent = rows[rows["stage"].eq("link") & rows["status"].eq("ok")]
    off = (1000 * rates.message_s(sent["message_bytes"]) / sent["median_ms"] - 1).abs().max()
    call, latency = (f"{number(1000 * x)} ms" for x in (rates.call_s, rates.latency_s))
    rate = f"**{number(rates.bytes_per_second / 1e9)} GB/s** after {latency}; every message is within {off:.0%} of that"
    said = f"Fitted to {counted(len(sent), 'size')} of messages, each {what} sends {rate}."
    return f"{said} A call takes **{call}** beside what it computes and moves."
