"""Sentences of a notebook that are computed from its results."""

from __future__ import annotations

import textwrap


def say(text: str) -> None:
    """Display Markdown, e.g. say(f"**{fastest}** is the fastest here.")."""
    from IPython.display import Markdown, display

    display(Markdown(textwrap.dedent(text).strip()))


def beyond_noise(times, name: str) -> bool:
    """Whether an alternative of `probes.timing.compare` differs from the first: the two intervals, of its speed-up and
    of the first against itself, are apart."""
    it, again = times.loc[name], times.loc["A/A"]
    return bool(it.speedup_low > again.speedup_high or it.speedup_high < again.speedup_low)


def compared(times, name: str) -> str:
    """How an alternative of `probes.timing.compare` did against the first, in words.

    Faster or slower only where it is beyond the noise.
    """
    it, again, first = times.loc[name], times.loc["A/A"], times.index[0]
    low, high = it.speedup_low, it.speedup_high
    noise = f"{first} against itself {again.speedup_low:.2f} to {again.speedup_high:.2f}"
    if beyond_noise(times, name):
        verdict = f"**{'faster' if low > again.speedup_high else 'slower'}** than {first}"
    else:
        verdict = f"**no different** from {first} within the noise"
    return f"{verdict}: {it.speedup:.2f} times its speed ({low:.2f} to {high:.2f}; {noise})"
