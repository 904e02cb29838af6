"""What the attention tests share: the table of cases, the check against the oracle, the error that a dtype may have.

Every check compares out, lse, dq, dk and dv under random upstream gradients of out and of lse, with memory that nobody
wrote poisoned with NaN.
"""

import contextlib
import functools
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from workbench import BlockSparse, Dense, Dilated, Neighborhood, PerHead, Predicate, Window, attention, layouts
from workbench.distributed.views import some_heads
from workbench.engines.reference import reference
from workbench.patterns import orderings, swin
from workbench.probes import error
from workbench.probes.error import LSE, RELATIVE, lse_error, relative

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = ("out", "lse", "dq", "dk", "dv")


def tiers(values, daily):
    """The values as parameters, of which the default tier runs those in `daily` and `make test-all` all."""
    values, daily = list(values), list(daily)
    assert all(x in values for x in daily), [x for x in daily if x not in values]
    return [pytest.param(x, marks=[] if x in daily else pytest.mark.slow) for x in values]


def slowness(clock=time.perf_counter) -> float:
    """How many times longer than on a quiet core of 2020 a fixed piece of work takes here and now; at least 1.

    A limit of time in a test is multiplied by it; clock: `time.process_time` where the limit is one of processor time.
    """
    begin = clock()
    sum(x * x for x in range(1_000_000))
    return max(1.0, (clock() - begin) / 0.06)


def alive(pid: int) -> bool:
    """Whether this process, or a thread of it, runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def until(holds, seconds=3600.0) -> bool:
    """Wait for holds(); whether it came to hold."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(holds())


def gone(*pids: int) -> bool:
    """Whether these processes end."""
    return until(lambda: not any(map(alive, pids)))


def refused(words: str, call, /, *given, **options) -> None:
    """AssertionError unless call(...) raises a ValueError in which these words are, a regular expression."""
    __tracebackhide__ = True
    with pytest.raises(ValueError, match=words):
        call(*given, **options)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Case:
    """One call: the pattern is made anew each time."""

    id: str
    pattern: Callable
    n: int
    nq: int | None = None
    heads: int = 2
    kv_heads: int | None = None
    head_dim: int = 8
    batch: int = 1

    def inputs(self, dtype, device="cpu", seed=0):
        """q, k, v and the upstream gradients of out and lse: N(0, 1), the same numbers rounded to the dtype."""
        nq, kv_heads = self.n if self.nq is None else self.nq, self.kv_heads or self.heads
        of_q = (self.batch, nq, self.heads, self.head_dim)
        of_k = (self.batch, self.n, kv_heads, self.head_dim)
        random = torch.Generator().manual_seed(seed)
        shapes = of_q, of_k, of_k, of_q, (self.batch, self.heads, nq)
        drawn = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)
        q, k, v, g, gl = (x.to(device, dtype) for x in drawn)
        return q, k, v, g, gl.to(torch.float64 if dtype == torch.float64 else torch.float32)


def every_third(h, i, j):
    return (i - j) % 3 == 0


def some_rows_only(h, i, j):  # rows 5, 12, 19, ... see nothing
    return (i % 7 != 5) & ((i * 7 + j + h) % 5 != 0)


def batch_layout(batch, heads, rows, cols, seed=3):
    keep = torch.rand(batch, heads, rows, cols, generator=torch.Generator().manual_seed(seed)) < 0.5
    return layouts.explicit(keep)


