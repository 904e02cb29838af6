"""The index: a row per notebook, a column per machine."""

import json
import re
from html import unescape

import pytest

from workbench.report import index


@pytest.fixture
def shelf(tmp_path):
    """reports/ with pages of two machines and one of a profile; the profile's last, so that it is not refreshed yet."""

    def put(machine: str, name: str, **facts) -> None:
        byline = [("device", f"a {machine}"), ("date", "2026-11-30 01:02 UTC"), ("commit", "abc1234")]
        facts = {"title": f"On {name}", "status": "ok", "failure": "", "byline": byline, "headline": ""} | facts
        path = tmp_path / "reports" / machine / f"{name}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'<script id="report-facts">{json.dumps(facts)}</script>')

    put("h100x1", "05_speed", headline="29 times", sentences=["**29** times dense.", "**Fast**."], question="How fast?")
    put("h200x2", "04_cards", status="error", failure="Failed in cell 2.")
    put("quick", "05_speed", headline="1.1 times")
    (tmp_path / "reports" / "quick" / "other.html").write_text("<p>no report")
    (tmp_path / "reports" / "quick" / "gone.html").symlink_to(tmp_path / "nowhere")
    (tmp_path / "reports" / "quick" / "folder.html").mkdir()
    return tmp_path / "reports"


def rows(path) -> dict[str, list[str]]:
    """First cell of a row -> the others, as text; the head's is empty."""
    html = path.read_text()
    cells = [re.findall(r"<t[hd]\b.*?</t[hd]>", row, re.S) for row in re.findall(r"<tr>.*?</tr>", html, re.S)]
    plain = [[unescape(" ".join(re.sub(r"<[^>]+>", " ", cell).split())) for cell in row] for row in cells]
    return {row[0]: row[1:] for row in plain}


def test_machines_of_named_hardware_share_one_table(shelf):
    index.refresh(shelf / "h100x1")
    found = rows(shelf / "index.html")
    assert found["Question"] == ["H100 a h100x1", "2 x H200 a h200x2"]
    speed, cards = found["On 05_speed How fast?"], found["On 04_cards"]
    assert speed == ["29 times Fast. 2026-11-30 · commit abc1234", "not run here"]
    assert cards[0] == "not run here" and "Not complete. Failed in cell 2." in cards[1]
    assert 'href="h100x1/05_speed.html"' in (shelf / "index.html").read_text()
    assert 'href="../h100x1/05_speed.html"' in (shelf / "h200x2" / "index.html").read_text()
    assert not (shelf / "quick" / "index.html").exists()


def test_what_was_made_here_stands_beside_the_machines_and_leaves_their_index_alone(shelf):
    index.refresh(shelf / "quick")
    assert rows(shelf / "quick" / "index.html")["Question"] == ["quick a quick", "H100 a h100x1", "2 x H200 a h200x2"]
    assert not (shelf / "index.html").exists() and len(rows(shelf / "quick" / "index.html")) == 3
