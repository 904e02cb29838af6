"""Attention over several ranks, each with a contiguous shard of the sequence: plan, exchange, and the call itself.

A plan (`plan`, `Shards`) is pure computation: it needs no process group and no other ranks.
"""

from workbench import files_of

_HOMES = {
    "plan": "plans", "Plan": "plans", "Shards": "shards", "attention": "api", "MultiheadAttention": "layers",
    "Traffic": "traffic",
}  # fmt: skip
__getattr__ = files_of(__name__, **{name: f"{__name__}.{home}:{name}" for name, home in _HOMES.items()})
