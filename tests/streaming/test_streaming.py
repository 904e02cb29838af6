"""Streams against the float64 definition: any length, pattern and chunk; what they take; and that they can be ended."""

import os

import pytest
import torch

import workbench as wb
from workbench import streaming

LAYOUT = wb.layouts.local(2) | wb.layouts.strided(3)
GEOMETRIC = [16, 64, 256, 1024], [1, 2, 4, 8]
CASES = {  # name: (pattern, positions, heads, key heads, chunk)
    "geometric": (wb.Dilated(*GEOMETRIC), 1000, 2, 2, 64),
    "geometric, causal, grouped heads": (wb.Dilated(*GEOMETRIC, causal=True), 1000, 4, 2, 100),
    "one chunk": (wb.Dilated(*GEOMETRIC, causal=True), 333, 2, 1, 400),
    "chunks of one position": (wb.Dilated([3, 9], [1, 2]), 29, 2, 2, 1),
    "segments that no rate divides": (wb.Dilated([7, 100, 333], [1, 3, 5]), 777, 6, 2, 50),
    "the same, causal": (wb.Dilated([7, 100, 333], [1, 3, 5], causal=True), 777, 6, 2, 50),
    "blocked offsets": (wb.Dilated([7, 100, 333], [2, 3, 5], causal=True, offsets="blocked"), 351, 6, 3, 50),
    "branches with heads of their own": (wb.Dilated([8, 100, 333], [2, 3, 5], heads="partition"), 351, 6, 2, 50),
    "rows that nothing reaches": (wb.Dilated([4, 400], [9, 500], causal=True), 401, 6, 6, 50),
    "dense": (wb.Dense(), 333, 4, 2, 64),
    "dense, causal": (wb.Dense(causal=True), 130, 2, 2, 64),
    "blocks": (wb.BlockSparse(LAYOUT, (16, 8)), 333, 4, 2, 64),
    "blocks, causal": (wb.BlockSparse(LAYOUT, (16, 8), causal=True), 301, 2, 2, 50),
    "window": (wb.Neighborhood(333, 40), 333, 4, 2, 64),
    "window wider than a chunk": (wb.Neighborhood(100, 40), 100, 1, 1, 16),
    "causal window": (wb.Window(50, causal=True), 333, 4, 2, 64),
    "sinks": (wb.Window(20, causal=True, sinks=5), 200, 2, 1, 64),
    "a predicate": (wb.Predicate(lambda h, i, j: (i - j) % 3 == 0, causal=True), 150, 2, 2, 64),
    "blocks drawn for each head": (wb.BlockSparse(wb.layouts.random(0.3, 1, True), 16, causal=True), 120, 2, 2, 50),
    "grid": (wb.Neighborhood((20, 17), 3, wb.orderings.hilbert((20, 17))), 340, 2, 2, 64),
}
BACKWARD = [name for name in CASES if not name.startswith(("dense", "blocks", "grid", "sinks", "a pred"))]
D = 8


def made(name, dtype=torch.float64):
    """(pattern, the options of a stream, q, k and v on the host)."""
    pattern, n, heads, kv_heads, chunk = CASES[name]
    torch.manual_seed(n)
    tensors = [torch.randn(n, h, D, dtype=dtype) for h in (heads, kv_heads, kv_heads)]
    return pattern, {"heads": heads, "head_dim": D, "dtype": dtype, "chunk": chunk, "device": "cpu"}, tensors


def results(q, dtype=None):
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, dtype=wide)


def close(got, want, most=1e-10):
    assert torch.equal(got.isinf(), want.isinf()) and not got.isnan().any()
    assert (got - want).nan_to_num(0).abs().max() <= most


