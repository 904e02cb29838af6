"""The roofline in a real browser: a mark per kernel and length, each with its name, below both ceilings."""

import pytest

from tests import browser
from workbench.analysis import roofline as found
from workbench.explorers.roofline import roofline
from workbench.probes import speed, suite


@pytest.mark.browser
def test_every_kernel_and_length_is_a_mark_that_names_itself():
    rows, best = speed.recorded("h100x1")
    device = found.device(rows, best, suite.recorded("h100x1"))
    with browser.shown(roofline({"H100": device})._repr_html_()) as tab:
        said = tab.run("document.querySelector('canvas').getAttribute('aria-label')")
        assert f"{len(device['points'])} points" in said and "% of it" in said
        names = []
        for _ in device["points"].itertuples():
            tab.press("ArrowRight")
            names.append(tab.run("document.querySelector('.x-tip').textContent"))
        assert [name.rpartition("\n")[0] for name in names] == list(device["points"]["text"])
        assert not any(name.split("\n")[-1].startswith(">") for name in names)  # never more than all of a ceiling
        tab.slide("[name=mode]", "fwd")
        tab.run("new Promise(done => setTimeout(done, 200))")
        fewer = int((device["points"]["mode"] == "fwd").sum())
        assert f"{fewer} points" in tab.run("document.querySelector('canvas').getAttribute('aria-label')")
        assert not tab.requests[1:]
