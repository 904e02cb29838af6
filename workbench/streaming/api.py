"""Attention, its gradients and a layer over a sequence on the host or in files, chunk by chunk on a card."""

import dataclasses
import math
import time
from types import SimpleNamespace

import psutil
import torch
from torch import Tensor, nn

from workbench.engines import partial
from workbench.engines.check import DTYPES, refuse
from workbench.engines.layers import MultiheadAttention
from workbench.fit import cards
from workbench.patterns import Dilated, Pattern
from workbench.patterns.checks import choice, describe, device, whole
from workbench.streaming import files, host
from workbench.streaming.calls import Calls, window_of
from workbench.streaming.plan import Plan, plan
from workbench.streaming.run import Backward, Forward, Stream

SHAPE = ("heads", "head_dim", "dtype")
OPTIONS = dict.fromkeys((*SHAPE, "budget_bytes", "scale", "device", "chunk", "journal", "watch")) | {"backend": "auto"}


def attention(source, pattern: Pattern, sink, **options) -> dict:
    """Attention of N positions whose rows come from the host and go there, with at most budget_bytes on the card.

    source: (q, k, v), tensors (N, H, D) and (N, G, D) in the host's memory, best pinned, or in files (`memory_map`); or
        `Projected(x, q, k, v)`.
    sink: out (N, H, D), or (out, lse (N, H), float32, or float64 for float64). It may be the source's own memory where
        the pattern is dilated, since then no later chunk reads the rows of an earlier one.
    heads, head_dim, dtype: those of q, which `Projected` has to be told.
    budget_bytes: by default, what is free. chunk: positions on the card together, by default as the budget allows.
    scale, backend: as of `wb.attention`. device: "cuda", or "cpu", the default where there is no card.
    journal: the path of a record of finished ranges, for a sink in files: the same call goes on where one that was
        killed has ended. watch(positions done, seconds): called as it runs.

    Returns a record's fields. `explain` says beforehand what it will take. ValueError, before any work, for what cannot
    run, such as a budget that is too small.
    """
    sink = tuple(sink) if isinstance(sink, (tuple, list)) else (sink, None)
    return _run(Forward(source, sink), pattern, _options(source, options))


def explain(source, pattern: Pattern, *, card=None, **options) -> Plan:
    """What `attention` to out, without an lse, will take, without running it: a `Plan`, which prints as a sentence.

    card: by default this machine's, or the processor. Tensors of the source may be without contents, of any length:
    torch.empty(n, heads, head_dim, dtype=dtype, device="meta").
    """
    n, options = len(next(iter(host.tensors(source).values()))), _options(source, options)
    out = torch.empty(n, options.heads, options.head_dim, dtype=options.dtype, device="meta")
    return _planned(Forward(source, (out, None)), pattern, options, card)


def gradients(source, pattern: Pattern, grad: Tensor, result, sink, **options) -> dict:
    """dq, dk and dv, written to `sink`, tensors like the three of the source (q, k, v), from out's gradient, `grad`.

    result: (out, lse) as `attention` gave them. The dk and dv of a dilated pattern, and of a window without sinks, are
    of dtype. In others many chunks add to them: want float32, or float64 for float64. The rest as in `attention`.
    """
    options = _options(source, options)
    adds = not isinstance(pattern, Dilated) and not window_of(pattern)
    others = dict(zip(("grad", "out", "lse"), (grad, *result), strict=True))
    job = Backward(tuple(source), others, tuple(sink), pattern.divisor(options.heads), adds)
    return _run(job, pattern, options)


