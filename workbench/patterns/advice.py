"""Warnings about calls that are allowed and seldom meant: one of each kind in a process."""

from __future__ import annotations

import sys
import warnings

import torch

from workbench.patterns.base import Pattern

_given: set[str] = set()
PAIRS = 1 << 20  # (head, query, key) up to which coverage is found without a closed form


def advise(pattern: Pattern, n: int, heads: int, nq: int) -> None:
    """Warn where heads seem to stand in the place of positions, and where half of the rows see nothing.

    Nothing under torch.compile. The rows are looked at in the first call with a pattern, if it is one of few pairs.
    """
    if torch.compiler.is_compiling():
        return
    if heads >= 64 and heads > 2 * n > 2:
        _warn(
            "heads",
            f"{n} positions of {heads} heads: tensors are (batch, positions, heads, head_dim) here; "
            "transpose(1, 2) those of (batch, heads, positions, head_dim)",
        )
    few = heads * n * nq <= PAIRS
    if few and nq == n and "advised" not in pattern._kept and "coverage" not in _given:
        pattern._kept["advised"] = True
        seen = float(pattern.for_batch(0).coverage(n, heads).mean()) if n and heads else 1
        if seen <= 0.5:
            _warn(
                "coverage",
                f"{pattern.name}: {1 - seen:.0%} of the rows see no key, and their out is 0; `pattern.coverage` says "
                "which heads (a branch with dilation rate 1, or a local layout, covers all)",
            )


def _warn(kind: str, text: str) -> None:
    """The warning points at the caller's line, through however many functions of this package it came."""
    if kind in _given:
        return
    _given.add(kind)
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(__package__.partition(".")[0] + "."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