def longnet(scale, causal=False):
    """LongNet's own configuration with every segment length divided by `scale`."""
    return lambda: Dilated([2048 // scale, 4096 // scale, 8192 // scale, 16384 // scale, 32768 // scale],
                           [1, 2, 4, 6, 12], causal=causal)  # fmt: skip


GLOBAL = BlockSparse(layouts.global_(1), 16)
NEAR = BlockSparse(layouts.local(1), 8) & Predicate(some_rows_only)


def _causal_or_not(c: bool):
    """(id, pattern, sizes) of the patterns that can be causal."""
    local = layouts.local(1)
    return [
        ("dense-1-token", lambda: Dense(c), {"n": 1}),
        ("dense-prime", lambda: Dense(c), {"n": 37, "batch": 2, "heads": 3}),
        ("dense-last-9-queries", lambda: Dense(c), {"n": 37, "nq": 9, "heads": 4, "kv_heads": 2}),
        ("dilated-1-token", lambda: Dilated([4, 8], [1, 2], causal=c), {"n": 1, "heads": 3}),
        ("dilated-29-tokens", lambda: Dilated([4, 8, 16], [1, 2, 4], causal=c),
         {"n": 29, "heads": 5, "batch": 2}),
        ("dilated-prime-segments", lambda: Dilated([7, 13], [3, 5], causal=c), {"n": 61, "heads": 4}),
        ("dilated-longnet-64-grouped", longnet(1024, c), {"n": 64, "heads": 12, "kv_heads": 4, "batch": 2}),
        ("dilated-longnet-1-head", longnet(1024, c), {"n": 64, "heads": 1}),
        ("dilated-12-heads-5-branches", longnet(512, c), {"n": 67, "heads": 12}),
        ("dilated-same-branch-thrice", lambda: Dilated([8, 8, 8], [2, 2, 2], causal=c), {"n": 21}),
        ("dilated-uncovered-rows", lambda: Dilated([6, 12], [2, 4], causal=c), {"n": 31, "heads": 3}),
        ("dilated-rate-beyond-heads", lambda: Dilated([16], [8], causal=c), {"n": 40, "heads": 3}),
        ("dilated-last-query", lambda: Dilated([8, 16], [1, 2], causal=c), {"n": 37, "nq": 1, "heads": 4}),
        ("dilated-queries-inside-a-segment", lambda: Dilated([8, 16, 32], [1, 2, 3], causal=c),
         {"n": 61, "nq": 27, "heads": 6, "kv_heads": 3, "batch": 2}),
        ("dilated-blocked-offsets", lambda: Dilated([8, 16], [2, 3], causal=c, offsets="blocked"),
         {"n": 45, "heads": 7}),
        ("dilated-partition", lambda: Dilated([8, 16, 32], [1, 2, 4], causal=c, heads="partition"),
         {"n": 45, "heads": 7, "batch": 2}),
        ("dilated-partition-fewer-heads", lambda: Dilated([4, 8, 16], [1, 2, 3], c, heads="partition"),
         {"n": 29, "heads": 2}),
        ("dilated-head-dim-1", lambda: Dilated([4, 8], [1, 2], causal=c), {"n": 19, "head_dim": 1}),
        ("dilated-head-dim-300", lambda: Dilated([4, 8], [1, 2], causal=c), {"n": 19, "head_dim": 300}),
        ("dilated-head-dim-64", lambda: Dilated([16, 32, 64], [1, 2, 4], causal=c),
         {"n": 131, "head_dim": 64, "heads": 4, "kv_heads": 1}),
        ("local-ragged", lambda: BlockSparse(local, 8, c), {"n": 61, "heads": 3, "batch": 2}),
        ("local-1-token", lambda: BlockSparse(local, 8, c), {"n": 1}),
        ("local-global", lambda: BlockSparse(layouts.local(0) | layouts.global_(1), (4, 8), c),
         {"n": 59, "heads": 4, "kv_heads": 2}),
        ("strided-wide-blocks", lambda: BlockSparse(layouts.strided(3), (8, 4), c), {"n": 50, "nq": 21}),
        ("hierarchical", lambda: BlockSparse(layouts.hierarchical(1, 3), 4, c), {"n": 70, "heads": 1}),
        ("random-one-layout", lambda: BlockSparse(layouts.random(0.3, 1), 8, c),
         {"n": 77, "nq": 40, "heads": 3, "batch": 2}),
        ("random-by-head-grouped", lambda: BlockSparse(layouts.random(0.3, 2, per_head=True), 8, c),
         {"n": 61, "nq": 17, "heads": 6, "kv_heads": 2, "batch": 2}),
        ("layout-of-each-sequence", lambda: BlockSparse(batch_layout(2, 4, 5, 5), 8, c),
         {"n": 37, "heads": 4, "kv_heads": 2, "batch": 2}),
        ("blocks-64x128", lambda: BlockSparse(layouts.local(1) | layouts.global_(1), (64, 128), c),
         {"n": 300, "nq": 171}),
        ("blocks-with-a-predicate",
         lambda: BlockSparse(layouts.local(1), 8, c) & Predicate(some_rows_only),
         {"n": 61, "heads": 4, "kv_heads": 2}),
        ("predicate", lambda: Predicate(every_third, c), {"n": 143, "kv_heads": 1}),
        ("predicate-by-head-nothing", lambda: Predicate(lambda h, i, j: h + i + j < 0, c), {"n": 20}),
        ("predicate-by-head-empty-rows", lambda: Predicate(some_rows_only, c),
         {"n": 150, "nq": 30, "batch": 2}),
        ("window-last-queries", lambda: Window(13, c), {"n": 150, "nq": 37, "heads": 4, "kv_heads": 2}),
        ("window-dilated-sinks", lambda: Window(7, c, 3, 2), {"n": 131, "batch": 2}),
        ("union-of-a-window-and-branches", lambda: Window(9, c) | Dilated([16, 40], [2, 3], c) | GLOBAL,
         {"n": 131, "nq": 70, "heads": 4, "kv_heads": 2}),
        ("difference-by-sequence", lambda: Dense(c) - BlockSparse(batch_layout(2, 4, 8, 8), 16, c),
         {"n": 125, "heads": 4, "batch": 2}),
        ("each-head-its-own", lambda: PerHead([Window(20, c), Dilated([16, 40], [1, 2], c), NEAR, NEAR]),
         {"n": 77, "nq": 61, "heads": 4, "kv_heads": 2, "batch": 2}),
        ("blocks-longer-than-the-sequence", lambda: BlockSparse(layouts.local(0), 4096, c), {"n": 23}),
        ("head-dim-64", lambda: BlockSparse(layouts.global_(1), 16, c),
         {"n": 120, "head_dim": 64, "heads": 4, "kv_heads": 2}),
    ]  # fmt: skip


def _cases():
    for causal, suffix in ((False, ""), (True, "-causal")):
        yield from (Case(id + suffix, pattern, **sizes) for id, pattern, sizes in _causal_or_not(causal))
    yield Case("only-key-block-0", lambda: BlockSparse(only_block_0(3), 16), 45)
    yield Case("one-dark-row", lambda: Predicate(lambda h, i, j: i != 4), 23, batch=2)
    yield Case("sees-nothing", lambda: Predicate(lambda h, i, j: i < 0), 23)
    yield Case("neighborhood-1d", lambda: Neighborhood((63,), 5), 63, heads=2, kv_heads=1)
    yield Case("neighborhood-2d", lambda: Neighborhood((7, 9), 2), 63, nq=20)
    yield Case("neighborhood-hilbert", lambda: Neighborhood((8, 8), 1, orderings.hilbert((8, 8))), 64, kv_heads=1)
    options = {"causal": (False, True), "dilation": 2, "stride": (2, 1), "border": "shift"}
    yield Case("neighborhood-options", lambda: Neighborhood((9, 11), (1, 2), orderings.hilbert((9, 11)), **options),
               99, 50, heads=4, kv_heads=2)  # fmt: skip
    yield Case("swin-shifted", lambda: swin((9, 11), (4, 3), 2, orderings.random((9, 11), 1)), 99)
    yield Case("neighborhood-3d", lambda: Neighborhood((4, 5, 3), (1, 0, 2)), 60, batch=2)


def only_block_0(blocks):
    keep = torch.zeros(blocks, blocks, dtype=torch.bool)
    keep[:, 0] = True
    return layouts.explicit(keep)


TABLE = {case.id: case for case in _cases()}


dark = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 1]]) > 0


