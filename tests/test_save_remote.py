"""Saving to object stores: parts in parallel, a marker until all is there, and who comes second."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import penstock
import servers
from conftest import as_bytes, threads_left

MARKER = "penstock-save.incomplete"


@contextlib.contextmanager
def google(directory: Path) -> Iterator[servers.Remote]:
    """Google's XML interface, by moto, whose S3 has the same requests: fake-gcs-server does not know it.

    It does not heed ``x-goog-if-generation-match``; here, the listing that comes before is what refuses a second saver.
    Nor does it decode dashes in a bucket's name.
    """
    with servers.moto(directory, bucket="plain") as remote:
        environment = {"GOOGLE_BASE_URL": remote.environment["AWS_ENDPOINT_URL"], "GOOGLE_BEARER_TOKEN": "sentinel"}
        yield servers.Remote("gs://plain", environment, remote.put)


STORES = {"moto": servers.moto, "s3": servers.s3, "azure": servers.azure, "google": google}
EACH = [name if name == "moto" else pytest.param(name, marks=pytest.mark.stores) for name in STORES]


@pytest.fixture(scope="module", params=EACH)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Remote]:
    with STORES[request.param](tmp_path_factory.mktemp("server")) as remote:
        yield remote


@pytest.fixture
def place(server: servers.Remote, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A prefix of the test's own."""
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"{server.root}/{abs(hash(request.node.name))}/model/"


def tensors(count: int = 6, size: int = 250) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((size,), i, dtype=torch.float32) for i in range(count)}


def large() -> dict[str, torch.Tensor]:
    """More than goes with one request: two parts and the beginning of a third."""
    return {"big": torch.arange((40 << 20) // 4 + 17, dtype=torch.float32), "small": torch.ones(3).bfloat16()}


def names(place: str) -> list[str]:
    from penstock._native import list_objects

    try:
        return sorted(os.fsdecode(name) for _, name, _ in list_objects(place)[0])
    except penstock.LocationNotFoundError:
        return []


def same(loaded: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == saved.keys()
    assert all(as_bytes(loaded[name]) == as_bytes(tensor) for name, tensor in saved.items())


def test_large_tensors_go_in_parts_and_come_back(place: str) -> None:
    given = large()
    saved = penstock.save(given, place, manifest=True)
    assert [file.path for file in saved.files] == ["model.safetensors", "penstock-manifest.blake3"]
    assert names(place) == ["model.safetensors", "penstock-manifest.blake3"]
    same(penstock.open(place, options=penstock.LoadOptions(verify="require")).load(), given)
    assert threads_left() == []


def test_shards_come_with_an_index_and_the_marker_goes(place: str) -> None:
    saved = penstock.save(tensors(), place, shard_bytes=2100, manifest=True)
    assert names(place) == [file.path for file in saved.files]
    assert len(saved.files) == 5
    same(penstock.open(place, options=penstock.LoadOptions(verify="require")).load(), tensors())


def test_a_prefix_that_holds_something_is_refused(place: str, server: servers.Remote) -> None:
    penstock.save(tensors(1), place)
    with pytest.raises(penstock.LocationExistsError, match="holds nothing") as refused:
        penstock.save(tensors(2), place)
    assert refused.value.code == "exists"
    with pytest.raises(penstock.ConfigError, match="overwrite"):
        penstock.save(tensors(2), place, overwrite=True)
    same(penstock.load_file(place), tensors(1))


def test_the_second_of_two_savers_and_loads_meanwhile_are_refused(place: str) -> None:
    seen: list[str] = []

    def meanwhile(done: int, total: int) -> None:
        if seen or done == total:
            return
        for refused in (
            lambda: penstock.save(tensors(), place),
            lambda: penstock.open(place),
            lambda: penstock.pull(place, "never-made"),
        ):
            with pytest.raises(penstock.PenstockError) as error:
                refused()
            seen.append(error.value.code)

    penstock.save(tensors(40), place, shard_bytes=1000, progress=meanwhile, writers=1)
    assert seen == ["being_saved", "incomplete_save", "incomplete_save"]
    assert not Path("never-made").exists()
    same(penstock.load_file(place), tensors(40))


def test_whoever_is_stopped_takes_everything_away(place: str) -> None:
    class StopError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > 0:
            raise StopError

    with pytest.raises(StopError):
        penstock.save(tensors(40) | large(), place, shard_bytes=1000, progress=stop, writers=2)
    assert names(place) == []
    assert threads_left() == []
    # And the place is free.
    penstock.save(tensors(), place)


KILLED = """
import os, sys, torch, penstock
def kill(done, total):
    if done > 0:
        os.kill(os.getpid(), 9)
penstock.save({f"t{i}": torch.ones(250) for i in range(40)}, sys.argv[1], shard_bytes=1000, progress=kill, writers=1)
"""


def test_what_a_killed_save_left_is_refused_until_it_is_deleted(place: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, place], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    left = names(place)
    assert MARKER in left
    assert "model.safetensors.index.json" not in left
    with pytest.raises(penstock.FormatError, match="cut off") as incomplete:
        penstock.open(place)
    assert incomplete.value.code == "incomplete_save"
    with pytest.raises(penstock.FormatError):
        penstock.open(f"{place}*.safetensors")
    with pytest.raises(penstock.LocationExistsError, match="another save") as second:
        penstock.save(tensors(), place)
    assert MARKER in str(second.value.remedy)


def test_an_endpoint_that_nobody_is_at_is_an_error_and_not_a_wait(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"endpoint_url": "http://127.0.0.1:1"} if place.startswith("s3://") else None
    if options is None:
        pytest.skip("one store is enough")
    with pytest.raises(penstock.StorageError):
        penstock.save(tensors(), place, storage_options=options)


def test_a_bucket_that_is_not_there_is_named(place: str, server: servers.Remote) -> None:
    missing = place.replace(server.root, f"{server.root}nothere")
    with pytest.raises(penstock.PenstockError) as refused:
        penstock.save(tensors(), missing)
    assert "nothere" in str(refused.value)


def test_converted_weights_go_to_a_bucket_by_the_command(place: str, tmp_path: Path) -> None:
    torch.save({"state_dict": tensors()}, tmp_path / "x.ckpt")
    command = [sys.executable, "-m", "penstock", "convert", str(tmp_path / "x.ckpt"), place, "--json", "--manifest"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {file["path"] for file in json.loads(done.stdout)["files"]} == set(names(place))
    same(penstock.load_file(place), tensors())
