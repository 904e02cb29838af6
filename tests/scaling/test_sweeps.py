"""Sweeps over gloo: rows are complete, wrong results are caught, failures are rows; and the parts they are made of."""

import contextlib
import json

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from tests.tools import refused
from workbench import BlockSparse, Dense, Dilated, attention, layouts
from workbench.harness import records
from workbench.patterns.dilated import geometric
from workbench.probes.case import Case
from workbench.probes.timing import AA
from workbench.scaling import compare, lengths, link, on_ranks, strategies, sweeps, timeline
from workbench.scaling.strategies import ONE

MINE = """
import gc

import torch
import torch.distributed as dist
import workbench as wb

def mine(q, k, v, pattern):
    return wb.distributed.attention(q, k, v, pattern, strategy="sequence")

def late(q, k, v, pattern):
    out = mine(q, k, v, pattern)
    if dist.get_rank() == 1:
        out = torch.cat([out[:, :-1], out[:, -1:] * 1.001], 1)  # the last row of all, by a thousandth
    return out

def wants_room(q, k, v, pattern):
    whole = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.shape == (1, 192, 4, 8)]
    if any(x.dtype == q.dtype for x in whole):
        raise MemoryError("no room beside one device's inputs")
    return mine(q, k, v, pattern)

def fails(q, k, v, pattern):
    if dist.get_rank() == 1:
        raise MemoryError("no room here")
    return mine(q, k, v, pattern)
"""
SIZES = {"n": 192, "heads": 4, "head_dim": 8, "mode": "fwdbwd"}
DILATED = Dilated([32, 192], [1, 2])


MODULES = {"mine_on_ranks.py": MINE}


def sweep(folder, cases, names, **options):
    """{(case, strategy): row}, None for what a row has not."""
    frame = sweeps.sweep(cases, 2, names, samples=3, folder=folder, say=None, **options)
    rows = [{x: None if y != y else y for x, y in row.items()} for row in frame.astype(object).to_dict("records")]
    return {(row["label"], row["strategy"]): row for row in rows}


@pytest.fixture(scope="module")
def rows(folder):
    cases = {
        "dilated": Case(DILATED, dtype="float64", **SIZES),
        "pair": Case(Dense(True), dtype="float32", batch=2, **SIZES),
        "blocks": Case(BlockSparse(layouts.local(1), 16), 192, 3, 8, nq=150),
    }
    return sweep(folder / "rows", cases, sweeps.STRATEGIES)


def test_every_strategy_of_every_case_is_a_row_in_order(rows):
    assert list(rows) == [(x, y) for x in ("dilated", "pair", "blocks") for y in (*sweeps.STRATEGIES, AA)]
    assert all(row["status"] in records.STATUSES for row in rows.values())


def test_a_row_that_ran_is_complete(rows):
    for strategy in (ONE, "distributed data parallel", "sequence", "heads"):
        row = rows["dilated", strategy]
        assert row["status"] == "ok" and len(row["samples_ms"]) == 3
        assert row["median_ms"] == sorted(row["samples_ms"])[1] > 0
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert row["extra_bytes"] == max(row["extra_by_card"]) > 0 and len(row["peak_by_card"]) == 2
        assert row["pairs"] == DILATED.pairs(192, 4) and all(0 <= x < 1.5 for x in row["busy"])
        assert row["world"] == (1 if strategy == ONE else 2) and row["nproc"] == 2
    assert rows["dilated", AA]["median_ms"] > 0 and rows["dilated", ONE]["speedup"] == 1


def test_inputs_are_counted_once_for_who_holds_them(rows):
    held = 4 * 192 * 4 * 8 * 8  # q, k, v and the upstream gradient
    for strategy, shares in ((ONE, (1, 0)), ("distributed data parallel", (1, 0)), ("sequence", (0.5, 0.5))):
        row = rows["dilated", strategy]
        inputs = [a - b for a, b in zip(row["peak_by_card"], row["extra_by_card"], strict=True)]
        assert inputs == [held * x for x in shares]


def test_bytes_on_the_wire_are_the_plans(rows):
    for key in (("dilated", "sequence"), ("dilated", "heads"), ("pair", "sequence"), ("blocks", "sequence")):
        row = rows[key]
        assert row["sent_bytes"] == row["planned_bytes"] and sum(row["sent_bytes"]) > 0
        assert all(0 < x < 1000 for x in row["control_bytes"])
    assert rows["pair", "distributed data parallel"]["sent_bytes"] == [0, 0]


