"""Probes of one card, a module and a verb each: timing.time, memory.measure, roofline.ceilings, error.of,
speed.sweep, suite.run, validity.check. `baselines` has other people's implementations of attention, to be measured in
the same way. What is predicted for any card is in `workbench.fit`, several cards are in `workbench.scaling`; their
`estimate`, `frontier`, `layer` and `link` are found here, too.
"""

import importlib

_MODULES = dict.fromkeys(("baselines", "error", "memory", "roofline", "speed", "suite", "timing", "validity"), "probes")
_MODULES |= dict.fromkeys(("estimate", "frontier", "layer"), "fit") | {"link": "scaling"}

__all__ = [*_MODULES]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'workbench.probes' has no attribute {name!r}")
    return importlib.import_module(f"workbench.{_MODULES[name]}.{name}")
