"""A workbench for long-sequence attention: which attention runs at which length, how fast, and how exactly.

Names are imported when they are first used, so that `import workbench` and the command line start at once.
"""

import importlib
import importlib.util

__version__ = "0.1.0"

_HOMES = {
    "patterns": ("Dense", "Dilated", "BlockSparse", "Neighborhood", "Predicate", "layouts"),
    "patterns.tile_order": ("tile_order",),
    "engines.reference": ("reference",),
    "engines.dispatch": ("attention", "explain"),
    "engines.layers": ("MultiheadAttention",),
    "analysis.mass": ("captured_mass",),
    "fit.virtual_card": ("VirtualCard",),
}
_FROM = {name: home for home, names in _HOMES.items() for name in names}
_FOLDERS = (
    "patterns", "engines", "harness", "probes", "distributed", "fit", "scaling", "analysis", "plots",
    "explorers", "report",
)  # fmt: skip
_MODULES = {name: name for name in _FOLDERS} | {
    "orderings": "patterns.orderings", "records": "harness.records", "machine": "harness.machine",
    "cards": "fit.cards",
}  # fmt: skip

__all__ = [*_FROM, *_MODULES]


def __getattr__(name: str):
    if name in _FROM:
        value = getattr(importlib.import_module(f"workbench.{_FROM[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"workbench.{_MODULES[name]}")
    else:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    globals()[name] = value
    return value


def files_of(folder: str, **homes: str):
    """The `__getattr__` of a folder of this package: a file is imported when its name is first used.

    homes: of names that are not files of the folder, the module that is meant, or "module:name" in it.
    """

    def __getattr__(name: str):
        module, _, of = homes.get(name, f"{folder}.{name}").partition(":")
        if name in homes or not name.startswith("_") and importlib.util.find_spec(module):
            found = importlib.import_module(module)
            return getattr(found, of) if of else found
        raise AttributeError(f"module {folder!r} has no attribute {name!r}")

    return __getattr__


def __dir__():
    return sorted([*globals(), *__all__])
