"""explore: sliders in a live kernel, a player of frames in a batch run."""

from __future__ import annotations

import base64
import io
import json
import re

import pytest
from matplotlib import pyplot
from PIL import Image

from workbench.report import explore as module
from workbench.report.explore import MOST_FRAMES, Player, explore


def square(n: int, sign: int = 1) -> str:
    return f"<p>{sign * n * n}</p>"


def bar(width: int):
    fig, ax = pyplot.subplots(figsize=(3, 2))
    ax.barh([0], [width])
    ax.set(xlim=(0, 3), title=f"a bar of {width}")
    return fig


@pytest.fixture
def batch(monkeypatch):
    monkeypatch.setenv("WORKBENCH_BATCH", "1")


@pytest.fixture
def live(monkeypatch):
    monkeypatch.setattr(module, "_is_live", lambda: True)


def data(player: Player) -> dict:
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', player._repr_html_(), re.S)[1])


def test_a_batch_run_gets_a_frame_for_every_combination_in_order(batch):
    calls = []
    player = explore(lambda n, sign: calls.append((n, sign)) or square(n, sign), n=[1, 2, 3], sign=(1, -1))
    assert calls == [(1, 1), (1, -1), (2, 1), (2, -1), (3, 1), (3, -1)]
    kept = data(player)
    assert [kept["frames"][k] for k in kept["order"]] == [square(*call) for call in calls]
    assert kept["labels"] == [["1", "2", "3"], ["1", "-1"]]


def test_the_start_is_what_shows_without_a_script(batch):
    html = explore(square, start={"n": 3}, n=[1, 2, 3], sign=[1, -1])._repr_html_()
    frame = re.search(r'<div class="wb-frame">(.*?)</div>', html, re.S)[1]
    assert frame == "<p>9</p>"
    assert re.findall(r'value="(\d)".*?<output>(.*?)</output>', html) == [("2", "3"), ("0", "1")]


def test_each_choice_has_a_named_range_input(batch):
    html = explore(lambda head_count, causal: "x", head_count=range(1, 4), causal=[False, True])._repr_html_()
    assert html.count('type="range"') == 2
    assert 'aria-label="head count" aria-valuetext="1"' in html and 'aria-label="causal" aria-valuetext="False"' in html


def test_frames_alike_are_kept_once(batch):
    kept = data(explore(lambda n, idle: square(n), n=[1, 2], idle=range(5)))
    assert len(kept["frames"]) == 2 and len(kept["order"]) == 10


def test_a_figure_becomes_an_image_of_one_size_and_is_closed(batch):
    before = pyplot.get_fignums()
    frames = data(explore(bar, width=[1, 2, 3]))["frames"]
    images = [Image.open(io.BytesIO(base64.b64decode(re.search(r"base64,([^\"]+)", frame)[1]))) for frame in frames]
    assert len({image.size for image in images}) == 1 and len({image.tobytes() for image in images}) == 3
    assert all(image.mode == "P" for image in images)
    assert pyplot.get_fignums() == before


def test_a_frame_has_alternative_text(batch):
    def labelled(width):
        bar(width).set_label(f'width "{width}" & more')
        return pyplot.gcf()

    assert '<img alt="a bar of 1"' in explore(bar, width=[1, 2])._repr_html_()
    assert '<img alt="width &quot;1&quot; &amp; more"' in explore(labelled, width=[1, 2])._repr_html_()


def test_html_that_could_end_the_script_does_not(batch):
    player = explore(lambda n: f"<b>{n}</b></script><!--", n=[1, 2])
    assert data(player)["frames"] == ["<b>1</b></script><!--", "<b>2</b></script><!--"]


def test_a_live_kernel_gets_sliders_that_run_the_function(live):
    box = explore(square, start={"sign": -1}, n=[1, 2, 3], sign=[1, -1])
    n, sign, view = box.children
    assert [n.description, n.label, sign.label, view.value] == ["n", "1", "-1", "<p>-1</p>"]
    n.index = 2
    assert view.value == "<p>-9</p>"
    sign.index = 0
    assert view.value == "<p>9</p>"


def test_an_error_after_a_slider_moved_is_shown_and_goes_away(live):
    n, view = explore(lambda n: f"{6 // n}", start={"n": 1}, n=[0, 1, 2]).children
    n.index = 0
    assert "ZeroDivisionError" in view.value
    n.index = 2
    assert view.value == "3"


def test_live_needs_a_kernel_with_somebody_in_front_of_it(monkeypatch):
    import IPython

    monkeypatch.delenv("WORKBENCH_BATCH", raising=False)
    assert not module._is_live()
    monkeypatch.setattr(IPython, "get_ipython", lambda: type("Shell", (), {"kernel": object()})())
    assert module._is_live()
    monkeypatch.setenv("WORKBENCH_BATCH", "1")
    assert not module._is_live()


@pytest.mark.parametrize("how", ["batch", "live"])
def test_more_frames_than_a_page_can_hold_are_refused_with_the_product(request, how):
    request.getfixturevalue(how)
    explore(lambda **_: "x", a=range(8), b=range(8))
    with pytest.raises(ValueError, match=f"13 a x 5 b = 65 frames; at most {MOST_FRAMES}"):
        explore(lambda **_: pytest.fail("it ran"), a=range(13), b=range(5))


@pytest.mark.parametrize("arguments, message", [
    ({}, "no choices"), ({"n": []}, r"n=\[\]: a list of the values"), ({"n": 5}, "n=5: a list of the values"),
    ({"n": "abc"}, "n='abc': a list of the values"),
    ({"n": [1, 2], "start": {"n": 3}}, r"start n=3: one of \[1, 2\]"),
    ({"n": [1, 2], "start": {"m": 1}}, "start m=1: no such choice; there are n"),
])  # fmt: skip
def test_choices_that_do_not_fit_are_refused(batch, arguments, message):
    with pytest.raises(ValueError, match=message):
        explore(square, **arguments)


def test_a_function_that_returns_neither_is_refused(batch):
    with pytest.raises(ValueError, match="returned list; should be a matplotlib figure or a string of HTML"):
        explore(lambda n: [n], n=[1])
