"""``penstock cache``: what people see of a disk cache, and what they can do with it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import penstock
import servers
from conftest import Raw, raw_bytes, write_raw

pytest.importorskip("typer")
from typer.testing import CliRunner

from penstock.cli.app import app


class Cache(NamedTuple):
    """Two models that were loaded, the first of them last, of the root URL ``root``."""

    directory: Path
    root: str
    nbytes: int


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    tensors = {"w": Raw("U8", (3 << 20,), raw_bytes("U8", (3 << 20,), 1))}
    body = write_raw(tmp_path / "m.safetensors", tensors).read_bytes()
    with servers.web(tmp_path) as remote:
        for name in ("old/m.safetensors", "new/m.safetensors"):
            remote.put(name, body)
            penstock.open(f"{remote.root}/{name}?sig=SECRET", cache_dir=tmp_path / "cache").load(framework="np")
            assert penstock.flush_disk_cache()
        yield Cache(tmp_path / "cache", remote.root, len(body))


def run(cache: Cache, *arguments: str, code: int = 0, columns: int = 100) -> str:
    environment = {"PENSTOCK_CACHE_DIR": str(cache.directory), "COLUMNS": str(columns), "NO_COLOR": "1"}
    done = CliRunner().invoke(app, ["cache", *arguments], env=environment)
    assert done.exit_code == code, done.output
    assert "SECRET" not in done.output
    return done.output


def locations(cache: Cache) -> list[str]:
    listed = json.loads(run(cache, "ls", "--json"))["entries"]
    return [re.sub(r"[?].*", "", entry["location"]).removeprefix(f"{cache.root}/") for entry in listed]


def data_of(cache: Cache, name: str) -> Path:
    (found,) = cache.directory.glob(f"*/{name}/data")
    return found


def test_it_lists_what_is_there_and_what_was_used_last_first(cache: Cache) -> None:
    assert locations(cache) == ["new/m.safetensors", "old/m.safetensors"]
    shown = run(cache, "ls").splitlines()
    assert f"{cache.root}/new/m.safetensors" in shown[2]
    assert shown[2].split()[-4:] == ["3.15", "MB", "all", "now"]
    assert shown[-1] == f"2 objects, 6.29 MB in {cache.directory}"
    assert len(run(cache, "ls", "*/old/*").splitlines()) == len(shown) - 1


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_list_fits_the_terminal(cache: Cache, columns: int) -> None:
    table = run(cache, "ls", columns=columns).split("\n\n")[0]
    assert max(map(len, table.splitlines())) <= columns


def test_damaged_bytes_are_found(cache: Cache) -> None:
    assert run(cache, "verify").splitlines()[-1] == "2 objects, 6.29 MB compared: all intact"
    (entry, _) = json.loads(run(cache, "ls", "--json"))["entries"]
    with data_of(cache, entry["name"]).open("r+b") as data:
        data.seek(1 << 20)
        data.write(b"damaged")
    first, last = run(cache, "verify").splitlines()
    assert first.startswith(f"damaged: 524 kB of {cache.root}/new/m.safetensors")
    assert last.endswith("1 damaged")
    assert json.loads(run(cache, "verify", "--json"))["damaged"] == []
    assert run(cache, "ls", entry["name"]).splitlines()[2].split()[-3:] == ["83", "%", "now"]


def test_entries_are_removed_by_location_or_name(cache: Cache) -> None:
    assert run(cache, "rm", "*/old/*").strip() == "removed 1 object, 3.15 MB"
    assert locations(cache) == ["new/m.safetensors"]
    assert "none of the 1 entries matches '*/old/*'" in run(cache, "rm", "*/old/*", code=3)
    (entry,) = json.loads(run(cache, "ls", "--json"))["entries"]
    run(cache, "rm", entry["name"])
    assert locations(cache) == []


def test_it_is_pruned_to_a_size(cache: Cache) -> None:
    assert run(cache, "prune", "--bytes", "4MB").strip() == "removed 1 object, 3.15 MB"
    assert locations(cache) == ["new/m.safetensors"]
    assert json.loads(run(cache, "prune", "--bytes", "0", "--json"))["removed"][0]["nbytes"] == cache.nbytes
    assert locations(cache) == []


def test_a_cache_that_is_not_named_is_an_error() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PENSTOCK_CACHE_DIR"}
    done = CliRunner().invoke(app, ["cache", "ls"], env={**environment, "PENSTOCK_CACHE_DIR": ""})
    assert done.exit_code == 8
    assert "set PENSTOCK_CACHE_DIR" in done.output


@pytest.mark.parametrize("command", [("ls",), ("verify",), ("prune", "--bytes", "1GB")])
def test_a_cache_that_no_load_has_made_yet_is_empty(tmp_path: Path, command: tuple[str, ...]) -> None:
    absent = Cache(tmp_path / "absent", "", 0)
    told = run(absent, *command)
    assert f"note: {absent.directory} does not exist: the first load" in told.replace("\n", "")
    assert "0 objects, 0 B" in told
    assert not absent.directory.exists()
    absent.directory.mkdir()
    if command == ("ls",):
        assert run(absent, *command).startswith("0 objects")