def test_results_are_compared_row_by_row(rows):
    for key, row in rows.items():
        if row["status"] == "ok" and key[1] not in (ONE, AA):
            twice = key[0] == "pair" and "data" in key[1]
            assert row["valid"] is True and row["compared"] == row["nq"] * (1 + twice)
            assert set(row["errors"]) == ({"out"} if key[0] == "blocks" else {"out", "dq", "dk", "dv"})
    assert rows["dilated", "sequence"]["max_abs_error"] < 1e-12


def test_one_sequence_leaves_the_other_rank_idle_and_two_do_not(rows):
    alone, both = (rows[x, "distributed data parallel"] for x in ("dilated", "pair"))
    assert alone["extra_by_card"][1] == 0 and alone["busy"][1] < alone["busy"][0] / 2
    assert min(both["extra_by_card"]) > 0


def test_what_is_not_for_this_case_or_machine_says_why(rows):
    assert rows["blocks", "heads"]["status"] == "refused" and "multiples of 2" in rows["blocks", "heads"]["error"]
    assert rows["dilated", "context parallel"]["error"].startswith("torch's context parallel computes dense")
    assert rows["pair", "context parallel"]["status"] == rows["pair", "data parallel"]["status"] == "unsupported"
    assert not sweeps.failed(pd.DataFrame(list(rows.values())))


def test_each_case_may_have_strategies_of_its_own(rows, folder):
    cases = {"dilated": Case(DILATED, dtype="float64", **SIZES), "pair": Case(Dense(True), batch=2, **SIZES)}
    found = sweep(folder / "rows", cases, lambda case: ["sequence"] if case.batch == 2 else ["heads"])
    assert list(found) == [("dilated", ONE), ("dilated", "heads"), ("dilated", AA), ("pair", ONE), ("pair", "sequence"),
                           ("pair", AA)]  # fmt: skip


def test_a_table_says_what_is_noise_and_what_is_from_the_records(rows):
    def lines(**changed):
        some = [rows["dilated", x] | {"from_records": False} for x in (ONE, "sequence", AA)]
        return sweeps.table(pd.DataFrame([x | changed.get(x["strategy"], {}) for x in some])).splitlines()[1:]

    header, *every = sweeps.table(pd.DataFrame(list(rows.values()))).splitlines()
    assert header.split() == ["case", "strategy", "ms", "speed-up", "peak", "MiB", "sent", "MiB", "busy", "note"]
    assert len(every) == len(rows) and "multiples of 2" in every[list(rows).index(("blocks", "heads"))]
    noise = {"speedup_low": 0.9, "speedup_high": 1.1}
    inside, outside = ({"speedup": x, "speedup_low": x - 0.1, "speedup_high": x + 0.1} for x in (1.15, 1.5))
    one, sequence, again = lines(**{"sequence": inside, AA: noise})
    assert sequence.endswith("  within the noise (A/A)") and again.endswith("  one device against itself")
    assert "noise" not in one and not any("from the records" in x for x in (one, sequence, again))
    one, sequence, again = lines(**{"sequence": outside | {"from_records": True}, AA: noise})
    assert sequence.endswith("  from the records") and "noise" not in sequence


def test_strategies_that_have_no_room_beside_each_others_inputs_are_timed_all_the_same(folder):
    found = sweep(folder / "room", {"x": Case(DILATED, dtype="float32", **SIZES)}, ["mine_on_ranks:wants_room"])
    for row in found.values():
        assert row["status"] == "ok" and len(row["samples_ms"]) == 3 and row["median_ms"] > 0


@pytest.fixture(scope="module")
def own(folder):
    """Rows of a user's own strategies, one that is right and two that are not."""
    names = [f"mine_on_ranks:{x}" for x in ("late", "fails", "mine")]
    found = sweep(folder / "own", {"x": Case(Dense(), dtype="float32", **SIZES)}, names)
    return {strategy.partition(":")[2] or strategy: row for (_, strategy), row in found.items()}


def test_a_wrong_strategy_is_caught_and_has_no_speed(own):
    row = own["late"]
    assert row["valid"] is False and row["limiter"] == "validity" and row["error"].startswith("wrong: ")
    assert row["speedup"] is None and row["median_ms"] is None and 0 < row["max_abs_error"] < 0.01
    assert own["mine"]["valid"] is True and own["mine"]["speedup"] > 0
    wrong, right = (pd.DataFrame([own[x], own[ONE]]) for x in ("late", "mine"))
    assert sweeps.failed(wrong) and not sweeps.failed(right)


