"""Decoding: what a token takes, and what is held for it, against the number of tokens before it."""

from collections.abc import Iterable, Mapping

import pandas as pd
import torch

from workbench.engines.cache import Cache
from workbench.harness import records
from workbench.harness.narrate import times
from workbench.harness.outcome import attempt
from workbench.patterns import Dense, Dilated, Pattern, Window, checks
from workbench.probes import timing
from workbench.probes.case import Case

WARMUP = 3  # tokens that do not count


def lineup(segments, rates) -> dict[str, Pattern]:
    """Name -> a causal pattern: dense, dilated, and a window of the first segment's length."""
    dilated, window = Dilated(segments, rates, causal=True), Window(segments[0], causal=True)
    return {"dense": Dense(causal=True), "dilated": dilated, "window": window}


def sweep(
    patterns: Mapping[str, Pattern], lengths: Iterable[int], sizes: Mapping, samples=9, profile="quick", folder=None
):
    """The last tokens before N, one by one, of every pattern at every length: a record of each, as `table` gives them.

    sizes: what else a `Case` takes (heads, head_dim, dtype, device). median_ms is of a token; held_bytes, what is held
    for the last one, see `Cache.rows`.
    """
    recorder, rows = records.start("decode", profile, folder), []
    for n in checks.listed("lengths", lengths):
        n = checks.whole("length", n, samples + WARMUP + 2)
        rows += [recorder.row(label=x, **time(Case(p, n, nq=1, **sizes), samples)) for x, p in patterns.items()]
    return table(recorder.frame(rows))


@torch.no_grad()
def time(case: Case, samples: int = 9) -> dict:
    """A record's row, whatever becomes of it."""

    def work():
        # no max_len: on a card a sample may be several steps
        cache, before = Cache(case.pattern), case.n - samples - WARMUP
        shape = case.batch, before - 1, case.kv_heads, case.head_dim
        k = torch.zeros(shape, dtype=case.dtype, device=case.device)
        token = k[:, :1].repeat_interleave(case.heads // case.kv_heads, 2), k[:, :1], k[:, :1]
        cache.step(*token)
        cache.step(token[0], k, k)  # held, and not attended to
        took = timing.measure(lambda: cache.step(*token), warmup=WARMUP, samples=samples)
        held = cache.rows(case.n - 1, case.heads, case.kv_heads) * 2 * case.head_dim * case.dtype.itemsize
        return {"samples_ms": took.samples_ms, "median_ms": took.median_ms, "held_bytes": held}

    outcome = attempt(work)
    row = {"probe": "decode"} | case.fields() | {"backend": "cache", "status": outcome.status, "error": outcome.error}
    return row | (outcome.result or {})


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of this probe that ran, of each label, N and device the newest, with family, q10_ms and q90_ms."""
    rows = rows[(rows["probe"] == "decode") & (rows["status"] == "ok")]
    rows = rows.drop_duplicates(["label", "n", "run_device"], keep="last") if len(rows) else rows
    low, high = (rows["samples_ms"].map(lambda s, q=q: float(pd.Series(s).quantile(q))) for q in (0.1, 0.9))
    return rows.assign(family=[spec["pattern"] for spec in rows["pattern_spec"]], q10_ms=low, q90_ms=high)


def gain(rows: pd.DataFrame) -> str:
    """What a token of each pattern takes and holds beside one of dense attention, at the longest N, in a sentence."""
    last = rows[rows["n"] == rows["n"].max()].set_index("label")[["median_ms", "held_bytes"]]
    each = [(f"{name} is {times(time)} fast" if time >= 1 else f"{name} takes {times(1 / time)} long")
            + f" and holds {1 / held:.1%} of the bytes"
            for name, time, held in (last.loc["dense"] / last.drop("dense")).itertuples()]  # fmt: skip
    return f"A token after {int(rows['n'].max()):,}, beside dense attention: {', '.join(each)}."
