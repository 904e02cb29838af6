"""Attention over two cards, by NCCL: exact, and what is left of a job whose rank fails."""

import os
import signal
import subprocess
import time

import pytest
import torch

from tests import tools
from tests.distributed import work
from tests.distributed.cases import CASES as ODD
from workbench import BlockSparse, Dense, Dilated, Neighborhood, PerHead, Predicate, Window, layouts
from workbench.harness.ranks import Pool, RankError
from workbench.patterns import orderings

CARDS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(CARDS < 2, reason="needs two CUDA cards")

LOCAL = layouts.local(1) | layouts.strided(5)
HILBERT = Neighborhood((48, 48), 3, orderings.hilbert((48, 48)))
EVEN = (2048, 2048)
LARGE = {  # what tiles, cuDNN and several exchanges take: (pattern, sizes, lengths of the shards)
    "dense": (Dense(), {"heads": 4, "head_dim": 64}, EVEN),
    "dense-head-dim-128": (Dense(), {"heads": 2, "head_dim": 128}, (1500, 2596)),
    "dense-causal": (Dense(True), {"heads": 4, "head_dim": 64}, EVEN),
    "dense-causal-uneven": (Dense(True), {"heads": 2, "head_dim": 128}, (1100, 2996)),
    "dense-grouped": (Dense(True), {"heads": 4, "kv_heads": 2, "head_dim": 64, "batch": 2}, EVEN),
    "geometric": (Dilated([512, 1024, 4096], [1, 2, 4]), {"heads": 8, "head_dim": 64}, EVEN),
    "geometric-causal": (Dilated([512, 1024, 4096], [1, 2, 4], True), {"heads": 8, "head_dim": 64}, EVEN),
    "geometric-uneven": (Dilated([500, 1700, 4096], [1, 3, 5], True),
                         {"heads": 6, "kv_heads": 2, "head_dim": 128}, (1777, 2319)),
    "whole-and-sparse": (Dilated([4096, 4096], [1, 2]), {"heads": 2, "head_dim": 64}, EVEN),
    "blocks": (BlockSparse(LOCAL, 128), {"heads": 4, "head_dim": 64}, EVEN),
    "blocks-causal-at-both-ends": (BlockSparse(layouts.local(2), 128, True), {"heads": 4, "head_dim": 128},
                                   (3072, 1024)),
    "blocks-whole-by-head": (BlockSparse(layouts.random(0.3, 1, per_head=True), 64),
                             {"heads": 4, "kv_heads": 2, "head_dim": 64, "batch": 2}, EVEN),
    "blocks-causal-by-head": (BlockSparse(layouts.random(0.3, 1, per_head=True) | layouts.local(1), 64, True),
                              {"heads": 4, "kv_heads": 2, "head_dim": 64}, (2000, 2096)),
    "window": (Neighborhood((4096,), 200), {"heads": 4, "head_dim": 64}, EVEN),
    "window-causal-uneven": (Window(600, True), {"heads": 4, "kv_heads": 2, "head_dim": 64}, (2100, 1996)),
    "window-sinks": (Window(600, True, sinks=4), {"heads": 4, "head_dim": 64}, EVEN),
    "union": (Window(300, True) | BlockSparse(LOCAL, 64, True), {"heads": 4, "head_dim": 64}, (2000, 2096)),
    "by-head": (PerHead([Window(300), Window(300), BlockSparse(LOCAL, 64), Predicate(tools.every_third)]),
                {"heads": 4, "kv_heads": 2, "head_dim": 64, "batch": 2}, EVEN),
    "grid": (HILBERT, {"heads": 4, "head_dim": 64}, (1152, 1152)),
}  # fmt: skip
SMALL = ("rates-that-share-no-divisor-causal", "last-queries", "dense-one-holds-all-causal", "blocks-wide-and-ragged")
HEADS = ("dense", "dense-causal-uneven", "geometric", "blocks", "by-head")
WIDE = {
    "float64": ("geometric-uneven", "window-sinks", "by-head"),
    "float32": ("dense", "blocks-whole-by-head", "grid"),
}


def found(name: str) -> tuple[tools.Case, tuple[int, ...]]:
    if name in ODD:
        case, lengths = ODD[name]
        return case, lengths[2]
    pattern, sizes, lengths = LARGE[name]
    return tools.Case(name, lambda: pattern, sum(lengths), **sizes), lengths


