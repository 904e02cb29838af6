"""Streams against the float64 definition: any length, pattern and chunk; what they take; and that they can be ended."""

import os

import pytest
import torch

import workbench as wb
from tests.tools import refused
from workbench import streaming
from workbench.streaming import files

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
D = 8


def made(name, dtype=torch.float64):
    """(pattern, the options of a stream, q, k and v on the host)."""
    pattern, n, heads, kv_heads, chunk = CASES[name]
    torch.manual_seed(n)
    tensors = [torch.randn(n, h, D, dtype=dtype) for h in (heads, kv_heads, kv_heads)]
    return pattern, {"chunk": chunk, "device": "cpu"}, tensors


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


def gradients(tensors, pattern, result=None, **more):
    """(the reference's dq, dk, dv of a random upstream gradient; what `streaming.gradients` takes but for the sink)."""
    leaves = [x[None].double().requires_grad_() for x in tensors]
    want, lse = wb.reference(*leaves, pattern)
    grad = torch.randn_like(tensors[0])
    result = result or (want[0].detach().contiguous(), lse[0].T.detach().contiguous())
    return [x[0] for x in torch.autograd.grad(want, leaves, grad[None].double())], (tensors, pattern, grad, result)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_definition(name):
    pattern, options, tensors = made(name)
    exact, asked = gradients(tensors, pattern)
    got = [torch.full_like(x, torch.nan) for x in tensors]
    streaming.gradients(*asked, got, **options)
    for some, want in zip(got, exact, strict=True):
        close(some, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["geometric", "dense", "window", "blocks"])
def test_16_bits_err_as_in_memory(name, dtype):
    pattern, options, tensors = made(name, dtype)
    leaves = [x[None].requires_grad_() for x in tensors]
    out, lse = results(tensors[0])
    streaming.attention(tensors, pattern, (out, lse), **options)
    exact, asked = gradients(tensors, pattern, (out, lse))
    want, usual = wb.reference(*(x[None].double() for x in tensors), pattern)[0], wb.attention(*leaves, pattern)
    wide = dtype if name in ("geometric", "window") else torch.float32
    got = [torch.empty_like(x, dtype=to) for x, to in zip(tensors, (dtype, wide, wide), strict=True)]
    streaming.gradients(*asked, got, **options)
    others = torch.autograd.grad(usual, leaves, asked[2][None])
    for some, other, right in zip([out, *got], [usual, *others], [want[0], *exact], strict=True):
        error, its = ((x - right).norm() for x in (some.double(), other[0].detach().double()))
        assert error <= 2 * its + torch.finfo(dtype).eps / 2 * right.norm()


@pytest.mark.parametrize("name", ["geometric", "one chunk", "blocked offsets", "dense", "dense, causal", "grid"])
def test_memory_is_the_plan_s_to_the_byte(name):
    lists = 0.01 if name == "grid" else 0  # of blocks, made on the way
    pattern, options, (q, k, v) = made(name, torch.float32)
    out, lse = results(q)
    with wb.VirtualCard(1) as card:
        row = streaming.attention((q, k, v), pattern, out, **options)
    plan = streaming.explain((q, k, v), pattern, **options)  # of out alone
    assert row["planned_bytes"] == plan.peak == pytest.approx(card.peak_requested_bytes, lists)
    assert (row["bytes_in"], row["bytes_out"]) == (plan.bytes_in, plan.bytes_out)
    lse.zero_()
    grad, got = torch.randn_like(q), tuple(torch.empty_like(x) for x in (q, k, v))
    with wb.VirtualCard(1) as card:
        row = streaming.gradients((q, k, v), pattern, grad, (out, lse), got, **options)
    assert row["planned_bytes"] == pytest.approx(card.peak_requested_bytes, lists)


def test_a_budget_decides_the_chunk_and_what_no_budget_holds_is_refused():
    n, pattern = 1 << 12, wb.Dilated([16, 64, 256, 1024, 4096], [1, 2, 4, 8, 16])
    torch.manual_seed(0)
    source, options, out = [torch.randn(n, 1, D) for _ in range(3)], {"device": "cpu"}, torch.empty(n, 1, D)
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
    plan = streaming.explain((q, q, q), pattern, card="h200")
    assert plan.bytes_out == 64 * n and plan.kept == n // 512 and plan.peak < 1 << 30
    assert plan.milliseconds > 64 * n / 48e6


