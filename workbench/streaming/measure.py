"""Streams measured on the card that is here, beside attention in memory: LongNet, one head of 32, float16.

On a CPU the same happens on a card in software. Rows are drawn in a block on the card and repeated to the end: a second
for 64 GiB, and what a layer has written over is still known.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from workbench.engines.dispatch import attention
from workbench.engines.layers import MultiheadAttention
from workbench.fit.virtual_card import VirtualCard
from workbench.harness import records
from workbench.harness.outcome import attempt
from workbench.patterns import Dilated
from workbench.patterns.dilated import geometric
from workbench.probes import timing, validity
from workbench.probes.visible import tensor
from workbench.streaming import api
from workbench.streaming.plan import CHUNK

HEAD_DIM = 32
PERIOD = (1 << 20) - 3  # rows in a block: odd, so that no two segments are alike
HELD = {"fwd": 4, "layer": 1, "fwdbwd": 8}  # tensors on the host: q, k, v, out; x; these four and their gradients


def measure(lengths: Mapping[str, list[int]], gib: float, first: int = 4096, profile="quick", folder=None, watch=None):
    """A DataFrame of records, each on disk as soon as its run has ended, its sampled rows checked against float64.

    lengths: tokens, of "fwd", attention of q, k, v, and "fwdbwd", with its gradients, both in at most gib GiB of the
        card, and again in memory; of "layer", on x and written over it, with all of the card.
    first: tokens of LongNet's first segment. profile, folder: as of `records.start`. watch: `streaming.layer`'s.
    """
    recorder, rows = records.start("streaming", profile, folder), []
    wanted = [(mode, n) for mode in HELD for n in lengths[mode]]
    memory = torch.empty(max(HELD[mode] * n for mode, n in wanted), 1, HEAD_DIM, dtype=torch.float16,
                         pin_memory=_where() == "cuda")  # fmt: skip
    for mode, n in wanted:
        pattern, host = geometric(n, first=first), memory[: HELD[mode] * n].unflatten(0, (HELD[mode], n))
        if mode == "layer":
            works = {"layer": lambda p=pattern, x=host[0]: _layer(p, x[:, 0], gib, watch)}
        else:
            works = {"streamed": lambda p=pattern, x=host: _streamed(p, x, gib),
                     "in memory": lambda p=pattern, x=host: _in_memory(p, x)}  # fmt: skip
        for execution, work in works.items():
            row = {"pattern": pattern.short_name, "pattern_spec": pattern.spec(), "causal": False, "n": n, "heads": 1}
            row |= {"kv_heads": 1, "head_dim": HEAD_DIM, "dtype": memory.dtype, "budget_bytes": None}
            outcome = attempt(work)
            row |= {"status": outcome.status, "error": outcome.error} | (outcome.result or {})
            rows.append(recorder.row(**row | {"mode": "fwd" if mode == "layer" else mode, "execution": execution}))
    return recorder.frame(rows)


def _layer(pattern: Dilated, x: Tensor, gib: float, watch) -> dict:
    n, chunk = len(x), _chunk(len(x))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = MultiheadAttention(HEAD_DIM, 1, pattern, bias=False, dtype=x.dtype).to(_where()).eval()
    _run(lambda: api.layer(module, x[: 4 * chunk], chunk=chunk), gib)  # compiles, and makes the lists of a chunk
    block = _filled(x, 0).double()
    row = _run(lambda: api.layer(module, x, chunk=chunk, watch=watch), gib)
    with torch.no_grad():
        module.double()
        exact = _Repeated(pattern, n, *(f(block)[None, :, None] for f in (module.q, module.k, module.v)))
        places = [i for _, i, _ in validity.sample((1, n, 1, HEAD_DIM), pattern)]
        want = torch.stack([module.out(exact.rows(0, 0, torch.tensor([i]))["out"][0][0]) for i in places])
    got = x[torch.tensor(places)].to(want)
    error = float(((got - want).norm(dim=1) / want.norm(dim=1)).max())
    allowed = 4 * torch.finfo(x.dtype).eps  # twice what `validity` allows: q, k and v are rounded, too
    return row | {"error_sampled": error, "valid": error <= allowed, "rows_sampled": len(places)}


def _streamed(pattern: Dilated, host: Tensor, gib: float) -> dict:
    q, k, v, out, *others = host
    inputs = [q, k, v, *others[:1]]
    for seed, x in enumerate(inputs):
        _filled(x, seed)
    options = {"chunk": _chunk(len(q)), "budget_bytes": int(gib * 2**30)}
    lse = torch.empty(len(q), 1, pin_memory=q.is_pinned()) if others else None

    def run() -> dict:
        row = _run(lambda: api.attention((q, k, v), pattern, (out, lse), **options), gib)
        if others:
            grad, *sink = others
            back = _run(lambda: api.gradients((q, k, v), pattern, grad, (out, lse), sink, **options), gib)
            most = {x: max(row[x], back[x]) for x in ("planned_bytes", "peak_bytes")}
            row = back | {x: row[x] + back[x] for x in ("bytes_in", "bytes_out", "median_ms", "traffic_ms")} | most
        return row

    run()  # compiles, and makes the lists
    return run() | _checked(pattern, *([x[None].to(_where()) for x in y] for y in (inputs, [out, *others[1:]])))


def _in_memory(pattern: Dilated, host: Tensor) -> dict:
    q, k, v, _, *others = host
    inputs, results = [x.to(_where())[None] for x in (q, k, v, *others[:1])], []
    leaves = [x.requires_grad_(bool(others)) for x in inputs[:3]]

    def run() -> None:
        results.clear()
        results.append(attention(*leaves, pattern))
        if others:
            results.extend(torch.autograd.grad(results[0], leaves, inputs[3]))

    took = timing.measure(run, warmup=0, samples=1)  # on a card, of a call after the first
    return {"median_ms": took.median_ms} | _checked(pattern, inputs, results)


def _checked(pattern: Dilated, inputs: list[Tensor], results: list[Tensor]) -> dict:
    """What a check of sampled rows says. Tensors are (1, n, 1, HEAD_DIM), on the card, where it takes less long."""
    found = validity.check(pattern, dict(zip(("out", "dq", "dk", "dv"), results, strict=False)), inputs)
    return {"error_sampled": max(found.errors.values()), "valid": found.ok, "rows_sampled": found.rows + found.keys}


class _Repeated(validity.Exact):
    """Rows of n positions at which q, k and v (1, period, heads, head_dim) repeat themselves."""

    def __init__(self, pattern, n: int, *tensors: Tensor):
        super().__init__(pattern, *tensors)
        self.n = n

    def take(self, x, b, at, h):
        return super().take(x, b, tensor(at) % x.shape[1], h)


def _where() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _chunk(n: int) -> int:
    return min(CHUNK, max(1, n // 8))  # what is short is streamed, too


def _filled(x: Tensor, seed: int) -> Tensor:
    """A block of random rows, on the card, which x has again and again."""
    random = torch.Generator(_where()).manual_seed(seed)
    block = torch.randn(min(PERIOD, len(x)), *x.shape[1:], dtype=x.dtype, device=_where(), generator=random)
    for rows in x.split(len(block)):
        rows.copy_(block[: len(rows)], non_blocking=True)
    if _where() == "cuda":
        torch.cuda.synchronize()
    return block


def _run(work: Callable[[], dict], gib: float) -> dict:
    if _where() == "cuda":
        return work()
    with VirtualCard(gib) as card:
        return work() | {"peak_bytes": card.peak_requested_bytes}
