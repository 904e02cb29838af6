"""FlashAttention-4 on Hopper, an optional package, for patterns that its kernels see as lists of blocks."""
