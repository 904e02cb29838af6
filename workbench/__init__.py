"""A workbench for long-sequence attention: which attention runs at which length, how fast, and how exactly.

Names are imported when they are first used, so that `import workbench` and the command line start at once.
"""

import importlib
import importlib.util
import sys

__version__ = "0.1.0"


def files_of(folder: str, **homes: str):
    """The `__getattr__` of a folder of this package: a file is imported when its name is first used.

    homes: of names that are not files of the folder, the module that is meant, or "module:name" in it.
    """

    def __getattr__(name: str):
        module, _, of = homes.get(name, f"{folder}.{name}").partition(":")
        if name not in homes and (name.startswith("_") or not importlib.util.find_spec(module)):
            raise AttributeError(f"module {folder!r} has no attribute {name!r}")
        found = importlib.import_module(module)
        value = vars(sys.modules[folder])[name] = getattr(found, of) if of else found
        return value

    return __getattr__


_HOMES = {
    "patterns": (
        "Dense", "Dilated", "BlockSparse", "Neighborhood", "PerHead", "Predicate", "Window", "layouts", "swin",
    ),
    "patterns.tile_order": ("tile_order",), "engines.reference": ("reference",),
    "engines.dispatch": ("attention", "explain"), "engines.layers": ("MultiheadAttention",),
    "models.transformer": ("LongNet", "Transformer"), "engines.cache": ("Cache",),
    "analysis.mass": ("captured_mass",), "fit.virtual_card": ("VirtualCard",),
}  # fmt: skip
_NAMES = {name: f"workbench.{home}:{name}" for home, names in _HOMES.items() for name in names} | {
    "orderings": "workbench.patterns.orderings", "records": "workbench.harness.records",
    "machine": "workbench.harness.machine", "cards": "workbench.fit.cards", "streaming": "workbench.streaming",
}  # fmt: skip
__all__ = [*_NAMES]
__getattr__ = files_of(__name__, **_NAMES)


def __dir__():
    return sorted([*globals(), *__all__])
