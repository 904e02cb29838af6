"""Will it fit? A calculator for any card, of the programs in fit.json."""
from __future__ import annotations

from pathlib import Path

from workbench.fit import cards
from workbench.probes import catalog
from workbench.probes.case import Case

DATA = Path(__file__).with_name("fit.json")  # written by tests/programs.py
DTYPES = ("float32", "float16", "bfloat16")
HEAD_DIMS = (32, 64, 128)
MODES = ("fwd", "fwdbwd")
WORLDS = (1, 2, 4, 8)
WAYS = (
    "dense, cudnn", "dense, flash", "dense, fa4", "dense, efficient", "dense, eager", "longnet-paper, triton",
    "longnet-paper, fa4", "longnet-paper, torch", "window-blocks, triton", "window-blocks, flex",
    "window-tokens, triton",
)  # fmt: skip


def classes() -> list[cards.Card]:
    """A card of each compute capability: calls are alike on those of one."""
    return list({card.capability: card for card in cards.CARDS.values()}.values())


def case(way: str, n: int, batch: int, heads: int, head_dim: int, dtype: str, mode: str) -> Case:
    """The call of a way at N."""
    pattern, _, backend = way.partition(", ")
    return Case(catalog.maker(pattern)(n, False), n, heads, head_dim, dtype, backend, mode, "cuda", batch)
