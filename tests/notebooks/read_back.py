"""Whether the numbers of a page's "In short" can be read in a table or in the data of a figure of the same page."""

from __future__ import annotations

import csv
import io
import json
import re
from html import unescape

SIZES = {"K": 2**10, "KiB": 2**10, "M": 2**20, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
NUMBER = re.compile(r"(?<![\w.])(-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)(?:\s?(%|[KM]\b|[KMGT]iB\b))?")


def numbers(text: str) -> list[tuple[str, float, str]]:
    """(as written, value, unit) of the numbers in a text."""
    found = ((number.rstrip(","), unit) for number, unit in NUMBER.findall(text))
    return [(number, float(number.replace(",", "")), unit) for number, unit in found]


def shown(html: str) -> list[float]:
    """The values that a reader finds on a page: of every cell of a table, of captions, and of the data of every figure,
    and how many rows these have."""
    parts = re.findall(r"<(t[hd]|summary|figcaption)\b[^>]*>(.*?)</\1>", html, re.S)
    cells = [unescape(re.sub("<[^>]+>", " ", text)) for _, text in parts]
    data = re.findall(r'<script class="csv" type="application/json">(.*?)</script>', html, re.S)
    for rows in (list(csv.reader(io.StringIO(json.loads(text)))) for text in data):
        cells += [cell for row in rows for cell in row] + [str(len(rows) - 1)]
    return [value * SIZES.get(unit, 1) / (100 if unit == "%" else 1) for x in cells for _, value, unit in numbers(x)]


def unread(html: str) -> list[str]:
    """The numbers of the page's sentences that are nowhere on it, as written. Whole ones to 16 are taken as words."""
    facts = json.loads(re.findall(r'id="report-facts"[^>]*>(.*?)</script>', html, re.S)[-1])
    values = shown(html)
    lost = []
    for sentence in [*facts["sentences"], facts["headline"]]:
        for written, value, unit in numbers(re.sub(r"[*`$]", "", sentence)):
            room = 0.5001 * 10.0 ** -len(written.partition(".")[2]) if "e" not in written else 0.06 * abs(value)
            scales = [100, 1] if unit == "%" else [1 / SIZES.get(unit, 1), 1]  # the heading may have the unit
            seen = values + [1 / x for x in values if x] * ("times as long" in sentence)  # a speed of 0.5
            close = any(abs(x * scale - value) <= room for x in seen for scale in scales)
            if not close and (value not in range(17) or "." in written or unit):
                lost.append(f"{written}{unit} in: {sentence}")
    return lost
