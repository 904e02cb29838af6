"""Will it fit? A calculator for any card: every way's longest sequence, what limits it, its bytes and time at an N.

The page computes with programs (`fit.json`, written by tests/programs.py from traces), torch's allocator in JavaScript,
and the time model of `fit.estimate`: `fit_model.js`.
"""

import json
from pathlib import Path

from workbench.engines import torch_rules
from workbench.explorers import Explorer
from workbench.fit import cards, estimate
from workbench.harness.narrate import title
from workbench.patterns.dilated import PAPER
from workbench.probes import catalog
from workbench.probes.case import Case

DATA = Path(__file__).with_name("fit.json")
DTYPES = ("float32", "float16", "bfloat16")
HEAD_DIMS = (32, 64, 128)
MODES = ("fwd", "fwdbwd")
WORLDS = (1, 2, 4, 8)
WAYS = (
    "dense, cudnn", "dense, flash", "dense, fa4", "dense, efficient", "dense, eager", "longnet-paper, triton",
    "longnet-paper, fa4", "window-blocks, triton", "window-tokens, triton",
)  # fmt: skip


def classes() -> list[cards.Card]:
    """A card of each compute capability: calls are alike on those of one."""
    return [*map(cards.find, ["gtx1080", "t4", "rtx3090", "v100-32gb", "l40s", "rtx5090", "a100-80gb", "h200", "b200"])]


def grain(way: str) -> int:
    """What N of a way is a multiple of, on each card: whole segments of LongNet's."""
    return 128 if not way.startswith("longnet") else max(PAPER)


def case(way: str, n: int, batch: int, heads: int, head_dim: int, dtype: str, mode: str) -> Case:
    """The call of a way of WAYS at N, not causal."""
    pattern, _, backend = way.partition(", ")
    return Case(catalog.maker(pattern)(n, False), n, heads, head_dim, dtype, backend, mode, "cuda", batch)


def calculator(
    card="h100", n=131_072, heads=32, head_dim=128, dtype="float16", mode="fwdbwd", seconds=60.0
) -> Explorer:
    """The explorer, with these settings at first; it keeps what is set in the address.

    n: the length at which bytes and time are shown. seconds: what attention may take at most.
    ValueError for a card that is not known.
    """
    first = {"card": cards.find(card).key, "n": n, "heads": heads, "head_dim": head_dim, "dtype": dtype, "mode": mode}
    return Explorer("Will it fit?", ["fit_model", "fit"], known() | {"state": first | {"seconds": seconds}})


def known() -> dict:
    """What `fit_model.js` computes with."""
    data = json.loads(DATA.read_text())
    kinds = [card.capability for card in classes()]
    on = [
        {
            "key": card.key, "name": title(card.key), "gib": round(card.total_bytes / 2**30, 2),
            "total": card.total_bytes, "context": card.context_bytes, "communicator": card.communicator_bytes,
            "workspace": card.workspace_bytes, "kind": kinds.index(card.capability), "tflops": card.matmul_tflops,
        }
        for card in cards.CARDS.values()
    ]  # fmt: skip
    rates = {f"{way} {dtype} {mode}": _rates(way, dtype, mode) for way in WAYS for dtype in DTYPES for mode in MODES}
    wrong = {way: why for way in WAYS if (why := torch_rules.WRONG_PAST_2_31.get(way.removeprefix("dense, ")))}
    return data | {
        "cards": on, "rates": rates, "wrong": wrong, "ways": [[way, title(way), grain(way)] for way in WAYS],
        "worlds": WORLDS, "head_dims": HEAD_DIMS, "dtypes": DTYPES,
    }  # fmt: skip


def _rates(way: str, dtype: str, mode: str) -> dict | None:
    """{head_dim: [[rows, share], ...]} of `estimate.efficiency`; None where it was not measured."""
    at, found = case(way, 1 << 16, 1, 8, 64, dtype, mode), {}
    for line in estimate.efficiency().get(estimate.family(at, at.backend, cards.find("h100")), ()):
        found.setdefault(line["head_dim"], []).append([line["rows"], line["share"]])
    return found or None  # by rows, as they are written
