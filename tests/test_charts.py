"""The charts of docs/performance.md can be read: text lies within the picture, alone, and large enough at 800 pixels.

Chromium draws each chart and says where its text came to lie: see docs/testing.md for how to install it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGE = DOCS / "performance.md"
CHARTS = sorted(set(re.findall(r"\((charts/[\w-]+\.svg)\)", PAGE.read_text())))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTH = 800
SMALLEST = 11  # pixels of a font, of which smaller ones tire

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: see docs/testing.md"),
]

# Reports the boxes of the chart, its texts and its bars, in pixels of the window.
LOOK = """
<style>body { margin: 0 } svg { width: 100vw; height: auto; display: block }</style>
%s
<pre id="out"></pre>
<script>
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] };
const svg = document.querySelector("svg");
const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
const texts = [...svg.querySelectorAll("text")].map(e => ({
  text: e.textContent, box: box(e), size: parseFloat(getComputedStyle(e).fontSize) * scale }));
const bars = [...svg.querySelectorAll("rect")].slice(1).map(box);
document.getElementById("out").textContent = JSON.stringify({ width: innerWidth, svg: box(svg), texts, bars });
</script>
"""


def chromium(page: Path, *arguments: str) -> str:
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={page.parent / 'profile'}", f"--window-size={WIDTH},600", *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout


def overlap(one: list[float], other: list[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def problems(seen: dict[str, Any]) -> list[str]:
    """What a reader would stumble over."""
    left, top, right, bottom = seen["svg"]
    found = []
    for item in seen["texts"]:
        of = item["box"]
        if of[0] < left or of[1] < top or of[2] > right or of[3] > bottom:
            found.append(f"{item['text']!r} leaves the chart")
        if item["size"] < SMALLEST:
            found.append(f"{item['text']!r} is {item['size']:.1f} px high")
        found += [f"{item['text']!r} lies on a bar" for bar in seen["bars"] if overlap(of, bar)]
    pairs = combinations(seen["texts"], 2)
    found += [f"{a['text']!r} and {b['text']!r} overlap" for a, b in pairs if overlap(a["box"], b["box"])]
    return found


def look(svg: str, directory: Path) -> dict[str, Any]:
    page = directory / "page.html"
    page.write_text(f"<!doctype html><meta charset=utf-8>{LOOK % svg}")
    dumped = chromium(page, "--dump-dom")
    (out,) = re.findall(r'<pre id="out">(.*?)</pre>', dumped, re.DOTALL)
    seen: dict[str, Any] = json.loads(out)
    return seen


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_can_be_read(name: str, tmp_path: Path) -> None:
    seen = look((ROOT / "docs" / name).read_text(), tmp_path)
    assert seen["width"] == WIDTH
    assert len(seen["texts"]) >= 5
    assert problems(seen) == []


def test_the_picture_of_the_data_path_can_be_read(tmp_path: Path) -> None:
    seen = look((ROOT / "docs" / "pictures" / "data-path.svg").read_text(), tmp_path)
    assert problems(seen | {"bars": []}) == [], "its boxes hold text, unlike bars"


def test_a_chart_that_cannot_be_read_is_found(tmp_path: Path) -> None:
    bad = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 100" font-size="14"><rect width="800" height="100"/>'
        '<text x="780" y="20">leaves it</text><text x="10" y="50">one</text><text x="12" y="52">two</text>'
        '<text x="10" y="90" font-size="6">small</text><rect x="300" y="30" width="50" height="30"/>'
        '<text x="310" y="50">covered</text></svg>'
    )
    found = problems(look(bad, tmp_path))
    assert [line.split("'")[1] for line in found] == ["leaves it", "small", "covered", "one"]


@pytest.mark.parametrize("name", [*CHARTS, "pictures/data-path.svg"])
def test_a_picture_has_the_colours_of_the_dark_mode_too(name: str) -> None:
    style, inner = re.findall(
        r"<style>(.*?)@media \(prefers-color-scheme:dark\){(.*)}</style>", (DOCS / name).read_text()
    )[0]
    colored = {
        kind: set(re.findall(r"([.\w]+){[^}]*(?:fill|stroke):#", css))
        for kind, css in (("light", style), ("dark", inner))
    }
    assert colored["light"] == colored["dark"] != set()
    drawn = (DOCS / name).read_text().partition("</style>")[2]
    assert not re.search(r'(fill|stroke)="#', drawn), "a colour that knows no mode"
