"""Sentences of a notebook that are computed from its results."""

from __future__ import annotations

import textwrap

MODES = {"fwd": "forward", "fwdbwd": "forward + backward"}


def say(text: str) -> None:
    """Display Markdown, e.g. say(f"**{fastest}** is the fastest here.")."""
    from IPython.display import Markdown, display

    display(Markdown(textwrap.dedent(text).strip()))


def listed(words) -> str:
    """a; a and b; a, b and c; none."""
    *most, last = [str(x) for x in words] or ["none"]
    return f"{', '.join(most)} and {last}" if most else last


def counted(number: int, noun: str) -> str:
    """A number and its noun, which takes an s unless the number is one: 1 card, 1,024 cards."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def number(x: float) -> str:
    """Three digits or all of a whole number's, and never an exponent for a large one: 0.123, 12.3, 1,234."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def spread(low: float, high: float, form: str = ".2f") -> str:
    """A range in words; one number where both ends read the same."""
    low, high = format(low, form), format(high, form)
    return low if low == high else f"{low} to {high}"


def first_mode(rows):
    """Those of the first of MODES that ran: forwards if there are any."""
    return rows[rows["mode"] == next((mode for mode in MODES if mode in set(rows["mode"])), None)]


def beyond_noise(times, name: str) -> bool:
    """Whether an alternative of `probes.timing.compare` differs from the first: the two intervals, of its speed-up and
    of the first against itself, are apart."""
    it, again = times.loc[name], times.loc["A/A"]
    return bool(it.speedup_low > again.speedup_high or it.speedup_high < again.speedup_low)


def compared(times, name: str) -> str:
    """How an alternative of `probes.timing.compare` did against the first, in words.

    Faster or slower only where it is beyond the noise; slower is told as the time it takes, in times of the first.
    """
    it, again, first = times.loc[name], times.loc["A/A"], times.index[0]
    low, high = it.speedup_low, it.speedup_high
    noise = f"{first} against itself {again.speedup_low:.2f} to {again.speedup_high:.2f}"
    if not beyond_noise(times, name):
        return f"**no different** from {first} within the noise: {it.speedup:.2f} ({low:.2f} to {high:.2f}; {noise})"
    if low > again.speedup_high:
        return f"**faster** than {first}: {it.speedup:.2f} times its speed ({low:.2f} to {high:.2f}; {noise})"
    took = f"{1 / it.speedup:.2f} times as long ({1 / high:.2f} to {1 / low:.2f}; {noise})"
    return f"**slower** than {first}: it takes {took}"
