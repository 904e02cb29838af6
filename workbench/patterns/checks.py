"""Checks of arguments: one ValueError with the name, the value, and what would be accepted.

A NumPy scalar or a tensor of no dimensions is taken as the Python number that it holds. A bool is not a number.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import numbers
import operator
import re
import sys
import weakref
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

FINITE = sys.float_info.max


class _Living(weakref.WeakValueDictionary):
    made: Callable[[str], Value]  # of a key that is a spec; set by `patterns`, which imports this module

    def __getitem__(self, key: str) -> Value:
        """Of a pattern that a compiled function made all that is left is its spec, as the key: an equal one."""
        return self.made(key) if (found := self.get(key)) is None else found


LIVING: _Living[str, Value] = _Living()
_numbers = itertools.count()


class _Finished(type):
    __signature__ = property(lambda cls: inspect.signature(cls.__init__.__get__(cls)))  # what help() shows

    def __call__(cls, *args, **options):
        made = super().__call__(*args, **options)
        made._finish(new=True)
        return made


class Value(metaclass=_Finished):
    """Something that does not change once it is made, so that what is found out about it can be kept with it."""

    def _finish(self, new: bool = False) -> None:
        """What is found out can be kept from now on; `LIVING` has it by its key, as long as it lives. new: no copy."""
        vars(self).update(_kept={}, key=str(next(_numbers)))
        LIVING[self.key] = self

    def __setattr__(self, name, value):
        if "_kept" in vars(self):
            raise AttributeError(f"{name} of {self!r}: a {type(self).__name__} does not change, make another one")
        super().__setattr__(name, value)

    def __delattr__(self, name):
        raise AttributeError(f"{name} of {self!r}: a {type(self).__name__} does not change, make another one")

    def __getstate__(self):  # a copy is a value of its own, and keeps tables of its own
        return {k: v for k, v in vars(self).items() if k not in ("_kept", "key")}

    def __setstate__(self, state):
        vars(self).update(state)
        self._finish()


@contextlib.contextmanager
def on_host():
    """Tables are ordinary tensors on the CPU, whatever default device, inference mode or transform of torch.func they
    are asked for in."""
    with torch.inference_mode(False), torch.device("cpu"), torch._C._DisableFuncTorch():
        yield


def unwritten(name: str, tensor: Tensor) -> Tensor:
    """The tensor, a copy that a `Value` made for itself; ValueError where it has been written to since."""
    seen = not torch.compiler.is_compiling() and not tensor.is_inference()  # torch 2.11's compiler knows no versions
    if seen and tensor._version:
        raise ValueError(f"{name} has been written to: it belongs to what was made of it; make another one from a copy")
    return tensor


def python(value):
    """A NumPy scalar or a tensor of no dimensions as the Python number that it holds; anything else as it is."""
    if isinstance(value, (np.generic, np.ndarray, Tensor)) and value.ndim == 0:
        try:
            return value.item()
        except RuntimeError:  # a tensor without contents
            return value
    return value


def whole(name: str, value, least: int) -> int:
    """`value` as an int >= least; bools, floats and strings are refused."""
    if type(value) is int and value >= least:  # also a length that torch.compile leaves open
        return value
    number = python(value)
    try:
        number = None if isinstance(number, (bool, Tensor)) else operator.index(number)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{name}={value!r}: want an int >= {least}")
    return number


def wholes(name: str, values, least: int, most: float = math.inf) -> tuple[int, ...]:
    """A non-empty sequence of ints from `least` to `most`, as a tuple."""
    try:
        found = None if isinstance(values, str) else list(values)
    except TypeError:
        found = None
    if not found:
        raise ValueError(f"{name}={values!r}: want a non-empty list of ints >= {least}")
    found = tuple(whole(f"{name}[{place}]", value, least) for place, value in enumerate(found))
    for place, value in enumerate(found):
        if value > most:
            raise ValueError(f"{name}[{place}]={value!r}: want an int <= {most:,}")
    return found


def several(value) -> bool:
    """Whether a value is several numbers."""
    return value.ndim > 0 if isinstance(value, (np.ndarray, Tensor)) else isinstance(value, (tuple, list))


def axes(name: str, value, many: int, least: int) -> tuple[int, ...]:
    """An int for each of `many` axes, from one int for all or one for each."""
    found = wholes(name, value, least) if several(value) else (whole(name, value, least),) * many
    if len(found) != many:
        raise ValueError(f"{name}={value!r}: want an int >= {least}, or {many} of them")
    return found


def number(name: str, value, above: float = 0, most: float = math.inf, want: str = "") -> float:
    """`value` as a float, above < value <= most; `want` says so in other words. Nan, bools and strings are refused."""
    found = value if type(value) is float else python(value)
    if isinstance(found, bool) or not isinstance(found, numbers.Real) or not above < found <= most:
        want = want or f"a number above {above:g}" + f", at most {most:g}" * (most < math.inf)
        raise ValueError(f"{name}={value!r}: want {want}")
    return float(found)


def flag(name: str, value) -> bool:
    found = value if type(value) is bool else python(value)
    if not isinstance(found, bool):
        raise ValueError(f"{name}={value!r}: want True or False")
    return found


def choice(name: str, value, *options: str) -> str:
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{name}={value!r}: want one of {', '.join(map(repr, options))}")
    return value


def describe(value) -> str:
    """A value for an error message; tensors by dtype and shape."""
    return f"{value.dtype} {tuple(value.shape)}" if hasattr(value, "dtype") else repr(value)


def listed(name: str, values) -> list:
    """Several values as a list: one string is no list of its letters."""
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
        raise ValueError(f"{name}={values!r}: want a list, e.g. [{values!r}]")
    return list(values)


def named(name: str, values, want: str) -> dict:
    """A dictionary with at least one entry; want: what it is of."""
    if not isinstance(values, Mapping) or not values:
        raise ValueError(f"{name}={values!r}: want a dictionary {{name: {want}}} with at least one")
    return dict(values)


def callable_(name: str, value) -> Callable:
    if not callable(value):
        raise ValueError(f"{name}={describe(value)}: want a function")
    return value


def device(value, here: bool = False) -> str:
    """'cpu', 'cuda' or 'cuda:1', given as such or as a torch.device; here: this machine must have it."""
    name = str(value)
    if not isinstance(value, (str, torch.device)) or not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device={name!r}: want 'cpu', 'cuda' or 'cuda:<number>'")
    cards = torch.cuda.device_count() if here and name != "cpu" else None
    if cards is not None and int(name.partition(":")[2] or 0) >= cards:
        raise ValueError(f"device={name!r}: want 'cpu', or one of the CUDA cards of this machine, which has {cards}")
    return name