def test_a_rank_that_fails_is_a_row_and_the_sweep_goes_on(own):
    assert own["fails"]["status"] == "oom"
    assert own["fails"]["error"].startswith("rank 1 of 2: MemoryError: no room here")
    assert own["mine"]["status"] == own[AA]["status"] == "ok"
    assert sweeps.failed(pd.DataFrame([own["fails"]]))


def test_what_is_settled_is_not_measured_again(rows, folder, monkeypatch):
    asked, real = [], sweeps.ask

    def ask(pool, name, case, strategy, *more):
        asked.append((name, strategy))
        return real(pool, name, case, strategy, *more)

    monkeypatch.setattr(sweeps, "ask", ask)
    case = {"dilated": Case(DILATED, dtype="float64", **SIZES)}
    same = sweep(folder / "rows", case, sweeps.STRATEGIES)
    first = {x: y | {"from_records": True} for x, y in rows.items() if x[0] == "dilated"}
    assert asked == [] and same == first and not any(y["from_records"] for y in rows.values())
    renamed = sweep(folder / "rows", {"another name": case["dilated"]}, ["sequence"])
    assert asked == [] and {x for x, _ in renamed} == {"another name"}
    more = sweep(folder / "rows", case, ["sequence", "mine_on_ranks:mine"])
    mine = "dilated", "mine_on_ranks:mine"
    assert asked == [("facts", mine[1]), ("times", [ONE, mine[1]])]  # beside the one that a speed-up is over
    found = more.pop(mine)
    assert found["speedup"] > 0 and not found["from_records"] and all(row == first[x] for x, row in more.items())
    (journal,) = (folder / "rows").glob("*-scaling-*.jsonl")
    written = [json.loads(line) for line in journal.read_text().splitlines()]
    assert sum(line.get("label") == "dilated" for line in written) == len(same) + 1
    asked.clear()
    sweep(folder / "rows", case, ["sequence", mine[1]])
    assert asked == [("facts", mine[1]), ("times", [ONE, mine[1]])]  # it may have been edited since


@pytest.mark.parametrize("cases, names, message", [
    ({"x": Case(Dense(), 8, 1, 8)}, ["ring"], "strategy='ring': want one of one device, data parallel"),
    ({"x": Case(Dense(), 8, 1, 8), "y": Case(Dense(), 8, 1, 8, device="cuda")}, [], "want cases on one kind"),
])  # fmt: skip
def test_a_sweep_of_what_is_not_there_is_refused(folder, cases, names, message):
    refused(message, sweeps.sweep, cases, 2, names, folder=folder / "refused", say=None)
    assert not (folder / "refused").exists()


@pytest.mark.slow
def test_two_ranks_hold_a_longer_sequence_and_lengths_are_tried_once(folder):
    options = {"budget_bytes": 24 << 20, "step": 0.2, "first": 4096, "folder": folder / "long", "say": None}
    case = Case(Dilated([64], [2]), 512, 2, 16)
    one, two = lengths.longest(case, **options).astype(object).to_dict("records")
    assert (one["strategy"], two["strategy"]) == (ONE, "sequence") and one["limiter"] == two["limiter"] == "memory"
    assert 1.5 < two["ratio"] == two["n"] / one["n"] < 2.5 and one["reserved_bytes"] <= 24 << 20
    tried = records.load(folder / "long").query("stage == 'length'")
    assert not tried.duplicated(["strategy", "n"]).any() and set(tried["status"]) == {"ok", "oom"}
    lengths.longest(case, **options)
    assert len(records.load(folder / "long").query("stage == 'length'")) == len(tried)
    refused("on the CPU want the bytes of a card in software", lengths.longest, case, folder=folder / "long", say=None)


def test_a_length_leaves_nothing_to_the_next(ranks):
    cases = [Case(Dilated([64, 256], [1, 2]), n, 2, 16) for n in (4096, 9000, 4096)]
    ranks(2).pool.run("workbench.patterns.dilated:geometric", [4096])  # whose tables are kept for an equal one
    first, _, again = [ranks(2).pool.run("workbench.scaling.on_ranks:fits", [x, "sequence", 1 << 26]) for x in cases]
    assert [x["peak_bytes"] for x in first] == [x["peak_bytes"] for x in again]
    assert ranks(2).pool.run("builtins:eval", ["__import__('workbench').patterns.tables.EQUAL"]) == [{}, {}]


