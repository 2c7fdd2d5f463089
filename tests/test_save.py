"""Saving: files that safetensors would have written, complete or absent, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import penstock
from conftest import as_bytes

MANIFEST = "penstock-manifest.blake3"

pytestmark = pytest.mark.usefixtures("nothing_remains")


def dtypes() -> dict[str, torch.Tensor]:
    """A tensor of every dtype that torch and safetensors have in common."""
    from penstock.frameworks.torch import DTYPES

    made = {}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 2 if name == "BOOL" else 256, (6, 64), dtype=torch.uint8)
        made[f"of.{name}"] = raw.view(dtype)
    return made


def model() -> torch.nn.Module:
    module = torch.nn.Module()
    module.embed = torch.nn.Embedding(50, 16)
    module.head = torch.nn.Linear(16, 50)
    module.head.weight = module.embed.weight
    module.norm = torch.nn.BatchNorm1d(16)
    return module


def same(saved: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    assert saved.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert saved[name].dtype == tensor.dtype, name
        assert saved[name].shape == tensor.shape, name
        assert as_bytes(saved[name]) == as_bytes(tensor), name


def beside(place: Path) -> list[str]:
    return sorted(path.name for path in place.parent.iterdir() if path != place)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"ü": 'a "b" \n \x01 ☃'}])
def test_a_file_is_byte_for_byte_what_safetensors_writes(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    tensors = dtypes() | {
        "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 7), 'a "quoted" ☃\t': torch.arange(5), "": torch.ones(3),
    }  # fmt: skip
    penstock.save(tensors, tmp_path / "ours.safetensors", metadata=metadata or {})
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors", metadata)
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["ours.safetensors", "theirs.safetensors"]


def test_arrays_of_numpy_are_saved_as_safetensors_does(tmp_path: Path) -> None:
    arrays = {
        name: np.arange(12).astype(name).reshape(3, 4)
        for name in ("float64", "float32", "float16", "int64", "int8", "uint16", "bool", "complex64")
    } | {"zero": np.array(1.5), "big": np.arange(4, dtype=">f4"), "columns": np.arange(6.0).reshape(2, 3).T}
    penstock.save(arrays, tmp_path / "x.safetensors")
    loaded = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].dtype == array.dtype.newbyteorder("="), name
    assert penstock.open(tmp_path / "x.safetensors").metadata() == {"format": "np"}


def test_large_tensors_are_saved_past_the_page_cache_and_their_tails_are_right(tmp_path: Path) -> None:
    # More than the smallest file that is written so; parts that end within tensors, and pages that end within parts.
    tensors = {f"t{i}": torch.randint(0, 256, (7 * 2**20 + i * 1001,), dtype=torch.uint8) for i in range(5)}
    saved = penstock.save(tensors, tmp_path / "m", manifest=True)
    same(safetensors.torch.load_file(tmp_path / "m" / "model.safetensors"), tensors)
    penstock.manifest(shutil.copytree(tmp_path / "m", tmp_path / "again"))
    assert (tmp_path / "again" / MANIFEST).read_bytes() == (tmp_path / "m" / MANIFEST).read_bytes()
    assert saved.nbytes == sum(path.stat().st_size for path in (tmp_path / "m").iterdir())


def test_what_does_not_lie_in_memory_as_it_is_written_is_made_right(tmp_path: Path) -> None:
    base = torch.randn(64, 48)
    tensors = {
        "transposed": base.T, "rows": base[3:9], "columns": base[:, ::5], "expanded": base[0].expand(4, 48),
        "conj": torch.randn(5, 6, dtype=torch.complex64).conj(), "base": base, "again": base,
        "neg": torch.randn(4, dtype=torch.complex64).conj().imag, "grad": torch.randn(3, requires_grad=True),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }  # fmt: skip
    penstock.save(tensors, tmp_path / "x.safetensors")
    loaded = penstock.load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


def test_a_module_is_saved_as_save_model_does_and_loads_back(tmp_path: Path) -> None:
    module = model()
    penstock.save(module, tmp_path / "ours.safetensors", metadata={})
    safetensors.torch.save_model(module, str(tmp_path / "theirs.safetensors"))
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert penstock.open(tmp_path / "ours.safetensors").metadata() == {"head.weight": "embed.weight"}
    fresh = model()
    penstock.load_model(fresh, tmp_path / "ours.safetensors")
    same(dict(fresh.state_dict()), dict(module.state_dict()))
    assert fresh.head.weight is fresh.embed.weight


def test_shards_are_filled_in_order_and_the_index_has_every_tensor(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.randn(250) for i in range(10)} | {"huge": torch.randn(2000)}
    saved = penstock.save(tensors, tmp_path / "m", shard_bytes="3kB", manifest=True)
    names = [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    assert [file.path for file in saved.files] == [*names, "model.safetensors.index.json", MANIFEST]
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (2500 + 2000)
    assert index["weight_map"]["layer.3"] == names[1]
    assert index["weight_map"]["huge"] == names[4]
    checkpoint = penstock.open(tmp_path / "m", options=penstock.LoadOptions(verify="require"))
    same(checkpoint.load(), tensors)
    for name in names:
        safetensors.torch.load_file(tmp_path / "m" / name)
    by_hand = penstock.manifest(shutil.copytree(tmp_path / "m", tmp_path / "again"))
    assert {(file.path, file.blake3) for file in by_hand.files} == {
        (file.path, file.blake3) for file in saved.files if file.path != MANIFEST
    }


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    place = tmp_path / "m"
    penstock.save({"a": torch.ones(3)}, place)
    with pytest.raises(penstock.LocationExistsError, match="overwrite=True") as refused:
        penstock.save({"a": torch.zeros(3)}, place)
    assert refused.value.code == "exists"
    assert isinstance(refused.value, FileExistsError)
    with pytest.raises(penstock.LocationExistsError):
        penstock.save({"a": torch.zeros(3)}, place / "model.safetensors")
    assert torch.equal(penstock.load_file(place)["a"], torch.ones(3))
    assert beside(place) == []
    # An empty directory is no obstacle.
    (tmp_path / "empty").mkdir()
    penstock.save({"a": torch.ones(3)}, tmp_path / "empty")


def test_a_directory_is_replaced_in_one_step_and_keeps_what_is_no_weights(tmp_path: Path) -> None:
    place = tmp_path / "m"
    penstock.save({f"a{i}": torch.ones(300) for i in range(4)}, place, shard_bytes=1300, manifest=True)
    (place / "config.json").write_text("{}")
    (place / "onnx").mkdir()
    (place / "onnx" / "model.safetensors").write_bytes(b"not ours")
    (place / "link").symlink_to("config.json")
    place.chmod(0o750)
    saved = penstock.save({"b": torch.zeros(3)}, place, overwrite=True, manifest=True)
    assert sorted(os.listdir(place)) == ["config.json", "link", "model.safetensors", "onnx", MANIFEST]
    assert (place / "onnx" / "model.safetensors").read_bytes() == b"not ours"
    assert place.stat().st_mode & 0o777 == 0o750
    assert beside(place) == []
    assert [file.path for file in saved.files] == ["model.safetensors", MANIFEST]
    again = penstock.manifest(shutil.copytree(place, tmp_path / "again", symlinks=True))
    assert again.path.read_bytes() == (place / MANIFEST).read_bytes()
    # A file is replaced, and keeps its mode, too.
    single = tmp_path / "single.safetensors"
    penstock.save({"b": torch.ones(1)}, single)
    single.chmod(0o600)
    penstock.save({"c": torch.ones(1)}, single, overwrite=True)
    assert single.stat().st_mode & 0o777 == 0o600
    assert list(penstock.load_file(single)) == ["c"]


def test_what_is_open_goes_on_while_it_is_replaced(tmp_path: Path) -> None:
    place = tmp_path / "m"
    penstock.save({"a": torch.ones(1000)}, place)
    with safetensors.safe_open(place / "model.safetensors", "pt") as file:
        penstock.save({"a": torch.zeros(1000)}, place, overwrite=True)
        assert torch.equal(file.get_tensor("a"), torch.ones(1000))
    assert torch.equal(penstock.load_file(place)["a"], torch.zeros(1000))


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"a": torch.ones(2, device="meta")}, "meta device"),
        ({"a": torch.ones(2).to_sparse()}, "layout"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "complex128"),
        ({"a": [1, 2]}, "list"),
        ({1: torch.ones(1)}, "names of tensors"),
        ({"__metadata__": torch.ones(1)}, "for itself"),
        ({"\udcff": torch.ones(1)}, "Unicode"),
        ({"a": np.array(["x"])}, "dtype"),
        ([torch.ones(1)], "mapping"),
    ],
)
def test_what_no_file_can_hold_is_refused_before_anything_is_written(tmp_path: Path, tensors: Any, named: str) -> None:
    with pytest.raises(penstock.ConfigError, match=named):
        penstock.save(tensors, tmp_path / "m")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"shard_bytes": 0}, {"shard_bytes": "many"}, {"writers": 0}, {"name": "../m"}, {"metadata": {"a": 1}},
    ],
)  # fmt: skip
def test_impossible_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(penstock.ConfigError):
        penstock.save({"a": torch.ones(1)}, tmp_path / "m", **arguments)
    with pytest.raises(penstock.ConfigError, match="directory"):
        penstock.save({"a": torch.ones(1)}, tmp_path / "m.safetensors", manifest=True)
    assert os.listdir(tmp_path) == []


def large(count: int = 24) -> dict[str, torch.Tensor]:
    return {f"t{i:02d}": torch.full((1 << 20,), i, dtype=torch.float32) for i in range(count)}


def test_the_second_of_two_savers_is_refused(tmp_path: Path) -> None:
    place, seen = tmp_path / "m", []

    def meanwhile(done: int, total: int) -> None:
        if not seen and done < total:
            with pytest.raises(penstock.LocationExistsError) as refused:
                penstock.save({"b": torch.ones(1)}, place)
            seen.append(refused.value.code)
            with pytest.raises(penstock.FormatError) as incomplete:
                penstock.open(tmp_path / ".m.penstock-save")
            seen.append(incomplete.value.code)

    penstock.save(large(), place, shard_bytes=4 << 20, progress=meanwhile)
    assert seen == ["being_saved", "incomplete_save"]
    assert beside(place) == []
    same(penstock.load_file(place), large())


def test_of_many_savers_in_threads_one_is_done_and_all_others_are_refused(tmp_path: Path) -> None:
    results: list[object] = []

    def run(value: int) -> None:
        try:
            penstock.save({"a": torch.full((1 << 18,), value)}, tmp_path / "m")
            results.append(value)
        except penstock.LocationExistsError as error:
            results.append(error.code)

    threads = [threading.Thread(target=run, args=(value,)) for value in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = [result for result in results if isinstance(result, int)]
    assert len(done) == 1, results
    assert torch.equal(penstock.load_file(tmp_path / "m")["a"], torch.full((1 << 18,), done[0]))
    assert beside(tmp_path / "m") == []


def forked(work: Callable[[], object]) -> int:
    """The process id of a child that does this, and nothing else, and ends."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


