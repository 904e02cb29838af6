"""What a function can see, in short: as long as its fingerprint is the same, so are its answers.

A pattern's function may read what others change: a tensor, a list, a global name, an attribute. Blocks that were found
with it are right only until then, so its fingerprint is taken wherever they are used. That reads everything the
function can reach, about a millisecond for a megabyte.
"""

import functools
import hashlib
import pickle
import sys
import types
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from workbench.patterns.checks import Value

LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", __package__.partition(".")[0]}  # their code does not change
CACHED = type(functools.cache(id))
INNER = ("__func__", "__wrapped__", "fget", "func")  # under these names a wrapper has the function that it wraps


class Fingerprint(NamedTuple):
    """digest: of all that was read; unlike any other where something cannot be read (an open file, a lock).

    held: what the digest names by identity: as long as it lives, nothing else has that identity.
    """

    digest: object
    held: list

    def known(self) -> bool:
        return isinstance(self.digest, bytes)


def fingerprint(function) -> Fingerprint:
    if function is None:
        return Fingerprint(b"", [])
    digest = hashlib.sha1()
    reader = _Reader(types.SimpleNamespace(write=digest.update), protocol=5)
    reader.held = []
    try:
        with _disable_current_modes():
            reader.dump(function)
        return Fingerprint(digest.digest(), reader.held)
    except Exception:  # whatever an object of the user's raises when it is asked what it consists of
        return Fingerprint(object(), [])


class _Reader(pickle.Pickler):
    """What pickle takes an object to consist of; but functions, classes and tensors by their contents."""

    held: list

    def reducer_override(self, value):
        parts = None if value is list else self.parts(value)
        return NotImplemented if parts is None else (list, (), parts)  # a state: it may lead back to the value

    def parts(self, value) -> list | None:
        """What a value is read as; None for pickle's own way."""
        match value:
            case types.ModuleType():
                return [value.__name__]
            case types.CodeType():
                return [value.co_code, value.co_names, value.co_freevars, value.co_consts]
            case types.FunctionType():
                return self.function(value)
            case type():
                return [value.__module__, value.__qualname__, *_members(value)]
            case Value():
                self.held.append(value)
                return [id(value), getattr(value, "function", None)]
            case Tensor():
                return [str(value.dtype), tuple(value.shape), str(value.device), *self.contents(value)]
            case _ if type(value) is CACHED:  # which pickle takes by its name
                return [value.__wrapped__]
        return None

    def contents(self, value: Tensor) -> list:
        if value.device.type == "cpu":
            return [value.detach().contiguous().view(-1).view(torch.uint8).numpy()]
        self.held.append(value)  # to read it would be to wait for the card
        return [id(value), value.data_ptr(), value._version]

    def function(self, value: types.FunctionType) -> list:
        cells = {name: _inside(x) for name, x in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)}
        parts = [value.__module__, value.__qualname__, cells, value.__defaults__, value.__kwdefaults__, value.__dict__]
        if not _library(value.__module__):
            parts += [value.__code__, *_named(value.__globals__ | cells, _names(value.__code__), set())]
        return parts


def _named(scope: dict, names: list[str], modules: set):
    """Yield what a scope has under these names; of a module only what they name in it."""
    for name in names:
        value = scope[name] if name in scope else sys.modules.get(name)  # which may be imported in the function
        if not isinstance(value, types.ModuleType):
            yield name, value
        elif value not in modules:
            modules.add(value)
            inside = {k: vars(value).get(k) for k in names}
            fixed = _library(value.__name__)
            yield from _named({k: None if fixed and callable(v) else v for k, v in inside.items()}, names, modules)


def _members(kind: type):
    """Yield the names and values of a class and of its bases, those of libraries aside."""
    for base in kind.__mro__:
        for name, x in () if _library(base.__module__) else vars(base).items():
            x = next((getattr(x, inner) for inner in INNER if hasattr(x, inner)), x)
            if isinstance(x, types.FunctionType) or not name.startswith(("__", "_abc")):
                yield name, x


def _library(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in LIBRARIES


def _inside(cell: types.CellType):
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return "empty"


def _names(code: types.CodeType) -> list[str]:
    """The global names and attributes that a function mentions, and the functions defined in it, and its free names."""
    inner = [name for x in code.co_consts if isinstance(x, types.CodeType) for name in _names(x)]
    return [*code.co_names, *code.co_freevars, *inner]
