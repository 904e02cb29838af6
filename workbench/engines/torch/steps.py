"""Loops over equal parts. The trace of a call's memory (`fit.tracer_shortcuts`) follows a few of many equal steps."""


def starts(length: int, step: int, followed: int = 6) -> range:
    """Where each part of `length` begins. followed: how many are enough for a trace, more where a step is few calls."""
    return range(0, length, step)
