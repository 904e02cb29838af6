"""Attention over sequences that no card holds: segments stream from the host's memory, or a file, through the card."""

from workbench import files_of

__getattr__ = files_of(
    __name__, **{name: f"{__name__}.api:{name}" for name in ("attention", "explain", "gradients", "layer")},
    memory_map=f"{__name__}.files:memory_map", Projected=f"{__name__}.host:Projected",
)  # fmt: skip