@torch.no_grad()
def layer(module: MultiheadAttention, x: Tensor, out: Tensor | None = None, **options) -> dict:
    """A layer on x (N, embed_dim) on the host, its weights on the card; written over x, or to `out` like it.

    q, k and v are projected on the card as x streams, and out's projection is done before its rows leave: beside x
    nothing of its length is on the host. The rest as in `attention`. Dropout in training and positions are refused.
    """
    if module.rope is not None or module.tokens != "natural":
        raise ValueError(f"rope={module.rope}, tokens={module.tokens!r}: want None and 'natural', rows come alone here")
    if module.training and module.dropout.p:
        raise ValueError(f"dropout={module.dropout.p}: want module.eval(), a stream computes no gradients of a layer")
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != module.q.in_features:
        raise ValueError(f"x={describe(x)}: want (N, {module.q.in_features})")
    heads, kv_heads = module.num_heads, module.num_kv_heads
    parts = ((module.q, heads, module.q_norm), (module.k, kv_heads, module.k_norm), (module.v, kv_heads, nn.Identity()))
    parts = (nn.Sequential(linear, nn.Unflatten(-1, (h, module.head_dim)), norm) for linear, h, norm in parts)
    source, finish = host.Projected(x, *parts, kv_heads), nn.Sequential(nn.Flatten(1), module.norm, module.out)
    known = {"heads": heads, "head_dim": module.head_dim, "dtype": x.dtype}
    options = _options(source, {"backend": module.backend} | options | known)
    return _run(Forward(source, (x if out is None else out, None), finish), module.pattern, options)


def _options(source, options: dict) -> SimpleNamespace:
    refuse("a stream", {key: value for key, value in options.items() if key not in OPTIONS})
    options = OPTIONS | options
    if not isinstance(source, host.Projected):
        q = host.tensors(source)["q"]
        of_q = dict(zip(SHAPE, (q.shape[1], q.shape[-1], q.dtype), strict=True))
        options |= {name: x for name, x in of_q.items() if options[name] is None}
    for name in ("heads", "head_dim", "budget_bytes", "chunk"):
        if name in SHAPE or options[name] is not None:
            options[name] = whole(name, options[name], 1)
    found = SimpleNamespace(**options)
    if found.dtype not in DTYPES:
        raise ValueError(f"dtype={found.dtype!r}: want torch.float64, float32, bfloat16 or float16")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    found.device = device(choice("device", found.device or default, "cuda", "cpu"), here=True)
    found.scale = 1 / math.sqrt(found.head_dim) if found.scale is None else float(found.scale)
    return found


def _planned(job, pattern, options, card=None) -> Plan:
    """The plan, after all checks that need no memory."""
    if not isinstance(pattern, Pattern) or pattern.batch not in (None, 1):
        raise ValueError(f"pattern={pattern!r}: want a pattern, that of one sequence")
    n, heads = len(next(iter(job.tensors.values()))), options.heads
    projected = isinstance(job.source, host.Projected)
    kv_heads = (job.source.kv_heads or heads) if projected else job.source[1].shape[1]
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} key heads do not divide {heads} heads: want a divisor")
    _check_tensors(job, n, kv_heads, options)
    pattern.for_batch(0).check(n, heads)
    like = torch.empty(1, 1, heads, options.head_dim, dtype=options.dtype, device=options.device)
    if reason := partial.why_not(options.backend, like, like, pattern):
        raise ValueError(reason)
    room = options.budget_bytes
    if card is not None:
        card = cards.find(card)
        room = room or card.total_bytes - card.context_bytes
    elif options.device == "cuda":
        card = cards.from_device()
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        room = room or free
    else:  # whose kernels are the processor's
        card = dataclasses.replace(cards.find("h100"), key=cards.VIRTUAL, workspace_bytes=0)
    return plan(job, Calls(pattern, n, heads, kv_heads, n), options, card, room)


