"""Patterns made of patterns: `a | b`, `a & b`, `a - b` of any two, and another pattern for each head.

A combination is a set: a key that two branches of a Dilated show counts twice in Dilated's own softmax, and once in
that of `Dilated(...) | Window(...)`.
"""

from __future__ import annotations

import math

import torch

from workbench.patterns.base import Blocks, Pattern
from workbench.patterns.checks import listed
from workbench.patterns.dilated import Dilated
from workbench.patterns.listed import ALL, OPEN, PART, Listed, Looked, States, by_head, merged, refined, repeats


class _Made(Listed):
    """What both kinds have from the patterns that they are made `of`.

    block_size: where some of them have one of their own, the least common multiple; else there is none.
    """

    def __init__(self, of):
        for part in of:
            if not isinstance(part, Pattern):
                raise ValueError(f"{part!r} among the parts of a pattern: want patterns, e.g. Window(512)")
        self.of = tuple(of)
        if not self.of:
            raise ValueError("of=[]: want patterns, e.g. [Window(512), Dense()]")
        batches = {part.batch for part in self.of} - {None}
        if len(batches) > 1:
            raise ValueError(f"patterns of batches {sorted(batches)}: want one batch size")
        self.batch = batches.pop() if batches else None
        sizes = [part.block_size for part in self.of if hasattr(part, "block_size")]
        if sizes:
            self.block_size = tuple(math.lcm(*each) for each in zip(*sizes, strict=True))

    def for_batch(self, b):
        if self.batch is None:
            return self
        each = {part.key: part.for_batch(b) for part in self.of}
        return self._like([each[part.key] for part in self.of])

    def check(self, n, heads, nq=None):
        for part in self.of:
            part.for_batch(0).check(n, heads, nq)
        return super().check(n, heads, nq)

    def spec(self):
        return {"pattern": self.kind, "of": [part.spec() for part in self.of]}

    @property
    def short_name(self):
        return self._joined(part.short_name for part in self.of)

    @property
    def name(self):
        return self._joined(part.name for part in self.of)


class Combined(_Made):
    """What a set operation makes of patterns: `a | b`, what one of them shows; `a & b`, what both show; `a - b`, what a
    shows and b hides. A pair is seen once, however often the parts show it.

    kind: "|", "&" or "-". of: the patterns, two or (for "|" and "&") more.
    """

    def __init__(self, kind: str, of):
        self.kind = kind
        of = listed("of", of)
        if kind in ("|", "&"):  # a | b | c is one of three
            of = [x for part in of for x in (part.of if type(part) is Combined and part.kind == kind else [part])]
        super().__init__(of)
        flags = [part.causal for part in self.of]
        self.causal = flags[0] if kind == "-" else all(flags) if kind == "|" else any(flags)

    def _like(self, of):
        return Combined(self.kind, of)

    @property
    def same_heads(self):
        return all(part.same_heads for part in self.of)

    @property
    def by_spec(self):
        return type(self) is Combined and all(part.by_spec for part in self.of)

    def count(self, h, i, j, n, heads):
        first, *rest = ((seen if seen.dtype == torch.bool else seen > 0)
                        for seen in (part.count(h, i, j, n, heads) for part in self.of))  # fmt: skip
        for seen in rest:
            first = first | seen if self.kind == "|" else first & (seen if self.kind == "&" else ~seen)
        return first

    @property
    def everywhere(self) -> bool:
        """Whether its blocks come from looking at all pairs."""
        each = [part.everywhere for part in self.of]
        return each[0] if self.kind == "-" else any(each) if self.kind == "|" else all(each)

    def _blocks(self, n, heads, nq, block_size):
        if self.everywhere or not (n and heads and nq):
            return Looked._blocks(self, n, heads, nq, block_size)
        lists = [None if part.everywhere else _states(part, n, heads, nq, block_size) for part in self.of]
        layouts = max(x[0] for x in lists if x is not None)
        if layouts < heads and any(x is None and by_head(p, n, heads) for x, p in zip(lists, self.of, strict=True)):
            layouts = heads
        grid = Blocks.joined(block_size, n, nq, layouts, [])
        known = [_spread(x, layouts, grid) for x in lists if x is not None]
        if len(known) < len(lists):  # a function is asked about the blocks that the others show
            shown = known[0] if self.kind == "-" else merged("&", known)
            unknown = States(shown.key, torch.full_like(shown.key, OPEN))
            known = [unknown if x is None else known.pop(0) for x in lists]
        return refined(self, grid, heads, merged(self.kind, known))

    def _pairs(self, n, heads, nq):
        return self._distinct(n, heads, nq)

    def _distinct(self, n, heads, nq):
        """By inclusion and exclusion, so that only what two parts both show is evaluated."""
        if self.everywhere:
            return Pattern._distinct(self, n, heads, nq)
        if self.kind == "&":
            return super()._distinct(n, heads, nq)
        *rest, last = self.of
        rest = rest[0] if len(rest) == 1 else Combined(self.kind, rest)
        first, both = (x._distinct(n, heads, nq) for x in (rest, rest & last))
        more = last._distinct(n, heads, nq) if self.kind == "|" else [0] * heads
        return [x + y - z for x, y, z in zip(first, more, both, strict=True)]

    @property
    def sees_itself(self):
        each = [part.sees_itself for part in self.of]
        return any(each) if self.kind == "|" else all(each) and self.kind == "&"

    def _uncovered(self, n, heads, nq):
        own = Pattern if self.everywhere or self.sees_itself else Listed
        return own._uncovered(self, n, heads, nq)

    def _joined(self, names) -> str:
        each = zip(names, self.of, strict=True)
        return f" {self.kind} ".join(f"({x})" if isinstance(part, Combined) else x for x, part in each)

    def __repr__(self):
        return self._joined(map(repr, self.of))