def test_no_case_is_begun_after_the_time_and_what_is_measured_comes_all_the_same(rows, folder, capsys):
    cases = {"dilated": Case(DILATED, dtype="float64", **SIZES), "late": Case(Dilated([64], [2]), 4096, 2, 16)}
    found = sweeps.sweep(cases, 2, ["sequence"], samples=3, within_s=0, folder=folder / "rows")
    assert found["label"].tolist() == ["dilated"] * 3 and found["from_records"].all()
    assert capsys.readouterr().out.startswith("1/2: dilated, N = 192, from the records\n2/2: late: not begun")
    late = sweeps.sweep({"late": cases["late"]}, 2, ["sequence"], samples=3, within_s=0, folder=folder / "rows")
    assert late.empty and "1/1: late: not begun" in capsys.readouterr().out
    assert sweeps.table(late) == "nothing was measured" and not sweeps.failed(late)


def test_the_link_is_measured_by_message_and_a_call_beside_it(folder):
    found = link.measure(2, [1 << 16, 1 << 20], samples=3, folder=folder / "link")
    assert found["stage"].tolist() == ["link", "link", "cost"] and (found["status"] == "ok").all()
    assert found["message_bytes"].tolist() == [1 << 16, 1 << 20, 2 * 64 * 64 * 2 * 4]  # 64 rows of k and v, two heads
    sent, cost = found[:2], found.iloc[2]
    assert (sent["bytes_per_second"] == 1000 * sent["message_bytes"] / sent["median_ms"]).all()
    rates = link.fit(found)
    moving = cost["message_bytes"] / rates.bytes_per_second + rates.latency_s * (cost["exchanges"] - 1)
    assert rates.call_s == pytest.approx(max(0, cost["median_ms"] / 1000 - moving))
    for options, message in (({"nproc": 1}, "nproc=1: want an int >= 2"), ({"nproc": 3, "sizes": [1]}, "sizes.*>= 2")):
        refused(message, link.measure, **options, folder=folder / "link")


def measured(*ms, sizes=(1 << 16, 1 << 20, 1 << 24), call=4.0):
    rows = [{"stage": "link", "status": "ok", "message_bytes": x, "median_ms": y}
            for x, y in zip(sizes, ms, strict=True)]  # fmt: skip
    cost = {"stage": "cost", "status": "ok", "message_bytes": 1, "exchanges": 1, "median_ms": call}
    return pd.DataFrame(rows + [cost] * bool(call))


def test_latency_and_bandwidth_are_those_of_the_messages():
    exact = link.fit(measured(*(1000 * (2e-4 + x / 5e9) for x in (1 << 16, 1 << 20, 1 << 24))))
    assert exact == pytest.approx((2e-4, 5e9, 4e-3)) and exact.message_s(5e9) == pytest.approx(1.0002)
    near = link.fit(measured(0.3, 0.8, 9))  # on no line: a short message counts as much as a long one
    assert [1000 * near.message_s(x) for x in (1 << 16, 1 << 20, 1 << 24)] == pytest.approx([0.3, 0.8, 9], rel=0.01)
    free = link.fit(measured(0.01, 1, 20))  # short messages that cost less than their share of a long one
    assert free.latency_s == 1e-5 and free.message_s(1 << 24) == pytest.approx(0.02)
    assert link.fit(measured(3, 2, 1)).message_s(1 << 24) == pytest.approx(0.001)  # noise alone
    assert link.fit(measured(1, 2, 3, call=None)) is None and link.fit(pd.DataFrame()) is None
    assert link.fit(measured(1, sizes=[8])) is None, "one message tells no two numbers"


def test_curves_are_modelled_and_say_so():
    case = Case(geometric(1 << 16), 1 << 16, 8, 64, "bfloat16")
    free = link.Rates(0, 1e12, 0)
    fast = link.modelled(case, 1e9, free, (2, 64))
    assert not fast["measured"].any() and fast["speedup"].to_list() == pytest.approx([2, 64], rel=1e-3)
    weak = link.modelled(case, 1e9, free, (2, 8), scaling="weak", at=lambda n: Case(geometric(n), n, 8, 64, "bfloat16"))
    assert weak["n"].tolist() == [1 << 17, 1 << 19]
    refused("scaling='both': want one of 'strong', 'weak'", link.modelled, case, 1e9, free, scaling="both")


