"""The one stream on which a card does beside its attention what ranks tell and send each other."""

from __future__ import annotations

import functools

import torch


@functools.cache
def beside(device: torch.device) -> torch.cuda.Stream:
    """One for all calls: what the allocator keeps, it keeps for a stream. Its kernels go before others that wait."""
    return torch.cuda.Stream(device, priority=-1)
