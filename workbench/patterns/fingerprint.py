"""What a function can see, in short: as long as its fingerprint is the same, so are its answers.

A pattern's function may read what others change: a tensor, a list, a global name, an attribute. Blocks that were found
with it are right only until then, so its fingerprint is taken wherever they are used. That reads everything the
function can reach, about a millisecond for a megabyte.
"""

from __future__ import annotations

import copyreg
import hashlib
import sys
import types
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from workbench.patterns.checks import Value

LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", __package__.partition(".")[0]}  # their code does not change
PLAIN = (type(None), bool, int, float, complex, str, bytes)
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
    reader = _Reader()
    try:
        with _disable_current_modes():
            reader.read(function)
        return Fingerprint(reader.hash.digest(), reader.held)
    except Exception:  # whatever an object of the user's raises when it is asked what it consists of
        return Fingerprint(object(), [])


class _Reader:
    def __init__(self):
        self.hash, self.held, self.seen, self.alive = hashlib.sha1(), [], {}, []

    def put(self, *words) -> None:
        self.hash.update(repr(words).encode())

    def each(self, *values) -> None:
        for value in values:
            self.read(value)

    def read(self, value) -> None:
        kind = type(value)
        if kind in PLAIN:
            return self.put(kind.__name__, value)
        if id(value) in self.seen:
            return self.put("again", self.seen[id(value)])
        self.seen[id(value)] = len(self.seen)
        self.alive.append(value)  # so that nothing else gets its identity while this reads
        self.put(kind.__module__, kind.__qualname__)
        how = _EXACT.get(kind) or next(
            (how for known, how in _DERIVED.items() if isinstance(value, known)), _Reader.thing
        )
        how(self, value)

    def thing(self, value) -> None:
        """By what pickle and copy take it to consist of."""
        self.each(*(vars(value)[name] for name in INNER if name in getattr(value, "__dict__", ())))
        reduce = copyreg.dispatch_table.get(type(value))
        reduced = reduce(value) if reduce else value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return self.put(reduced)
        self.each(*reduced[:3], *(list(items) for items in reduced[3:5] if items))

    def sequence(self, values) -> None:
        self.each(len(values), *values)

    def mapping(self, values: dict) -> None:
        self.each(len(values), *values, *values.values())

    def itself(self, value) -> None:
        self.held.append(value)
        self.each(id(value), getattr(value, "function", None))

    def tensor(self, value: Tensor) -> None:
        self.put(value.dtype, value.shape, str(value.device))
        if value.device.type != "cpu":  # to read it would be to wait for the card
            self.held.append(value)
            return self.put(id(value), value.data_ptr(), value._version)
        self.hash.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy())

    def array(self, value: np.ndarray) -> None:
        self.put(value.dtype, value.shape)
        if value.dtype.hasobject:
            return self.read(value.tolist())
        self.hash.update(np.ascontiguousarray(value).view(np.uint8))

    def code(self, value: types.CodeType) -> None:
        self.put(value.co_code, value.co_names, value.co_freevars)
        self.read(value.co_consts)

    def function(self, value: types.FunctionType) -> None:
        self.put(value.__module__, value.__qualname__)
        cells = {name: _inside(x) for name, x in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)}
        self.each(cells, value.__defaults__, value.__kwdefaults__, value.__dict__)
        if not _library(value.__module__):
            self.read(value.__code__)
            self.named(value.__globals__ | cells, _names(value.__code__))

    def named(self, scope: dict, names: list[str]) -> None:
        """What a scope has under these names; of a module only what they name in it."""
        for name in names:
            value = scope[name] if name in scope else sys.modules.get(name)  # which may be imported in the function
            if not isinstance(value, types.ModuleType):
                self.each(name, value)
            elif id(value) not in self.seen:
                self.seen[id(value)] = len(self.seen)
                inside = {k: vars(value).get(k) for k in names}
                fixed = _library(value.__name__)
                self.named({k: None if fixed and callable(v) else v for k, v in inside.items()}, names)

    def kind(self, value: type) -> None:
        self.put(value.__module__, value.__qualname__)
        for base in value.__mro__:
            for name, x in () if _library(base.__module__) else vars(base).items():
                x = next((getattr(x, inner) for inner in INNER if hasattr(x, inner)), x)
                if isinstance(x, types.FunctionType) or not name.startswith(("__", "_abc")):
                    self.each(name, x)


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


_EXACT = {kind: _Reader.sequence for kind in (list, tuple, set, frozenset)} | {
    dict: _Reader.mapping, types.FunctionType: _Reader.function, types.CodeType: _Reader.code,
    types.ModuleType: lambda reader, module: reader.put(module.__name__),
}  # fmt: skip
_DERIVED = {Value: _Reader.itself, Tensor: _Reader.tensor, np.ndarray: _Reader.array, type: _Reader.kind}