def test_what_a_rank_computes_and_moves_is_added_and_at_best_hidden():
    case, pairs, moved = Case(Dense(), 1000, 2, 64, "bfloat16"), 2 * 500 * 1000, 2 * 500 * 2 * 64 * 2
    for speed in (1e6, 1e5):
        row = link.modelled(case, 1e6, link.Rates(0, speed, 0), [2]).iloc[0]
        assert row["seconds"] == pytest.approx(pairs / 1e6 + moved / speed)
        assert row["most"] == pytest.approx(pairs / 1e6 / max(pairs / 1e6, moved / speed))


def test_a_call_and_each_further_exchange_cost_what_was_measured():
    case = Case(Dense(), 1 << 16, 12, 64, "bfloat16")
    free, dear = (link.modelled(case, 1e12, x, (2,)).iloc[0] for x in (link.Rates(0, 1e12, 0), link.Rates(3, 1e12, 5)))
    assert free["exchanges"] == 2 and dear["seconds"] - free["seconds"] == pytest.approx(5 + 3)


def test_a_timeline_has_each_ranks_events_by_stage(folder, monkeypatch):
    monkeypatch.setattr(timeline, "SHORTEST", 0)  # on a busy machine a call waits a thousand times as long as it copies
    cases, skip = {"dilated": Case(DILATED, dtype="float64", **SIZES | {"mode": "fwd"})}, {("dilated", "heads")}
    found = timeline.measure(cases, 2, ["sequence", "heads", "context parallel"], folder=folder / "timeline", skip=skip)
    assert found["status"].tolist() == ["ok", "refused"]
    row = json.loads((next((folder / "timeline").glob("*.jsonl"))).read_text().splitlines()[1])
    assert row["stage"] == "spans" and row["events"] == found["events"][0] and len(row["events"]) == 2
    for events in row["events"]:
        assert {stage for stage, *_ in events} == {"compute", "pack", "exchange"}
        assert [x[2] for x in events] == sorted(x[2] for x in events) and all(x[3] > 0 for x in events)
        assert max(x[2] + x[3] for x in events) <= 1000 * row["milliseconds"] * 1.001
        names = {name for stage, name, *_ in events if stage == "exchange"}
        assert names == {"gloo:all_gather", "gloo:all_to_all"}, "the agreement and the rows; no barrier"
    spent = timeline.shares(found)
    assert spent["rank"].tolist() == [0, 1] and (spent["compute"] + spent["pack"] <= spent["call"]).all()
    refused("mode='fwdbwd': want 'fwd'", timeline.measure, {"x": Case(DILATED, **SIZES)})


def test_operations_inside_attention_compute_also_where_no_gradient_is_asked_for():
    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return attention(q.clone(), k, v, DILATED)

        backward = None

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        Attend.apply(*torch.randn(3, 1, 64, 2, 8).unbind())
    events = seen.profiler.kineto_results.events()
    inside = [x for x in events if x.name().startswith("workbench::")]
    assert len(inside) == 1
    begin = inside[0].start_ns()
    stages = {(stage, start >= begin) for stage, _, start, _ in timeline.of_processor(events)}
    assert stages == {("pack", False), ("compute", True)}


def test_kernels_compute_on_the_stream_that_works_longest():
    events = [("fill", 0, 7, -9, 1), ("ncclDevKernel_AllReduce", 0, 9, 0, 5), ("gemm", 0, 7, 5, 100),
              ("copy", 0, 9, 6, 4), ("nccl:all_to_all", 0, 9, 10, 30), ("ncclDevKernel_SendRecv", 0, 9, 10, 30),
              ("fill", 0, 7, 106, 1), ("ncclDevKernel_AllReduce", 0, 9, 106, 5)]  # fmt: skip
    assert timeline.of_card(events) == [
        ["compute", "gemm", 5, 100], ["pack", "copy", 6, 4], ["exchange", "ncclDevKernel_SendRecv", 10, 30],
    ]  # fmt: skip
    row = timeline.together([timeline.of_card(events), []]) | {"status": "ok", "label": "x", "strategy": "sequence"}
    assert row["milliseconds"] == 1e-4 and row["events"][0][0] == ["compute", "gemm", 0, 0.1] and not row["events"][1]
    first, idle = timeline.shares(pd.DataFrame([row])).to_dict("records")
    assert [first["exchange"], first["beside"]] == pytest.approx([3e-5, 3e-5]) and idle["compute"] == 0


