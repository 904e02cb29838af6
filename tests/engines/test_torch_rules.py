"""Which kernels of torch's attention take which call, by answers known from torch's source and from cards."""

import pytest
import torch

import workbench as wb
from workbench.engines import torch_rules
from workbench.fit import estimate
from workbench.probes.case import Case

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
GTX1080, V100, T4, A100, RTX4090, H100, B200, RTX5090 = (
    (6, 1), (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0),
)  # fmt: skip
KNOWN = [  # card, dtype, head_dim, what else is said of the call, the kernels in torch's order
    (H100, BF16, 64, {}, "cudnn flash efficient math"),
    (A100, BF16, 64, {}, "flash efficient math cudnn"),  # cuDNN by name from 8.0 on
    (RTX5090, BF16, 64, {}, "flash efficient math cudnn"),
    (T4, BF16, 64, {}, "math"),  # no memory-efficient bfloat16 below 8.0
    (T4, FP16, 64, {"grouped": True}, "math"),
    (T4, FP16, 60, {}, "math"),  # 8s on tensor cores
    (GTX1080, FP16, 61, {}, "efficient math"),
    (A100, FP32, 61, {}, "math"),  # 4s from 8.0 on
    (H100, FP32, 64, {"grouped": True}, "math"),  # measured: 72.2 GiB for 8 heads on 2 x 64, N = 32,768
    (H100, BF16, 64, {"grouped": True}, "cudnn flash math"),
    (H100, FP64, 64, {}, "math"),
    (H100, BF16, 60, {}, "flash math"),  # which torch pads
    (H100, BF16, 264, {}, "efficient math"),
    (H100, BF16, 64, {"n": 1}, "flash efficient math"),
    (H100, BF16, 64, {"causal": True, "n": 64, "nq": 8}, "cudnn efficient math"),
    (H100, BF16, 64, {"causal": True, "n": 64, "nq": 64}, "cudnn flash efficient math"),
    (RTX4090, BF16, 200, {"gradients": True}, "efficient math"),
    (A100, BF16, 200, {"gradients": True}, "flash efficient math"),
]


@pytest.mark.parametrize("capability, dtype, head_dim, options, want", KNOWN)
def test_known_answers(capability, dtype, head_dim, options, want):
    assert " ".join(torch_rules.kernels(capability, dtype, head_dim, **options)) == want


@pytest.mark.parametrize(
    "card, backend, dtype, kv_heads, runs",
    [("t4", "efficient", BF16, 8, False), ("t4", "efficient", FP16, 8, True), ("h100", "efficient", FP32, 2, False),
     ("a100-40gb", "cudnn", BF16, 2, True), ("t4", "cudnn", FP16, 8, False), ("gtx1080", "flash", FP16, 8, False)],
)  # fmt: skip
def test_a_kernel_that_torch_does_not_have_is_not_predicted(card, backend, dtype, kv_heads, runs):
    case = Case(wb.Dense(), 4096, 8, 64, dtype, backend, device="cuda", kv_heads=kv_heads)
    if runs:
        assert estimate.trace(case, card).requested_bytes < 64 << 20
    else:
        with pytest.raises(NotImplementedError, match="No available kernel"):
            estimate.trace(case, card)


def test_a_head_dim_that_flash_pads_is_padded():
    found = estimate.trace(Case(wb.Dense(), 4096, 8, 60, BF16, "flash", device="cuda"), "a100-40gb")
    inputs, padded = 3 * 4096 * 8 * 60 * 2, 4 * 4096 * 8 * 64 * 2
    assert inputs + padded <= found.requested_bytes < 1.1 * (inputs + padded)