def _tiled(c):
    """Block-sparse cases with blocks of a multiple of 16, which the Triton kernels want."""
    edge, suffix = layouts.local(1) | layouts.global_(1), "-causal" * c
    return [
        Case(f"local-ragged{suffix}", lambda: BlockSparse(layouts.local(1), 32, c), 77, heads=3),
        Case(f"one-token{suffix}", lambda: BlockSparse(layouts.local(1), 16, c), 1),
        Case(f"wide-blocks-last-queries{suffix}", lambda: BlockSparse(edge, (16, 32), c), 150, 61, 4, 2),
        Case(f"tall-blocks-head-dim-20{suffix}", lambda: BlockSparse(edge, (32, 16), c), 77, head_dim=20),
        Case(f"a-layout-a-sequence{suffix}", lambda: BlockSparse(batch_layout(2, 4, 3, 3), 16, c), 45, heads=4,
             kv_heads=2, batch=2),
        Case(f"random-by-head{suffix}", lambda: BlockSparse(layouts.random(0.3, 2, per_head=True), 16, c), 97, 40,
             heads=4, kv_heads=2),
    ]  # fmt: skip


TILED = [
    *_tiled(False),
    *_tiled(True),
    Case("empty-rows", lambda: BlockSparse(layouts.explicit(dark), 16), 45),
    Case("window", lambda: Neighborhood((70,), 21), 70, kv_heads=1),
    Case("window-last-queries", lambda: Neighborhood((70,), 5), 70, 21),
    Case("neighborhood-hilbert", lambda: Neighborhood((16, 8), 1, orderings.hilbert((16, 8))), 128, kv_heads=1),
    Case("shuffled-line", lambda: Neighborhood((60,), 4, orderings.random((60,), 3)), 60),
    Case("window-causal", lambda: Window(21, True), 70, 37, kv_heads=1),
    Case("dilated-window-sinks", lambda: Window(5, dilation=3, sinks=2), 70, 37),
    Case("function-of-heads-causal", lambda: Predicate(some_rows_only, True), 45, 29, heads=4, kv_heads=2, batch=2),
    Case("union-last-queries", lambda: BlockSparse(layouts.global_(1), 16) | Window(9), 50, 29, kv_heads=1),
    Case("another-pattern-a-head", lambda: PerHead([Window(9, True), Dense(), Window(5, dilation=3)]), 45, heads=3),
    Case("layouts-and-a-function", lambda: BlockSparse(batch_layout(2, 2, 3, 3), 16) & Predicate(some_rows_only), 45,
         batch=2),
    Case("several-axes", lambda: Neighborhood((2,) * 5 + (1,) * 28, (1, 0, 1, 1, 0) + (1,) * 28), 32),
]  # fmt: skip