@pytest.mark.parametrize("replaced", [False, True])
def test_whoever_is_killed_leaves_the_old_or_nothing(tmp_path: Path, replaced: bool) -> None:
    place, chance = tmp_path / "m", random.Random(7)
    new = {f"t{i:02d}": torch.full((1 << 18,), 3, dtype=torch.float32) for i in range(16)}
    outcomes = set()
    for _ in range(16):
        shutil.rmtree(place, ignore_errors=True)
        if replaced:
            penstock.save({"old": torch.ones(5)}, place)
        child = forked(partial(penstock.save, new, place, shard_bytes=3 << 20, overwrite=True, manifest=True))
        time.sleep(chance.random() * 0.12)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if place.exists():
            loaded = penstock.open(place).load()
            outcomes.add("old" if "old" in loaded else "new")
            if "old" not in loaded:
                same(loaded, new)
        else:
            assert not replaced
            outcomes.add("nothing")
        assert set(beside(place)) <= {".m.penstock-save", ".m.penstock-save.lock"}
        if (tmp_path / ".m.penstock-save").exists():
            with pytest.raises(penstock.FormatError, match="not complete"):
                penstock.open(tmp_path / ".m.penstock-save")
    # The next save clears away what is left.
    penstock.save({"a": torch.ones(1)}, place, overwrite=True)
    assert beside(place) == []
    assert outcomes & {"old", "nothing"}, "every child ended before it was killed"


