"""What a checkpoint lies on: found out, acted upon, and said. Mounts of many kinds are tested with the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from conftest import Raw, assert_bits, drop_cache, raw_bytes, write_raw


def _tensor(rows: int, seed: int) -> Raw:
    return Raw("U8", (rows, 1000), raw_bytes("U8", (rows, 1000), seed))


@pytest.fixture
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A directory in /dev/shm, which is memory, while other temporary files are somewhere else."""
    import tempfile

    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        here, there = _storage_of(Path(folder)), _storage_of(tmp_path_factory.mktemp("elsewhere"))
        if here != "tmpfs" or there == here:
            pytest.skip(f"/dev/shm is {here}, and temporary files are on {there}")
        yield Path(folder)


def _storage_of(folder: Path) -> str:
    path = write_raw(folder / "probe.safetensors", {"x": _tensor(1, 0)})
    return penstock.open(path).storage


def test_statistics_say_what_was_read_from(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "model.safetensors", {"x": _tensor(10, 1)})
    ckpt = penstock.open(path)
    ckpt.load(framework="np")
    assert ckpt.stats is not None
    assert ckpt.stats.storage == ckpt.storage
    assert ckpt.stats.as_dict()["storage"] == ckpt.storage
    assert ckpt.storage not in {"", "unknown"}


def test_the_storage_with_the_most_bytes_decides_and_the_rest_is_noted(tmp_path: Path, in_memory: Path) -> None:
    tensors = {"large": _tensor(300, 2), "small": _tensor(100, 3)}
    paths = [
        write_raw(tmp_path / "small.safetensors", {"small": tensors["small"]}),
        write_raw(in_memory / "large.safetensors", {"large": tensors["large"]}),
    ]
    ckpt = penstock.open(paths)
    elsewhere = penstock.open(paths[0]).storage
    assert_bits(ckpt.load(framework="np"), tensors)
    assert ckpt.stats is not None
    assert ckpt.stats.storage == "tmpfs"
    assert f"25 % of the bytes lie on {elsewhere}" in ckpt.stats.notes

    # Of one load, not of the checkpoint.
    ckpt.load(["small"], framework="np")
    assert (ckpt.stats.storage, ckpt.stats.notes) == (elsewhere, [])


def test_links_lead_to_the_storage_of_what_they_point_to(tmp_path: Path, in_memory: Path) -> None:
    blob = write_raw(in_memory / "blob", {"x": _tensor(10, 4)})
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    assert penstock.open(link).storage == "tmpfs"


def test_the_command_line_says_it(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    path = write_raw(tmp_path / "model.safetensors", {"x": _tensor(10, 5)})
    storage = penstock.open(path).storage
    inspected = json.loads(_run("-m", "penstock.cli", "inspect", str(path), "--json"))
    assert inspected["storage"] == storage
    assert f"storage:  {storage}" in _run("-m", "penstock.cli", "inspect", str(path))
    assert storage in _run("-m", "penstock.cli", "load", str(path), "--framework", "np", "--stats")


def test_loads_where_neither_proc_nor_sys_is_mounted(tmp_path: Path) -> None:
    data = np.arange(100_000, dtype=np.uint8)
    path = write_raw(tmp_path / "model.safetensors", {"x": Raw("U8", data.shape, data.tobytes())})
    program = tmp_path / "load.py"
    program.write_text(
        "import os, sys, numpy, penstock\n"
        "assert not os.path.exists('/proc/self') and not os.path.exists('/sys/dev')\n"
        "ckpt = penstock.open(sys.argv[1])\n"
        "assert (ckpt.load(framework='np')['x'] == numpy.arange(100_000, dtype=numpy.uint8)).all()\n"
        "print(ckpt.stats.storage)\n"
    )
    # In a mount namespace of its own, which goes with the process.
    hide = 'mount --make-rprivate / && umount -l /sys && umount -l /proc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", hide, "sh", sys.executable, str(program), str(path)]
    probe = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hide, "sh", "true"], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        pytest.skip(f"mounts cannot be hidden: {probe.stderr.strip()}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    # Nothing is known; the load does not mind.
    assert done.stdout.strip() in {*penstock.open(path).storage.split(), "unknown"}


def _run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _cached_share(path: Path) -> float:
    """How much of a file is in the page cache, by ``mincore``."""
    import ctypes
    import mmap

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        pages = (ctypes.c_ubyte * -(-len(mapping) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapping)
        address = ctypes.c_void_p(ctypes.addressof(start))
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapping)), pages) == 0
        del start, address
        return sum(page & 1 for page in pages) / len(pages)


@pytest.mark.parametrize(("cache", "filled"), [("auto", False), ("bypass", False), ("use", True), ("populate", True)])
def test_the_policy_decides_what_a_load_leaves_in_the_page_cache(tmp_path: Path, cache: Any, filled: bool) -> None:
    tensors = {"a": _tensor(20_000, 1), "b": _tensor(3_000, 2)}
    path = write_raw(tmp_path / "model.safetensors", tensors)
    drop_cache(path)
    if _cached_share(path) > 0.1:
        pytest.skip("this file system keeps what it was told to forget")
    assert_bits(penstock.open(path, options=penstock.LoadOptions(cache=cache)).load(framework="np"), tensors)
    share = _cached_share(path)
    assert share == 1 if filled else share < 0.1
