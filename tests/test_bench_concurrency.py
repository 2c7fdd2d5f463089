"""``penstock bench concurrency`` tries numbers of readers beside Penstock's own choice, on files and on stores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
import servers
from penstock.bench import concurrency, data, machine, result

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SHAPES = {f"layer.{n}": (256, 2048) for n in range(8)}


def bench(*arguments: Any, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "bench", "concurrency", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | (env or {}))
    assert done.returncode == 0, done.stderr
    return done


def test_files_are_read_by_each_number_of_readers(tmp_path: Path) -> None:
    if machine.filesystem(tmp_path) in {"tmpfs", "ramfs"}:
        pytest.skip("a file in memory has no other state")
    data.write_checkpoint(tmp_path / "model.safetensors", SHAPES)
    output = tmp_path / "report"
    few = ("--readers", "1,3", "--rounds", "1", "--device", "cpu", "--loaders", "penstock,safetensors")
    done = bench(tmp_path / "model.safetensors", *few, "--output", output)
    found = result.read(output / "result.json")
    used = {
        item["axes"]["loader"]: item["facts"]["stats"]["readers"]
        for item in found["samples"]
        if "loader" in item["axes"]
    }
    assert used.pop("penstock")
    assert used == {"penstock:readers=1": 1, "penstock:readers=3": 3}
    assert "cannot be told how many readers" in found["runs"][0]["skipped"]["safetensors"]
    assert "penstock:readers=3" in done.stdout
    assert "penstock, automatic" in (output / "readers-cold.svg").read_text()


@pytest.mark.stores
@pytest.mark.parametrize("store", [servers.s3, servers.moto], ids=["versitygw", "moto"])
def test_an_object_store_is_read_by_each_number_of_readers(tmp_path: Path, store: Any) -> None:
    (tmp_path / "gateway").mkdir()
    data.write_checkpoint(tmp_path / "model.safetensors", SHAPES)
    output = tmp_path / "report"
    with store(tmp_path / "gateway") as remote:
        remote.put("model/model.safetensors", (tmp_path / "model.safetensors").read_bytes())
        few = ("--readers", "1,4", "--rounds", "1", "--device", "cpu", "--loaders", "penstock")
        bench(f"{remote.root}/model/", *few, "--output", output, env=remote.environment)
    found = result.read(output / "result.json")
    assert {item["axes"]["network"] for item in found["samples"]} == {"s3"}
    assert [item["facts"]["bytes_ok"] for item in found["samples"]] == [True] * 3
    assert found["cases"]["checkpoint"]["tensors"] == len(SHAPES)
    assert (output / "readers-s3.png").exists()
    assert "sentinel-secret" not in (output / "result.json").read_text()


def test_rows_are_of_those_that_can_be_told() -> None:
    found, skipped = concurrency.rows(["penstock", "penstock-mmap", "runai", "safetensors"], [2, 8], {})
    assert found == ["penstock", "penstock:readers=2", "penstock:readers=8", "runai:readers=2", "runai:readers=8"]
    assert skipped.keys() == {"safetensors"}
