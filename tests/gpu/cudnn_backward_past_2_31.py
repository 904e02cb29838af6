"""cuDNN's attention backward is silently wrong past 2^31 elements: run this on a card with 60 GB free.

A sequence of 4,096 tokens x 8 heads x 64 is 2^21 elements, so 1,024 of them are 2^31. Printed for a few more or less:
the largest difference of dq by cuDNN from dq by FlashAttention, and of both from float64 in single sequences.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

TOKENS, HEADS, HEAD_DIM = 4096, 8, 64
CUDNN, FLASH, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH


def gradient(kernel, q, k, v, upstream):
    """dq like q, (sequences, tokens, heads, head_dim)."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(kernel):
        out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves)).transpose(1, 2)
    return torch.autograd.grad(out, leaves, upstream)[0]


def main():
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, "
          f"{torch.cuda.get_device_name()}")  # fmt: skip
    for sequences in (1023, 1024, 1025):
        torch.manual_seed(0)
        shape = sequences, TOKENS, HEADS, HEAD_DIM
        inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        cudnn, flash = gradient(CUDNN, *inputs), gradient(FLASH, *inputs)
        apart = torch.stack([(a.float() - b.float()).abs().max() for a, b in zip(cudnn, flash, strict=True)])
        print(f"\nN = {sequences} x {TOKENS} = {sequences * TOKENS:,}, {cudnn.numel() - 2**31:+,} elements from 2^31: "
              f"cuDNN and flash differ by {apart.max():.2g}, by 0.01 or more in {int((apart > 0.01).sum())} "
              f"sequences")  # fmt: skip
        for at in sorted({0, int(apart.argmax()), sequences - 1}):
            exact = gradient(MATH, *(x[at : at + 1].double() for x in inputs))[0]
            errors = [float((dq[at] - exact).abs().max()) for dq in (cudnn, flash)]
            print(f"  sequence {at:>4} against float64: cuDNN {errors[0]:.2g}, flash {errors[1]:.2g}")


if __name__ == "__main__":
    main()
