"""A small odd case of each kernel, forward and backward: `compute-sanitizer python -m tests.gpu.sanitize`."""

import torch

from workbench import BlockSparse, Dilated, Neighborhood, attention, layouts
from workbench.patterns import orderings

CASES = {
    "dilated": (Dilated([100, 300], [1, 3]), 333, 200),
    "dilated, causal": (Dilated([100, 300], [1, 3], causal=True), 333, 333),
    "dilated, strided views": (Dilated([1024, 2048], [1, 2]), 4096, 4096),
    "block-sparse": (BlockSparse(layouts.local(1) | layouts.global_(1), 64, causal=True), 333, 333),
    "line": (Neighborhood((333,), 70), 333, 200),
    "grid": (Neighborhood((18, 18), 3, orderings.hilbert((18, 18))), 324, 200),
    "grid, row-major": (Neighborhood((18, 18), 3), 324, 324),
}


def main() -> None:
    from workbench.engines.triton import cudnn_views

    cudnn_views.FROM, cudnn_views.WORK = dict.fromkeys(cudnn_views.FROM, 512), 1e9  # so that small calls go there too
    for name, (pattern, n, nq) in CASES.items():
        heads = 4 if n > 1000 else 2
        q = torch.randn(1, nq, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.randn(1, n, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        out = attention(q, k, v, pattern, backend="triton")
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        torch.cuda.synchronize()
        print(name, flush=True)


if __name__ == "__main__":
    main()
