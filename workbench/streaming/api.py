"""Attention, its gradients and a layer over a sequence in the host's memory or in files, chunk by chunk on a card."""

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import torch
from torch import Tensor, nn

from workbench.engines import partial
from workbench.engines.check import DTYPES, refuse
from workbench.engines.layers import MultiheadAttention
from workbench.fit import cards
from workbench.patterns import BlockSparse, Dense, Dilated, Neighborhood, Pattern
from workbench.patterns.checks import describe, whole
from workbench.streaming import files, host
from workbench.streaming.plan import Plan, plan
from workbench.streaming.run import Backward, Forward, Stream


def attention(
    source, pattern: Pattern, sink, *, heads: int, head_dim: int, dtype: torch.dtype, budget_bytes: int | None = None,
    scale: float | None = None, backend="auto", chunk: int | None = None, journal=None, watch=None, **unknown,
):  # fmt: skip
    """Attention of N positions whose rows come from the host and go there, with at most budget_bytes on the card.

    source: (q, k, v), tensors (N, H, D) and (N, G, D) in the host's memory or files (`memory_map`), best pinned; or
        `Projected(x, q, k, v)`. sink: out (N, H, D) or (out, lse (N, H), float32, or float64 for float64), which may be
        the source's own memory where the pattern is dilated, so that no later chunk reads these rows.
    chunk: positions on the card together, by default as the budget allows. journal: a file of finished ranges, for a
        sink in files: the same call goes on where a killed one ended. watch(positions done, seconds): called as
        it runs.
    Returns the run as a record's fields. `explain` says beforehand what it will take. ValueError, before any work, for
    what cannot run, too little memory among it. On the current CUDA device, or on the CPU where there is none.
    """
    refuse("streaming.attention", unknown)
    out, lse = sink if isinstance(sink, (tuple, list)) else (sink, None)
    job = Forward(source, (out, lse))
    return _run(job, pattern, heads, head_dim, dtype, budget_bytes, scale, backend, chunk, journal, watch)


def explain(
    source, pattern: Pattern, sink=None, *, heads: int, head_dim: int, dtype: torch.dtype, budget_bytes=None, card=None,
    scale: float | None = None, backend="auto", chunk: int | None = None, **unknown,
) -> Plan:  # fmt: skip
    """The plan of `attention`, without running it: print it. On `card`, by default this machine's, or on the CPU.

    Tensors of the source may be without contents, torch.empty(n, heads, head_dim, dtype=dtype, device="meta"): of any
    length. sink: by default out alone, (N, H, D).
    """
    refuse("streaming.explain", unknown)
    n = len(next(iter(host.tensors(source).values())))
    sink = torch.empty(n, heads, head_dim, dtype=dtype, device="meta") if sink is None else sink
    job = Forward(source, sink if isinstance(sink, (tuple, list)) else (sink, None))
    return _planned(job, pattern, heads, head_dim, dtype, budget_bytes, scale, backend, chunk, card)[0]


def gradients(
    source: tuple[Tensor, Tensor, Tensor], pattern: Pattern, grad: Tensor, result: tuple[Tensor, Tensor],
    sink: tuple[Tensor, Tensor, Tensor], *, heads: int, head_dim: int, dtype: torch.dtype,
    budget_bytes: int | None = None, scale=None, backend="auto", chunk=None, journal=None, watch=None, **unknown,
):  # fmt: skip
    """dq, dk and dv, written to `sink`, of tensors on the host as in `attention`, which gave result = (out, lse).

    grad (N, H, D): the gradient of out. For dilated patterns and windows on a line: of others the gradient of a key
    comes from many chunks. The rest as in `attention`.
    """
    refuse("streaming.gradients", unknown)
    line = isinstance(pattern, Neighborhood) and len(pattern.shape) == 1 and pattern.ordering is None
    if not line and not isinstance(pattern, Dilated):
        raise ValueError(f"pattern={pattern!r}: want a dilated pattern or a window on a line for gradients")
    others = {"grad": grad, "out": result[0], "lse": result[1]}
    job = Backward(tuple(source), others, tuple(sink), pattern.divisor(whole("heads", heads, 1)))
    return _run(job, pattern, heads, head_dim, dtype, budget_bytes, scale, backend, chunk, journal, watch)


@torch.no_grad()
def layer(module: MultiheadAttention, x: Tensor, out: Tensor | None = None, **options):
    """A layer on x (N, embed_dim) in the host's memory, its weights on the card; written over x, or to `out` like it.

    q, k and v are projected on the card as x streams, and out's projection is done before its rows leave: beside x
    nothing of its length is on the host. options: of `attention`. Dropout in training is refused.
    """
    if module.training and module.dropout.p:
        raise ValueError(f"dropout={module.dropout.p}: want module.eval(), a stream computes no gradients of a layer")
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != module.q.in_features:
        raise ValueError(f"x={describe(x)}: want (N, {module.q.in_features})")
    by_head = {"q": module.num_heads, "k": module.num_kv_heads, "v": module.num_kv_heads}
    parts = (
        nn.Sequential(getattr(module, name), nn.Unflatten(-1, (heads, module.head_dim)))
        for name, heads in by_head.items()
    )
    source = host.Projected(x, *parts, module.num_kv_heads)
    job = Forward(source, (x if out is None else out, None), nn.Sequential(nn.Flatten(1), module.out))
    given = {"budget_bytes": None, "scale": None, "backend": module.backend, "chunk": None, "journal": None,
             "watch": None}  # fmt: skip
    refuse("streaming.layer", {key: value for key, value in options.items() if key not in given})
    return _run(job, module.pattern, module.num_heads, module.head_dim, x.dtype, *(given | options).values())


