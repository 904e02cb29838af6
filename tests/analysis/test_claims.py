"""The verdicts on made-up measurements: each one that a rule can give, and what a machine lacks."""

import functools
import re

import pandas as pd
import pytest

import workbench as wb
from workbench.analysis import claims
from workbench.analysis.claims import FALSE, NOT, ONLY, TRUE, Seen
from workbench.probes import catalog
from workbench.report import notebooks

DP, DDP, ONE, OURS = "data parallel", "distributed data parallel", "one device", "sequence"
counts = functools.cache(claims.counts)


def call(label, strategy, n=1024, batch=1, ms=10.0, speedup=1.0, peak=40, busy=(1, 1), status="ok", **more):
    """A row of a sweep. peak, in MiB, has inputs of 12."""
    row = {"label": label, "strategy": strategy, "n": n, "batch": batch, "mode": "fwd", "nproc": 2, "status": status}
    row |= {"median_ms": ms, "samples_ms": [0.9 * ms, ms, 1.1 * ms], "speedup": speedup, "valid": None, "error": None}
    row |= {"speedup_low": 0.98 * speedup, "speedup_high": 1.02 * speedup, "peak_bytes": peak << 20, "pairs": 100}
    row |= {"extra_bytes": (peak - 12) << 20, "busy": list(busy), "pattern": "a pattern", "sent_bytes": [1 << 20, 0]}
    return row | {"errors": {"dq": [1e-7, 0.25]}, "pattern_spec": None} | more


def judged(claim, *rows, **fields):
    """(the verdict's kind, its words) by calls, as fast as themselves where no "A/A" is given, or by other fields."""
    again = [call(x, "A/A", speedup_low=1, speedup_high=1) for x in {x["label"] for x in rows}]
    again = [] if any(x["strategy"] == "A/A" for x in rows) else again
    verdict, figures = claims.judge(claim, Seen(calls=pd.DataFrame([*rows, *again]), **fields))
    kind = next(x for x in (ONLY, TRUE, FALSE, NOT) if verdict.startswith(x))
    return kind, f"{verdict}. {figures}"


def batches(strategy, one, several):
    """One sequence and several: (speed-up, peak) each."""
    case, sizes = "report-000-16k", ({"n": 2048, "batch": 1}, {"n": 1024, "batch": 2})
    ours = [call(case, strategy, speedup=x, peak=y, **size) for (x, y), size in zip((one, several), sizes, strict=True)]
    return [call(case, ONE, **size) for size in sizes] + ours


@pytest.mark.parametrize("claim, strategy", [(1, DP), (6, DDP)])
@pytest.mark.parametrize("one, several, kind", [(40, 40, FALSE), (40, 20, ONLY), (20, 20, TRUE)])
def test_memory_of_a_divided_batch(claim, strategy, one, several, kind):
    assert judged(claim, *batches(strategy, (1, one), (1, several)))[0] == kind


@pytest.mark.parametrize("one, several, kind", [(1.0, 1.0, FALSE), (1.0, 1.9, ONLY), (1.3, 1.9, TRUE), (1.1, 2.0, NOT)])
def test_time_of_a_divided_batch(one, several, kind):
    got, words = judged(2, *batches(DP, (one, 40), (several, 40)))
    assert got == kind and f"is {one:.2f} times as fast" in words


def test_what_a_machine_lacks_is_said_with_its_reason():
    refused = call("report-000-16k", DP, status="unsupported", error="DataParallel copies between CUDA cards")
    assert judged(1, refused) == (NOT, f"{NOT} (DataParallel copies between CUDA cards). ")
    assert judged(9, call("report-002-8k", ONE)) == (NOT, f"{NOT} (it takes two ranks). ")
    assert all(judged(claim)[0] == NOT for claim in claims.CLAIMS)


def test_efficiency():
    pairs = (1.9, 2), (1.5, 2), (0.5, 1.5), (1.82, 2)
    rows = [[call("report-002-8k", OURS, speedup=x) for x in pair] for pair in pairs]
    assert [judged(5, *x)[0] for x in rows] == [TRUE, ONLY, FALSE, NOT]
    got, words = judged(5, *rows[2], call("dense", OURS, n=1 << 17, speedup=1.9, kind="dense"))
    assert got == ONLY and all(x in words for x in ("0 of 2 calls of up to 1,024", "dense, 131,072 tokens: 1.90"))


def test_communication():
    for mb_s, spread, kind in ((1000, 1, FALSE), (0.1, 1, TRUE), (0.1, 1e4, NOT)):
        sent = [{"message_bytes": x, "median_ms": None, "samples_ms": [x / mb_s / 1000 / y for y in (1, spread)]}
                for x in (1 << 16, 1 << 20)]  # fmt: skip
        rows = pd.DataFrame(sent).assign(stage="link", status="ok")
        assert judged(3, messages=rows)[0] == kind
    assert judged(3, messages=rows[:1])[0] == NOT


