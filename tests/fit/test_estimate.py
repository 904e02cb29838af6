"""Estimates without a card: the four numbers, what is alive at the peak, and modelled time."""

import pytest
import torch

import workbench as wb
from tests import efficiency
from workbench import patterns
from workbench.fit import cards, estimate, frontier, workspace
from workbench.harness import records
from workbench.patterns.dilated import PAPER
from workbench.probes.case import Case


def longnet(n=131_072, mode="fwd", **changed):
    sizes = {"heads": 12, "head_dim": 64, "dtype": "bfloat16", "backend": "torch", "mode": mode} | changed
    return Case(wb.Dilated(PAPER, (1, 2, 4, 6, 12)), n, **sizes)


def test_four_numbers_in_order():
    found = estimate.trace(longnet())
    assert found.inputs_bytes == 3 * 131_072 * 12 * 64 * 2
    assert found.inputs_bytes < found.requested_bytes <= found.allocated_bytes <= found.reserved_bytes
    assert found.device_bytes == found.reserved_bytes + cards.find("h100").context_bytes
    assert sum(nbytes for _, nbytes in found.at_peak) == found.requested_bytes
    assert {"q", "k", "v", "out", "lse"} <= {name for name, _ in found.at_peak}


def test_cards_of_other_habits_are_traced_apart():
    """cuDNN is not there before Hopper, and its backward holds dq in float32; flash holds it too, in rounded sizes."""
    dense = Case(wb.Dense(), 8192, 12, 64, "bfloat16", "torch", "fwdbwd")
    assert any("cudnn" in event.name for event in estimate.trace(dense, "h100").events)
    assert any("flash" in event.name for event in estimate.trace(dense, "a100-80gb").events)


@pytest.mark.parametrize("heads, n, parts", [(2, 3001, 5), (12, 8192, 0)])
def test_flash_splits_its_keys_where_there_are_few_queries(heads, n, parts):
    """Measured on an H100: 2 heads x 3001 x 80 hold five parts, of 96 columns and an lse each."""
    q = torch.empty(1, heads, n, 80, device="meta")
    assert sum(workspace.flash(q, q, card=cards.find("h100"))) == parts * 4 * heads * n * 97


@pytest.mark.parametrize("n, heads, head_dim, measured", [
    (65_536, 12, 64, 1_821_376_512), (16_384, 16, 128, 1_211_105_280), (131_072, 2, 32, 337_707_008),
    (4096, 12, 64, 113_836_032), (32_768, 4, 128, 605_552_640), (3001, 2, 80, 18_560_456),
])  # fmt: skip
def test_the_memory_efficient_backward_takes_what_was_measured(n, heads, head_dim, measured):
    """On an H100, float32: q, k, v, the gradient of out, out, lse, three gradients and scratch."""
    found = estimate.trace(Case(wb.Dense(), n, heads, head_dim, "float32", "auto", "fwdbwd"), "h100")
    assert found.requested_bytes == measured


def test_eager_attention_takes_what_was_measured():
    """On an H100: a copy of the scores in softmax's backward, and a cuBLAS workspace for each of two threads."""
    sizes = {"batch": 8, "heads": 32, "head_dim": 128, "dtype": "bfloat16", "mode": "fwdbwd"}
    found = estimate.trace(Case(wb.Dense(), 816, backend="eager", **sizes), "h100")
    assert found.requested_bytes == 1_858_600_960


def test_time_is_modelled_where_the_execution_was_measured():
    dense = Case(wb.Dense(), 65_536, 12, 64, "bfloat16", "cudnn")
    here, faster = (estimate.trace(dense, card).milliseconds for card in ("h100", "b200"))
    assert 20 < here < 40 and faster < here
    last = Case(wb.Dense(), 131_072, 12, 64, "bfloat16", "fa4", "fwdbwd")
    assert estimate.trace(last, "h200").milliseconds == pytest.approx(349, rel=0.02)  # measured there, by runs
    assert all(estimate.trace(longnet(**x)).milliseconds is None for x in ({"dtype": "float64"}, {"batch": 0}))


def test_the_efficiency_table_is_what_the_committed_records_give(tmp_path, monkeypatch):
    shipped = estimate.EFFICIENCY.read_text()
    monkeypatch.setattr(estimate, "EFFICIENCY", tmp_path / "efficiency.json")
    efficiency.write()
    assert estimate.EFFICIENCY.read_text() == shipped


def test_time_is_within_15_percent_of_what_frontiers_measured():
    """The committed calls of an H100 that the efficiency table does not know, from 32K up, baselines aside."""
    rows = records.load(records.default_folder() / "h100x1")
    rows = rows[(rows["probe"] == "frontier") & (rows["stage"] == "probe") & (rows["status"] == "ok")]
    rows, off = rows[(rows["n"] >= 32_768) & ~rows["backend"].str.contains("efficient|eager")], {}
    for _, row in rows.iterrows():
        sizes = {x: int(row[x]) for x in ("n", "heads", "head_dim", "batch")}
        options = {x: row[x] for x in ("dtype", "backend", "mode", "device")}
        case = Case(patterns.from_spec(row["pattern_spec"]), **sizes, **options)
        modelled = estimate.milliseconds(case, cards.find("h100"), row["backend"])
        off[row["pattern"], row["mode"], int(row["n"])] = modelled / row["median_ms"] - 1
    assert len(off) > 5 and max(map(abs, off.values())) < 0.15, off


@pytest.mark.parametrize("backend, wrong", [("cudnn", "cuDNN"), ("flash", "Flash"), ("efficient", ""), ("torch", "")])
def test_what_is_known_to_compute_wrongly_is_said(backend, wrong):
    """Past 2^31 elements, of which a sequence of 4096 x 8 x 64 has 2^21, and in gradients only."""

    def said(batch, mode="fwdbwd"):
        return estimate.trace(Case(wb.Dense(), 4096, 8, 64, "bfloat16", backend, mode, batch=batch)).wrong

    assert said(1023) is None and said(1025, "fwd") is None
    assert wrong in said(1025) if wrong else said(1025) is None


def test_a_frontier_ends_where_gradients_go_wrong():
    """As measured on an H100: 16,336, a step of the search from 2^31 elements."""
    rows = records.load(*(records.default_folder() / "h100x1").glob("*-frontier-*.jsonl"))
    (row,) = rows[(rows.stage == "search") & (rows.limiter == "validity")].to_dict("records")
    case = Case(wb.Dense(), 1024, 32, 128, "bfloat16", row["asked"], "fwdbwd", device="cuda", batch=int(row["batch"]))
    found = frontier.search(case, card="h100", grain=16, seconds=row["seconds"], say=None)
    assert found["limiter"] == "validity" and "cuDNN" in found["error"]
    assert found["n"] == pytest.approx(row["measured_n"], rel=row["step"])


def test_a_share_between_head_dims():
    lines = [{"head_dim": d, "rows": 4096, "share": share} for d, share in ((64, 0.4), (128, 0.5))]
    assert estimate.share(lines, 64, 9999) == pytest.approx(0.4)
    assert estimate.share(lines, 96, 9999) == pytest.approx(96 / ((64 / 0.4 + 128 / 0.5) / 2))
    assert 0.2 < estimate.share(lines, 32, 9999) < 0.4 and 0.5 < estimate.share(lines, 256, 9999) < 0.6
    assert estimate.share(lines[:1], 128, 9999) == pytest.approx(0.4)
