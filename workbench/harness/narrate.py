"""Sentences of a notebook that are computed from its results."""

import re
import textwrap

MODES = {"fwd": "forward", "fwdbwd": "forward + backward"}
# Identifier -> the words for it on a page; the same on every page.
NAMES = MODES | {
    "longnet": "LongNet", "longnet-paper": "LongNet, paper", "longnet-paper-blocked": "LongNet, paper, blocked offsets",
    "longnet-pow2": "LongNet, powers of two", "longnet-geometric": "LongNet, geometric", "dilated": "dilated",
    "window-blocks": "window of blocks", "window-tokens": "window", "strided": "local + strided blocks", "cpu": "CPU",
    "random": "random blocks", "blocks": "block-sparse", "cudnn": "cuDNN", "flash": "FlashAttention-2", "nccl": "NCCL",
    "fa4": "FlashAttention-4", "flex": "FlexAttention", "triton": "Triton", "efficient": "memory-efficient",
    "sdpa": "torch's SDPA", "workbench": "this package", "row_major": "row-major", "hilbert": "Hilbert",
    "morton": "Morton", "oom": "out of memory", "validity": "wrong results", "untimed": "memory (time not modelled)",
}  # fmt: skip
# Column of a frame -> the heading of a table; what is not here is shown as it is, with spaces for underscores.
heads = {
    "n": "N", "head_dim": "head dim", "dtype": "type", "median_ms": "ms", "tflops": "TFLOP/s", "longest_n": "longest N",
    "intensity": "operations per byte", "speedup": "speed relative to the first", "speedup_low": "low",
    "speedup_high": "high", "backend": "kernel", "share": "of the ceiling", "gb_s": "GB/s",
    "in_memory_gib": "in memory, GiB", "streamed_gib": "streamed, GiB", "peak_gib": "peak, GiB",
    "traffic_s": "copies, s", "products_s": "products, s",
}  # fmt: skip


def title(name: str) -> str:
    """The words for an identifier of the catalog, a record, a backend, an order, a card or a machine.

    longnet-geometric -> LongNet, geometric; random-0.90 -> random blocks, 90% left out; h200x2 -> 2 x H200. Several
    with commas between ("dense, cudnn") are named one by one; what is no known identifier comes back as it is.
    """
    if name in NAMES:
        return NAMES[name]
    if ", " in name:
        return ", ".join(map(title, name.split(", ")))
    for form, words in _FORMS:
        if found := re.fullmatch(form, name):
            return words(*found.groups(default=""))
    return name


def _dilated(branches: str) -> str:
    each = [tuple(map(int, branch.split("x"))) for branch in branches.split("-")]
    if len(each) > 1 and each[:-1] == [(4096 * 4**i, 2**i) for i in range(len(each) - 1)]:
        return NAMES["longnet-geometric"]  # whose last segment is cut at N
    return "dilated: " + listed(f"{w:,} at rate {r}" for w, r in each)


def _card(make: str, model: str, rest: str, count: str) -> str:
    words = re.sub(r"(?<=\d)(?=TI|GB)", " ", " ".join(filter(None, [make, model, rest])).upper())
    words = words.replace("TI", "Ti").replace("PCIE", "PCIe")
    return f"{count} x {words}" if count not in ("", "1") else words


_FORMS = (
    (r"dilated-((?:\d+x\d+-?)+)", _dilated),
    (r"(random)-\d+", str),  # an order and its seed
    (r"random-(\d\.\d+)", lambda left_out: f"random blocks, {float(left_out):.0%} left out"),
    (r"window-(\d+)", lambda width: f"window of {int(width):,}"),
    (r"neighborhood-(\d+)-?(.*)", lambda r, order: f"neighborhood, radius {r}" + f", {title(order)}" * bool(order)),
    (r"tiles[- ](\d+) ?x ?(\d+)", "tiles {} x {}".format),
    (r"((?:local|global|strided)-\d+(?:\+(?:local|global|strided)-\d+)*)",
     lambda layout: f"blocks: {layout.replace('-', ' ').replace('+', ' + ')}"),
    (r"(gtx|rtx|)(\d+[a-z]*|[ahbvlt]\d+[a-z]?|mi\d+x)-?(\d+gb|pcie|nvl|)(?:x(\d+))?", _card),
)  # fmt: skip


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
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def times(x: float, form: str = "") -> str:
    """A ratio before an adjective and its "as": "**3.4 times** as"; "as" where it reads 1, for what is equal."""
    words = format(x, form) if form else number(x)
    return "as" if float(words.replace(",", "")) == 1 else f"**{words} times** as"


def duration(seconds: float) -> str:
    """A time in the largest unit of which there are two: 20.6 s, 3.5 hours, 5.64 days."""
    units = ((x, long) for x, long in (("days", 86400), ("hours", 3600), ("min", 60)) if seconds >= 2 * long)
    unit, long = next(units, ("s", 1))
    return f"{number(seconds / long)} {unit}"


def binary(size: float) -> str:
    """Bytes in the largest unit of 1,024 of which there is one: 64 MiB, 1.25 GiB."""
    power = max(0, min(4, (max(1, int(size)).bit_length() - 1) // 10))
    return f"{number(size / 1024**power)} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


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
        return f"not to be told from {first} in this noise: {it.speedup:.2f} times ({low:.2f} to {high:.2f}; {noise})"
    if low > again.speedup_high:
        return f"**faster** than {first}: {it.speedup:.2f} times its speed ({low:.2f} to {high:.2f}; {noise})"
    took = f"{1 / it.speedup:.2f} times as long ({1 / high:.2f} to {1 / low:.2f}; {noise})"
    return f"**slower** than {first}: it takes {took}"