def nested(t):
    """Dilated cases whose branches have a tile order with tiles of t tokens."""
    two, four, n = ([2 * t, 4 * t], [1, 2]), ([4 * t, 8 * t], [2, 4]), 4 * t + t // 2 + 5
    return [
        Case("nested-short-last-segment", lambda: Dilated(*two), n, batch=2),
        Case("nested-causal-grouped", lambda: Dilated(*two, causal=True), n, heads=4, kv_heads=2),
        Case("nested-several-periods-last-queries", lambda: Dilated(*two), 2 * n, 2 * n - t - 3),
        Case("nested-causal-last-queries", lambda: Dilated(*two, causal=True), n, t + 3, heads=3),
        Case("nested-blocked-empty-rows", lambda: Dilated(*four, offsets="blocked"), n, heads=3),
        Case("nested-partition", lambda: Dilated(*two, heads="partition"), n, heads=3),
        Case("nested-some-heads", lambda: some_heads(Dilated(*two), 1, 2, 3), n, heads=2),
        Case("nested-one-segment", lambda: Dilated([2 * t, 999 * t], [1, 2]), n),
        Case("nested-same-branch-thrice-causal", lambda: Dilated([2 * t] * 3, [2] * 3, causal=True), n, head_dim=20),
        Case("nested-and-others-causal", lambda: Dilated([*two[0], 2 * t + 3], [1, 2, 3], causal=True), n, heads=3),
    ]


