"""The pattern explorer: any pattern's mask, what it counts, and how far a token sees through layers."""

from workbench.explorers import Explorer
from workbench.plots import style

START = {
    "kind": "dilated", "n": 64, "shape": [8, 8], "segments": [8, 16, 64], "dilations": [1, 2, 4],
    "offsets": "interleaved", "radius": 4, "width": 8, "dilation": 1, "sinks": 0, "block": 8, "local": 1, "global": 1,
    "strided": None, "causal": False, "heads": 4, "head": 0, "all": False, "layers": 2,
}  # fmt: skip
FAMILIES = {"dense": "Dense", "dilated": "Dilated", "window": "Neighborhood", "grid": "Neighborhood",
            "blocks": "BlockSparse", "empty": "accent"}  # fmt: skip


def explore(n: int = 64, heads: int = 4, **settings) -> Explorer:
    """An explorer of patterns on n tokens: a mask up to 4,096 tokens, its pairs up to 2^30.

    settings: of START, what is shown at first: kind is "dense", "dilated", "window", "grid" or "blocks".
    ValueError for a setting that is none.
    """
    if unknown := settings.keys() - START.keys():
        raise ValueError(f"settings {sorted(unknown)}: want some of {', '.join(START)}")
    colors = {kind: style.COLORS[family] for kind, family in FAMILIES.items()}
    data = START | settings | {"n": n, "heads": heads, "colors": colors}
    return Explorer("Pattern explorer", ["masks", "pattern"], data)