@pytest.mark.parametrize("shard_bytes", [64 << 20, 3 << 20])
def test_a_limit_of_file_sizes_leaves_the_old(tmp_path: Path, shard_bytes: int) -> None:
    place, told = tmp_path / "m", tmp_path / "told"
    penstock.save({"old": torch.ones(5)}, place)
    tensors = {f"t{i}": torch.ones(1 << 18) for i in range(16)}

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
        try:
            penstock.save(tensors, place, shard_bytes=shard_bytes, overwrite=True)
        except penstock.StorageError as error:
            told.write_text(f"{error.code} {error.remedy}")

    os.waitpid(forked(limited), 0)
    assert told.read_text().startswith("storage_full Raise the limit")
    told.unlink()
    assert list(penstock.load_file(place)) == ["old"]
    assert beside(place) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_leaves_the_old(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("this sandbox does not mount")
    try:
        with pytest.raises(penstock.ConfigError, match="mount point"):
            penstock.save({"old": torch.ones(5)}, disk, overwrite=True)
        penstock.save({"old": torch.ones(5)}, disk / "m")
        with pytest.raises(penstock.StorageError, match="full") as full:
            penstock.save(large(8), disk / "m", overwrite=True, manifest=True)
        assert full.value.code == "storage_full"
        assert list(penstock.load_file(disk / "m")) == ["old"]
        assert os.listdir(disk) == ["m"]
        # The first save fits again.
        penstock.save({"new": torch.ones(5)}, disk / "m", overwrite=True)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done < total:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        penstock.save(large(), tmp_path / "m", shard_bytes=4 << 20, progress=interrupt)
    assert os.listdir(tmp_path) == []


def test_what_is_there_before_the_last_step_is_not_replaced(tmp_path: Path) -> None:
    place = tmp_path / "m"

    def meanwhile(done: int, total: int) -> None:
        if not place.exists():
            place.mkdir()
            (place / "theirs").write_text("x")

    with pytest.raises(penstock.LocationExistsError, match="while the save went on"):
        penstock.save(large(4), place, progress=meanwhile)
    assert os.listdir(place) == ["theirs"]
    assert beside(place) == []


def test_a_place_that_may_not_be_written_to_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(penstock.PenstockError, match="file"):
        penstock.save({"a": torch.ones(1)}, tmp_path / "file" / "m")
    with pytest.raises(penstock.LocationExistsError, match="no directory"):
        penstock.save({"a": torch.ones(1)}, tmp_path / "file", overwrite=True)
    (tmp_path / "d.safetensors").mkdir()
    with pytest.raises(penstock.LocationExistsError, match="a directory is there"):
        penstock.save({"a": torch.ones(1)}, tmp_path / "d.safetensors", overwrite=True)


@pytest.mark.parametrize("url", ["hf://org/name", "https://user:secret@host/m/", "s3://bucket/m.safetensors"])
def test_what_cannot_be_saved_to_is_refused_by_name(url: str) -> None:
    with pytest.raises(penstock.ConfigError) as refused:
        penstock.save({"a": torch.ones(1)}, url)
    assert "secret" not in str(refused.value)
    assert refused.value.remedy


def test_a_file_url_is_the_place_that_a_load_of_it_reads(tmp_path: Path) -> None:
    url = f"{tmp_path.as_uri()}/with%20a%20blank"
    tensors = {"w": torch.arange(6.0)}
    penstock.save(tensors, url)
    assert [path.name for path in tmp_path.iterdir()] == ["with a blank"]
    same(penstock.open(url).load(), tensors)
    torch.save(tensors, tmp_path / "with a blank" / "pytorch_model.bin")
    penstock.convert(f"{url}/pytorch_model.bin", tmp_path / "converted")
    same(penstock.open(tmp_path / "converted").load(), tensors)
    with pytest.raises(penstock.LocationNotFoundError, match="another machine"):
        penstock.save(tensors, "file://elsewhere/place")
