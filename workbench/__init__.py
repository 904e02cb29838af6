"""A workbench for long-sequence attention: which attention runs at which length, how fast, and how exactly.

Names are imported when they are first used, so that `import workbench` and the command line start at once.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOMES = {
    "patterns": ("Dense", "Dilated", "BlockSparse", "Neighborhood", "Predicate", "layouts"),
    "oracle": ("reference",),
    "dispatch": ("attention", "explain"),
    "mass": ("captured_mass",),
    "modules": ("MultiheadAttention",),
    "virtual": ("VirtualCard",),
}
_FROM = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = (
    "orderings", "patterns", "probes", "records", "plots", "explore", "report", "machine", "cards", "distributed"
)  # fmt: skip

__all__ = [*_FROM, *_MODULES]


def __getattr__(name: str):
    if name in _FROM:
        value = getattr(importlib.import_module(f"workbench.{_FROM[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"workbench.{name}")
    else:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *__all__])
