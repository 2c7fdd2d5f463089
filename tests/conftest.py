"""What tests share: files of every kind, and counts of what a load must not leave behind."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As it is for what a shell starts in the background, and what that starts: Ctrl-C would never come.
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Raw(NamedTuple):
    """One tensor of a file written byte by byte."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Every dtype of safetensors 0.8."""


def raw_bytes(dtype: str, shape: tuple[int, ...], seed: int = 0) -> bytes:
    """Random bytes for a tensor; booleans are 0 or 1."""
    size = int(np.prod(shape, dtype=np.int64)) * BITS[dtype] // 8
    top = 2 if dtype == "BOOL" else 256
    return np.random.default_rng(seed).integers(0, top, size, dtype=np.uint8).tobytes()


def write_raw(
    path: Path, tensors: Mapping[str, Raw], metadata: dict[str, str] | None = None, *, pad_to: int = 8
) -> Path:
    """Writes a safetensors file by the format's definition, independent of any library."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % pad_to)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensor.data for tensor in tensors.values()))
    return path


def shard(tmp_path: Path, seed: int, count: int = 3) -> tuple[bytes, dict[str, Raw]]:
    """A file of some MiB, more than opening one brings."""
    shape = (640, 257 + seed)
    tensors = {f"s{seed}.t{i}": Raw("F32", shape, raw_bytes("F32", shape, seed * 10 + i)) for i in range(count)}
    path = write_raw(tmp_path / f"shard-{seed}.safetensors", tensors, {"format": "pt"})
    return path.read_bytes(), tensors


def write_header(path: Path, header: Any, data: bytes = b"") -> Path:
    """Writes a file with any header at all: JSON, or bytes as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def drop_cache(path: Path) -> None:
    """Makes the kernel forget the file's pages."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def threads() -> dict[str, str]:
    """This process's threads and their names, but for those that end while one looks."""
    found = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[task] = Path(f"/proc/self/task/{task}/comm").read_text().strip()
    return found


def threads_left(but: Collection[str] = ()) -> list[str]:
    """Names of the threads of loads in this process, other than ``but``.

    One that was joined leaves the list a moment later, so it is looked twice, until both looks say the same.
    """

    def look() -> list[str]:
        return sorted(name for task, name in threads().items() if task not in but and name.startswith("penstock"))

    last, now = None, look()
    end = time.monotonic() + 2
    while now and now != last and time.monotonic() < end:
        time.sleep(0.02)
        last, now = now, look()
    return now


class Remains(NamedTuple):
    """What a process holds that a load may have left behind."""

    threads: int
    files: int
    slots_in_use: int

    @classmethod
    def now(cls) -> Remains:
        from penstock._native import staging_usage

        return cls(len(threads_left()), len(os.listdir("/proc/self/fd")), staging_usage()[2])


def opened_elsewhere(location: str, environment: dict[str, str] | None = None) -> str:
    """What a process of its own says when it opens the object: a process reads the variables of proxies once."""
    code = (
        "import penstock, sys\ntry:\n    penstock.open(sys.argv[1])\n    print('opened')\n"
        "except penstock.PenstockError as error:\n    print(type(error).__name__, error)"
    )
    command = [sys.executable, "-c", code, location]
    environment = {**os.environ, **(environment or {})}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout


def python_threads() -> int:
    """Python's threads, but for the one that the first bar of a process starts, which may be a library's: tqdm's."""
    return sum(type(thread).__name__ != "TMonitor" for thread in threading.enumerate())


@pytest.fixture
def nothing_remains() -> Any:
    """Fails the test if a thread, a file or a staging slot is left after it."""
    # What tests before this one left in cycles goes now, or some time during this one; pools end their threads later.
    gc.collect()
    before, threads = Remains.now(), python_threads()
    yield
    now = Remains.now()
    assert now.threads <= before.threads, (before, now)
    assert now.files <= before.files, (before, now)
    assert now.slots_in_use == before.slots_in_use, (before, now)
    assert python_threads() <= threads


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[Path, dict[str, Raw]]:
    """A file of some MiB: a large tensor, middling ones of several dtypes, many small ones, a scalar, an empty."""
    tensors = {"large": Raw("F32", (1024, 1500), raw_bytes("F32", (1024, 1500), 1))}
    for index, dtype in enumerate(["BF16", "F16", "I64", "U8", "BOOL", "F64"]):
        shape = (63 + index, 257)
        tensors[f"layer.{index}.{dtype}"] = Raw(dtype, shape, raw_bytes(dtype, shape, index))
    for index in range(200):
        tensors[f"norm.{index}"] = Raw("F32", (index % 37,), raw_bytes("F32", (index % 37,), index))
    tensors["scalar"] = Raw("F32", (), raw_bytes("F32", ()))
    tensors["empty"] = Raw("BF16", (0, 7), b"")
    return write_raw(tmp_path / "mixed.safetensors", tensors, {"format": "pt"}), tensors


def as_bytes(tensor: Any) -> bytes:
    """A tensor's bytes, whatever its framework and dtype."""
    if type(tensor).__module__.startswith("torch"):
        import torch

        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return np.ascontiguousarray(tensor).view(np.uint8).tobytes() if tensor.size else b""


def assert_bits(loaded: Mapping[str, Any], tensors: Mapping[str, Raw]) -> None:
    """Every tensor is there, and every bit of it."""
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert as_bytes(loaded[name]) == tensor.data, name
