"""Writes workbench/explorers/fit.json, what the calculator of notebook 03 computes with: python tests/programs.py.

A program is the life of a call's tensors (`fit.tracer`), a step each: a birth, as the coefficients of its bytes, or
the index of the birth whose tensor dies. Bytes are a x G N^2 + b x G N + c x G + d x N + e + f x `sums`, with
G = batch x heads, through traces at samples. Where the tensors are not the same ones at all of these (work is done in
pieces, so many the longer it is), and for windows on several cards, the program is one tensor of the bytes that the
allocator reserved, if that is within NEAR of all LARGE calls. LongNet on several cards, of whole segments each, takes
on each what one card takes; dense attention's plan over several is one of many, by N and heads: it has no program.
"""

import json
import sys
from random import Random

import numpy as np

from workbench.explorers.fit import DATA, DTYPES, HEAD_DIMS, MODES, WAYS, WORLDS, case, classes, grain
from workbench.fit import allocator, cards, estimate
from workbench.harness.outcome import attempt
from workbench.patterns import Neighborhood
from workbench.probes import roofline

ONE = [(n, 1, heads) for n in (1 << 16, 1 << 17, 3 << 16) for heads in (4, 8)]  # N, batch, heads
BATCHED = [(n, 2, heads) for n in (1 << 16, 1 << 17, 3 << 16) for heads in (4, 8)]
MANY = [(n, 32, heads) for n in (1 << 16, 1 << 17, 3 << 16) for heads in (8, 16)]  # of 256 heads in all kernels differ
LARGE = [(x << 15, *size) for x in (1, 3, 4, 7) for size in ((1, 15), (1, 40), (2, 40), (8, 3), (8, 32))]
FITTED, NEAR = 2 << 30, 0.045  # bytes (of less, the rounding to segments is much); the share that a fit may be off
LENGTHS = [1024 * x for x in (1, 2, 4, 8, 12, 16, 24, 32, 64, 128)]  # at which pairs are counted


def write(ways=WAYS) -> dict:
    """Trace these ways, and write them; a program that several calls share is kept once."""
    data = json.loads(DATA.read_text()) if DATA.exists() else {"programs": [], "calls": {}, "several": {}}
    kept, programs = data["programs"], {}

    def place(program: list) -> int:
        return programs.setdefault(json.dumps(program), len(programs))

    calls = {x: [y and [place(kept[z]) for z in y] for y in found] for x, found in data["calls"].items()}
    several = {x: y and place(kept[y]) for x, y in data["several"].items()}
    for way in ways:
        known = {}  # what was traced before has the same program: another card's, another type of as many bytes
        for kind in [(d, dtype, mode) for d in HEAD_DIMS for dtype in DTYPES for mode in MODES]:
            words = " ".join(map(str, (way, *kind)))
            found = [programs_of(way, card, kind, known) for card in classes()]
            calls[words] = [x and [*map(place, x)] for x in found]
            for world in WORLDS[1:] if way.startswith("window") else ():
                its = fitted_reserved(way, cards.find("h200"), kind, world)
                several[f"{words} {world}"] = place(its) if its else None
            print(words, calls[words], file=sys.stderr)
    data = {"programs": [json.loads(x) for x in programs], "calls": calls, "several": several, "pairs": pairs()}
    data["checked"] = checked(data)
    DATA.write_text(json.dumps(data, separators=(",", ":")) + "\n")
    return data


def programs_of(way: str, card: cards.Card, kind: tuple, known: dict) -> list | None:
    """The programs of a call on a card, of one sequence, of a batch and, if that is another, of MANY; None where the
    call is refused, or where there is no program."""
    first = attempt(lambda: estimate.trace(case(way, *ONE[0], *kind), card))
    if first.status != "ok":
        return None
    key = json.dumps([first.result.backend, first.result.events, kind[0], kind[2]])
    if key not in known:
        found = [program(way, card, kind, samples) for samples in (ONE, BATCHED, MANY)]
        if not all(found):
            one = fitted_reserved(way, card, kind)
            found = [one, one] if one else None
        elif all(reserved(found[1], 1, *x, kind[0]) == reserved(found[2], 1, *x, kind[0]) for x in MANY):
            found.pop()
        known[key] = found
    return known[key]


def program(way: str, card: cards.Card, kind: tuple, samples: list) -> list | None:
    """The program through traces at samples; None where the tensors are not the same ones at all of them."""
    traces = [estimate.trace(case(way, *x, *kind), card) for x in samples]
    if len({tuple((e.name, e.nbytes < 0, e.id) for e in x.events) for x in traces}) > 1:
        return None
    steps, born = [], {}
    for place, event in enumerate(traces[0].events):
        if event.nbytes < 0:
            steps.append(born[event.id])
        else:
            born[event.id] = len(steps)
            use = [0, 1, 2, 3, 4] if way.endswith("eager") else [1, 2, 3, 4]
            steps.append(fitted(samples, [x.events[place].nbytes for x in traces], use))
    return steps


