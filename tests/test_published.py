"""The pages with figures say what the results say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tomllib")
from benchmarks import published

from penstock.bench import result

ROOT = Path(__file__).resolve().parent.parent
PERFORMANCE, SWITCHING = "docs/performance.md", "docs/switching.md"
PAGE = ROOT / PERFORMANCE
FIGURES = published.published()["figure"]
# Of what is switched: rows whose figures are a test's (``tests/test_pool_trace.py``), or were noted by hand.
UNTIED = ("| memory wasted over", "| eviction of 24 GB")
# Numbers that no measurement gave: sizes of what was loaded, and versions.
GIVEN = {"15.19", "7.77", "8.21", "2.16", "0.24"}


def lines_of(page: str) -> list[str]:
    """The lines of a page whose figures are measurements."""
    text = (ROOT / page).read_text()
    return (text.partition("## Measured\n")[2] if page == SWITCHING else text).splitlines()


def page_of(figure: dict[str, Any]) -> str:
    return figure.get("page", PERFORMANCE)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: str(figure["id"]))
def test_a_figure_is_what_its_result_says(figure: dict[str, Any]) -> None:
    digits = len(figure["text"].partition(".")[2])
    # Half a digit either way: a median may lie just between two.
    assert abs(published.value(figure) - float(figure["text"])) <= 0.5001 * 10**-digits
    lines = [line for line in lines_of(page_of(figure)) if line.startswith(figure["line"])]
    assert len(lines) == 1
    assert figure["text"] in re.findall(r"\d+\.\d+", lines[0])


@pytest.mark.parametrize("page", [PERFORMANCE, SWITCHING])
def test_a_page_has_no_other_figures(page: str) -> None:
    assert any(page_of(figure) == page for figure in FIGURES)
    for line in lines_of(page):
        if page == SWITCHING and (not line.startswith("| ") or line.startswith(UNTIED)):
            continue
        known = {figure["text"] for figure in FIGURES if page_of(figure) == page and line.startswith(figure["line"])}
        assert set(re.findall(r"\d+\.\d+", line)) <= known | GIVEN, line


def test_charts_are_those_of_the_results() -> None:
    drawn = published.charts()
    assert {path.name: path.read_text() for path in published.CHARTS.glob("*.svg")} == drawn
    assert all(f"(charts/{name})" in PAGE.read_text() for name in drawn)


@pytest.mark.parametrize(("state", "cached"), [("cold", 0.5), ("warm", 0.5), ("half", 1.0), ("warm", None)])
def test_a_figure_without_cache_proof_is_refused(
    state: str, cached: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = result.empty("rivals")
    document["runs"] = [{"command": "c", "machine": {}, "versions": {}}]
    proof = None if cached is None else {"before": cached}
    axes = {"loader": "x", "state": state}
    document["samples"] = [{"run": 0, "round": 0, "axes": axes, "cache": proof, "figures": {"seconds": 1.0}}]
    result.write(tmp_path / "r.json", document)
    monkeypatch.setattr(published, "RESULTS", tmp_path)
    with pytest.raises(result.UnprovedError):
        published.value({"id": "x", "result": "r", "where": axes, "value": "seconds"})


@pytest.mark.parametrize("path", sorted(published.RESULTS.glob("*.json")), ids=lambda path: str(path.stem))
def test_every_kept_result_is_of_the_schema(path: Path) -> None:
    assert result.read(path)["samples"]


def test_results_that_the_docs_name_exist() -> None:
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "NOTEBOOK.md"]:
        for name in re.findall(r"`(?:benchmarks/results/)?(\d{4}-\d\d-\d\d-[\w-]+\.json)`", page.read_text()):
            assert (published.RESULTS / name).exists(), (page.name, name)
