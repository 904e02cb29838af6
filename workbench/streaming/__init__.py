"""Attention over sequences that no card holds: chunks stream from the host's memory, or a file, through the card.

attention, gradients and layer run; explain says beforehand what attention takes; memory_map is a tensor in a file;
Projected is a source whose q, k and v are computed on the card. A stream of 1,024 positions at a time:

    out = torch.empty_like(q)  # q, k, v (N, H, D) in the host's memory
    wb.streaming.attention((q, k, v), pattern, out, chunk=1024)
"""

from workbench import files_of

__getattr__ = files_of(
    __name__, **{name: f"{__name__}.api:{name}" for name in ("attention", "explain", "gradients", "layer")},
    memory_map=f"{__name__}.files:memory_map", Projected=f"{__name__}.host:Projected",
)  # fmt: skip