def fitted_reserved(way: str, card: cards.Card, kind: tuple, world: int = 1) -> list | None:
    """The program of one tensor, of the bytes that the allocator reserves for a call on each of several cards, at
    lengths of a card's own; None where that is not near."""
    found = {}
    for n, batch, heads in LARGE:
        at = case(way, n * world, batch, heads, *kind)
        one = attempt(lambda: estimate.trace(at, card, world=world, rank=world // 2))  # noqa: B023 (called at once)
        if one.status != "ok":
            return None
        if one.result.reserved_bytes >= FITTED:
            found[n, batch, heads] = one.result.reserved_bytes
    one = [fitted([*found], [*found.values()], [1, 2, 3, 4, *[5] * way.endswith("fa4")], kind[0])]
    off = {x: reserved(one, 1, *x, kind[0]) / y - 1 for x, y in found.items()}
    print(way, card.key, kind, world, f"off by {max(map(abs, off.values())):.3f}", file=sys.stderr)
    return one if all(abs(x) <= NEAR for x in off.values()) else None


def terms(n: int, batch: int, heads: int, head_dim: int) -> list[int]:
    """What the coefficients multiply. The last: the rows of sums that FlashAttention-4's backward has at a time."""
    group, room = batch * heads, (1 << 26) // (batch * (n + 384) * head_dim)  # rows are padded
    return [group * n * n, group * n, group, n, 1, batch * n * min(heads, max(1, room))]


def fitted(samples: list, nbytes: list[int], use: list[int], head_dim: int = 64) -> list:
    """[place of a coefficient, the coefficient, ...], those that are not 0; the least squares of relative errors. use:
    the places that may be."""
    points = np.array([terms(*x, head_dim) for x in samples], dtype=float)
    scale = points.max(axis=0)
    want = np.maximum(np.array(nbytes, dtype=float), 1)
    solved = np.linalg.lstsq((points / scale)[:, use] / want[:, None], np.ones(len(want)), rcond=None)[0]
    found = []
    for place, x in zip(use, solved, strict=True):
        if abs(x) > 0.5:  # bytes, at the largest sample
            rounded = round(float(x / scale[place]), 9)
            found += [place, int(rounded) if rounded == int(rounded) else rounded]
    return found


def pairs() -> dict:
    """{pattern: [[N, pairs a head, those of the blocks that are visited], ...]}; dense attention's are N^2."""
    found = {}
    for way in WAYS:
        name = way.partition(", ")[0]
        if name != "dense" and name not in found:
            found[name] = []
            for n in LENGTHS:
                at = case(way, n, 1, 12, 64, "float16", "fwd")
                blocks = roofline.block_pairs(at) if isinstance(at.pattern, Neighborhood) else None
                whole = at.pattern.pairs(n, 12) / 12
                found[name].append([n, whole, blocks / 12 if blocks else whole])
    return found


def drawn(random: Random, data: dict, worlds=(1,)) -> tuple:
    """(words of a call, way, card, world, N, batch, heads, head_dim, dtype, mode): a setting that a card takes."""
    while True:
        way, card, world = random.choice(WAYS), random.choice(classes()), random.choice(worlds)
        kind = random.choice(HEAD_DIMS), random.choice(DTYPES), random.choice(MODES)
        words = " ".join(map(str, (way, *kind)))
        its = data["calls"][words][[x.key for x in classes()].index(card.key)]
        if its and (world == 1 or grain(way) > 128 or data["several"].get(f"{words} {world}")):
            n = grain(way) * random.randint(1, 8) if grain(way) > 128 else 128 * random.randint(64, 2048)
            return words, way, card, world, n * world, random.choice((1, 1, 2, 3, 8)), random.randint(2, 40), *kind


def program_of(data: dict, words: str, card: cards.Card, world: int, batch: int, heads: int) -> list:
    if world > 1 and f"{words} {world}" in data["several"]:
        return data["programs"][data["several"][f"{words} {world}"]]
    its, at = data["calls"][words][[x.key for x in classes()].index(card.key)], (batch > 1) + (batch * heads >= 256)
    return data["programs"][its[min(at, len(its) - 1)]]


def reserved(steps: list, world: int, n: int, batch: int, heads: int, head_dim: int, *_) -> int:
    """Bytes reserved by a program, as the page computes them."""
    known = terms(n // world, batch, heads, head_dim)
    sizes = [x if isinstance(x, int) else [round(sum(c * known[k] for k, c in zip(x[::2], x[1::2], strict=True)))]
             for x in steps]  # fmt: skip
    return allocator.replay([(x, -1) if isinstance(x, int) else (at, x[0]) for at, x in enumerate(sizes)]).peak_reserved


def errors(data: dict, count: int, seed: int, worlds=(1,)) -> tuple[list[float], list[float]]:
    """Of random settings, by which share of the traced bytes the program is off: those with all steps, and those that
    are fitted, of twice FITTED bytes and more."""
    random, found = Random(seed), ([], [])
    for _ in range(count):
        words, way, card, world, *sizes = drawn(random, data, worlds)
        place = {"world": world, "rank": world // 2} if world > 1 else {}
        traced = attempt(lambda: estimate.trace(case(way, *sizes), card, **place))  # noqa: B023 (called at once)
        if traced.status == "ok":
            steps = program_of(data, words, card, world, *sizes[1:3])
            want = traced.result.reserved_bytes
            if len(steps) == 1 and want < 2 * FITTED:
                continue
            found[len(steps) == 1].append(abs(reserved(steps, world, *sizes) / want - 1))
    return found


def checked(data: dict) -> dict:
    """What the page says of its programs' errors."""
    (steps, fits), (_, several) = errors(data, 600, 1), errors(data, 190, 1, WORLDS[1:])
    exact = {"points": len(steps), "equal": sum(x == 0 for x in steps) / len(steps), "worst": max(steps)}
    return exact | {"fitted": max(fits + several)}


if __name__ == "__main__":
    write(sys.argv[1:] or WAYS)
