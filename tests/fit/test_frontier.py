import importlib
import sys
from unittest import mock

import pandas as pd
import pytest

import workbench as wb
from tests import tools
from workbench.fit import cards, estimate, frontier, trial
from workbench.harness import processes, records
from workbench.harness.outcome import Outcome
from workbench.probes.case import Case

MIB = 1 << 20
HERE = """
import os, signal, time
import numpy, torch
from torch.nn.functional import scaled_dot_product_attention

LONG = 1536

def attention(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)

def past(fault):
    def call(q, k, v):
        out = attention(q, k, v)
        return fault(out) if q.shape[1] > LONG else out

    return call

def raises(error):
    raise error

wrong = past(lambda out: torch.cat([out[:, :-1], out[:, -1:] + 1], 1))
endless = past(lambda out: [numpy.ones(8 << 20, numpy.uint8) for _ in iter(int, 1)])
asleep = past(lambda out: time.sleep(600))
killed = past(lambda out: os.kill(os.getpid(), signal.SIGKILL))
launch = past(lambda out: raises(RuntimeError("CUDA error: invalid configuration argument")))
refused = past(lambda out: raises(ValueError("want at most 1536")))
"""
MODULES = {"mine.py": HERE}


def toy(monkeypatch, bytes_=1000.0, milliseconds=None, fails=None):
    """A trace of a program that reserves so many bytes a token; returns the lengths that are asked for."""
    asked = []

    def trace(case, card="h100"):
        asked.append(case.n)
        if fails:
            fails(case.n)
        total, time = int(bytes_ * case.n), milliseconds and milliseconds(case.n)
        events = [estimate.Event(1, total, "x")]
        return estimate.Estimate("h100", "toy", total // 2, total, total, total, total, time, events)

    monkeypatch.setattr(estimate, "trace", trace)
    return asked


class Card:
    """Answers as fresh processes whose probes reserve so many bytes a token; scripted(n) may say something else."""

    def __init__(self, bytes_=1000.0, scripted=lambda n, times: None):
        self.bytes_, self.scripted, self.asked = bytes_, scripted, []

    def run(self, function, arguments, timeout_s, memory_bytes):
        case, budget, _ = arguments
        self.asked.append(case.n)
        said = self.scripted(case.n, self.asked.count(case.n))
        if isinstance(said, Outcome):
            return said
        total = int(self.bytes_ * case.n)
        if total > budget:
            return Outcome("oom", "CUDA out of memory")
        found = {"backend": "toy", "peak_bytes": total, "reserved_bytes": total, "extra_bytes": total // 2}
        found |= {"median_ms": 1.0, "samples_ms": [1.0], "valid": True, "error": None}
        return Outcome("ok", result=found | (said or {}))


CASE = Case(wb.Dense(), 1024, 2, 16, device="cuda")
BUDGET = 1000 * MIB
TRUE = BUDGET // 1000 // 128 * 128


def search(case=CASE, answering=processes, **options):
    with mock.patch.object(processes, "run", answering.run):
        return frontier.search(case, **({"budget_bytes": BUDGET, "say": None, "card": "h100"} | options))


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_COMMIT", "0123456789abcdef")
    return lambda: records.start("frontier", "quick", tmp_path)


def test_a_prediction_takes_few_traces(monkeypatch):
    asked = toy(monkeypatch)
    row = search()
    assert TRUE * 0.9995 < row["n"] <= TRUE and len(asked) <= 6
    assert (row["predicted_n"], row["measured_n"], row["measured"], row["probes"]) == (row["n"], None, False, 0)
    assert (row["limiter"], row["predicted_limiter"], row["status"], row["error"]) == ("memory", "memory", "ok", None)
    assert row["peak_bytes"] == row["predicted_bytes"] == 1000 * row["n"] and row["extra_bytes"] == 500 * row["n"]
    found = {"nq": row["n"], "budget_bytes": BUDGET, "card": "h100", "backend": "toy", "probe": "frontier"}
    assert row | found == row


def test_what_limits_a_prediction_has_a_name(monkeypatch):
    toy(monkeypatch, milliseconds=lambda n: (n / 1000) ** 2 + n / 100)
    rows = [search(seconds=10.8, step=0.1, budget_bytes=x * BUDGET) for x in (1, 3, 9)]
    assert {(x["limiter"], x["n"]) for x in rows} == {("time", 98_944)} and rows[0]["predicted_ms"] <= 10_800
    toy(monkeypatch)
    row = search(limit_n=100_100)
    assert (row["limiter"], row["n"]) == ("search", 100_096)  # a multiple of the grain

    def refused(n):
        if n > 200_000:
            raise ValueError(f"{n} is more than a grid has")

    toy(monkeypatch, fails=refused)
    row = search()
    assert row["limiter"] == "launch" and 199_800 < row["n"] <= 200_000 and "than a grid has" in row["error"]
    toy(monkeypatch, bytes_=1e10)
    assert (search()["n"], search()["limiter"]) == (0, "memory")


def test_memory_that_is_given_back_counts_as_free(monkeypatch):
    def trace(case, card):  # two tensors that are never there together, but of two sizes
        events = [estimate.Event(*x, "") for x in ((1, 300 * case.n), (1, -1), (2, 600 * case.n))]
        total = 900 * case.n
        return estimate.Estimate("h100", "toy", 0, 600 * case.n, total, total, total, None, events)

    monkeypatch.setattr(estimate, "trace", trace)
    assert BUDGET / 600 * 0.995 < search()["n"] <= BUDGET / 600


@pytest.mark.parametrize("error, status, said", [
    (estimate.CannotTrace("it looks at data"), "refused", "CannotTrace: it looks at data"),
    (ValueError("not with 3 heads"), "refused", "not with 3 heads"),
    (RuntimeError("a bug"), "killed", "RuntimeError: a bug"),
])  # fmt: skip
def test_what_cannot_be_predicted_says_why_and_is_measured_only(monkeypatch, error, status, said):
    def fails(n):
        raise error

    toy(monkeypatch, fails=fails)
    row = search()
    assert (row["n"], row["predicted_n"], row["limiter"], row["status"]) == (None, None, None, status)
    assert row["error"] == row["predicted_error"] == said
    card = Card()
    row = search(measure=True, answering=card)
    assert (row["status"], row["limiter"], row["predicted_n"], row["predicted_error"]) == ("ok", "memory", None, said)
    assert TRUE * 0.995 < row["n"] <= TRUE and len(card.asked) <= 6


def test_a_card_gives_its_memory_less_its_context():
    case = Case(wb.Dense(), 1024, 12, 64, "float16", "torch", device="cuda")
    small, large = (search(case, card=x, budget_bytes=None, seconds=6000) for x in ("gtx1080", "h100"))
    gtx = cards.find("gtx1080")
    assert small["budget_bytes"] == gtx.total_bytes - gtx.context_bytes
    assert small["limiter"] == large["limiter"] == "memory" and 8 < large["n"] / small["n"] < 12
    assert small["predicted_bytes"] <= small["budget_bytes"]
    assert (small["kernel"], large["kernel"]) == ("efficient", "cudnn")
    tools.refused("gtx1080", search, case, card="gtx1081")


def test_queries_follow_the_keys_unless_they_are_fewer(monkeypatch):
    toy(monkeypatch)
    few = Case(wb.Dense(), 1024, 2, 16, device="cuda", nq=16)
    assert search(few)["nq"] == 16 and search()["nq"] == search()["n"]
    row = search(lambda n: Case(wb.Neighborhood((n // 128, 128), 4), n, 2, 16, device="cuda"))
    assert row["pattern_spec"]["shape"] == [row["n"] // 128, 128]


@pytest.mark.parametrize(
    "options", [{"grain": 0}, {"limit_n": 100}, {"step": 0}, {"step": 1}, {"seconds": 0}, {"budget_bytes": None},
                {"budget_bytes": 0}, {"budget_bytes": float("nan")}, {"budget_bytes": float("inf")}],
)  # fmt: skip
def test_arguments_that_mean_nothing_are_refused(options):
    tools.refused(next(iter(options)), search, Case(wb.Dense(), 1024, 2, 16), card=None, **options)


def test_where_the_prediction_is_right_two_probes_do(monkeypatch, recorder):
    toy(monkeypatch)
    card, said = Card(), []
    journal = recorder()
    row = search(measure=True, answering=card, recorder=journal, say=said.append)
    assert row["measured_n"] == row["predicted_n"] == row["n"] and row["probes"] == len(card.asked) == 2
    assert (row["limiter"], row["measured"], row["valid"], row["median_ms"]) == ("memory", True, True, 1.0)
    assert len(said) == 3 and "works" in said[0] and "oom" in said[1] and "limited by memory (0.98 GiB)" in said[2]
    frame = records.load(journal.path)
    assert frame.stage.tolist() == ["probe", "probe", "search"] and frame.status.tolist() == ["ok", "oom", "ok"]
    assert frame.n.tolist() == [row["n"], card.asked[1], row["n"]] and set(frame.probe) == {"frontier"}


def test_a_doubtful_probe_is_repeated_once(monkeypatch):
    toy(monkeypatch)
    for status in ("killed", "timeout"):
        card = Card(scripted=lambda n, times, status=status: Outcome(status, "bad luck") if times == 1 else None)
        row = search(measure=True, answering=card)
        assert (row["n"], row["limiter"], row["status"]) == (row["predicted_n"], "memory", "ok")
        assert row["probes"] == 2 and len(card.asked) == 4
    card = Card(scripted=lambda n, _: Outcome("killed", "ended by signal 11") if n > 500_000 else None)
    row = search(measure=True, answering=card)
    assert (row["n"], row["limiter"], row["status"], row["error"]) == (None, None, "killed", "ended by signal 11")
    assert len(card.asked) == 2


def test_a_time_out_is_a_limit_when_it_is_repeated(monkeypatch):
    toy(monkeypatch)
    card = Card(scripted=lambda n, _: Outcome("timeout", "too long") if n > 500_000 else {"median_ms": n / 100})
    row = search(measure=True, answering=card, seconds=5)
    assert row["limiter"] == "time" and 450_000 < row["n"] <= 500_000 and row["status"] == "ok"
    assert all(card.asked.count(n) == 1 + (n > 500_000) for n in card.asked)
    card = Card(scripted=lambda n, _: {"median_ms": n / 100})  # and one that ends, but late
    row = search(measure=True, answering=card, seconds=5)
    assert row["limiter"] == "time" and 450_000 < row["n"] <= 500_000 and row["median_ms"] <= 5000


def test_a_refusal_at_every_length_ends_the_search(monkeypatch):
    toy(monkeypatch)
    card = Card(scripted=lambda n, _: Outcome("refused", "not on this machine"))
    row = search(measure=True, answering=card)
    assert (row["n"], row["limiter"], row["status"], row["error"]) == (None, None, "refused", "not on this machine")
    assert len(card.asked) == 1


@pytest.mark.parametrize("limit", [None, 300_000], ids=["memory", "time"])
def test_interrupted_anywhere_and_run_again_it_gives_the_same_row(monkeypatch, tmp_path, limit):
    monkeypatch.setenv("WORKBENCH_COMMIT", "abc")
    toy(monkeypatch, bytes_=1050)

    def scripted(n, _):
        return Outcome("timeout", "too long") if limit and n > limit else None

    whole = Card(scripted=scripted)
    want = search(measure=True, answering=whole, recorder=records.start("frontier", "quick", tmp_path / "whole"))
    assert (total := len(whole.asked)) > 4
    for stop in range(total):
        folder, card = tmp_path / str(stop), Card(scripted=scripted)

        def interrupt(_, card=card, stop=stop):
            if len(card.asked) > stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            search(measure=True, answering=card, recorder=records.start("frontier", "quick", folder), say=interrupt)
        journal = next(folder.iterdir())
        with open(journal, "a") as file:
            file.write('{"kind": "row", "n": 12')  # what a killed process leaves
        got = search(measure=True, answering=card, recorder=records.start("frontier", "quick", folder))
        assert got == want
        assert card.asked == whole.asked  # nothing twice but what was asked twice at first
        again = search(measure=True, answering=card, recorder=records.start("frontier", "quick", folder))
        assert again == want and len(card.asked) == total
        assert (records.load(journal).stage == "search").sum() == 1


def test_a_sweep_is_a_table_and_is_not_measured_again(monkeypatch, tmp_path):
    toy(monkeypatch)
    card, said = Card(), []
    monkeypatch.setattr(processes, "run", card.run)
    cases = {"two heads": CASE, "four": Case(wb.Dense(), 1024, 4, 16, device="cuda")}
    options = {"measure": True, "folder": tmp_path, "say": said.append}
    tables = [frontier.sweep(cases, ["h100"], (BUDGET, BUDGET // 2), **options) for _ in range(2)]
    pd.testing.assert_frame_equal(*tables)
    assert tables[0].label.tolist() == ["two heads"] * 2 + ["four"] * 2 and len(card.asked) == 8
    assert said[0].startswith("1/4: two heads")
    assert frontier.sweep(cases, ["h100"], (BUDGET,), say=None).measured.tolist() == [False, False]


def test_gradients_that_were_not_checked_do_not_count_as_valid(monkeypatch):
    case = Case(wb.Dense(), 128, 1, 16, "float32", "torch", "fwdbwd")
    assert trial.call(case, 1 << 30, 60)["valid"] is True
    monkeypatch.setitem(trial.PAIRS, "cpu", 0)
    row = trial.call(case, 1 << 30, 60)
    assert row["valid"] is None and row["error"].startswith("dk and dv not checked; right at")


@pytest.mark.parametrize("how, status, limiter, said", [
    ("attention", "ok", "search", None), ("wrong", "ok", "validity", "wrong: out of sequence 0"),
    ("endless", "ok", "memory", "its cap"), ("asleep", "ok", "time", "more than "),
    ("killed", "killed", None, "SIGKILL"), ("launch", "ok", "launch", "invalid configuration"),
    ("refused", "ok", "launch", "want at most 1536"),
])  # fmt: skip
def test_a_fault_is_what_it_is(monkeypatch, folder, how, status, limiter, said):
    monkeypatch.setattr(trial, "SLACK_BYTES", 256 * MIB)  # of the first call of a CUDA build of torch
    monkeypatch.setattr(frontier, "FIRST", 1024)
    toy(monkeypatch, fails=lambda n: (_ for _ in ()).throw(estimate.CannotTrace("it sleeps")))
    case = Case(wb.Dense(), 1024, 1, 8, backend=f"mine:{how}")
    seconds = 4 * tools.slowness() if how == "asleep" else 3600
    options = {"budget_bytes": 16 * MIB, "limit_n": 2048, "grain": 512, "seconds": seconds}
    row = search(case, card=None, measure=True, **options)
    assert (row["status"], row["limiter"]) == (status, limiter), row
    assert row["n"] == (2048 if how == "attention" else 1024 if how == "killed" else 1536)
    assert said is None and row["error"] is None or said in row["error"]


@pytest.mark.parametrize("case", [
    Case(wb.Dense(), 1024, 16, 128, backend="sdpa"), Case(wb.Dilated([128, 256], [1, 2]), 1024, 4, 32),
    Case(wb.Dilated([128, 256], [1, 2]), 1024, 4, 32, "bfloat16", mode="fwdbwd"),
    Case(wb.Dense(), 1024, 4, 32, mode="fwdbwd"), Case(wb.Dilated([128, 256], [1, 2]), 1024, 2, 32, "float64"),
    Case(wb.BlockSparse(wb.layouts.local(1), causal=True), 1024, 4, 64),
], ids=["dense by torch", "dilated", "dilated bfloat16 fwdbwd", "dense fwdbwd", "dilated float64", "masked blocks"]
)  # fmt: skip
def test_a_card_in_software_holds_what_was_predicted(case):
    row = search(case, card=None, budget_bytes=22 * MIB, measure=True, seconds=120)
    assert row["limiter"] == row["predicted_limiter"] == "memory" and row["valid"]
    assert row["measured_n"] == row["predicted_n"], row


@pytest.mark.parametrize("given", ["by name", "itself"])
def test_a_function_of_the_users_is_measured_again(monkeypatch, folder, tmp_path, recorder, given):
    """It may have been edited since."""
    monkeypatch.setattr(frontier, "FIRST", 512)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    backend = "mine:attention" if given == "by name" else importlib.import_module("mine").attention
    case = Case(wb.Dense(), 512, 1, 8, backend=backend)
    options = {"budget_bytes": 16 * MIB, "limit_n": 512, "measure": True, "card": None}
    for lines in (2, 4):
        assert search(case, **options, recorder=recorder())["limiter"] == "search"
        assert len(records.load(tmp_path)) == lines


def test_what_was_measured_before_or_comes_too_late_is_only_predicted(monkeypatch, tmp_path):
    monkeypatch.setattr(frontier, "probed", lambda *_: pytest.fail("measured"))
    case = Case(wb.Dense(), 1024, 2, 16, backend="sdpa")
    asked = {"cases": {"dense, sdpa": case}, "budgets": [1 << 24, 1 << 25], "say": None}
    known = frontier.sweep(**asked)
    known = known.assign(measured_n=known["n"] - 128, limiter="memory", median_ms=1.0, run_commit="abc")
    rows = frontier.sweep(**asked, measure=True, known=known, folder=tmp_path)
    assert rows["measured_n"].tolist() == known["measured_n"].tolist()
    assert not rows["measured"].any() and set(rows["run_commit"]) == {"abc"}
    assert rows["predicted_n"].tolist() == known["predicted_n"].tolist()
    late = frontier.sweep(**asked, measure=True, known=known.assign(heads=4), within_s=-1, folder=tmp_path)
    assert late["measured_n"].isna().all() and late["predicted_n"].tolist() == known["predicted_n"].tolist()
