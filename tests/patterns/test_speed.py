"""Questions about long sequences are answered without looking at their pairs: in seconds of one quiet core."""

import time

import pytest

from tests import tools
from workbench.analysis.multicard import one_thread
from workbench.patterns import BlockSparse, Dilated, Neighborhood, PerHead, Window, layouts, orderings
from workbench.patterns.dilated import PAPER

MILLION, LONG, LONGNET, TINY = 1 << 20, 1 << 24, (PAPER, (1, 2, 4, 6, 12)), ((4, 8, 16), (1, 2, 4))
LONGFORMER, USUAL = Window(512) | BlockSparse(layouts.global_(1)), layouts.local(4) | layouts.global_(1)
UNUSUAL = {"dilation": 2, "stride": 4, "border": "shift"}
BOTH = False, True


def square(side, radius=16, **options):
    return Neighborhood((side, side), radius, orderings.hilbert((side, side)), **options)


ASKED = [  # of what, the question, its arguments, seconds
    *((BlockSparse(USUAL | layouts.strided(16), 128, c), x, (MILLION, 12), 1) for c in BOTH
      for x in ("pairs", "density", "blocks")),
    *((Dilated(*x, c), "pairs", (MILLION, 12, nq), 1) for x in (LONGNET, TINY) for c in BOTH for nq in (None, 349_530)),
    *((square(1024), x, (MILLION, 12), 1) for x in ("pairs", "density", "coverage", "uncovered")),
    (square(256), "blocks", (1 << 16, 1), 0.5), (square(1024), "blocks", (MILLION, 1), 5),
    (square(256, 7.5, **UNUSUAL), "blocks", (1 << 16, 1), 1), (orderings, "hilbert", ((2048, 2048),), 1),
    *((LONGFORMER | x, "blocks", (1 << 18, 1), s) for x, s in ((Dilated(*LONGNET), 2), (Window(9), 0.5),
                                                              (BlockSparse(layouts.random(3 / 2048)), 1))),
    (Window(4096, True) - Window(64, True), "blocks", (1 << 18, 1), 1),
    (PerHead([Window(512, True), Window(4096, True)]), "blocks", (1 << 18, 2), 0.5),
    *((window, *asked) for window, s in ((Window(512, True), 1), (Window(512, sinks=4), 1), (Window(512, True, 4), 5),
                                         (Window(16, True, 4096), 5))
      for asked in (("blocks", (LONG, 1), s), ("pairs", (LONG, 12), 0.1), ("coverage", (LONG, 12), 0.1))),
]  # fmt: skip


@pytest.mark.parametrize("of, question, given, seconds", ASKED, ids=lambda x: getattr(x, "short_name", None))
def test_an_answer_takes_no_longer(of, question, given, seconds):
    def took():
        begin = time.process_time()
        getattr(of, question)(*given)
        return (time.process_time() - begin) / tools.slowness(time.process_time)

    with one_thread():
        assert any(took() < seconds for _ in range(3))