def _planned(job, pattern, heads, head_dim, dtype, budget, scale, backend, chunk, card=None) -> tuple[Plan, object]:
    """(the plan, the options of each call) after all checks that need no memory."""
    if not isinstance(pattern, (Dense, Dilated, Neighborhood, BlockSparse)) or pattern.batch not in (None, 1):
        raise ValueError(f"pattern={pattern!r}: want dense, dilated, a neighborhood or blocks, for one sequence")
    heads, head_dim = whole("heads", heads, 1), whole("head_dim", head_dim, 1)
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: want float64, float32, bfloat16 or float16")
    n, kv_heads = len(next(iter(job.tensors.values()))), host.key_heads(job.source, heads)
    if n == 0 or heads % kv_heads:
        raise ValueError(f"{n} positions, {heads} heads, {kv_heads} key heads: want a position, key heads that divide")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = {"q": (n, heads, head_dim), "k": (n, kv_heads, head_dim), "v": (n, kv_heads, head_dim)}
    shapes |= dict.fromkeys(("grad", "out"), shapes["q"]) | {"lse": (n, heads)}
    sinks = zip(("out", "lse") if isinstance(job, Forward) else ("q", "k", "v"), job.sink, strict=True)
    named = [*job.tensors.items(), *((f"sink's {name}", x) for name, x in sinks if x is not None)]
    for name, x in named:
        what = name.removeprefix("sink's ")
        want = shapes.get(what, (n, *x.shape[1:])) if getattr(job, "finish", None) is None else (n, *x.shape[1:])
        to = wide if what == "lse" else dtype
        if tuple(x.shape) != want or x.dtype != to or x.device.type == "cuda" or not x.is_contiguous():
            raise ValueError(f"{name}={describe(x)}: want a contiguous {to} {want} in the host's memory")
    pattern.for_batch(0).check(n, heads)
    options = SimpleNamespace(scale=1 / math.sqrt(head_dim) if scale is None else scale, backend=backend)
    like = torch.empty(1, 1, heads, head_dim, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")
    if reason := partial.why_not(backend, like, like, pattern):
        raise ValueError(reason)
    if card is None:
        here = replace(cards.find("h100"), key=cards.VIRTUAL, workspace_bytes=0)  # whose kernels are the processor's
        card = cards.from_device() if torch.cuda.is_available() else here
    sizes = n, heads, kv_heads, head_dim
    chunk = None if chunk is None else whole("chunk", chunk, 1)
    return plan(job, pattern, sizes, dtype, options, cards.find(card), budget, chunk), options


def _run(job, pattern, heads, head_dim, dtype, budget, scale, backend, chunk, journal, watch) -> dict:
    found, options = _planned(job, pattern, heads, head_dim, dtype, budget, scale, backend, chunk)
    mapped = {x.path: x for x in (*job.tensors.values(), *job.sink) if x is not None and hasattr(x, "path")}
    for path, x in mapped.items():
        files.check_length(path, x.nbytes)
    sinks = [x for x in job.sink if x is not None]
    read = {_memory(x) for x in job.tensors.values()}
    over = any(_memory(x) in read for x in sinks)
    if over and not isinstance(pattern, Dilated):
        raise ValueError(f"sink is the source's memory, which later chunks of {pattern.name} read: want other memory")
    if (free := psutil.virtual_memory().available) < found.host:
        raise ValueError(f"{found.host:,} bytes to be pinned and {free:,} free: want a smaller chunk")
    record, done = None, set()
    if journal is not None:
        if over or not all(hasattr(x, "path") for x in sinks):
            raise ValueError(f"journal={str(journal)!r}: want a sink of `memory_map`, not over the source")
        what = pattern.spec(), found.calls.chunk, heads, head_dim, options.scale, type(job).__name__
        record = files.Journal(journal, files.identity(job.tensors, *what), [x.path for x in sinks])
        done = record.done
    chunks = [x for x in found.calls.chunks if (x.start, x.stop) not in done]
    begin, state = time.perf_counter(), {"done": found.calls.n - sum(map(len, chunks))}

    def finished(piece: range) -> None:
        if record:
            record.finished(piece)
        state["done"] += len(piece)
        if watch:
            watch(state["done"], time.perf_counter() - begin)

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"] if cuda else 0
    stream = Stream(found.calls, job, dtype, head_dim, "cuda" if cuda else "cpu", options, chunks, finished)
    stream.run()
    seconds = time.perf_counter() - begin
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before if cuda else None
    return {
        "probe": "streaming", "pattern": pattern.short_name, "pattern_spec": pattern.spec(), "causal": pattern.causal,
        "n": found.calls.n, "heads": heads, "kv_heads": found.calls.kv_heads, "head_dim": head_dim,
        "dtype": str(dtype).removeprefix("torch."), "mode": "fwd" if isinstance(job, Forward) else "bwd",
        "chunk": found.calls.chunk, "kept": found.kept, "bytes_in": stream.bytes_in, "bytes_out": stream.bytes_out,
        "budget_bytes": budget, "peak_bytes": peak, "planned_bytes": found.peak, "median_ms": 1000 * seconds,
        "planned_ms": found.milliseconds, "traffic_ms": found.floors[0], "status": "ok",
    }  # fmt: skip


def _memory(x: Tensor):
    return getattr(x, "path", None) or x.untyped_storage().data_ptr()
