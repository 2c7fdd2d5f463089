"""Manifests: what is put beside a checkpoint's files, by Python and by the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock

NAME = "penstock-manifest.blake3"
EMPTY = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
"""BLAKE3 of nothing, from its specification."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "unet").mkdir()
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "unet" / "big").write_bytes(b"\5" * (3 << 20))
    (tmp_path / "b\udcff").write_bytes(b"a name that is not UTF-8")
    (tmp_path / ".hidden").write_bytes(b"not covered")
    return tmp_path


def command(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_a_manifest_has_every_file_below_its_directory(directory: Path) -> None:
    made = penstock.manifest(directory)
    assert made.path == directory / NAME
    assert [(file.path, file.nbytes) for file in made.files] == [
        ("b\udcff", 24),
        ("empty", 0),
        ("unet/big", 3 << 20),
    ]
    assert made.files[1].blake3 == EMPTY
    assert made.nbytes == (3 << 20) + 24
    # Small: a value for each block, and names.
    assert made.path.stat().st_size < 500
    # The same files make the same manifest, in place of the first one.
    before = made.path.read_bytes()
    assert penstock.manifest(directory, threads=1).files == made.files
    assert made.path.read_bytes() == before
    assert sorted(path.name for path in directory.iterdir() if "penstock" in path.name) == [NAME]


def test_the_command_makes_one_and_lists_hashes(directory: Path) -> None:
    done = command("manifest", directory, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["path"] == str(directory / NAME)
    assert {file["path"]: file["blake3"] for file in told["files"]}["empty"] == EMPTY
    done = command("manifest", directory, "-v")
    assert EMPTY in done.stdout
    assert "3 files" in done.stdout


@pytest.mark.parametrize("url", ["s3://bucket/model/", "hf://org/name", "https://user:secret@host/model", "file:///m"])
def test_a_url_is_refused_since_stores_are_only_read(url: str) -> None:
    with pytest.raises(penstock.ConfigError, match="local directory") as raised:
        penstock.manifest(url)
    assert "secret" not in str(raised.value)
    assert command("manifest", url).returncode == 8


def test_what_no_manifest_can_be_made_of_is_an_error(directory: Path) -> None:
    with pytest.raises(penstock.ConfigError, match="of a directory"):
        penstock.manifest(directory / "empty")
    with pytest.raises(penstock.LocationNotFoundError):
        penstock.manifest(directory / "missing")
    with pytest.raises(penstock.ConfigError, match="threads"):
        penstock.manifest(directory, threads=0)
    (directory / "broken").symlink_to("nowhere")
    with pytest.raises(penstock.LocationNotFoundError, match="broken"):
        penstock.manifest(directory)
