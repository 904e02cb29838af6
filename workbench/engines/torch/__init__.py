"""Attention by torch's own kernels."""
