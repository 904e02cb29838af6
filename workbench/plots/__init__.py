"""Pictures, a module for each subject: each function draws from a DataFrame or a pattern alone and returns a Figure."""

from __future__ import annotations

import importlib

__all__ = ["distributed", "exactness", "frontier", "orderings", "patterns", "scaling", "speed", "style"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'workbench.plots' has no attribute {name!r}")
    return importlib.import_module(f"workbench.plots.{name}")
