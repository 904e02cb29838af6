"""The pattern explorer: any pattern's mask, what it counts, and how far a token sees through layers."""

from workbench.explorers import Explorer
from workbench.patterns import BlockSparse, Dense, Dilated, Neighborhood, Pattern, Window
from workbench.plots import style

START = {
    "kind": "dilated", "n": 64, "shape": [8, 8], "segments": [8, 16, 64], "dilations": [1, 2, 4],
    "offsets": "interleaved", "radius": 4, "width": 8, "dilation": 1, "sinks": 0, "block": 8, "local": 1, "global": 1,
    "strided": None, "causal": False, "heads": 4, "head": 0, "all": False, "layers": 2,
}  # fmt: skip
FAMILIES = {"dense": "Dense", "dilated": "Dilated", "window": "Neighborhood", "grid": "Neighborhood",
            "blocks": "BlockSparse", "empty": "accent"}  # fmt: skip


def explore(pattern: Pattern | None = None, n: int = 64, heads: int = 4) -> Explorer:
    """An explorer that starts from a pattern on n tokens: its mask up to 4,096 tokens, its pairs up to 2^30.

    pattern: dense, dilated, a window, a neighborhood on one or two axes in row-major order, or a union of local, global
    and strided blocks; ValueError for another.
    """
    begun = {} if pattern is None else {"n": n, "causal": pattern.causal} | _settings(pattern)
    data = START | begun | {"heads": heads}
    colors = {kind: style.COLORS[family] for kind, family in FAMILIES.items()}
    return Explorer("Pattern explorer", ["masks", "pattern"], data | {"colors": colors})


def _settings(pattern: Pattern) -> dict:
    match pattern:
        case Dense():
            return {"kind": "dense"}
        case Dilated(heads="all"):
            branches = {"segments": list(pattern.segment_lengths), "dilations": list(pattern.dilation_rates)}
            return {"kind": "dilated", "offsets": pattern.offsets} | branches
        case Neighborhood(plain=True, ordering=None, shape=(_,)):
            return {"kind": "window", "width": 2 * pattern.radius[0] or 1, "dilation": 1, "sinks": 0}
        case Window():
            sizes = {"width": pattern.width, "dilation": pattern.dilation, "sinks": pattern.sinks}
            return {"kind": "window"} | sizes
        case Neighborhood(plain=True, ordering=None, shape=(_, _), radius=(r, s)) if r == s:
            return {"kind": "grid", "shape": list(pattern.shape), "radius": r}
        case BlockSparse(block_size=(a, b)) if a == b and (parts := _union(pattern.layout)):
            return {"kind": "blocks", "block": a, "local": None, "global": None, "strided": None} | parts
    raise ValueError(f"{pattern!r}: want a pattern that the page can compute: see explore's docstring")


def _union(layout) -> dict | None:
    """The sizes of a union of local, global and strided layouts, one of each at most; None where it is another."""
    if layout.kind == "|":
        left, right = map(_union, layout.of)
        return left | right if left and right and not left.keys() & right.keys() else None
    named = layout.kind in ("local", "global_", "strided")
    return {layout.kind.rstrip("_"): next(iter(layout.arguments.values()))} if named else None
