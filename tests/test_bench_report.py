"""What is shown is what was proved: tables fit their terminal, charts have the page's colours, nothing is made up."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("matplotlib")
from penstock.bench import charts, report, result, summary
from penstock.cli.bench import show
from penstock.cli.output import Output


def document(**states: dict[str, dict[str, Any]]) -> result.Result:
    """A result of loaders by state: seconds, and the share that was cached before and that the device gave."""
    made = result.empty("compare")
    made["runs"] = [
        {"command": "penstock bench compare", "device": "cpu", "machine": {"cpu": "C<1>", "cores": 2}, "versions": {}}
    ]
    made["cases"] = {"llama": {"bytes": 10**9, "tensors": 3, "files": 1}}
    for state, rows in states.items():
        for loader, of in rows.items():
            for number, seconds in enumerate(of["seconds"]):
                cache = {"before": of["before"]} | ({"device": of["device"]} if "device" in of else {})
                item = {"run": 0, "round": number, "axes": {"case": "llama", "state": state, "loader": loader}}
                figures = {"seconds": seconds, "bytes": 10**9, "bytes_ok": True, "cpu_seconds": 0.5, "peak_rss": 10**9}
                made["samples"].append(item | {"cache": cache} | result.sample(figures))
    return result.validate(made)


COLD = {
    "penstock": {"seconds": [0.5, 0.51, 0.49, 0.5, 0.5, 0.5], "before": 0.0, "device": 1.0},
    "safetensors": {"seconds": [1.0, 1.02, 0.98, 1.0, 1.0, 1.0], "before": 0.0, "device": 1.0},
}


@pytest.mark.parametrize("proof", [{"before": 0.5, "device": 1.0}, {"before": 0.0, "device": 0.2}])
def test_a_measurement_without_proof_is_in_no_chart(tmp_path: Path, proof: dict[str, float]) -> None:
    found = document(cold=COLD | {"runai": {"seconds": [0.1]} | proof})
    (panel,) = summary.panels(found)
    assert [row.loader for row in panel.measured] == ["penstock", "safetensors"]
    report.write(tmp_path, found)
    drawn = (tmp_path / "cold.svg").read_text()
    assert "safetensors" in drawn
    assert "runai" not in drawn
    page = (tmp_path / "report.html").read_text()
    assert "no proof of the cache" in page
    assert "for want of that proof: 1." in page


def test_nothing_is_drawn_of_a_state_without_any_proof(tmp_path: Path) -> None:
    report.write(tmp_path, document(cold={"penstock": {"seconds": [0.1], "before": 0.9}}))
    assert not list(tmp_path.glob("cold.*"))
    assert "<svg" not in (tmp_path / "report.html").read_text()


def test_a_loader_that_passes_a_warm_cache_by_is_still_measured_warm() -> None:
    (panel,) = summary.panels(document(warm={"runai": {"seconds": [0.1], "before": 1.0, "device": 1.0}}))
    assert panel.measured[0].device == 1.0


def test_ratios_are_of_the_same_round_and_have_an_interval() -> None:
    (panel,) = summary.panels(document(cold=COLD))
    ours, theirs = panel.rows
    assert (ours.loader, ours.ratio) == ("penstock", 1.0)
    assert theirs.ratio == pytest.approx(2.0)
    (said,) = summary.headlines([panel])
    assert "safetensors takes 2.00 times as long [2.00, 2.00]" in said


class Checked(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [tag] if tag in {"link", "script", "img", "iframe"} else []
        self.fetched += [
            str(value) for name, value in attrs if name in {"src", "href"} and not str(value).startswith("#")
        ]


def test_the_page_needs_nothing_else_and_follows_light_and_dark(tmp_path: Path) -> None:
    report.write(tmp_path, document(cold=COLD))
    page = (tmp_path / "report.html").read_text()
    checked = Checked()
    checked.feed(page)
    assert checked.fetched == []
    assert "url(http" not in page
    assert "prefers-color-scheme: dark" in page
    assert "C&lt;1&gt;" in page
    # Colours of charts are the page's.
    pictures = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert "var(--ours)" in pictures
    assert not [light for light, _ in charts.COLOURS.values() if light in pictures]
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) - len(set(ids)) <= len([name for name in ids if re.fullmatch(r"[a-z]+_\d+", name)])


def test_every_figure_of_the_table_has_a_heading() -> None:
    found = document(cold=COLD)
    page = report.page(found, summary.panels(found), [])
    heads = re.findall(r"<th>(.*?)</th>", page)
    (row,) = re.findall(r"<tr class=ours>(.*?)</tr>", page)
    told = dict(zip(heads, re.findall(r"<td.*?>(.*?)</td>", row), strict=True))
    assert (told["seconds"], told["CPU s"], told["from disk"], told["bytes"]) == ("0.500", "0.50", "100%", "ok")


def test_charts_are_files_too(tmp_path: Path) -> None:
    report.write(tmp_path, document(cold=COLD))
    assert (tmp_path / "cold.png").read_bytes().startswith(b"\x89PNG")
    assert charts.THEME in (tmp_path / "cold.svg").read_text()
    rows = list(csv.DictReader(io.StringIO((tmp_path / "samples.csv").read_text())))
    assert len(rows) == 12
    assert {row["proved"] for row in rows} == {"True"}
    assert result.read(tmp_path / "result.json")["experiment"] == "compare"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    show(Output(), document(cold=COLD, warm={"fastsafetensors-buffered": COLD["penstock"] | {"before": 1.0}}))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    assert any("2.00×" in line for line in lines)


def test_a_busy_machine_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(cold=COLD)
    show(Output(), found)
    assert "busy" not in capsys.readouterr().out
    found["runs"][0]["machine"]["load_average"] = 9.5
    show(Output(), found)
    assert "its load average was 9.5, for 2 cores" in capsys.readouterr().out
    assert "load average was 9.5" in report.page(found, summary.panels(found), [])


def test_wrong_bytes_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(cold=COLD)
    found["samples"][0]["facts"]["bytes_ok"] = False
    show(Output(), found)
    assert "WRONG" in capsys.readouterr().out
    assert 'class="bad"' in report.page(found, summary.panels(found), [])
