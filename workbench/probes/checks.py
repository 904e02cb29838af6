"""Checks of what a probe is asked for: one ValueError with the name, the value and what is taken, before any work."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Mapping

import torch

from workbench.patterns.checks import choice, describe, whole, wholes


def number(name: str, value, above: float = 0, most: float = math.inf) -> float:
    """A real number, above < value <= most; nan, bools and strings are refused."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and above < value <= most:
        return float(value)
    raise ValueError(f"{name}={value!r}: want a number above {above:g}" + f", at most {most:g}" * (most < math.inf))


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


def case(value):
    """A `Case`, known by its fields: its module imports this one."""
    if callable(getattr(value, "prepare_from", None)):
        return value
    raise ValueError(f"case={describe(value)}: want a Case, e.g. Case(Dense(), n=4096, heads=8, head_dim=64)")


def device(value, here: bool = False) -> str:
    """'cpu', 'cuda' or 'cuda:1', given as such or as a torch.device; here: this machine must have it."""
    name = str(value)
    if not isinstance(value, (str, torch.device)) or not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device={name!r}: want 'cpu', 'cuda' or 'cuda:<number>'")
    cards = torch.cuda.device_count() if here and name != "cpu" else None
    if cards is not None and int(name.partition(":")[2] or 0) >= cards:
        raise ValueError(f"device={name!r}: want 'cpu', or one of the CUDA cards of this machine, which has {cards}")
    return name


__all__ = ["callable_", "case", "choice", "device", "listed", "named", "number", "whole", "wholes"]