class PerHead(_Made):
    """Head h has the pattern of[h], at its place among all heads: `PerHead([Window(512), Window(512), Dense()])`.

    of: a pattern for each query head. One that is given several times is kept once: give the same object.
    """

    kind = "PerHead"

    def __init__(self, of):
        super().__init__(listed("of", of))
        self.causal = all(part.causal for part in self.of)

    @property
    def groups(self) -> list[tuple[Pattern, list[int]]]:
        """(pattern, its heads), of each that is another object."""
        found = {}
        for h, part in enumerate(self.of):
            found.setdefault(part.key, (part, []))[1].append(h)
        return [*found.values()]

    def _like(self, of):
        return PerHead(of)

    def check(self, n, heads, nq=None):
        n, heads, nq = super().check(n, heads, nq)
        if heads != len(self.of):
            raise ValueError(f"heads={heads} with patterns for {len(self.of)} heads: want {len(self.of)}")
        if len({part.divisor(heads) for part in self.of}) > 1:
            raise ValueError("patterns of heads whose outputs are divided by different numbers: want heads='all'")
        return n, heads, nq

    def divisor(self, heads):
        return self.of[0].divisor(heads)

    def count(self, h, i, j, n, heads):
        total = torch.zeros((), dtype=torch.bool, device=i.device)
        for part, mine in self.groups:
            among = torch.tensor([x in mine for x in range(len(self.of))], device=h.device)[h]
            total = torch.where(among, part.count(h, i, j, n, heads), total)
        return total

    def _each(self, answer) -> list:
        """Of each head, what its pattern answers for it."""
        known = {part.key: answer(part) for part, _ in self.groups}
        return [known[part.key][h] for h, part in enumerate(self.of)]

    def _pairs(self, n, heads, nq):
        return self._each(lambda part: part._pairs(n, heads, nq))

    def _distinct(self, n, heads, nq):
        return self._each(lambda part: part._distinct(n, heads, nq))

    def _uncovered(self, n, heads, nq):
        return torch.stack(self._each(lambda part: part._uncovered(n, heads, nq)))

    def _blocks(self, n, heads, nq, block_size):
        def lines(part):
            blocks = part._blocks(n, heads, nq, block_size)
            each = []
            for layout in range(blocks.layouts):
                starts = blocks.starts[layout * blocks.rows : (layout + 1) * blocks.rows + 1]
                some = slice(int(starts[0]), int(starts[-1]))
                each.append((starts.diff(), blocks.columns[some], blocks.full[some]))
            return each * heads if blocks.layouts < heads else each

        return Blocks.joined(block_size, n, nq, heads, self._each(lines))

    def _joined(self, names) -> str:
        names = list(names)
        runs = [x for x in range(len(names)) if not x or names[x] != names[x - 1]]
        each = (f"{b - a} x {names[a]}" for a, b in zip(runs, [*runs[1:], len(names)], strict=True))
        return f"per-head[{', '.join(each)}]"

    def __repr__(self):
        return f"PerHead([{', '.join(map(repr, self.of))}])"


def _states(pattern: Pattern, n, heads, nq, block_size) -> tuple[int, States]:
    """(layouts, the blocks of what a pattern shows at least once)."""
    if isinstance(pattern, Dilated):
        return heads, merged("|", pattern.states(n, heads, nq, block_size))
    blocks = pattern._blocks(n, heads, nq, block_size)
    state = torch.where(blocks.full, ALL, OPEN if repeats(pattern, n, heads) else PART)
    return blocks.layouts, States(blocks.key, state)


def _spread(found: tuple[int, States], layouts: int, grid: Blocks) -> States:
    """The same for as many layouts, where there is one for all."""
    have, (key, state, _) = found
    if have == layouts:
        return States(key, state)
    return States((torch.arange(layouts)[:, None] * (grid.rows * grid.cols) + key).flatten(), state.repeat(layouts))


Pattern.__or__ = lambda a, b: Combined("|", [a, b]) if isinstance(b, Pattern) else NotImplemented
Pattern.__and__ = lambda a, b: Combined("&", [a, b]) if isinstance(b, Pattern) else NotImplemented
Pattern.__sub__ = lambda a, b: Combined("-", [a, b]) if isinstance(b, Pattern) else NotImplemented
