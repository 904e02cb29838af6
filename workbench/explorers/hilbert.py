"""The Hilbert explorer: a cell's window on the grid and the key blocks it touches, under two orders side by side."""

import math

from workbench.explorers import Explorer
from workbench.plots import style

COLORS = {"cell": style.COLORS["BlockSparse"], "window": style.COLORS["accent"], "keys": style.COLORS["Neighborhood"],
          "query": style.COLORS["Dilated"]}  # fmt: skip
LEGIBLE = 4096  # cells up to which the path is drawn at first


def explore(shape=(32, 32), radius: int = 3, block: int = 64, left="row_major", right="hilbert") -> Explorer:
    """An explorer of neighborhoods on a grid of (rows, columns) or a box of (depth, rows, columns), row by row.

    radius: of the window, in cells; block: tokens per block; left, right: row_major, snake, tiles, morton or hilbert.
    """
    tile = [8, 16] if len(shape) == 2 else [4]
    data = {"shape": list(shape), "radius": radius, "block": block, "left": left, "right": right, "tile": tile}
    data |= {"slice": 0, "path": math.prod(shape) <= LEGIBLE, "colors": COLORS}
    return Explorer("Hilbert explorer", ["curves", "hilbert"], data)
