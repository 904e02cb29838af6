"""Argument checks shared by the patterns: one ValueError with the name, the value, and what would be accepted."""

from __future__ import annotations

import operator


def whole(name: str, value, least: int) -> int:
    """`value` as an int >= least; bools, floats and strings are refused."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{name}={value!r}: want an int >= {least}")
    return number


def wholes(name: str, values, least: int) -> tuple[int, ...]:
    """A non-empty sequence of ints >= least, as a tuple."""
    try:
        listed = None if isinstance(values, str) else list(values)
    except TypeError:
        listed = None
    if not listed:
        raise ValueError(f"{name}={values!r}: want a non-empty list of ints >= {least}")
    return tuple(whole(f"{name}[{x}]", value, least) for x, value in enumerate(listed))


def flag(name: str, value) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: want True or False")
    return value


def choice(name: str, value, *options: str) -> str:
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{name}={value!r}: want one of {', '.join(map(repr, options))}")
    return value


def describe(value) -> str:
    """A value for an error message; tensors by dtype and shape."""
    return f"{value.dtype} {tuple(value.shape)}" if hasattr(value, "dtype") else repr(value)