@pytest.mark.parametrize("name", CASES)
def test_out_and_lse_are_those_of_the_definition(name):
    pattern, options, (q, k, v) = made(name)
    out, lse = results(q)
    row = streaming.attention((q, k, v), pattern, (out, lse), **options)
    want, want_lse = wb.reference(q[None], k[None], v[None], pattern)
    close(out, want[0])
    close(lse, want_lse[0].T)
    assert row["bytes_out"] == out.nbytes + lse.nbytes


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_are_those_of_the_definition(name):
    pattern, options, tensors = made(name)
    leaves = [x[None].clone().requires_grad_() for x in tensors]
    want, lse = wb.reference(*leaves, pattern)
    grad = torch.randn_like(tensors[0])
    got = [torch.full_like(x, torch.nan) for x in tensors]
    result = want[0].detach().contiguous(), lse[0].T.detach().contiguous()
    streaming.gradients(tuple(tensors), pattern, grad, result, tuple(got), **options)
    for some, exact in zip(got, torch.autograd.grad(want, leaves, grad[None]), strict=True):
        close(some, exact[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["geometric", "dense", "window"])
def test_16_bits_err_as_in_memory(name, dtype):
    pattern, options, (q, k, v) = made(name, dtype)
    out, lse = results(q)
    streaming.attention((q, k, v), pattern, (out, lse), **options)
    want = wb.reference(q[None], k[None], v[None], pattern)[0][0]
    error, usual = ((x - want).norm() for x in (out.double(), wb.attention(q[None], k[None], v[None], pattern)[0]))
    assert error <= 2 * usual + torch.finfo(dtype).eps / 2 * want.norm()


@pytest.mark.parametrize("name", ["geometric", "one chunk", "blocked offsets", "dense", "dense, causal"])
def test_memory_is_the_plan_s_to_the_byte(name):
    pattern, options, (q, k, v) = made(name, torch.float32)
    out, lse = results(q)
    with wb.VirtualCard(1) as card:
        row = streaming.attention((q, k, v), pattern, out, **options)
    plan = streaming.explain((q, k, v), pattern, **options)  # of out alone
    assert card.peak_requested_bytes == plan.peak == row["planned_bytes"]
    assert (row["bytes_in"], row["bytes_out"]) == (plan.bytes_in, plan.bytes_out)
    if name in BACKWARD:
        lse.zero_()
        grad, got = torch.randn_like(q), tuple(torch.empty_like(x) for x in (q, k, v))
        with wb.VirtualCard(1) as card:
            row = streaming.gradients((q, k, v), pattern, grad, (out, lse), got, **options)
        assert card.peak_requested_bytes == row["planned_bytes"]


def test_a_budget_decides_the_chunk_and_what_no_budget_holds_is_refused():
    n, pattern = 1 << 12, wb.Dilated([16, 64, 256, 1024, 4096], [1, 2, 4, 8, 16])
    torch.manual_seed(0)
    source, options = (
        [torch.randn(n, 1, D) for _ in range(3)],
        {"heads": 1, "head_dim": D, "dtype": torch.float32, "device": "cpu"},
    )
    out = torch.empty(n, 1, D)
    plan = streaming.explain(source, pattern, **options, budget_bytes=24 << 20)
    assert plan.reserved <= 24 << 20 and str(plan).startswith("1 chunks of at most 4,096 positions")
    with pytest.raises(ValueError, match=r"budget_bytes=1,000: want at least [\d,]+ for this pattern at 4,096"):
        streaming.attention(source, pattern, out, **options, budget_bytes=1000)
    with wb.VirtualCard(24 / 1024) as card:
        streaming.attention(source, pattern, out, **options, budget_bytes=24 << 20)
    assert card.peak_reserved_bytes == plan.reserved


def test_a_plan_of_a_billion_tokens_runs_nothing():
    n = 1 << 30
    q = torch.empty(n, 1, 32, dtype=torch.float16, device="meta")
    pattern = wb.Dilated([4096, 1 << 14, n], [1, 2, 512])
    plan = streaming.explain((q, q, q), pattern, heads=1, head_dim=32, dtype=torch.float16, card="h200")
    assert plan.bytes_out == 64 * n and plan.kept == n // 512 and plan.peak < 1 << 30
    assert plan.milliseconds > 64 * n / 48e6


@pytest.mark.parametrize("over", [True, False])
def test_a_layer_is_that_of_memory_and_may_write_over_x(over):
    torch.manual_seed(0)
    module = wb.MultiheadAttention(
        32, 4, wb.Dilated(*GEOMETRIC, causal=True), num_kv_heads=2, qk_norm=True, sub_norm=True
    ).eval()
    x = torch.randn(777, 32)
    want, to = module(x[None])[0].detach(), None if over else torch.empty_like(x)
    with wb.VirtualCard(1) as card:
        row = streaming.layer(module, x, to, chunk=64, device="cpu")
    close(x if over else to, want, 1e-6)
    assert row["bytes_out"] == x.nbytes and card.peak_requested_bytes == row["planned_bytes"]


def mapped(folder, name, like, write=False):
    return streaming.memory_map(folder / name, like.shape, like.dtype, write)


def test_a_run_that_is_ended_goes_on_and_nothing_half_written_counts(tmp_path):
    pattern, options, tensors = made("geometric")
    for name, x in zip("qkv", tensors, strict=True):
        mapped(tmp_path, name, x, True).copy_(x)
    source = tuple(mapped(tmp_path, name, x) for name, x in zip("qkv", tensors, strict=True))
    out = mapped(tmp_path, "out", tensors[0], True)

    class Ended(Exception):
        pass

    def end(done, seconds):
        if done >= 300:
            raise Ended

    with pytest.raises(Ended):
        streaming.attention(source, pattern, out, **options, journal=tmp_path / "journal", watch=end)
    with open(tmp_path / "journal", "ab") as file:
        file.write(b'\n{"start": 320, "st')  # what a killed process may leave
    want = wb.reference(*(x[None] for x in tensors), pattern)[0][0]
    done = 5 * 64
    close(out[:done], want[:done])
    out[:done] = 7  # finished ranges are not computed again
    out[done:] = torch.nan
    seen = []
    row = streaming.attention(
        source, pattern, out, **options, journal=tmp_path / "journal", watch=lambda n, _: seen.append(n)
    )
    assert seen[0] == 6 * 64 and seen[-1] == 1000 and row["bytes_out"] == out[done:].nbytes
    assert (out[:done] == 7).all()
    close(out[done:], want[done:])
    again = streaming.attention(source, pattern, out, **options, journal=tmp_path / "journal")
    assert again["bytes_in"] == again["bytes_out"] == 0
    source[0][0] += 1
    with pytest.raises(ValueError, match="journal=.*of another run"):
        streaming.attention(source, pattern, out, **options, journal=tmp_path / "journal")


def test_files_that_are_not_whole_are_refused_before_any_work(tmp_path):
    pattern, options, (q, k, v) = made("dense")
    x = mapped(tmp_path, "q", q, True)
    with pytest.raises(ValueError, match="is no file"):
        mapped(tmp_path, "nothing", q)
    os.truncate(tmp_path / "q", 100)
    with pytest.raises(ValueError, match="has 100 bytes, want one of"):
        mapped(tmp_path, "q", q)
    with pytest.raises(ValueError, match="has 100 bytes, want one of"):
        streaming.attention((x, k, v), pattern, torch.empty_like(q), **options)


def test_a_full_disk_is_an_error_before_work(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        streaming.memory_map(tmp_path / "out", (8, 8), torch.float32, write=True)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_run_is_refused_by_name(monkeypatch):
    pattern, options, (q, k, v) = made("dense")
    out, long = torch.empty_like(q), wb.Dilated([4], [1])
    refused = {
        "want other memory": lambda: streaming.attention((q, k, v), pattern, q, **options),
        "has no such option": lambda: streaming.attention((q, k, v), pattern, out, **options, mask=1),
        "that of one sequence": lambda: streaming.attention((q, k, v), "dense", out, **options),
        "want a dilated pattern or a window": lambda: streaming.gradients(
            (q, k, v), pattern, q, results(q), (q, k, v), **options),
        "source: k is torch.float64": lambda: streaming.attention((q, k[:-1], v), pattern, out, **options),
        "sink: out is torch.float64": lambda: streaming.attention((q, k, v), pattern, out[:-1], **options),
        "want \\(q, k, v\\), or Projected": lambda: streaming.attention(q, pattern, out, **options),
        "want a sink of `memory_map`": lambda: streaming.attention((q, k, v), long, out, **options, journal="j"),
    }  # fmt: skip
    for reason, call in refused.items():
        with pytest.raises(ValueError, match=reason):
            call()
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 10}))
    with pytest.raises(ValueError, match="bytes to be pinned and 10 free"):
        streaming.attention((q, k, v), pattern, out, **options)