@pytest.mark.parametrize("over", [True, False])
def test_a_layer_is_that_of_memory_and_may_write_over_x(over):
    torch.manual_seed(0)
    options = {"num_kv_heads": 2, "qk_norm": True, "sub_norm": True}
    module = wb.MultiheadAttention(32, 4, wb.Dilated(*GEOMETRIC, causal=True), **options).eval()
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
    options |= {"journal": tmp_path / "journal"}
    out = mapped(tmp_path, "out", tensors[0], True)

    class Ended(Exception):
        pass

    def end(done, seconds):
        if done >= 300:
            raise Ended

    with pytest.raises(Ended):
        streaming.attention(source, pattern, out, **options, watch=end)
    with open(tmp_path / "journal", "ab") as file:
        file.write(b'\n{"start": 320, "st')  # what a killed process may leave
    want = wb.reference(*(x[None] for x in tensors), pattern)[0][0]
    done = 5 * 64
    close(out[:done], want[:done])
    out[:done] = 7  # finished ranges are not computed again
    out[done:] = torch.nan
    seen = []
    row = streaming.attention(source, pattern, out, **options, watch=lambda n, _: seen.append(n))
    assert seen[0] == 6 * 64 and seen[-1] == 1000 and row["bytes_out"] == out[done:].nbytes
    assert (out[:done] == 7).all()
    close(out[done:], want[done:])
    again = streaming.attention(source, pattern, out, **options)
    assert again["bytes_in"] == again["bytes_out"] == 0
    source[0][0] += 1
    refused("journal=.*of another run", streaming.attention, source, pattern, out, **options)


@pytest.mark.parametrize("name", ["dense, causal", "blocks"])
def test_gradients_go_on_and_nothing_is_added_twice(name, tmp_path, monkeypatch):
    pattern, options, tensors = made(name)
    exact, asked = gradients(tensors, pattern)
    got = [mapped(tmp_path, f"d{x}", y, True) for x, y in zip("qkv", tensors, strict=True)]
    finished, journal = files.Journal.finished, tmp_path / "journal"
    for last in (0, 64, 128):

        def killed(self, chunk, last=last):
            if chunk.start == last:
                raise InterruptedError  # after the chunk has added its part
            finished(self, chunk)

        monkeypatch.setattr(files.Journal, "finished", killed)
        with pytest.raises(InterruptedError):
            streaming.gradients(*asked, got, **options, journal=journal)
        for path in tmp_path.glob("journal.*"):
            _, which, where, _ = torch.load(path)
            got[which][where] += 7  # or some of it
    monkeypatch.undo()
    seen = []
    streaming.gradients(*asked, got, **options, journal=journal, watch=lambda done, _: seen.append(done))
    assert seen[0] > 128  # what has finished is not computed again
    for some, want in zip(got, exact, strict=True):
        close(some, want)
    assert [x.name for x in tmp_path.glob("journal*")] == ["journal"]


def test_files_that_are_not_whole_are_refused_before_any_work(tmp_path):
    pattern, options, (q, k, v) = made("dense")
    x = mapped(tmp_path, "q", q, True)
    refused("is no file", mapped, tmp_path, "nothing", q)
    os.truncate(tmp_path / "q", 100)
    refused("has 100 bytes, want one of", mapped, tmp_path, "q", q)
    refused("has 100 bytes, want one of", streaming.attention, (x, k, v), pattern, torch.empty_like(q), **options)


def test_a_full_disk_is_an_error_before_work(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        streaming.memory_map(tmp_path / "out", (8, 8), torch.float32, write=True)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_run_is_refused_by_name(monkeypatch):
    pattern, options, (q, k, v) = made("dense")
    out, long, half = torch.empty_like(q), wb.Dilated([4], [1]), torch.empty_like(q, dtype=torch.float16)
    reasons = {
        "want other memory": lambda: streaming.attention((q, k, v), pattern, q, **options),
        "has no such option": lambda: streaming.attention((q, k, v), pattern, out, **options, mask=1),
        "that of one sequence": lambda: streaming.attention((q, k, v), "dense", out, **options),
        "sink: dk is torch.float16.*want a tensor of torch.float32": lambda: streaming.gradients(
            (half, half, half), pattern, half, results(half), (half, half, half), **options),
        "source: q is torch": lambda: streaming.attention((q, k, v), pattern, out, **options, heads=2),
        "heads=None: want": lambda: streaming.attention(
            streaming.Projected(q, *[lambda x: x] * 3), pattern, out, **options),
        "source: k is torch.float64": lambda: streaming.attention((q, k[:-1], v), pattern, out, **options),
        "sink: out is torch.float64": lambda: streaming.attention((q, k, v), pattern, out[:-1], **options),
        "want \\(q, k, v\\), or Projected": lambda: streaming.attention(q, pattern, out, **options),
        "want a sink of `memory_map`": lambda: streaming.attention((q, k, v), long, out, **options, journal="j"),
    }  # fmt: skip
    for reason, call in reasons.items():
        refused(reason, call)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 10}))
    refused("bytes to be pinned and 10 free", streaming.attention, (q, k, v), pattern, out, **options)
