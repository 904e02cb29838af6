"""Predicted against measured peaks on a CUDA card: every execution, forward and backward, odd and large shapes."""

import pytest
import torch

from tests import tools
from workbench import BlockSparse, Dense, Dilated, Neighborhood, cards, layouts, orderings
from workbench.probes import estimate, scratch
from workbench.probes.case import Case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]

SHAPES = ((4096, 12, 64, 1), (10_000, 6, 64, 1), (16_384, 16, 128, 1), (5000, 8, 32, 2), (65_536, 12, 64, 1),
          (32_768, 4, 128, 1), (3001, 2, 80, 1), (131_072, 2, 32, 1))  # N, H, D, B  # fmt: skip


def grid(n):
    return orderings.hilbert((n // 32, 32)) if n % 32 == 0 else None


EXECUTIONS = {
    "dense": (lambda n: Dense(), "auto", "bfloat16"),
    "dense, causal": (lambda n: Dense(True), "auto", "bfloat16"),
    "dense, flash": (lambda n: Dense(), "flash", "bfloat16"),
    "dense, float32": (lambda n: Dense(), "auto", "float32"),
    "dilated": (lambda n: tools.longnet(1)(), "auto", "bfloat16"),
    "dilated, causal, odd": (lambda n: Dilated([1000, 3000], [1, 3], True), "auto", "float16"),
    "dilated, torch": (lambda n: tools.longnet(1)(), "torch", "bfloat16"),
    "dilated, float32": (lambda n: tools.longnet(1)(), "auto", "float32"),
    "block-sparse": (lambda n: BlockSparse(layouts.local(2) | layouts.global_(1)), "auto", "bfloat16"),
    "block-sparse, torch": (lambda n: BlockSparse(layouts.local(2)), "torch", "bfloat16"),
    "block-sparse, flex": (lambda n: BlockSparse(layouts.local(2)), "flex", "bfloat16"),
    "neighborhood": (lambda n: Neighborhood((n // 32, 32), 3, grid(n)) if n % 32 == 0 else Neighborhood((n,), 99),
                     "auto", "bfloat16"),
    "neighborhood, float32": (lambda n: Neighborhood((n,), 99), "auto", "float32"),
}  # fmt: skip


def case(name, shape, mode):
    n, h, d, b = shape
    make, backend, dtype = EXECUTIONS[name]
    return Case(make(n), n, h, d, dtype, backend, mode, "cuda", b)


@pytest.mark.parametrize("mode", ["fwd", "fwdbwd"])
@pytest.mark.parametrize("name", EXECUTIONS)
def test_the_peak_is_predicted(name, mode):
    """Requested bytes within 0.5 %."""
    off = {}
    for shape in SHAPES:
        row = estimate.check(case(name, shape, mode))
        assert row["status"] == "ok", row["error"]
        if abs(row["off"]) > 0.005:
            off[shape] = f"{row['off']:+.2%}"
    assert not off


def test_the_rules_for_scratch_are_what_is_taken():
    card, wrong = cards.from_device(), []
    for row in scratch.measure():
        if row["operator"] in scratch.RULES:
            b, h, n, d = row["shape"]
            empty = torch.empty(b, n, h, d, dtype=getattr(torch, row["dtype"]), device="meta")
            tensors = [empty.transpose(1, 2)] * 4  # as they lie in what is measured
            rule = scratch.peak(scratch.of(row["operator"], tensors, card))
            if rule != row["scratch_bytes"]:
                wrong.append(f"{row}: {rule} by the rule")
    assert not wrong, "\n".join(wrong)
