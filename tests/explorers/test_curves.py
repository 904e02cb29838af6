"""The page's orderings against Python's, on random grids and boxes: curves, blocks touched, a cell's key blocks."""

import json
import math
import random

import pytest

import workbench as wb
from tests import browser
from workbench import explorers
from workbench.analysis import locality
from workbench.patterns import orderings

pytestmark = pytest.mark.browser
ASK = """
const answers = %s.map(({name, shape, tile, radius, block, cell}) => {
  const curve = curves.make(name, shape, tile), rank = curves.rank(curve), {rows, seen} = curves.touched(rank, shape, radius, block);
  return {curve: [...curve], rank: [...rank], rows, seen: [...seen], keys: curves.keyBlocks(rank, shape, radius, block, cell)};
});
"""  # noqa: E501


def drawn(rng: random.Random) -> dict:
    most = rng.choice([[400], [24, 24], [24, 24], [40, 5], [7, 7, 7], [3, 9, 5]])
    shape = [rng.randint(1, side) for side in most]
    return {
        "name": rng.choice(["row_major", "snake", "tiles", "morton", "hilbert", "hilbert"]), "shape": shape,
        "tile": [rng.randint(1, 9) for _ in shape], "radius": rng.randint(0, 9), "block": rng.randint(1, 40),
        "cell": rng.randrange(math.prod(shape)),
    }  # fmt: skip


def test_curves_and_blocks_are_python_s():
    rng = random.Random(21)
    settings = [drawn(rng) for _ in range(200)]
    with browser.shown(f"<script>{explorers.source('curves.js')}{ASK % json.dumps(settings)}</script>") as tab:
        answers = tab.run("answers")
    assert len(answers) == 200
    for asked, got in zip(settings, answers, strict=True):
        make, more = getattr(orderings, asked["name"]), [asked["tile"]] if asked["name"] == "tiles" else []
        order = make(asked["shape"], *more)
        assert got["curve"] == order.curve.tolist() and got["rank"] == order.rank.tolist(), asked
        pattern, n = wb.Neighborhood(order.shape, asked["radius"], order), len(order)
        seen = locality.touched(pattern, n, asked["block"])
        assert got["rows"] == len(seen) and got["seen"] == seen.astype(int).flatten().tolist(), asked
        keys = pattern.multiplicity(n, 1)[0, int(order.rank[asked["cell"]])].nonzero().flatten() // asked["block"]
        assert got["keys"] == keys.unique().tolist(), asked