def _check_tensors(job, n: int, kv_heads: int, options) -> None:
    wide = torch.float64 if options.dtype == torch.float64 else torch.float32
    query, key = ((n, h, options.head_dim) for h in (options.heads, kv_heads))
    shapes = {"k": key, "v": key, "dk": key, "dv": key, "lse": (n, options.heads)}  # others: as the queries
    if isinstance(job.source, host.Projected):
        shapes = {name: (n, *x.shape[1:]) for name, x in (("x", job.tensors["x"]), ("out", job.sink[0]))}
    names = ("out", "lse") if isinstance(job, Forward) else ("dq", "dk", "dv")
    sinks = [("sink", name, x) for name, x in zip(names, job.sink, strict=True) if x is not None]
    for where, name, x in (*(("source", *item) for item in job.tensors.items()), *sinks):
        to = wide if name == "lse" or job.adds and name in ("dk", "dv") else options.dtype
        shape = shapes.get(name, query)
        if not isinstance(x, Tensor) or x.is_cuda or (tuple(x.shape), x.dtype) != (shape, to):
            raise ValueError(f"{where}: {name} is {describe(x)}, want a tensor of {to} {shape} on the host")
        if not x.is_contiguous():
            raise ValueError(f"{where}: {name} has strides {x.stride()}: want it contiguous")


def _journal(job, pattern, options, found: Plan) -> files.Journal | None:
    """The journal, if one is asked for, after the checks of what is there: files, memory."""
    sinks = [x for x in job.sink if x is not None]
    for x in (*job.tensors.values(), *sinks):
        if hasattr(x, "path"):
            files.check_length(x.path, x.nbytes)
    over = {_memory(x) for x in job.tensors.values()} & {_memory(x) for x in sinks}
    if over and not isinstance(pattern, Dilated):
        raise ValueError(f"sink is the source's memory, which later chunks of {pattern.name} read: want other memory")
    if (free := psutil.virtual_memory().available) < found.pinned:
        raise ValueError(f"{found.pinned:,} bytes to be pinned and {free:,} free: want a smaller chunk")
    if options.journal is None:
        return None
    if over or not all(hasattr(x, "path") for x in sinks):
        raise ValueError(f"journal={str(options.journal)!r}: want a sink of `memory_map`, not over the source")
    what = type(job).__name__, pattern.spec(), found.calls.chunk, options.scale
    return files.Journal(options.journal, job.tensors, what, sinks)


def _run(job, pattern, options) -> dict:
    found, cuda = _planned(job, pattern, options), options.device == "cuda"
    record = _journal(job, pattern, options, found)
    chunks = [x for x in found.calls.chunks if not record or (x.start, x.stop) not in record.done]
    done, begin = [found.calls.n - sum(map(len, chunks))], time.perf_counter()

    def finished(chunk: range) -> None:
        done.append(done[-1] + len(chunk))
        if record:
            record.finished(chunk)
        if options.watch:
            options.watch(done[-1], time.perf_counter() - begin)

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"] if cuda else 0
    if job.adds and len(chunks) == len(found.calls.chunks):
        with host.Lane("cpu").within():
            [x.zero_() for x in job.sink[1:]]
    changing = {"changing": record.changing} if record and job.adds else {}
    stream = Stream(found.calls, job, options.device, options, chunks, finished, **changing)
    stream.run()
    seconds = time.perf_counter() - begin
    return {
        "probe": "streaming", "pattern": pattern.short_name, "pattern_spec": pattern.spec(), "causal": pattern.causal,
        "n": found.calls.n, "heads": options.heads, "kv_heads": found.calls.kv_heads, "head_dim": options.head_dim,
        "dtype": options.dtype, "mode": "fwd" if isinstance(job, Forward) else "bwd", "status": "ok",
        "chunk": found.calls.chunk, "kept": found.kept, "bytes_in": stream.bytes_in, "bytes_out": stream.bytes_out,
        "budget_bytes": options.budget_bytes, "planned_bytes": found.peak, "median_ms": 1000 * seconds,
        "peak_bytes": torch.cuda.memory_stats()["requested_bytes.all.peak"] - before if cuda else None,
        "traffic_ms": found.traffic_ms, "planned_ms": found.milliseconds,
    }  # fmt: skip


def _memory(x: Tensor):
    return getattr(x, "path", None) or x.untyped_storage().data_ptr()
