"""``penstock bench compare`` measures what is installed, plug-ins of others too, and no loader's failure ends it."""

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
from penstock.bench import data, machine, result

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PLUGIN = """
from penstock.bench.loaders import Loader, Use


def prepare(use: Use):
    from safetensors.torch import load_file

    def load(files):
        tensors = {}
        for file in files:
            tensors |= load_file(file)
            use.arrived()
        return tensors

    return load


def failing(use: Use):
    def load(files):
        raise RuntimeError("made to fail")

    return load


def dying(use: Use):
    import os

    return lambda files: os._exit(3)


def wrong(use: Use):
    right = prepare(use)
    return lambda files: {name: tensor.clone().zero_() for name, tensor in right(files).items()}


LOADERS = {
    "theirs": Loader("", prepare),
    "theirs-failing": Loader("", failing),
    "theirs-dying": Loader("", dying),
    "theirs-wrong": Loader("", wrong),
}
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    if machine.filesystem(tmp_path) in {"tmpfs", "ramfs"}:
        pytest.skip("a file in memory has no other state")
    directory = tmp_path / "model"
    directory.mkdir()
    for number in range(2):
        shapes = {f"layer.{number}.{n}": (256, 512) for n in range(8)}
        data.write_checkpoint(directory / f"model-{number}.safetensors", shapes, seed=number)
    return directory


@pytest.fixture
def plugins(tmp_path: Path) -> dict[str, str]:
    """The environment in which a distribution of plug-ins is installed, one of which is broken."""
    site = tmp_path / "site"
    about = site / "penstock_theirs-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "penstock_theirs.py").write_text(PLUGIN)
    (site / "penstock_broken.py").write_text("raise ImportError('built for another machine')")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-theirs\nVersion: 1.0\n")
    entries = "theirs = penstock_theirs\nbroken = penstock_broken\n"
    (about / "entry_points.txt").write_text(f"[penstock.bench.loaders]\n{entries}")
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))}


def bench(*arguments: Any, env: dict[str, str] | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "bench", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == code, done.stderr
    return done


def test_installed_loaders_and_plugins_are_measured_and_failures_are_told(
    files: Path, plugins: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "report"
    names = "penstock,safetensors,theirs,theirs-failing,theirs-dying,theirs-wrong,broken,instanttensor"
    few = ("--states", "cold,tmpfs", "--device", "cpu", "--loaders", names, "--output", output)
    before = {path: path.stat().st_mtime_ns for path in files.iterdir()}
    done = bench("compare", files, *few, "--rounds", "2", env=plugins)
    found = result.read(output / "result.json")

    loads = [item for item in found["samples"] if "loader" in item["axes"]]
    good = {(item["axes"]["state"], item["axes"]["loader"]) for item in loads if "figures" in item}
    assert {name for state, name in good if state == "cold"} == {"penstock", "safetensors", "theirs", "theirs-wrong"}
    assert ("tmpfs", "theirs") in good
    for item in loads:
        if "figures" in item:
            result.prove(item)
            assert 0 < item["figures"]["first_seconds"] <= item["figures"]["seconds"] + 1e-3
    errors = {item["axes"]["loader"]: item["error"] for item in loads if "error" in item}
    assert errors.keys() == {"theirs-failing", "theirs-dying"}
    assert "made to fail" in errors["theirs-failing"]
    skipped = found["runs"][0]["skipped"]
    assert "built for another machine" in skipped["broken"]
    assert "not installed" in skipped["instanttensor"] or "GPUs only" in skipped["instanttensor"]
    checked = {of["axes"]["loader"]: of["facts"]["bytes_ok"] for of in loads if "bytes_ok" in of.get("facts", {})}
    assert checked.pop("theirs-wrong") is False
    assert set(checked.values()) == {True}
    assert "theirs-failing failed: RuntimeError: made to fail" in done.stdout
    assert "WRONG" in done.stdout
    assert {path.name for path in output.iterdir()} == {
        "report.html", "result.json", "samples.csv",
        *(f"{state}.{end}" for state in ("cold", "tmpfs") for end in ("svg", "png")),
    }  # fmt: skip
    assert {path: path.stat().st_mtime_ns for path in files.iterdir()} == before, "the checkpoint is only read"
    assert str(tmp_path) not in (output / "report.html").read_text()

    # What is there is not measured again; a third round is.
    again = bench("compare", files, *few, "--rounds", "3", "--resume", env=plugins)
    assert "round 3" in again.stderr
    assert "round 1 checkpoint cold penstock:" not in again.stderr
    more = result.read(output / "result.json")
    rounds = [item["round"] for item in more["samples"] if item["axes"].get("loader") == "penstock"]
    assert sorted(rounds) == [0, 0, 1, 1, 2, 2]


def test_without_a_path_a_checkpoint_is_made_and_removed(tmp_path: Path) -> None:
    if machine.filesystem(tmp_path) in {"tmpfs", "ramfs"}:
        pytest.skip("a file in memory has no other state")
    few = ("--states", "warm", "--device", "cpu", "--loaders", "penstock", "--rounds", "1", "--gb", "0.01")
    done = bench("compare", *few, "--output", tmp_path / "report", "--json")
    told = json.loads(done.stdout)
    assert told["schema"] == result.SCHEMA
    assert 0.005e9 < told["cases"]["llama"]["bytes"] < 0.02e9
    assert [path.name for path in (tmp_path / "report").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--states", "tepid"], "'tepid' is no state"),
        (["--loaders", "absent"], "no loader absent"),
        (["nowhere"], "there is no .safetensors file"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_a_remedy(arguments: list[str], message: str) -> None:
    done = bench("compare", *arguments, "--device", "cpu", code=8)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
