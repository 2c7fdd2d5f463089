"""The performance page says what the results say, and links of the docs lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tomllib")
from benchmarks import published

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
FIGURES = published.published()["figure"]
# Numbers that no measurement gave: sizes of what was loaded, and versions.
GIVEN = {"15.19", "7.77", "8.21", "2.16", "0.24"}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: str(figure["id"]))
def test_a_figure_is_what_its_result_says(figure: dict[str, Any]) -> None:
    digits = len(figure["text"].partition(".")[2])
    # Half a digit either way: a median may lie just between two.
    assert abs(published.value(figure) - float(figure["text"])) <= 0.5001 * 10**-digits
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith(figure["line"])]
    assert len(lines) == 1
    assert figure["text"] in re.findall(r"\d+\.\d+", lines[0])


def test_the_page_has_no_other_figures() -> None:
    for line in PAGE.read_text().splitlines():
        known = {figure["text"] for figure in FIGURES if line.startswith(figure["line"])}
        assert set(re.findall(r"\d+\.\d+", line)) <= known | GIVEN, line


def test_charts_are_those_of_the_results() -> None:
    drawn = published.charts()
    assert {path.name: path.read_text() for path in published.CHARTS.glob("*.svg")} == drawn
    assert all(f"(charts/{name})" in PAGE.read_text() for name in drawn)


@pytest.mark.parametrize(("state", "cached"), [("cold", 0.5), ("warm", 0.5), ("half", 1.0), ("warm", None)])
def test_a_figure_without_cache_proof_is_refused(
    state: str, cached: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = {"loader": "x", "state": state, "seconds": 1.0, "cached": cached}
    (tmp_path / "r.json").write_text(json.dumps({"rows": [item], "measurements": [item]}))
    monkeypatch.setattr(published, "RESULTS", tmp_path)
    where = {"loader": "x", "state": state}
    with pytest.raises(published.UnprovedError):
        published.value({"id": "x", "result": "r", "list": "rows", "where": where, "value": "seconds"})


def _anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = [re.sub(r"[^\w\- ]", "", line.lower()) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {heading.replace(" ", "-") for heading in headings}


def test_relative_links_of_the_docs_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "NOTEBOOK.md"]
    for page in pages:
        for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
            there = (page.parent / target) if target else page
            assert there.exists(), (page.name, target)
            assert not anchor or there.suffix != ".md" or anchor in _anchors(there), (page.name, target, anchor)


def test_results_that_the_docs_name_exist() -> None:
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "NOTEBOOK.md"]:
        for name in re.findall(r"`(?:benchmarks/results/)?(\d{4}-\d\d-\d\d-[\w-]+\.json)`", page.read_text()):
            assert (published.RESULTS / name).exists(), (page.name, name)
