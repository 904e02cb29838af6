"""Decoding: what a token takes, and what is held for it, against the number of tokens before it."""

from collections.abc import Callable, Iterable, Mapping

import pandas as pd
import torch

from workbench.engines.cache import Cache
from workbench.harness import records
from workbench.harness.narrate import number
from workbench.harness.outcome import attempt
from workbench.patterns import Dense, Dilated, Pattern, Window, checks
from workbench.probes import timing
from workbench.probes.case import Case

WARMUP = 3  # tokens that do not count


def lineup(segments, rates) -> dict[str, Callable[[int], Pattern]]:
    """Name -> the causal pattern at N: dense, dilated, and a window of the first segment's length."""
    window, dilated = Window(segments[0], causal=True), Dilated(segments, rates, causal=True)
    return {"dense": lambda n: Dense(True), "dilated": lambda n: dilated, "window": lambda n: window}


def sweep(
    patterns: Mapping[str, Callable[[int], Pattern]], lengths: Iterable[int], sizes: Mapping, samples=9,
    profile="quick", folder=None,
) -> pd.DataFrame:  # fmt: skip
    """The last tokens before N, one by one, of every pattern at every length: a record of each.

    sizes: what else a `Case` takes (heads, head_dim, dtype, device). median_ms is of a token; held_bytes, what is held
    for the last one, see `Cache.rows`.
    """
    recorder, rows = records.start("decode", profile, folder), []
    for n in checks.listed("lengths", lengths):
        for label, make in checks.named("patterns", patterns, "a function of N that gives a pattern").items():
            case = Case(make(checks.whole("length", n, samples + WARMUP + 2)), n, nq=1, **sizes)
            rows.append(recorder.row(label=label, **time(case, samples)))
    return table(recorder.frame(rows))


@torch.no_grad()
def time(case: Case, samples: int = 9) -> dict:
    """A record's row, whatever becomes of it."""

    def work():
        cache, new = Cache(case.pattern, case.n), samples + WARMUP
        like = {"dtype": case.dtype, "device": case.device}
        k = torch.zeros(case.batch, case.n - new - 1, case.kv_heads, case.head_dim, **like)
        token = k[:, :1].repeat_interleave(case.heads // case.kv_heads, 2), k[:, :1], k[:, :1]
        cache.step(*token)
        cache.step(token[0], k, k)  # held, and not attended to
        took = timing.measure(lambda: cache.step(*token), warmup=WARMUP, samples=samples)
        return took, cache.rows(case.n - 1, case.heads, case.kv_heads)

    outcome = attempt(work)
    row = {"probe": "decode"} | case.fields() | {"backend": "cache", "status": outcome.status, "error": outcome.error}
    if outcome.status == "ok":
        took, held = outcome.result
        held *= 2 * case.head_dim * case.dtype.itemsize
        row |= {"samples_ms": took.samples_ms, "median_ms": took.median_ms, "held_bytes": held}
    return row


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of this probe with family, the pattern's class; of each pattern, device and N the newest."""
    rows = rows[(rows["probe"] == "decode") & (rows["status"] == "ok")]
    rows = rows.drop_duplicates(["label", "n", "run_device"], keep="last") if len(rows) else rows
    return rows.assign(family=[spec["pattern"] for spec in rows["pattern_spec"]])


def gain(rows: pd.DataFrame) -> str:
    """What a token of each pattern takes and holds beside one of dense attention, at the longest N, in a sentence."""
    last = rows[rows["n"] == rows["n"].max()].set_index("label")
    each = [
        f"{name} **{number(last.at['dense', 'median_ms'] / x['median_ms'])} times** as fast and "
        f"1 / {number(last.at['dense', 'held_bytes'] / max(1, x['held_bytes']))} of the bytes"
        for name, x in last.drop("dense").iterrows()
    ]
    return f"A token after {int(rows['n'].max()):,}, beside dense attention: {', '.join(each)}."