@pytest.mark.parametrize("claim, ours, kind", [
    (9, {"speedup": 0.5}, FALSE), (9, {"speedup": 0.005}, TRUE), (9, {"speedup": 0.01}, NOT),
    (10, {"peak": 30}, FALSE), (10, {"peak": 20}, TRUE), (20, {}, NOT),
    (17, {"speedup": 1.1}, FALSE), (17, {"speedup": 0.99}, NOT), (17, {"speedup": 0.6}, TRUE),
])  # fmt: skip
def test_a_divided_sequence(claim, ours, kind):
    labels = ["report-001-8k", "report-002-8k", "report-004-8k-dilated"]
    rows = [call(x, strategy, **(ours if strategy == OURS else {})) for x in labels for strategy in (ONE, OURS)]
    rows += [call("report-004-8k", strategy) for strategy in (ONE, OURS)]
    assert judged(claim, *rows)[0] == kind
    assert judged(claim, *rows, call("another", "A/A"))[0] == (NOT if claims.RULES[claim].timed else kind)


@pytest.mark.parametrize("few, memory, time", [
    ({"ms": 9.2, "peak": 40}, FALSE, TRUE), ({"ms": 0.5, "peak": 13}, TRUE, FALSE),
    ({"ms": 9.2, "samples_ms": [1, 9, 99]}, FALSE, NOT),
])  # fmt: skip
def test_sparsity(few, memory, time):
    rows = [call("report-001-density-1", ONE), *(call(f"report-001-density-{x}", ONE, **few) for x in (0.05, 0.01))]
    assert (judged(7, *rows)[0], judged(14, *rows)[0]) == (memory, time)
    busy = call("report-001-density-1", "A/A", speedup_low=0.5)
    assert (judged(7, *rows, busy)[0], judged(14, *rows, busy)[0]) == (memory, FALSE if time == FALSE else NOT)


@pytest.mark.parametrize("two, equal, kind", [(2.0, 2.0, ONLY), (2.0, 6.0, TRUE), (10.0, 10.0, FALSE)])
def test_dilation(two, equal, kind):
    specs = {"rate-1": (10.0, [64], [1]), "rate-2": (two, [64], [2]), "quarters": (equal, [16], [1])}
    rows = [call(f"report-004-{x}", ONE, ms=ms, pattern_spec=catalog.Dilated(*how, heads="partition").spec())
            for x, (ms, *how) in specs.items()]  # fmt: skip
    got, words = judged(15, *rows)
    assert got == kind and "50% of the rows" in words
    got, words = judged(15, *rows, call("report-004-rate-1", "A/A", speedup_low=0.1))
    assert got == NOT and words.startswith(f"{NOT} (it cannot be told from noise). Rate 2 is")


def test_what_stays_is_not_the_peak_and_the_longest():
    x = call("report-003-131k", ONE)
    assert [judged(12, x | {"extra_bytes": y})[0] for y in (28 << 20, -(80 << 20))] == [FALSE, TRUE]
    for claim, preset in ((11, "report-003-131k"), (16, "report-004-237k")):
        fields = catalog.report(preset).fields() | {"measured_n": None, "predicted_ms": 72e6}
        fits = [pd.DataFrame([fields | {"n": times * fields["n"]}]) for times in (1, 3)]
        (true, words), (false, _) = (judged(claim, fits=x) for x in fits)
        assert (true, false) == (TRUE, FALSE) and "by memory alone, as predicted (a call would take 20 hours)" in words
        assert "predicted" not in judged(claim, fits=fits[1].assign(measured_n=1))[1]


def test_what_is_counted_does_not_depend_on_a_machine():
    kinds = {claim: judged(claim, counts=counts(16))[0] for claim in (4, 8, 13, 18, 19, 21)}
    assert kinds == {4: ONLY, 8: FALSE, 13: FALSE, 18: FALSE, 19: ONLY, 21: ONLY}
    worse = counts(16) | {"touched": counts(16)["touched"].assign(**{"percent of the blocks": [1, 2, 1, 2]})}
    assert judged(19, counts=worse)[0] == FALSE


def test_the_table_leads_to_sections_and_what_the_map_calls_ours_is_there():
    card = claims.recorded(["h200x1", "h200x2"])
    found = claims.answers(Seen(counts=counts(16)), "a CPU", card, "H200")
    assert found["no."].tolist() == [*claims.RULES] == [*claims.CLAIMS] == [*range(1, 22)]
    assert found.set_index("no.").loc[6, "H200"].startswith(ONLY)  # two H200s are on record
    html = claims.linked(found).to_html()
    nb = notebooks.read(notebooks.find(["06"])[0])
    said = "\n".join(notebooks.source(x) for x in nb["cells"])
    for claim, words in claims.CLAIMS.items():
        assert f'<a href="#{words["section"]}">{claim}</a>' in html
        assert words["section"].replace("-", " ") in said.lower().replace(",", "").replace("`", "")
        assert claims.about(found, claim).startswith(f"**{claim}. {words['question']}**")
    assert "Here: **not measurable here (nothing was measured)**.\n" in claims.about(found, 6)
    assert "H200" not in claims.answers(Seen(*card[:3], counts(16)), "NVIDIA H200", card, "H200")
    assert claims.tally(found["here"]) == "**3** true under a condition, **3** false and **15** not measurable here"
    (text,) = (x for x in map(notebooks.source, nb["cells"]) if x.startswith("## From their names"))
    names = set(re.findall(r"\bwb\.([\w.]+)", text))
    assert len(names) > 10 and all(functools.reduce(getattr, name.split("."), wb) for name in names)
