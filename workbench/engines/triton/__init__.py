"""Triton kernels: one for each direction of dilated and of block-sparse attention, over the shared steps of a tile."""
