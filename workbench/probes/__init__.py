"""Probes, a module and a verb each: timing.measure, memory.measure, roofline.ceilings, error.measure, speed.sweep,
suite.run, layer.measure, estimate.trace, frontier.search, fit.table, validity.check, scaling.sweep, link.measure.
`peers` has other people's implementations of attention, to be measured in the same way."""

from __future__ import annotations

import importlib

__all__ = [
    "error", "estimate", "fit", "frontier", "layer", "link", "memory", "peers", "roofline", "scaling", "speed", "suite",
    "timing", "validity",
]  # fmt: skip


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'workbench.probes' has no attribute {name!r}")
    return importlib.import_module(f"workbench.probes.{name}")