def differentiate(run, inputs, pattern) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv of run(q, k, v, pattern) -> (out, lse), from inputs as `Case.inputs` makes them."""
    q, k, v, g, gl = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = run(*leaves, pattern)
    seen = lse > -torch.inf
    # rows that see nothing have no gradient to give
    grads = torch.autograd.grad((out, lse), leaves, (g.to(out.dtype), (gl * seen).to(lse.dtype)))
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def oracle(inputs, pattern) -> dict[str, torch.Tensor]:
    """What is right, float64: also the gradients, which autograd would round to the dtype of 16-bit leaves."""
    return differentiate(reference, [x.double() for x in inputs], pattern)


def budgets(pattern, inputs, want) -> dict[str, float]:
    """The error that each quantity may have. For 16 bit: twice what torch's attention of that dtype makes of the same
    inputs, mask and upstream gradient, plus one rounding of the right answer."""
    q, k, v, g, gl = inputs
    if q.dtype in RELATIVE:
        return dict.fromkeys(NAMES, RELATIVE[q.dtype]) | {"lse": LSE[q.dtype]}
    no_lse = (q, k, v, g, torch.zeros_like(gl))
    exact = oracle(no_lse, pattern)
    own = differentiate(torch_own, no_lse, pattern)
    budget = {"lse": LSE[q.dtype]}
    for name in ("out", "dq", "dk", "dv"):
        upstream = None if name == "out" else g
        rounding = relative(want[name].to(q.dtype), want[name], upstream)
        budget[name] = 2 * (relative(own[name], exact[name], upstream) + rounding)
    return budget


def torch_own(q, k, v, pattern):
    """(out, zeros for lse) by torch's attention of the inputs' dtype."""
    out = error._torch_own(q, k, v, pattern)
    return out, out.sum(-1).transpose(1, 2) * 0


def errors(
    case: Case, dtype, run=None, device="cpu", backend="torch", seed=0, through_lse=True
) -> dict[str, tuple[float, float]]:
    """(error, budget) of out, lse, dq, dk, dv for run(q, k, v, pattern) -> (out, lse), by default `attention`.

    through_lse: whether a gradient comes in through lse too.
    """
    run = run or functools.partial(attention, backend=backend, return_lse=True)
    pattern, inputs = case.pattern(), case.inputs(dtype, device, seed)
    if not through_lse:
        inputs[4].zero_()
        run = without_lse(run)
    want = oracle(inputs, pattern)
    with poisoned(device):
        got = differentiate(run, inputs, pattern)
    budget = budgets(pattern, inputs, want)
    for name, x in got.items():
        assert x.dtype == (inputs[4].dtype if name == "lse" else dtype), f"{name} is {x.dtype}"
        assert x.shape == want[name].shape, f"{name} is {tuple(x.shape)}, not {tuple(want[name].shape)}"
        assert name == "lse" or bool(x.isfinite().all()), f"{name} is not finite"
    found = {name: relative(x, want[name], None if name == "out" else inputs[3]) for name, x in got.items()}
    found["lse"] = lse_error(got["lse"], want["lse"])
    return {name: (found[name], budget[name]) for name in NAMES}


def without_lse(run):
    """run, whose lse is a number apart: no gradient goes through it."""

    def attend(*x):
        out, lse = run(*x)
        return out, lse.detach().requires_grad_()

    return attend


def check(case: Case, dtype, **options) -> None:
    """AssertionError, naming each quantity, where an error is over its budget."""
    over = {name: f"{e:.3g} > {b:.3g}" for name, (e, b) in errors(case, dtype, **options).items() if not e <= b}
    assert not over, f"{case.id} in {name_of(dtype)}: {over}"


def take_strided_views(monkeypatch, room: int) -> None:
    """Dilated branches go by fused attention on strided views at any length, in calls of about `room` bytes."""
    from workbench.engines.triton import cudnn_views

    for name, new in {"FROM": dict.fromkeys(cudnn_views.FROM, 1), "FROM_WHOLE": 1, "WORK": 0}.items():
        monkeypatch.setattr(cudnn_views, name, new)
    monkeypatch.setattr(cudnn_views, "room", lambda *x: room)


@contextlib.contextmanager
def poisoned(device="cpu"):
    """Memory that is not written holds NaN: torch fills it on a CPU; on CUDA freed blocks of NaN are what is reused."""
    if torch.device(device).type == "cuda":
        small = [torch.full((1 << x,), torch.nan, device=device) for x in range(7, 18) for _ in range(16)]
        large = [torch.full((1 << x,), torch.nan, device=device) for x in range(18, 24) for _ in range(4)]
        del small, large
        yield
        return
    with warnings.catch_warnings():
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
