"""The page's patterns against Python's, on random settings: masks, counts, empty rows, reach."""

import json
import random

import pytest
import torch

import workbench as wb
from tests import browser
from workbench import explorers
from workbench.analysis.reach import reach
from workbench.patterns import layouts

pytestmark = pytest.mark.browser
LAYERS = 3
ASK = """
const line = (spec, n, heads, h, i) => { const out = new Uint16Array(n); masks.row(spec, n, heads, h, i, out); return [...out]; };
const settings = %s;
const answers = settings.map(({spec, n, heads, token, far}) => ({
  mask: [...Array(heads).keys()].map(h => [...Array(n).keys()].map(i => line(spec, n, heads, h, i))),
  summary: masks.summary(spec, n, heads),
  pairs: String(masks.pairs(spec, n, heads)),
  far: String(masks.pairs(spec, far, heads)),
  known: [...masks.known(spec, n, heads, token, %d)],
  reach: masks.reach(spec, n, heads, %d),
}));
"""  # noqa: E501


def drawn(rng: random.Random) -> dict:
    kind = rng.choice(["dense", "dilated", "window", "grid", "blocks"])
    n, heads = rng.randint(1, 60), rng.randint(1, 5)
    spec = {"kind": kind, "causal": kind != "grid" and rng.random() < 0.5}
    if kind == "dilated":
        branches = range(rng.randint(1, 3))
        spec |= {"segments": [rng.randint(1, 70) for _ in branches], "dilations": [rng.randint(1, 6) for _ in branches]}
        spec["offsets"] = rng.choice(["interleaved", "blocked"])
    elif kind == "window":
        spec |= {"width": rng.randint(1, 70), "dilation": rng.choice([1, 1, 2, 5]), "sinks": rng.choice([0, 0, 3, 80])}
    elif kind == "grid":
        spec |= {"shape": [rng.randint(1, 8), rng.randint(1, 8)], "radius": [rng.randint(0, 9), rng.randint(0, 9)]}
        n = spec["shape"][0] * spec["shape"][1]
    elif kind == "blocks":
        parts = {"local": rng.randint(0, 3), "global": rng.randint(0, 3), "strided": rng.randint(1, 5)}
        wanted = rng.sample(sorted(parts), rng.randint(1, 3))
        spec |= {"block": rng.randint(1, 9)} | {name: x if name in wanted else None for name, x in parts.items()}
    # a length at which only the formula counts
    far = n if kind == "grid" else rng.randint(1 << 12, 1 << 14) if kind == "blocks" else rng.randint(1 << 20, 1 << 30)
    return {"spec": spec, "n": n, "heads": heads, "token": rng.randrange(n), "far": far}


def python(spec: dict, n: int) -> wb.patterns.Pattern:
    causal = spec["causal"]
    match spec["kind"]:
        case "dense":
            return wb.Dense(causal)
        case "dilated":
            return wb.Dilated(spec["segments"], spec["dilations"], causal, offsets=spec["offsets"])
        case "window":
            return wb.Window(spec["width"], causal, spec["dilation"], spec["sinks"])
        case "grid":
            return wb.Neighborhood(spec["shape"], spec["radius"])
    made = {"local": layouts.local, "global": layouts.global_, "strided": layouts.strided}
    first, *rest = [make(spec[name]) for name, make in made.items() if spec[name] is not None]
    for layout in rest:
        first = first | layout
    return wb.BlockSparse(first, spec["block"], causal)


@pytest.fixture(scope="module")
def settings():
    rng = random.Random(20)
    return [drawn(rng) for _ in range(200)]


@pytest.fixture(scope="module")
def answers(settings):
    ask = ASK % (json.dumps(settings), LAYERS, LAYERS)
    with browser.shown(f"<script>{explorers.source('masks.js')}{ask}</script>") as tab:
        return tab.run("answers")


def test_masks_counts_and_reach_are_python_s(settings, answers):
    assert len(answers) == 200
    for asked, got in zip(settings, answers, strict=True):
        n, heads, pattern = asked["n"], asked["heads"], python(asked["spec"], asked["n"])
        count = pattern.multiplicity(n, heads)
        assert torch.equal(torch.tensor(got["mask"]), count.long()), asked
        assert got["summary"] == {
            "pairs": pattern.pairs(n, heads), "distinct": pattern.distinct(n, heads),
            "uncovered": pattern.uncovered(n, heads), "repeated": int((count > 1).sum()), "most": int(count.max()),
        }, asked  # fmt: skip
        assert int(got["pairs"]) == pattern.pairs(n, heads), asked
        seen = reach(pattern, n, heads, LAYERS)  # (layers + 1, n, n)
        assert got["reach"] == pytest.approx(seen.double().mean((1, 2)).tolist(), abs=1e-12), asked
        layer = seen[:, asked["token"]].int()
        first = torch.where(layer.any(0), layer.argmax(0), -1)
        assert got["known"] == first.tolist(), asked


def test_counts_of_long_sequences_are_python_s(settings, answers):
    for asked, got in zip(settings, answers, strict=True):
        spec, far = asked["spec"], asked["far"]
        assert int(got["far"]) == python(spec, far).pairs(far, asked["heads"]), asked