def errors(name: str, dtype: str, strategy: str) -> dict[str, tuple[float, float]]:
    """On a rank: `work.whole_errors`."""
    import torch.distributed as dist

    return work.whole_errors(dist.get_rank(), *found(name), getattr(torch, dtype), strategy, "cuda")


@pytest.fixture(scope="module")
def pair():
    with Pool(2) as pool:
        assert pool.backend == "nccl"
        yield pool


CALLS = [(name, "bfloat16", "sequence") for name in (*LARGE, *SMALL)]
CALLS += [(name, dtype, "sequence") for dtype, names in WIDE.items() for name in names]
CALLS += [(name, "bfloat16", "heads") for name in HEADS]


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_two_cards_are_as_exact_as_one(pair, call):
    name, dtype, strategy = call
    for of_rank in pair.run(f"{__name__}:errors", {"name": name, "dtype": dtype, "strategy": strategy}, 120):
        wrong = {x: f"{error:.3g} > {most:.3g}" for x, (error, most) in of_rank.items() if not error <= most}
        assert not wrong


HELD = 4 << 30  # bytes on each card when the fault comes


def fails(how: str) -> None:
    """On a rank: holds memory, has talked with the other one; then rank 1 fails while rank 0 waits for it."""
    import torch.distributed as dist

    held = torch.empty(HELD, dtype=torch.uint8, device="cuda")
    dist.all_reduce(held[:1024].zero_())
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "sleeps":
            time.sleep(600)
        elif how == "runs out":
            torch.empty(1 << 41, dtype=torch.uint8, device="cuda")
        raise KeyError("lost")
    dist.all_reduce(held[:1024])
    torch.cuda.synchronize()


def runs_out_before(many: int) -> str:
    """On a rank: what it raises where rank 1 has no memory for its buffers; then the same group computes."""
    import torch.distributed as dist

    import workbench as wb

    q, k, v = torch.randn(3, 1, 4096, 4, 64, device="cuda", dtype=torch.bfloat16).unbind()
    free = torch.cuda.mem_get_info()[0]
    held = torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda") if dist.get_rank() == 1 else None
    wide = [x.expand(many, -1, -1, -1) for x in (q, k, v)]
    try:
        wb.distributed.attention(*wide, Dense(), strategy="sequence")
        raised = ""
    except torch.OutOfMemoryError as error:
        raised = str(error)
    del held
    torch.cuda.empty_cache()
    assert wb.distributed.attention(q, k, v, Dense(), strategy="sequence").isfinite().all()
    return raised


def used() -> list[int]:
    """Bytes on each card, of all processes; asked without starting CUDA here."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [int(x) << 20 for x in said.split()[:2]]


@pytest.mark.parametrize("how, status", [("killed", "killed"), ("raises", "refused"), ("runs out", "oom"),
                                         ("sleeps", "timeout")])  # fmt: skip
def test_a_rank_that_fails_is_named_and_the_cards_are_free(how, status):
    before = used()
    with Pool(2) as pool:
        pool.run(f"{__name__}:card")  # they have started
        begin = time.monotonic()
        with pytest.raises(RankError, match="rank 1 of 2") as raised:
            pool.run(f"{__name__}:fails", {"how": how}, timeout_s=10)
        assert time.monotonic() - begin < 15 + 10 * (how == "sleeps")
        assert raised.value.outcome.rank == 1
        assert raised.value.outcome.status == status or how == "raises"
        assert pool.run(f"{__name__}:card") == [0, 1]  # the next job
    for _ in range(50):
        if all(x < y + (256 << 20) for x, y in zip(used(), before, strict=True)):
            break
        time.sleep(0.1)
    else:
        raise AssertionError(f"{used()} bytes are taken, before it were {before}")


def card() -> int:
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1, device="cuda"))
    return torch.cuda.current_device()


def test_out_of_memory_on_one_rank_is_on_all_and_the_group_is_usable(pair):
    of_0, of_1 = pair.run(f"{__name__}:runs_out_before", {"many": 64}, 120)
    assert of_0.startswith("rank 1: ") and "memory" in of_0 and "memory" in of_1