def test_shards_are_rows_of_one_tensor_whoever_makes_them(monkeypatch):
    monkeypatch.setattr(strategies, "CHUNK", 16)
    drawn, real = [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda shape, **how: drawn.append(shape[1]) or real(shape, **how))
    case = Case(Dense(True), 70, 4, 8, batch=3, kv_heads=2, nq=50, seed=1)
    whole = {name: strategies.make(case, name, range(3), (range(50 if name in ("q", "upstream") else 70),))
             for name in strategies.TENSORS}  # fmt: skip
    assert {*drawn} == {16, 70 % 16, 50 % 16}, "and no rows that there are not"
    assert not torch.equal(whole["k"], whole["v"]) and not torch.equal(whole["k"][:, :16], whole["k"][:, 16:32])
    for strategy in sweeps.STRATEGIES:
        for rank in range(3):
            mine = strategies.share(strategy, case, rank, 3)
            for name, x in whole.items():
                rows = [y for part in mine.rows(name, case) for y in part]
                want = x[mine.batch.start : mine.batch.stop][:, rows]
                assert torch.equal(strategies.make(case, name, mine.batch, mine.rows(name, case)), want)


def test_shares_are_everything_once():
    case = Case(Dense(True), 24, 4, 8, batch=3)
    for strategy in sweeps.STRATEGIES:
        shares = [strategies.share(strategy, case, rank, 2) for rank in range(2)]
        held = [(b, j) for share in shares for b in share.batch for part in share.keys for j in part]
        assert sorted(held) == [(b, j) for b in range(3) for j in range(24)]


def test_long_calls_are_made_less_often(monkeypatch):
    made, real, case = [], strategies.dispatch.attention, Case(Dense(), 4, 1, 8)
    monkeypatch.setattr(strategies.dispatch, "attention", lambda *x, **y: made.append(x) or real(*x, **y))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for seconds, warm, busy in ((0, 1, 1), (1e9, 2, on_ranks.CALLS)):
            monkeypatch.setattr(on_ranks, "ENOUGH_S", seconds)
            made.clear()
            on_ranks.times(case, [ONE], 3, seconds)
            on_ranks.facts(case, ONE, False)
            assert len(made) == warm + 2 * 3 + 2 + busy
    finally:
        dist.destroy_process_group()


def test_the_union_of_intervals():
    assert on_ranks.covered([(5, 7), (0, 2), (1, 3), (6, 6), (2, 3)]) == 5 and on_ranks.covered([]) == 0


def test_long_results_are_compared_where_shards_and_segments_meet():
    case = Case(Dilated([1000, 300_000], [1, 2]), 300_000, 12, 64, nq=200_000)
    keys, queries = (set(compare.places(case, name, 2).tolist()) for name in ("dk", "out"))
    assert {0, 999, 1000, 149_999, 150_000, 299_999} <= keys and len(keys) < 100
    assert {0, 49_999, 50_000, 199_999} <= queries and max(queries) == 199_999


@pytest.mark.parametrize("causal", [False, True])
def test_torchs_context_parallel_leaves_no_trace(causal):
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import _attention

    def state():
        options, handlers = _attention._cp_options, DTensor._op_dispatcher._custom_op_handlers
        return functional.scaled_dot_product_attention, options.enable_load_balance, sorted(map(str, handlers))

    before = state()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            with contextlib.suppress(KeyError), strategies.context_parallel("cpu", causal):
                assert functional.scaled_dot_product_attention is not before[0]
                assert _attention._cp_options.enable_load_balance == causal
                raise KeyError
            assert state() == before
    finally:
        strategies._mesh.cache_clear()
        dist.destroy_process_group()


def test_geometric_segments_grow_by_four_until_one_is_all():
    for segments in ([1], [4096], [4096, 4097], [4096, 16_384, 65_536]):
        rates = [2**x for x in range(len(segments))]
        assert geometric(segments[-1], causal=True).spec() == Dilated(segments, rates, True).spec()
    assert geometric(9, first=9).segment_lengths == (9,) and geometric(3, first=1).segment_lengths == (1, 3)
