"""Checks of arguments: one ValueError with the name, the value, and what would be accepted.

A NumPy scalar or a tensor of no dimensions is taken as the Python number that it holds. A bool is not a number.
"""

from __future__ import annotations

import contextlib
import math
import operator

import numpy as np
import torch
from torch import Tensor


class _Finished(type):
    def __call__(cls, *args, **options):
        made = super().__call__(*args, **options)
        vars(made)["_kept"] = {}
        return made


class Value(metaclass=_Finished):
    """Something that does not change once it is made, so that what is found out about it can be kept with it."""

    def __setattr__(self, name, value):
        if "_kept" in vars(self):
            raise AttributeError(f"{name} of {self!r}: a {type(self).__name__} does not change, make another one")
        super().__setattr__(name, value)

    def __delattr__(self, name):
        raise AttributeError(f"{name} of {self!r}: a {type(self).__name__} does not change, make another one")

    def __getstate__(self):  # a copy is a value of its own, and keeps tables of its own
        return {k: v for k, v in vars(self).items() if k not in ("_handle", "_kept")}

    def __setstate__(self, state):
        vars(self).update(state, _kept={})


@contextlib.contextmanager
def on_host():
    """Tables are ordinary tensors on the CPU, whatever default device, inference mode or transform of torch.func they
    are asked for in."""
    with torch.inference_mode(False), torch.device("cpu"), torch._C._DisableFuncTorch():
        yield


def unwritten(name: str, tensor: Tensor) -> Tensor:
    """The tensor, a copy that a `Value` made for itself; ValueError where it has been written to since."""
    if tensor._version:
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


def wholes(name: str, values, least: int) -> tuple[int, ...]:
    """A non-empty sequence of ints >= least, as a tuple."""
    try:
        numbers = None if isinstance(values, str) else list(values)
    except TypeError:
        numbers = None
    if not numbers:
        raise ValueError(f"{name}={values!r}: want a non-empty list of ints >= {least}")
    return tuple(whole(f"{name}[{place}]", value, least) for place, value in enumerate(numbers))


def listed(value) -> bool:
    """Whether a value is several numbers."""
    return value.ndim > 0 if isinstance(value, (np.ndarray, Tensor)) else isinstance(value, (tuple, list))


def axes(name: str, value, many: int, least: int) -> tuple[int, ...]:
    """An int for each of `many` axes, from one int for all or one for each."""
    numbers = wholes(name, value, least) if listed(value) else (whole(name, value, least),) * many
    if len(numbers) != many:
        raise ValueError(f"{name}={value!r}: want an int >= {least}, or {many} of them")
    return numbers


def real(name: str, value, want: str, low: float = 0, high: float = math.inf) -> float:
    """`value` as a float above `low` and up to `high`, finite; `want` says so in words."""
    number = value if type(value) is float else python(value)
    if (
        isinstance(number, bool)
        or not isinstance(number, (int, float))
        or not low < number <= high
        or number == math.inf
    ):
        raise ValueError(f"{name}={value!r}: want {want}")
    return float(number)


def flag(name: str, value) -> bool:
    number = python(value)
    if not isinstance(number, bool):
        raise ValueError(f"{name}={value!r}: want True or False")
    return number


def choice(name: str, value, *options: str) -> str:
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{name}={value!r}: want one of {', '.join(map(repr, options))}")
    return value


def describe(value) -> str:
    """A value for an error message; tensors by dtype and shape."""
    return f"{value.dtype} {tuple(value.shape)}" if hasattr(value, "dtype") else repr(value)
