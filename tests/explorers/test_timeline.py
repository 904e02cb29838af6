"""The timeline in the page: the same sums as Python's, and each event's name under the pointer and by keyboard."""

import json

import numpy as np
import pandas as pd
import pytest

from tests import browser
from workbench.explorers.timeline import short, timeline
from workbench.scaling.timeline import STAGES, shares


def row(events, **fields):
    total = max(x[2] + x[3] for rank in events for x in rank) / 1000
    made = {"status": "ok", "label": "longnet-geometric", "strategy": "sequence", "n": 512, "dtype": "float32"}
    return made | {"heads": 2, "head_dim": 16, "device": "cpu", "milliseconds": total, "events": events} | fields


@pytest.fixture(scope="module")
def rows():
    """Calls of random events; the first is small enough to be read."""
    random, calls = np.random.default_rng(0), []
    few = [[["compute", "aten::lerp_", 0.0, 400.0], ["exchange", "gloo:all_to_all", 300.0, 500.0]],
           [["pack", "void at::native::copy<float, 4>(int)", 100.0, 50.0]]]  # fmt: skip
    for _ in range(200):
        found = [[[STAGES[random.integers(3)], "x", round(a, 1), round(b, 1)] for a, b in random.random((9, 2)) * 1000]
                 for _ in range(2)]  # fmt: skip
        calls.append(row(found, run_device="NVIDIA H200", device="cuda"))
    return pd.DataFrame([row(few), *calls])


@pytest.fixture(scope="module")
def page(rows):
    html = timeline(rows, "a processor")._repr_html_().replace("const timeline =", "const timeline = window.timeline =")
    with browser.shown(html) as tab:
        yield tab


@pytest.mark.browser
def test_the_page_sums_as_python_does(page, rows):
    data = timeline(rows, "").data["calls"]
    found = page.run(f"{json.dumps([x['ranks'] for x in data])}.map(ranks => ranks.map(timeline.shares))")
    ours = shares(rows).drop(columns=["label", "strategy", "rank", "call"])
    for name in ours:
        got = [rank[name] / 1000 for call in found for rank in call]
        assert np.allclose(got, ours[name], atol=2e-6), name
    assert page.run("[[1000, 8], [990, 8], [7, 4]].map(x => timeline.step(...x))") == [200, 200, 2]


@pytest.mark.browser
def test_an_event_has_its_name_under_the_pointer_and_by_arrow_keys(page):
    assert "N = 512, float32, 2 heads x 16, 2 ranks on a processor: 0.8 ms" in page.run("document.body.innerText")
    assert "packs 0 ms, exchanges 0.5 ms, of which 0.1 ms beside" in page.run("document.body.innerText")
    told = "document.querySelector('.x-tip').textContent"
    words = []
    for _ in range(3):
        page.press("ArrowRight")
        words.append(page.run(told))
    assert words == [
        "rank 0, compute: aten::lerp_\nfrom 0 ms, for 0.4 ms",
        "rank 0, exchange: gloo:all_to_all\nfrom 0.3 ms, for 0.5 ms",
        "rank 1, pack: copy\nfrom 0.1 ms, for 0.05 ms",
    ]  # fmt: skip
    page.run("(c => c.dispatchEvent(new PointerEvent('pointermove', {clientX: c.getBoundingClientRect().left + 140, "
             "clientY: c.getBoundingClientRect().top + 14})))(document.querySelector('canvas'))")  # fmt: skip
    assert page.run(told).startswith("rank 0, compute")


@pytest.mark.browser
def test_another_call_and_a_closer_look_are_in_the_address(page):
    page.slide("[name=call]", "3")
    page.slide("[name=zoom]", 2)
    assert "2 ranks on H200" in page.run("document.body.innerText") and "card 0" in page.run("document.body.innerText")
    assert page.run("location.hash") == "#~timeline?call=3&zoom=2&at=0"


def test_names_are_short():
    assert short("void flash::kernel<A<1>, 2>(Params)") == "kernel" and short("aten::add") == "aten::add"
    assert len(short("k" * 99)) == 60
