"""The catalog: patterns by name, and the named groups of cases that a card is measured by.

A name means one pattern everywhere: on the command line, in notebooks, in tables. "longnet" and "window" alone would
mean several, so they are refused with the choices.

Dimensions: N tokens, H heads, D head_dim.
"""

import itertools
import json
from collections.abc import Callable, Mapping

import torch

from workbench.patterns import BlockSparse, Dense, Dilated, Neighborhood, Pattern, checks, from_spec, layouts, orderings
from workbench.patterns.dilated import PAPER, geometric
from workbench.probes.case import Case

Maker = Callable[[int, bool], Pattern]  # of N and causal
PAPER_RATES, POW2_RATES = (1, 2, 4, 6, 12), (1, 2, 4, 8, 16)
PATTERNS: dict[str, Maker] = {
    "dense": lambda n, causal: Dense(causal),
    "longnet-paper": lambda n, causal: Dilated(PAPER, PAPER_RATES, causal),
    "longnet-pow2": lambda n, causal: Dilated(PAPER, POW2_RATES, causal),
    "longnet-geometric": geometric,
    "window-blocks": lambda n, causal: BlockSparse(layouts.local(8), 128, causal),
    "window-tokens": lambda n, causal: Neighborhood((n,), 1024),
    "strided": lambda n, causal: BlockSparse(layouts.local(4) | layouts.strided(64), 128, causal),
    "random": lambda n, causal: BlockSparse(layouts.random(0.1), 128, causal),
    "neighborhood": lambda n, causal: Neighborhood((n // 128, 128), 16),
}
MODES = ("fwd", "fwdbwd")


def maker(name: str, patterns: Mapping[str, Maker] = PATTERNS) -> Maker:
    """A name of `patterns`, or a pattern's spec as JSON -> the pattern as a function of N and causal; ValueError for
    a name that is none, or that several begin with."""
    if isinstance(name, str) and name in patterns:
        return patterns[name]
    if not isinstance(name, str) or not name.startswith("{"):
        several = [x for x in patterns if isinstance(name, str) and x.startswith(f"{name}-")]
        want = " or ".join(several) if several else f"one of {', '.join(patterns)}, or a pattern's spec as JSON"
        raise ValueError(f"pattern={name!r}: want {want}")
    try:
        made = from_spec(json.loads(name))
    except json.JSONDecodeError as error:
        raise ValueError(f"pattern={name!r}: not JSON: {error}") from None
    return lambda n, causal: made


def shaped(segments, rates, block_size: int) -> dict[str, Maker]:
    """The patterns of notebook 03, whose sizes are its parameters: dense; dilated, with these segments and rates;
    blocks, each of block_size tokens, its neighbours and the first one; window-tokens, block_size tokens each way."""
    dense, dilated = Dense(), Dilated(segments, rates)
    blocks = BlockSparse(layouts.local(1) | layouts.global_(1), block_size)
    return {
        "dense": lambda n, _: dense, "dilated": lambda n, _: dilated, "blocks": lambda n, _: blocks,
        "window-tokens": lambda n, _: Neighborhood((n,), block_size),
    }  # fmt: skip


def grid(n: int) -> tuple[int, int]:
    """(rows, cols) of the squarest grid of n cells, not higher than wide."""
    rows = next(x for x in range(int(n**0.5), 0, -1) if n % x == 0)
    return rows, n // rows


LONGNET = {  # name: (dilation rates, heads, head_dim)
    "paper 12x64": (PAPER_RATES, 12, 64), "pow2 16x64": (POW2_RATES, 16, 64), "pow2 16x128": (POW2_RATES, 16, 128),
}  # fmt: skip
LONG = (131_072, 1_048_576)


class Graphed(Case):
    """A case whose call is replayed from a CUDA graph."""

    def fields(self) -> dict:
        return super().fields() | {"graph": True}

    def prepare(self):
        call, backend = super().prepare()
        call()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            result = call()

        def replay():  # holds what the graph reads and writes: its inputs, which are `call`'s, and the result
            captured.replay()
            return call, result

        return replay, backend


def one_card() -> dict[str, Callable[[], dict[str, Case]]]:
    """Name -> a function that makes {label: Case}, the first of which is the baseline of the others."""
    longnet, found = Dilated(PAPER, PAPER_RATES), {}
    for (name, (rates, h, d)), n, causal, mode in itertools.product(LONGNET.items(), LONG, (False, True), MODES):
        words = f"longnet {name}{' causal' if causal else ''} {mode} {n}"
        found[words] = lambda rates=rates, c=causal, n=n, sizes=(h, d, mode): {
            "dense 16K": _on_card(Dense(c), 16_384, *sizes),
            "workbench": _on_card(Dilated(PAPER, rates, c), n, *sizes),
            "triton": _on_card(Dilated(PAPER, rates, c), n, *sizes, "triton"),
        }
    for label, n in (("short", 32_768), ("shorter 4096", 4096), ("shorter 16384", 16_384)):
        found[label] = lambda n=n: {
            "dense": _on_card(Dense(), n),
            "workbench": _on_card(longnet, n),
            "workbench, CUDA graph": _on_card(longnet, n, kind=Graphed),
        }
    for mode in MODES:
        found[f"window {mode}"] = lambda mode=mode: _masked(Neighborhood((32_768,), 1024), 32_768, mode)
        found[f"random {mode}"] = lambda mode=mode: _masked(BlockSparse(layouts.random(0.1)), 65_536, mode)
        found[f"others {mode}"] = lambda mode=mode: _others(mode)
    return found | {"neighborhood": _orders}


def _on_card(pattern: Pattern, n: int, h=12, d=64, mode="fwd", backend="auto", dtype="bfloat16", kind=Case) -> Case:
    return kind(pattern, n, h, d, dtype, backend, mode, "cuda")


def _masked(pattern: Pattern, n: int, mode: str) -> dict[str, Case]:
    dense = {"dense": _on_card(Dense(), n, 16, 128, mode)}
    return dense | {name: _on_card(pattern, n, 16, 128, mode, name) for name in ("fa4", "triton")}


def _orders() -> dict[str, Case]:
    shape = (256, 256)
    orders = {"row_major": None, "hilbert": orderings.hilbert(shape), "morton": orderings.morton(shape),
              "tiles 8x16": orderings.tiles(shape, (8, 16))}  # fmt: skip
    ours = {name: _on_card(Neighborhood(shape, 16, order), 65_536) for name, order in orders.items()}
    return {"dense 16K": _on_card(Dense(), 16_384)} | ours


def _others(mode: str) -> dict[str, Case]:
    """The executions that "auto" does not choose for 16-bit inputs, and float32, whose time `fit.estimate` models from
    these rows."""
    longnet, window = Dilated(PAPER, PAPER_RATES), Neighborhood((65_536,), 1024)
    random = BlockSparse(layouts.random(0.1))
    sizes = {
        "dense 16K": (Dense(), 16_384, 12, 64, "auto"), "dense cudnn 16K": (Dense(), 16_384, 12, 64, "cudnn"),
        "dense flash x128": (Dense(), 32_768, 8, 128, "flash"),
        "dense efficient": (Dense(), 32_768, 8, 64, "efficient"),
        "dense efficient x128": (Dense(), 32_768, 8, 128, "efficient"),
        "dense eager": (Dense(), 16_384, 8, 64, "eager"),
        "dense float32": (Dense(), 16_384, 8, 64, "efficient", "float32"),
        "dense float32 x128": (Dense(), 16_384, 8, 128, "efficient", "float32"),
        "longnet torch x128": (longnet, 131_072, 8, 128, "torch"),
        "longnet torch 1M": (longnet, 1_048_576, 12, 64, "torch"),
        "longnet float32": (longnet, 131_072, 12, 64, "torch", "float32"),
        "random torch": (random, 65_536, 8, 64, "torch"), "window x64": (window, 65_536, 12, 64, "triton"),
        "window torch": (window, 65_536, 8, 64, "torch"),
        "window float32": (window, 65_536, 8, 64, "triton", "float32"),
        "random float32": (random, 32_768, 8, 64, "triton", "float32"),
    }  # fmt: skip
    return {label: _on_card(*x[:4], mode, *x[4:]) for label, x in sizes.items()}


BILLION = 1 << 30

# The configurations of the five reports whose claims notebook 06 settles. Where one says no sizes, they are those that
# give its megabytes. NEAR is their "dilated_sparse": blocks i, i ± 1, i ± 2 and i ± 4.
NEAR = layouts.local(2) | (layouts.local(4) - layouts.local(3))
_SMALL, _WIDE, _SINGLE = (2, 32, "float16"), (8, 64, "float16"), (8, 64, "float32")


def _branches(*rates: int) -> Callable[[int], Pattern]:
    """Segments of 4096, 8192, ... for several rates, of all N for one; each branch has heads of its own."""
    lengths = [4096 << x for x in range(len(rates))]
    return lambda n: Dilated(lengths if len(rates) > 1 else [n], rates, heads="partition")


REPORTS = {  # name: (the pattern of N tokens, N, batch, (heads, head_dim, dtype))
    **{f"report-000-{n >> 10}k": (lambda n: BlockSparse(NEAR), n, 16_384 // n, _WIDE) for n in (2048, 8192, 16_384)},
    "report-000-65k": (lambda n: Dense(), 65_536, 1, _WIDE),
    "report-001-8k": (lambda n: BlockSparse(layouts.random(0.05)), 8192, 1, _WIDE),
    "report-002-8k": (_branches(1, 2), 8192, 1, _SINGLE),
    "report-003-65k-ring": (lambda n: BlockSparse(NEAR, 256), 65_536, 1, _SMALL),
    "report-003-131k": (lambda n: BlockSparse(NEAR, 256), 131_072, 1, _SMALL),
    "report-004-8k": (_branches(1), 8192, 1, _SINGLE),
    "report-004-8k-dilated": (_branches(2), 8192, 1, _SINGLE),
    "report-004-213k": (_branches(1, 2, 4), 212_992, 1, _SINGLE),
    "report-004-237k": (_branches(1), 237_568, 1, _SINGLE),
}  # fmt: skip


def report(name: str, most: int = BILLION, **changes) -> Case:
    """A configuration of REPORTS, of at most so many tokens; changes: other arguments of `Case`."""
    make, n, batch, (heads, head_dim, dtype) = REPORTS[checks.choice("name", name, *REPORTS)]
    sizes = {"n": min(n, most), "batch": batch, "heads": heads, "head_dim": head_dim, "dtype": dtype}
    return Case(make(min(n, most)), **sizes | changes)
