"""Attention over several ranks, each with a contiguous shard of the sequence: plan, exchange, and the call itself.

A plan (`plan`, `Shards`) is pure computation: it needs no process group and no other ranks.
"""

import importlib

_HOMES = {
    "plans": ("plan", "Plan"),
    "shards": ("Shards",),
    "api": ("attention",),
    "layers": ("MultiheadAttention",),
    "traffic": ("Traffic",),
}
_MODULES = ("training",)
_FROM = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*_FROM, *_MODULES]


def __getattr__(name: str):
    if name in _FROM:
        value = getattr(importlib.import_module(f"workbench.distributed.{_FROM[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"workbench.distributed.{name}")
    else:
        raise AttributeError(f"module 'workbench.distributed' has no attribute {name!r}")
    globals()[name] = value
    return value
