"""Claims of five reports on attention over two small cards, and what measurements say of each: notebook 06.

`claims.json` has the quotes and the words, RULES has what decides: a rule takes facts from what was measured (`Seen`)
and gives a verdict: true, false, true only if ..., or, where something is lacking, not measurable here.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from workbench.analysis import locality, multicard
from workbench.fit import cards, estimate, frontier
from workbench.harness import records
from workbench.harness.narrate import binary, duration, listed, number, title
from workbench.patterns import BlockSparse, Dense, Dilated, from_spec, layouts
from workbench.probes import catalog, error
from workbench.probes.timing import AA, speedup
from workbench.scaling import link, sweeps
from workbench.scaling.strategies import ONE, SHORT

CLAIMS = {int(x): y for x, y in json.loads(Path(__file__).with_name("claims.json").read_text("utf-8")).items()}
TRUE, FALSE, ONLY, NOT = "true", "false", "true only if", "not measurable here"
CARD = cards.find("gtx1080")  # the reports'
BUDGET = CARD.total_bytes - CARD.context_bytes
NOTHING = pd.DataFrame()
LONG = ("dense", "longnet-geometric")  # kinds of `multicard`
GAIN, SPARSER = 1.1, 1689.8 / 1549.0  # times as fast: what is faster at all, and what claim 14 is about


class Missing(LookupError):
    """What a rule needs and nobody measured, or why nobody could."""


class Seen(NamedTuple):
    """What is known of one machine. calls: of `sweep`; messages: of `link.measure`; fits: of `lengths`; counts: of
    `counts`, which are the same on any machine. Each may be empty."""

    calls: pd.DataFrame = NOTHING
    messages: pd.DataFrame = NOTHING
    fits: pd.DataFrame = NOTHING
    counts: dict = {}


def sweep(nproc: int, most: int, sizes: dict, **options) -> pd.DataFrame:
    """Configurations of the reports on one device and, where nproc is two or more, divided over so many ranks: rows of
    `scaling.sweeps.sweep`. most: the most tokens of what is divided, and an eighth of those of what is not.
    sizes: of a Case, as dtype and device; options: the sweep's."""
    names = [x for x in catalog.REPORTS if x.endswith(("-2k", "-8k", "-16k", "-8k-dilated"))]
    divided = {x: catalog.report(x, most, mode="fwdbwd" if "-001-" in x else "fwd", **sizes) for x in names}
    near, single = (catalog.report(x, at * most, **sizes) for x, at in (("report-003-131k", 8), ("report-004-237k", 4)))
    alone = {"report-003-131k": near}
    for x in (1, 0.5, 0.05, 0.01):
        alone[f"report-001-density-{x:g}"] = replace(near, pattern=BlockSparse(layouts.random(x)))
    for x, part, rate in (("rate-1", 1, 1), ("rate-2", 1, 2), ("quarters", 4, 1)):
        alone[f"report-004-{x}"] = replace(single, pattern=Dilated([single.n // part], [rate], heads="partition"))

    def of(case) -> tuple[str, ...]:
        label = next((x for x, y in divided.items() if y is case and nproc > 1), "")
        return (*SHORT, "sequence") if "report-000" in label else ("sequence",) if label else (ONE,)

    return sweeps.sweep(divided | alone, nproc, of, say=None, **options)


def lengths(cuda: bool, **options) -> pd.DataFrame:
    """The longest forward in BUDGET for the sizes of the reports: dilated attention, measured on a card; else that and
    dense, predicted for CARD by memory alone. theirs: the N that a report gives for `preset`."""
    how = {"budgets": [BUDGET], "measure": True, "step": 0.02} if cuda else {"cards": [CARD], "seconds": math.inf}
    found = []
    for name in ("report-003-65k-ring", "report-003-131k", "report-004-213k", "report-004-237k"):
        case = catalog.report(name, device="cuda")
        ours = {"longnet-geometric": Dilated([4096, 16_384], [1, 2])} | ({} if cuda else {"dense": Dense()})
        ours = {x: replace(case, pattern=pattern) for x, pattern in ours.items()}
        found.append(frontier.sweep(ours, **how, say=None, **options).assign(preset=name, theirs=case.n))
    return pd.concat(found, ignore_index=True)


def counts(side: int = 64) -> dict[str, pd.DataFrame]:
    """traces: peak bytes of dense calls on CARD, predicted; touched, parts: of `locality.along_a_curve`, `of_parts`."""
    wide, small, single = (replace(catalog.report(x, device="cuda"), pattern=Dense())
                           for x in ("report-000-65k", "report-003-131k", "report-004-8k"))  # fmt: skip
    asked = [("scores stored", replace(wide, backend="eager"), 1), ("one card", wide, 1), ("one card", small, 1)]
    asked += [(where, single.at(n << 10), world) for n in (16, 32, 64, 128)
              for world, where in enumerate(("one card", "two cards"), 1)]  # fmt: skip
    traces = []
    for where, case, world in asked:
        peak = estimate.trace(case, CARD, world=world, strategy="sequence" if world > 1 else "auto").requested_bytes
        sizes = {x: case.fields()[x] for x in ("heads", "head_dim", "dtype", "n")}
        traces.append({"where": where} | sizes | {"peak_bytes": peak, "bytes per token": peak / case.n})
    return {"traces": pd.DataFrame(traces), "touched": locality.along_a_curve(side), "parts": error.of_parts()}


def recorded(kinds: Iterable[str]) -> Seen:
    """What is committed of these machines: of its newest commit each, but of sweeps the newest run that has the
    reports' configurations, if one has, and the longest dense and LongNet sequences of the newest that divides such."""
    every = pd.concat([records.committed(x) for x in kinds], ignore_index=True).sort_values("run_utc", kind="stable")
    every = every.reindex(columns=[*dict.fromkeys([*every, "label", "stage", "budget_bytes", "measured_n"])])
    swept, links = (every[every["stage"].isin(x)] for x in (["sweep"], ["link", "cost"]))
    fits = every[every["stage"].eq("search") & every["budget_bytes"].eq(BUDGET) & every["measured_n"].notna()]
    theirs = swept["label"].astype(str).str.startswith("report-")
    alone = (swept[["strategy", "mode", "batch"]] == ["sequence", "fwd", 1]).all(axis=1)
    other = multicard.kinds(swept[alone & ~theirs]).query("kind in @LONG")
    of = (swept[theirs] if theirs.any() else swept, "run"), (other, "run"), (links, "run_commit"), (fits, "run_commit")
    calls, other, links, fits = (x[x[by].isin(x[by].tail(1))] for x, by in of)
    return Seen(pd.concat([calls, other.sort_values("n").drop_duplicates("kind", keep="last")]), links, fits)


def batches(rows: pd.DataFrame) -> pd.DataFrame:
    """Those of a sweep's rows whose batch may be divided: of report 000, or of dense attention in other sweeps."""
    return rows[rows["label"].str.startswith("report-000-") | rows["pattern"].eq("dense")]


def _batch(rows: pd.DataFrame, strategy: str) -> dict:
    """Of the longest case of one sequence, and of several (many_...), a line of `multicard.by_batch` each."""
    shares = multicard.by_batch(batches(rows)).query("strategy == @strategy").sort_values("N")
    if shares.empty:
        whys = rows[rows["strategy"].map(lambda x: SHORT.get(x, x)).eq(strategy)]["error"].dropna()
        raise Missing(whys.iloc[0] if len(whys) else "it takes two ranks")
    shares["span"] = [*zip(shares["low"], shares["high"], strict=True)]
    one, many = (shares[shares["sequences"].eq(1) == x].tail(1).to_dict("records") for x in (True, False))
    return (one or many)[0] | {f"many_{x}": y for x, y in (many or one)[0].items()}


def _calls(rows: pd.DataFrame, *labels: str, strategy: str = ONE) -> list[dict]:
    done = multicard.ok(rows).drop_duplicates(["label", "strategy"], keep="last").set_index(["strategy", "label"])
    if missing := [x for x in labels if (strategy, x) not in done.index]:
        raise Missing("it takes two ranks" if strategy != ONE else f"{listed(missing)} did not run")
    return [done.loc[(strategy, x)].to_dict() for x in labels]


def _divided(rows: pd.DataFrame, label: str) -> dict:
    """Of a case on ranks against one device."""
    (one,), (it,) = _calls(rows, label), _calls(rows, label, strategy="sequence")
    return {
        "n": it["n"], "times": 1 / it["speedup"], "span": (1 / it["speedup_high"], 1 / it["speedup_low"]),
        "like": it["peak_bytes"] / one["peak_bytes"], "mixed": it["extra_bytes"] / one["peak_bytes"],
        "off": max([100 * x for _, x in it["errors"].values()] or [math.nan]), "sent": binary(max(it["sent_bytes"])),
    }  # fmt: skip


def _gains(rows: pd.DataFrame) -> dict:
    """How much faster two cases are on ranks than on one device; what the second sends and computes, of the first's."""
    one, two = _calls(rows, "report-004-8k", "report-004-8k-dilated", strategy="sequence")
    return {"n": two["n"], "one": one["speedup"], "two": two["speedup"], "pairs": two["pairs"] / one["pairs"],
            "span": (one["speedup_low"] / two["speedup_high"], one["speedup_high"] / two["speedup_low"]),
            "bytes": max(two["sent_bytes"]) / max(one["sent_bytes"])}  # fmt: skip


def _near_linear(rows: pd.DataFrame) -> dict:
    done = multicard.ok(rows).query("strategy == 'sequence'").copy()
    done[["share", "low", "high"]] = done[["speedup", "speedup_low", "speedup_high"]].div(done["nproc"], axis=0)
    theirs = done["label"].str.startswith("report-")
    if not theirs.any():
        raise Missing("it takes two ranks")
    each = [f"{title(x.kind)}, {x.n:,.0f} tokens: {x.speedup:.2f} times" for x in done[~theirs].itertuples()]
    longer, one = f" On record of such cards: {'; '.join(each)}." if each else "", done[theirs].sort_values("share")
    least, best = (f"{x.share:.0%} ({x.label})" for x in one.iloc[[0, -1]].itertuples())
    return {"many": len(one), "good": one["share"].ge(0.9).sum(), "span": one[["low", "high"]].min(),
            "far": done[["low", "high"]].max(), "most": one["n"].max(), "longer": longer, "least": least,
            "best": best}  # fmt: skip


def _communication(rows: pd.DataFrame) -> dict:
    """Of report 000's slowest call (452.1 ms on two cards, 58.0 ms on one): how long what moves takes on this link, by
    the median, the fastest and the slowest samples, and how much longer the call took than half of one card's time."""
    case, done = catalog.report("report-000-2k"), rows[rows["status"].eq("ok")]
    rates = [link.fit(done.assign(median_ms=done["samples_ms"].map(of)), False) for of in (statistics.median, min, max)]
    if None in rates:
        raise Missing("the link was not measured")
    size = 4 * case.batch * case.n * case.heads * case.head_dim * case.dtype.itemsize // 2  # half of q, k, v and out
    low, took, high = sorted(1000 * x.message_s(size) for x in rates)  # fits need not lie as their samples do
    time, added = f"{number(took)} ms by this link ({number(low)} to {number(high)} by its samples)", 452.1 - 58.0 / 2
    size, rate = binary(size), binary(1000 * size / added)
    return {"size": size, "span": (2 * low / added, 2 * high / added), "time": time, "added": added, "rate": rate}


def _sparse(rows: pd.DataFrame, density: float) -> dict:
    full, few = _calls(rows, *(f"report-001-density-{x:g}" for x in (1, density)))
    bytes_, kept = (few[x] / full[x] for x in ("extra_bytes", "pairs"))
    faster, low, high = speedup(full["samples_ms"], few["samples_ms"]).values()
    like = min(low / SPARSER, SPARSER / high), min(high / SPARSER, SPARSER / low)
    return {"n": few["n"], "bytes": bytes_, "faster": faster, "out": 1 - kept, "claimed": SPARSER, "like": like}


def _after(rows: pd.DataFrame) -> dict:
    """What a call leaves, which is its output, against what it holds at its peak."""
    (x,) = _calls(rows, "report-003-131k")
    out = (x["peak_bytes"] - x["extra_bytes"]) / 3  # of q, k and v
    return {"n": x["n"], "after": binary(out), "peak": binary(x["peak_bytes"]), "kept": out / x["peak_bytes"]}


def _dilation(rows: pd.DataFrame) -> dict:
    one, two, equal = _calls(rows, *(f"report-004-{x}" for x in ("rate-1", "rate-2", "quarters")))
    covered = [float(torch.as_tensor(from_spec(x["pattern_spec"]).coverage(64, 8)).mean()) for x in (two, equal)]
    (faster, *than_one), (itself, *span) = (speedup(x["samples_ms"], two["samples_ms"]).values() for x in (one, equal))
    return {"faster": faster, "pairs": two["pairs"] / one["pairs"], "rows": covered[0], "all": covered[1],
            "itself": itself, "span": span, "over": than_one}  # fmt: skip


def _longest(rows: pd.DataFrame, preset: str) -> dict:
    case = catalog.report(preset).fields()
    same = rows[rows["n"].notna() & (rows[["head_dim", "dtype"]] == [case["head_dim"], case["dtype"]]).all(axis=1)]
    if same.empty:
        raise Missing("no search for the longest sequence")
    best = same.loc[same["n"].astype(float).idxmax()]
    took = duration(float(best["predicted_ms"] or math.nan) / 1000)
    predicted = f"would fit on an {CARD.name} by memory alone, as predicted (a call would take {took})"
    fit = "fit" if pd.notna(best["measured_n"]) else predicted
    return {"n": best["n"], "what": title(best["pattern"]), "fit": fit, "times": best["n"] / case["n"]}


def _counted(found: dict) -> dict:
    at = {(x.where, x.heads, x.dtype, x.n): x.peak_bytes for x in found["traces"].itertuples()}
    one, two = ({n: at[x, 8, "float32", n << 10] for n in (16, 32, 64, 128)} for x in ("one card", "two cards"))
    of, parts = found["touched"].iloc[:, -1].tolist(), found["parts"].iloc[:, -1].tolist()
    fused, saved = at["one card", 8, "float16", 1 << 16], [(one[n] - two[n]) / 2**30 for n in (32, 64, 128)]
    sign, side = (1, "less") if max(saved) > 0 else (-1, "more")
    saves = f"{listed(f'{sign * x:.2f}' for x in saved)} GiB {side}"
    return {
        "tensor": binary(8 * 64 * 2 << 16), "fused": binary(fused), "fits": fused < BUDGET,
        "stored": binary(at["scores stored", 8, "float16", 1 << 16]), "wide": one[128] / (1 << 17),
        "small": at["one card", 2, "float16", 1 << 17] / (1 << 17), "saved": saves, "most": saved[-1],
        "grown": two[32] / two[16], "sequence": of[1] / of[0], "grid": of[3] / of[2], "merged": parts[0],
        "summed": parts[1], "mean": parts[2],
    }  # fmt: skip


def _above(limit: float, facts: dict, span: str = "span") -> bool | None:
    """Whether an interval is above a limit; None where they are no further apart than a call may be from itself."""
    (low, high), noise = facts[span], facts.get("noise", 1)
    return True if low > limit * noise else False if high * noise <= limit else None


class Rule(NamedTuple):
    """data: the field of `Seen` that decides; facts: what it gives; holds: whether the claim is true by these, None
    where nothing can tell; then: the same under `only` of claims.json; timed: how labels begin, where time decides."""

    data: str
    facts: Callable
    holds: Callable[[dict], bool | None]
    then: Callable[[dict], bool | None] = lambda x: False
    timed: str = ""


_DP, _DDP = (partial(_batch, strategy=x) for x in ("DataParallel", "DDP"))
_LESS = (lambda x: x["peak"] <= 0.6, lambda x: x["many_peak"] <= 0.6)
RULES = {
    1: Rule("calls", _DP, *_LESS),
    2: Rule("calls", _DP, partial(_above, GAIN), partial(_above, GAIN, span="many_span"), "report-000"),
    3: Rule("messages", _communication, partial(_above, 1)),
    4: Rule("counts", _counted, lambda x: False, lambda x: x["fits"]),
    5: Rule("calls", _near_linear, partial(_above, 0.9), partial(_above, 0.9, span="far"), "report-"),
    6: Rule("calls", _DDP, *_LESS),
    7: Rule("calls", partial(_sparse, density=0.05), lambda x: x["bytes"] < 0.1),
    8: Rule("counts", _counted, lambda x: x["most"] > 8),
    9: Rule("calls", partial(_divided, label="report-002-8k"), partial(_above, 100), timed="report-002-8k"),
    10: Rule("calls", partial(_divided, label="report-002-8k"), lambda x: x["like"] < 0.6),
    11: Rule("fits", partial(_longest, preset="report-003-131k"), lambda x: x["times"] < 1.1),
    12: Rule("calls", _after, lambda x: x["kept"] > 0.9),
    13: Rule("counts", _counted, lambda x: x["small"] > 17_500),
    14: Rule("calls", partial(_sparse, density=0.01), partial(_above, 0.8, span="like"), timed="report-001-density"),
    15: Rule("calls", _dilation, partial(_above, GAIN), partial(_above, 1.25, span="over"), "report-004"),
    16: Rule("fits", partial(_longest, preset="report-004-237k"), lambda x: x["times"] < 1.1),
    17: Rule("calls", _gains, partial(_above, 1), timed="report-004-8k"),
    18: Rule("counts", _counted, lambda x: x["grown"] > 3),
    19: Rule("counts", _counted, lambda x: x["sequence"] < 1, lambda x: x["grid"] < 1),
    20: Rule("calls", partial(_divided, label="report-001-8k"), lambda x: None),
    21: Rule("counts", _counted, lambda x: x["summed"] < 1e-6, lambda x: x["merged"] < 1e-6),
}  # fmt: skip


def judge(claim: int, seen: Seen) -> tuple[str, str]:
    """(the verdict, the figures that decide)."""
    rule, words = RULES[claim], CLAIMS[claim]
    try:
        if not len(rows := getattr(seen, rule.data)):
            raise Missing("nothing was measured")
        facts = rule.facts(rows)
    except Missing as why:
        return f"{NOT} ({why})", ""
    if rule.timed:  # NaN where no such call was measured against itself, and nothing is decided
        again = rows[rows["strategy"].eq(AA) & rows["label"].astype(str).str.startswith(rule.timed)]
        facts["noise"] = max(again["speedup_high"].combine(1 / again["speedup_low"], max).median(), 1)
    holds, said = rule.holds(facts), words["said"].format_map(facts)
    then = holds is not None and not holds and rule.then(facts)
    if None in (holds, then):
        return f"{NOT} ({'it cannot be told from noise' if rule.timed else words['only']})", said
    return TRUE if holds else f"{ONLY} {words['only']}" if then else FALSE, said


def answers(here: Seen, device: str, card: Seen, where: str) -> pd.DataFrame:
    """The table of claims, a row each: verdict and figures here, on this device, and those on record for `where`, of
    other devices. What is counted or predicted is the same everywhere. record: the probe, and its commit on record."""
    lines, fits = [], "frontier" if "measured" in here.fits and here.fits["measured"].any() else "predicted"
    for claim, words in CLAIMS.items():
        data, ours, theirs = RULES[claim].data, judge(claim, here), judge(claim, card)
        other = device not in getattr(card, data).get("run_device", pd.Series()).tolist()
        known = not theirs[0].startswith(NOT) and (other or ours[0].startswith(NOT))
        commit = f", {getattr(card, data)['run_commit'].iloc[0][:7]}" if known else ""
        counted = "predicted" if "predicted" in words["run"] else "counted"
        lines.append({
            "no.": claim, "claim": f"“{words['quote']}” ({words['report']})",
            "here": ". ".join(filter(None, ours)), where: ". ".join(theirs) * known, "what was run": words["run"],
            "record": {"fits": fits, "counts": counted}.get(data, "scaling") + commit,
        })  # fmt: skip
    found = pd.DataFrame(lines)
    return found if found[where].ne("").any() else found.drop(columns=where)


def linked(frame: pd.DataFrame):
    """`answers` as a Styler: numbers are links to the sections, verdicts stand out."""
    forms = dict.fromkeys(frame, lambda x: escape(x).replace("_", "_<wbr>"))
    forms["no."] = lambda x: f'<a href="#{CLAIMS[x]["section"]}">{x}</a>'

    def strong(text: str) -> str:
        room = "<div style='min-width: min(12rem, 13vw)'>" * bool(text)
        return room + "<b>{}</b>{}{}".format(*escape(text).partition(". "))

    return frame.style.format(forms | dict.fromkeys(frame.columns[2:-2], strong)).hide()


def about(frame: pd.DataFrame, claim: int) -> str:
    """A claim in its section: the question, the quote, and the answers of the table."""
    words, (_, _, *said, _, _) = CLAIMS[claim], frame[frame["no."].eq(claim)].iloc[0]
    lines = [f"**{claim}. {words['question']}** Report {words['report']}: *“{words['quote']}”*"]
    places = zip(("Here", f"On {frame.columns[3]}"), dict.fromkeys(said), strict=False)  # what is equal is said once
    said = [(place, *x.partition(". ")) for place, x in places if x]
    return "\n\n".join(lines + [f"{place}: **{verdict}**. {figures}".rstrip() for place, verdict, _, figures in said])


def tally(said: pd.Series) -> str:
    """How many of the claims have which verdict, in words."""
    kinds = {f"{TRUE}.": TRUE, ONLY: "true under a condition", FALSE: "false", NOT: NOT}
    return listed(f"**{many}** {words}" for x, words in kinds.items() if (many := said.str.startswith(x).sum()))
