"""Loops over equal parts. The trace of a call's memory (`fit.tracer_shortcuts`) follows a few of many equal steps."""


def starts(length: int, step: int, followed: int = 6) -> range:
    """Where each part of `length` begins, of `step` or, the last one, fewer. followed: how many are enough for a trace,
    which are more where a step holds few calls."""
    return range(0, length, step)
