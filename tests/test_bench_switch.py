"""``penstock bench switch`` measures every part it can here, says what it cannot, and proves the cache's state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("safetensors")
from penstock.bench import charts, machine, result, summary
from penstock.bench.compare import Wanted
from penstock.bench.switch import bench, models
from penstock.errors import ConfigError


def run(tmp_path: Path, *options: str) -> dict[str, Any]:
    if machine.filesystem(tmp_path) in {"tmpfs", "ramfs"}:
        pytest.skip("a file in memory has no other state")
    command = [sys.executable, "-m", "penstock", "bench", "switch", "--device", "cpu", "--rounds", "1", *options]
    command += ["--output", "report"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    # Nothing but the report is left behind.
    assert os.listdir(tmp_path) == ["report"]
    return result.validate(json.loads((tmp_path / "report" / "result.json").read_text()))


def panels(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, summary.Row]]:
    return {(of.case, of.state): {row.loader: row for row in of.rows} for of in summary.panels(document)}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_part_is_measured_with_proof_and_the_right_bytes(tmp_path: Path) -> None:
    document = run(tmp_path, "--model", "plain", "--gb", "0.02", "--repeats", "1")
    found = panels(document)
    for (part, state), rows in found.items():
        wanted = {row for row in bench.PARTS[part][state] if "from_pretrained" not in row}
        assert rows.keys() == wanted - {"to", "accelerate", "components-manager"}, (part, state)
        for row in rows.values():
            assert row.error is None, (part, state, row)
            assert row.unproved == 0
            assert row.bytes_checked == ("not checked" if part == "pool" else "ok"), (part, state, row.loader)
    assert {part for part, _ in found} == set(bench.PARTS) - {"copy"}
    skipped = document["runs"][0]["skipped"]
    assert skipped["copies to the GPU"] == "there is no GPU"
    assert skipped["to"] == "on the CPU it moves nothing"
    cold = [item for item in document["samples"] if item["axes"].get("state") == "cold" and "loader" in item["axes"]]
    assert cold
    for item in cold:
        assert item["cache"]["before"] <= 0.01, item
        assert item["cache"].get("device", 1.0) >= 0.9, item
    # A worker that keeps the model reads nothing; one that was restarted does.
    requests = {state: found["request", state]["penstock"] for state in ("cold", "warm", "host")}
    assert requests["host"].stages["read"] == 0
    assert requests["cold"].stages["read"] > 0
    for row in requests.values():
        assert sum(row.stages.values()) == pytest.approx(row.median, rel=0.02)
    page = (tmp_path / "report" / "report.html").read_text()
    assert "One request, by stages, cold" in page
    assert "seconds by stage" in page


@pytest.mark.slow
@pytest.mark.libraries
@pytest.mark.timeout(400)
def test_flux_is_loaded_by_diffusers_beside_the_pool(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    document = run(tmp_path, "--model", "flux", "--gb", "0.02", "--parts", "request,turns", "--repeats", "1")
    found = panels(document)
    rows = found["request", "warm"]
    assert rows.keys() == {"penstock", "torch", "from_pretrained", "from_pretrained, parallel"}
    for of in found.values():
        assert all(row.bytes_checked == "ok" for row in of.values()), of
    moved = [item for item in document["samples"] if item["axes"]["state"] == "room for one"]
    assert all(0 < item["figures"]["copied_last"] <= item["figures"]["bytes"] for item in moved)


@pytest.mark.parametrize("kind", models.KINDS)
@pytest.mark.parametrize("gb", [0.1, 1.0, 5.0])
def test_a_model_is_about_as_large_as_was_asked_for(kind: str, gb: float) -> None:
    for package in models.KINDS[kind]:
        pytest.importorskip(package)
    import torch

    scale, narrow = models.sizes_for(kind, gb)
    with torch.device("meta"):
        made = [build().to(torch.bfloat16) for build in models.builders(kind, scale, narrow).values()]
    assert gb / 3 < sum(map(models.nbytes, made)) / 1e9 < gb * 2


def test_what_is_no_part_or_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="'speed' is no part"):
        bench.switch(Wanted(), bench.Asked(parts=("speed",)), "c")
    with pytest.raises(ConfigError, match="'gpt' is no model"):
        bench.switch(Wanted(), bench.Asked(model="gpt"), "c")


def test_stages_are_drawn_one_after_the_other() -> None:
    rows = [
        summary.Row("penstock", seconds=[3.0], ratios=[1.0], stages={"read": 1.0, "switch": 2.0}),
        summary.Row("other", seconds=[6.0], ratios=[2.0], stages={"read": 4.0, "compute": 2.0}),
    ]
    panel = summary.Panel("request", "cold", rows, None)
    assert panel.title == "One request, by stages, cold: nothing in the page cache"
    assert panel.stages == ["read", "switch", "compute"]
    bars = charts.stacked(panel).axes[0].patches
    assert sorted((bar.get_x(), bar.get_width()) for bar in bars if bar.get_width()) == [(0, 1), (0, 4), (1, 2), (4, 2)]
