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


with open(f"{__file__}i", encoding="utf-8") as _stub:
    _IMPORTS = [line.split() for line in _stub if line.startswith("from ")]  # from, module, import, name, as, name
_HOMES = {name: f"{module}:{name}" for _, module, _, name, *_ in _IMPORTS if module != __name__}
__all__ = [name for *_, name in _IMPORTS]
__getattr__ = files_of(__name__, **_HOMES)


def __dir__():
    return sorted([*globals(), *__all__])
