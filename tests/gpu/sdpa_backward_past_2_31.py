"""torch's attention backward fails past 2^31 elements: run this on a card with 60 GB free.

A sequence of 4,096 tokens x 8 heads x 64 is 2^21 elements, so 1,024 of them are 2^31. Printed for 1,024 and 1,025 of
them and for each kernel, in a process each: the largest difference of dq, dk and dv of some sequences from float64.
"""

import subprocess
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

TOKENS, HEADS, HEAD_DIM = 4096, 8, 64


def gradients(kernel, q, k, v, upstream):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]  # (sequences, tokens, heads, head_dim)
    with sdpa_kernel(kernel):
        out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves)).transpose(1, 2)
    return torch.autograd.grad(out, leaves, upstream)


def differences(kernel: str, sequences: int) -> None:
    torch.manual_seed(0)
    shape = sequences, TOKENS, HEADS, HEAD_DIM
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    found = gradients(getattr(SDPBackend, kernel), *inputs)
    for at in (0, sequences // 2, sequences - 1):
        exact = gradients(SDPBackend.MATH, *(x[at : at + 1].double() for x in inputs))
        errors = [float((x[at : at + 1] - y).abs().max()) for x, y in zip(found, exact, strict=True)]
        print(f"  {kernel}, sequence {at:,}: " + ", ".join(f"{error:.2g}" for error in errors), flush=True)


if len(sys.argv) == 3:
    differences(sys.argv[1], int(sys.argv[2]))
elif __name__ == "__main__":
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    for sequences in (1024, 1025):
        print(f"{sequences:,} sequences, {sequences * TOKENS * HEADS * HEAD_DIM - 2**31:+,} elements from 2^31")
        for kernel in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"):
            done = subprocess.run([sys.executable, __file__, kernel, str(sequences)], stderr=subprocess.PIPE, text=True)
            if done.returncode:
                error = [line for line in done.stderr.splitlines() if "rror:" in line]
                print(f"  {kernel}: {error[-1] if error else f'exit code {done.returncode}'}")
