"""The command, run as people run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Raw, raw_bytes, write_header, write_raw

pytest.importorskip("typer")
pytest.importorskip("rich")


def penstock(*arguments: object, columns: int = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli", *map(str, arguments)]
    environment = os.environ | {"COLUMNS": str(columns), "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_inspect_shows_names_dtypes_shapes_and_totals(mixed) -> None:
    path, _ = mixed
    shown = penstock("inspect", path)
    assert shown.returncode == 0, shown.stderr
    assert "layer.0.BF16" in shown.stdout
    assert "63×257" in shown.stdout
    assert "209 tensors" in shown.stdout
    assert "and 159 more" in shown.stdout
    assert "format: pt" in shown.stdout


def test_inspect_as_json_is_the_whole_catalogue(mixed) -> None:
    path, tensors = mixed
    told = json.loads(penstock("inspect", path, "--json").stdout)
    assert {t["name"]: t["shape"] for t in told["tensors"]} == {name: list(raw.shape) for name, raw in tensors.items()}
    assert told["total"]["nbytes"] == sum(len(raw.data) for raw in tensors.values())
    assert told["objects"] == [{"location": str(path), "bytes": path.stat().st_size}]
    assert told["metadata"] == {"format": "pt"}


def test_inspect_filters_and_sorts(mixed) -> None:
    path, _ = mixed
    told = json.loads(penstock("inspect", path, "--json", "--filter", "layer.*", "--sort", "size").stdout)
    sizes = [t["nbytes"] for t in told["tensors"]]
    assert len(sizes) == 6
    assert sizes == sorted(sizes, reverse=True)


def test_inspect_names_the_file_of_every_tensor_where_there_are_several(tmp_path: Path) -> None:
    for shard in "ab":
        write_raw(tmp_path / f"{shard}.safetensors", {shard: Raw("U8", (3,), b"xyz")})
    shown = penstock("inspect", tmp_path, columns=80)
    assert "a.safetensors" in shown.stdout
    assert "in 2 files" in shown.stdout


def test_a_reader_that_has_seen_enough_is_no_error(mixed) -> None:
    path, _ = mixed
    command = f"{sys.executable} -m penstock.cli inspect {path} --limit 0 | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("options", [[], ["--mmap"], ["--readers", "2", "--block-bytes", "8192", "--cache", "bypass"]])
def test_load_says_what_it_did(mixed, options: list[str]) -> None:
    pytest.importorskip("torch")
    path, tensors = mixed
    told = json.loads(penstock("load", path, "--json", *options).stdout)
    assert told["tensors"] == len(tensors)
    assert told["bytes"] == sum(len(raw.data) for raw in tensors.values())
    if "--readers" in options:
        assert (told["stats"]["readers"], told["stats"]["block_bytes"]) == (2, 8192)
        assert told["stats"]["direct_bytes"] + told["stats"]["buffered_bytes"] > 0


def test_load_prints_one_line_and_the_figures_when_asked(mixed) -> None:
    pytest.importorskip("numpy")
    path, _ = mixed
    shown = penstock("load", path, "--stats", "--framework", "dlpack")
    assert shown.returncode == 0, shown.stderr
    assert "209 tensors" in shown.stdout.splitlines()[0]
    assert "GB/s" in shown.stdout.splitlines()[0]
    assert "reading seconds" in shown.stdout
    assert shown.stderr == ""


def test_failures_are_one_block_and_an_exit_code(tmp_path: Path) -> None:
    bad = write_header(tmp_path / "bad.safetensors", {"w": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 1]}}, b"x")
    (tmp_path / "empty").mkdir()
    good = write_raw(tmp_path / "good.safetensors", {"w": Raw("F32", (4,), raw_bytes("F32", (4,)))})
    for arguments, code, words in [
        (["inspect", tmp_path / "none"], 3, "none"),
        (["inspect", tmp_path / "empty"], 3, "no .safetensors file"),
        (["inspect", bad], 4, "Q7"),
        (["inspect", "/dev/null"], 5, "a device"),
        (["load", good, "--device", "cuda:99"], 7, "cuda:99"),
        (["load", good, "--readers", "0"], 8, "readers"),
        (["load"], 2, "paths"),
    ]:
        done = penstock(*arguments)
        assert (done.returncode, words in done.stderr) == (code, True), (arguments, done.stderr)
        assert "Traceback" not in done.stderr


def test_failures_are_json_where_json_was_asked_for(tmp_path: Path) -> None:
    done = penstock("inspect", tmp_path / "none", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["type"]) == (3, "ObjectNotFoundError")
    assert error["object"] == str(tmp_path / "none")
    assert error["remedy"]


def test_the_version_is_the_packages() -> None:
    import penstock as package

    assert penstock("--version").stdout == f"penstock {package.__version__}\n"
