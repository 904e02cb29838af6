"""Traces without a card: the bytes that a program must take, from its own code."""

from pathlib import Path

import pytest
import torch

import workbench as wb
from workbench.fit import allocator, cards, estimate, fake_cuda, tracer, tracer_shortcuts, workspace
from workbench.probes.case import Case


def peak(events):
    """The largest sum of what is alive."""
    return allocator.replay(events).peak_requested


def life(*case):
    return tracer.of_case(Case(*case, device="cuda"), cards.find("h100"))


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch):
    monkeypatch.setattr(workspace, "of", lambda *_: [])


def toy(q, k, v):
    """Holds q + k beside its result for a moment: 5 tensors at the peak, inputs included."""
    kept = q + k
    return kept * v


def test_a_toy_is_followed_to_the_byte():
    one = 1000 * 2 * 16 * 4
    events, before, *_ = life(wb.Dense(), 1000, 2, 16, "float32", toy)
    assert [e.name for e in events[:before]] == ["q", "k", "v"]
    assert peak(events) == 5 * one
    assert [e.nbytes for e in events[before:]] == [one, one, -1]  # kept, the product, and kept is gone


def test_gradients_are_followed_too():
    one = 500 * 2 * 16 * 4
    events, before, *_ = life(wb.Dense(), 500, 2, 16, "float32", toy, "fwdbwd")
    assert peak(events[:before]) == 4 * one  # with the upstream gradient
    # Beside these: kept (saved), the product, the gradients of kept and of v.
    assert peak(events) == 8 * one


@pytest.mark.parametrize("mode", ["fwd", "fwdbwd"])
def test_our_kernels_hold_their_results_and_no_more(mode):
    pytest.importorskip("triton")
    n, h, d = 65_536, 12, 64
    events, before, backend, *_ = life(wb.Dilated([500, 3000], [1, 3]), n, h, d, "bfloat16", "auto", mode)
    one, row = n * h * d * 2, n * h * 4
    assert backend == "triton"
    want = 4 * one + row if mode == "fwd" else 8 * one + 3 * row  # out, lse; and gradients, lse and delta a row
    assert peak(events) == want


def test_the_torch_path_on_a_card_equals_what_it_takes_here(monkeypatch):
    """On this CPU torch's profiler counts the same operators' tensors, in float64, where neither has a kernel."""
    from workbench.engines.torch import fused
    from workbench.probes import memory

    monkeypatch.setattr(fused, "kernel", lambda q, mask=None: "unfused")
    case = wb.BlockSparse(wb.layouts.local(1), 16), 128, 2, 16, torch.float64, "torch"
    (call, _), inputs, _ = memory._allocations(Case(*case).prepare)
    used = inputs + memory.measure(call)
    assert abs(peak(life(*case).events) / used - 1) < 0.02


def test_the_lists_and_the_masks_of_blocks_are_counted_as_they_are():
    pytest.importorskip("triton")
    from workbench.engines.triton import bit_masks, block_lists

    n, pattern = 1 << 12, wb.Window(300, dilation=5, sinks=4)
    plan = block_lists.make_plan(*bit_masks.find(pattern, n, 1, n, (128, 128)), pattern, "cpu")
    lists = sum(x.nbytes for x in (*plan.by_queries, *plan.by_keys, plan.table))
    left = allocator.replay(life(pattern, n, 2, 64, "bfloat16", "triton").events).requested
    assert left == 4 * n * 2 * 64 * 2 + lists and plan.table.numel() % (128 * 4) == 0


def test_an_estimate_leaves_the_pattern_as_it_was():
    pytest.importorskip("triton")
    pattern = wb.BlockSparse(wb.layouts.local(1), 128)
    before = dict(pattern.__dict__)
    estimate.trace(Case(pattern, 512, 2, 64, "bfloat16", "triton", "fwdbwd"))
    assert pattern.__dict__ == before


def looks_at_data(q, k, v):
    return q * float(k.sum())


def test_what_looks_at_data_is_refused_with_the_reason():
    own = torch.cuda.is_available, torch.cuda.get_device_properties
    with pytest.raises(tracer.CannotTrace, match="without data"):
        life(wb.Dense(), 8, 1, 16, "float32", looks_at_data)
    assert (torch.cuda.is_available, torch.cuda.get_device_properties) == own


def projections(q, k, v):
    b, n, h, d = q.shape
    w = torch.empty(h * d, h * d, device=q.device, dtype=q.dtype)
    return (q.flatten(2) @ w).view(b, n, h, d)


def test_matrix_products_take_their_workspace_once():
    events, *_ = life(wb.Dense(), 64, 2, 16, "float32", projections)
    assert [e.nbytes for e in events if "workspace" in e.name] == [32 << 20]


def test_what_the_host_keeps_of_a_neighborhood_is_not_on_the_card():
    """`curve` and `rank`, 16 bytes a token, stay on the host; the lists of blocks go to the card, with the pattern."""
    n = 1 << 16
    pattern = wb.Neighborhood((n,), 300)
    left = allocator.replay(life(pattern, n, 1, 16, "float32", "torch").events).requested
    blocks = pattern.blocks(n, 1)
    lists = sum(x.nbytes for x in (blocks.starts, blocks.columns, blocks.full))
    assert left == 4 * n * 16 * 4 + lists  # q, k, v and out


def test_a_trace_replaces_eleven_attributes_and_nothing_else_does(monkeypatch):
    pytest.importorskip("triton")
    before, real = {}, fake_cuda.replaced

    def replaced(what):
        before.update({(where, name): getattr(where, name, "none") for where, name, _ in what})
        return real(what)

    monkeypatch.setattr(fake_cuda, "replaced", replaced)
    monkeypatch.setattr(tracer_shortcuts, "replaced", replaced)
    life(wb.Dense(), 64, 1, 16)
    assert all(getattr(where, name, "none") is old for (where, name), old in before.items())
    engines = "workbench.engines"
    assert sorted(f"{where.__name__}.{name}" for where, name in before) == sorted([
        "torch.cuda", "torch.clear_autocast_cache", "torch.autograd._engine_run_backward",
        "torch.utils.checkpoint._allowed_determinism_checks_to_fns",
        "torch.backends.cudnn.is_available", f"{engines}.fa4.STAND_IN",
        "JITFunction.run", "GridExecutor.__call__", "Blocks.to", f"{engines}.torch.block_sparse.strips",
        f"{engines}.torch.steps.starts",
    ])  # fmt: skip
    files = Path(wb.__file__).parent.rglob("*.py")
    assert {path.name for path in files if "setattr(" in path.read_text()} == {"fake_cuda.py"}
