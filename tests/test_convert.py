"""Weights that torch pickled, converted to safetensors: no code of theirs runs."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from conftest import as_bytes


def weights() -> dict[str, torch.Tensor]:
    shared = torch.randn(20, 8)
    return {
        "embed.weight": shared, "lm_head.weight": shared, "view": shared[3:9], "half": torch.randn(3).half(),
        "ids": torch.arange(7), "columns": torch.randn(4, 6).T,
    }  # fmt: skip


def same(place: Path, expected: dict[str, torch.Tensor]) -> None:
    loaded = penstock.load_file(place)
    assert loaded.keys() == expected.keys()
    assert all(as_bytes(loaded[name]) == as_bytes(tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("nested", [None, "state_dict"])
def test_a_file_is_converted_and_ties_are_saved_once(tmp_path: Path, archive: bool, nested: str | None) -> None:
    given = weights()
    torch.save(
        {nested: given, "epoch": 3} if nested else given, tmp_path / "x.pt", _use_new_zipfile_serialization=archive
    )
    saved = penstock.convert(tmp_path / "x.pt", tmp_path / "m", manifest=True)
    assert [file.path for file in saved.files] == ["model.safetensors", "penstock-manifest.blake3"]
    del given["lm_head.weight"]
    same(tmp_path / "m", given)
    assert penstock.open(tmp_path / "m").metadata() == {"format": "pt", "lm_head.weight": "embed.weight"}


def test_shards_are_found_by_their_index_and_other_files_of_a_directory_stay(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    given = {f"t{i}": torch.randn(30) for i in range(4)}
    for number in range(2):
        part = {name: given[name] for name in list(given)[2 * number : 2 * number + 2]}
        torch.save(part, directory / f"pytorch_model-{number}.bin")
    names = {name: f"pytorch_model-{i // 2}.bin" for i, name in enumerate(given)}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    (directory / "config.json").write_text("{}")
    (directory / "training_args.bin").write_bytes(b"no weights")
    penstock.convert(directory, directory, overwrite=True)
    same(directory / "model.safetensors", given)
    assert (directory / "config.json").exists()
    (directory / "pytorch_model-1.bin").unlink()
    with pytest.raises(penstock.LocationNotFoundError, match="pytorch_model-1"):
        penstock.convert(directory, tmp_path / "again")


class Runs:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("it-ran"),))


def test_code_in_a_pickle_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(1), "b": Runs()}, "x.bin")
    Path("y.bin").write_bytes(pickle.dumps(Runs()))
    for name in ("x.bin", "y.bin"):
        with pytest.raises(penstock.FormatError, match="weights_only"):
            penstock.convert(name, "m")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "y.bin"]


@pytest.mark.parametrize(
    ("held", "error"),
    [(torch.ones(3), penstock.FormatError), ({"a": 1}, penstock.ConfigError), ([torch.ones(1)], penstock.FormatError)],
)
def test_what_is_no_mapping_of_tensors_is_refused(tmp_path: Path, held: Any, error: type[Exception]) -> None:
    torch.save(held, tmp_path / "x.pth")
    with pytest.raises(error):
        penstock.convert(tmp_path / "x.pth", tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(penstock.LocationNotFoundError):
        penstock.convert(tmp_path / "missing.bin", tmp_path / "m")
    with pytest.raises(penstock.LocationNotFoundError, match="no file that ends in"):
        penstock.convert(tmp_path, tmp_path / "m")
    (tmp_path / "broken.bin").write_bytes(b"PK\3\4 no archive")
    with pytest.raises(penstock.FormatError):
        penstock.convert(tmp_path / "broken.bin", tmp_path / "m")


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1000)}, tmp_path / "x.bin")
    command = [sys.executable, "-m", "penstock", "convert", str(tmp_path / "x.bin"), str(tmp_path / "m")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1 file" in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 11
    assert "overwrite" in again.stderr
