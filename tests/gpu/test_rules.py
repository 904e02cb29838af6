"""What `torch_rules` says of this card, beside what torch itself says and does."""

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from workbench.engines import torch_rules
from workbench.probes.case import FUSED

CALLS = list(itertools.product(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16), (30, 60, 64, 128, 136, 192, 200, 256, 264),
    (8, 2), ((512, 512), (256, 512), (512, 1)), (False, True), (False, True),
))  # dtype, head_dim, key heads, (queries, keys), causal, gradients  # fmt: skip


def inputs(dtype, head_dim, kv_heads, lengths, gradients):
    """q (1, 8, Nq, D), k and v (1, Hkv, N, D), as attention lays them out."""
    sizes = ((lengths[0], 8), (lengths[1], kv_heads), (lengths[1], kv_heads))
    made = (torch.randn(1, n, h, head_dim, device="cuda", dtype=dtype).transpose(1, 2) for n, h in sizes)
    return [x.requires_grad_(gradients) for x in made]


def rule(dtype, head_dim, kv_heads, lengths, causal, gradients):
    options = {"grouped": kv_heads != 8, "nq": lengths[0], "n": lengths[1], "causal": causal, "gradients": gradients}
    return torch_rules.kernels(torch.cuda.get_device_capability(), dtype, head_dim, **options)


def ran(q, k, v, backend: str, causal: bool) -> str | None:
    """Why a kernel asked for by name does not run forward and, where q has a gradient, backward; None if it does."""
    try:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=k.shape[1] != q.shape[1])
        if q.requires_grad:
            torch.autograd.grad(out.sum(), (q, k, v))
    except RuntimeError as error:
        return str(error).splitlines()[0][:100]


def test_torch_says_and_does_the_same():
    cuda, off = torch.backends.cuda, []
    asked = {"cudnn": cuda.can_use_cudnn_attention, "flash": cuda.can_use_flash_attention,
             "efficient": cuda.can_use_efficient_attention}  # fmt: skip
    for call in CALLS:
        dtype, head_dim, kv_heads, lengths, causal, gradients = call
        q, k, v = inputs(dtype, head_dim, kv_heads, lengths, gradients)
        params, taken = cuda.SDPAParams(q, k, v, None, 0.0, causal, kv_heads != 8), rule(*call)
        for name, backend in FUSED.items():
            says, fails = asked[name](params), ran(q, k, v, backend, causal)
            if {says, fails is None} != {name in taken}:
                off.append(f"{name} {call}: torch says {says}, and {fails or 'runs it'}")
    assert not off, f"{len(off)} of {len(CALLS)}:\n" + "\n".join(off[:40])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_is_what_torch_picks(dtype):
    """By the operator that ran."""
    for head_dim, kv_heads in ((64, 8), (64, 2), (60, 8), (256, 8), (264, 8)):
        q, k, v = inputs(dtype, head_dim, kv_heads, (4096, 4096), False)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            scaled_dot_product_attention(q, k, v, enable_gqa=kv_heads != 8)
        names = {event.key for event in profile.key_averages()}
        first = rule(dtype, head_dim, kv_heads, (4096, 4096), False, False)[0]
        assert f"aten::_scaled_dot_product_{'attention_math' if first == 'math' else f'{first}_attention'}" in names
