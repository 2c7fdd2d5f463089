"""The loaders that are compared, each used as its own manual says, with every file handed over at once if it can.

A loader here is a function that imports what it needs (importing is not loading) and returns the function that is
timed: files in, tensors on the device out. All of them end with tensors that the caller may keep. This module knows
neither the clock nor the state of the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import checksum

Tensors = dict[str, Any]
Load = Callable[[list[str]], Tensors]
# What a loader tells of its load: Penstock's statistics.
Notes = dict[str, Any]


def _penstock() -> Any:
    """Penstock with what it would import when it is first used."""
    import penstock
    import penstock.checkpoint
    import penstock.frameworks.torch

    return penstock


def penstock_load(device: str, notes: Notes) -> Load:
    penstock = _penstock()

    def load(files: list[str]) -> Tensors:
        checkpoint = penstock.open(files)
        tensors = checkpoint.load(device=device)
        notes["stats"] = checkpoint.stats.as_dict() if checkpoint.stats else None
        return tensors

    return load


def penstock_stream(device: str, notes: Notes) -> Load:
    penstock = _penstock()

    def load(files: list[str]) -> Tensors:
        checkpoint = penstock.open(files)
        tensors = dict(checkpoint.stream(device=device))
        notes["stats"] = checkpoint.stats.as_dict() if checkpoint.stats else None
        return tensors

    return load


def penstock_into(device: str, notes: Notes) -> Load:
    penstock = _penstock()

    held: Tensors = {}

    def load(files: list[str]) -> Tensors:
        checkpoint = penstock.open(files)
        if held:
            checkpoint.load_into(held)
        else:
            held.update(checkpoint.load(device=device))
        notes["stats"] = checkpoint.stats.as_dict() if checkpoint.stats else None
        return dict(held)

    return load


def safetensors_load_file(device: str, _: Notes) -> Load:
    from safetensors.torch import load_file

    def load(files: list[str]) -> Tensors:
        tensors: Tensors = {}
        for file in files:
            tensors |= load_file(file, device=device)
        return tensors

    return load


def safetensors_prefetch(device: str, _: Notes) -> Load:
    from safetensors import safe_open

    def load(files: list[str]) -> Tensors:
        tensors: Tensors = {}
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(safe_open(file, framework="pt", device=device)) for file in files]
            for loader in [stack.enter_context(file.prefetch()) for file in opened]:
                tensors |= loader
        return tensors

    return load


def runai(device: str, _: Notes) -> Load:
    from runai_model_streamer import SafetensorsStreamer

    def load(files: list[str]) -> Tensors:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(files, device=device)
            return dict(streamer.get_tensors())

    return load


def fastsafetensors(device: str, _: Notes) -> Load:
    from fastsafetensors import SafeTensorsFileLoader

    def load(files: list[str]) -> Tensors:
        loader = SafeTensorsFileLoader(None, device, nogds=True)
        try:
            loader.add_filenames({0: files})
            buffers = loader.copy_files_to_device()
            tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
            buffers.close()
        finally:
            loader.close()
        return tensors

    return load


def instanttensor(device: str, _: Notes) -> Load:
    from instanttensor import safe_open

    def load(files: list[str]) -> Tensors:
        # It sorts the list that it is given.
        with safe_open(list(files), framework="pt", device=device) as opened:
            return dict(opened.tensors())

    return load


def tensorizer(device: str, _: Notes) -> Load:
    from tensorizer import TensorDeserializer

    def load(files: list[str]) -> Tensors:
        (file,) = files
        readers = {"num_readers": int(number)} if (number := os.environ.get("TENSORIZER_READERS")) else {}
        with TensorDeserializer(file, device=device, **readers) as tensors:
            return dict(tensors.items())

    return load


@dataclass(frozen=True)
class Loader:
    """How a loader is run."""

    distribution: str
    prepare: Callable[[str, Notes], Load]
    env: dict[str, str] = field(default_factory=dict)
    # Whether it can load to the CPU.
    cpu: bool = True
    # Whether the second load of the process is what is measured.
    second: bool = False
    # Whether it reads its own format, made of the same tensors beforehand.
    own_format: bool = False
    # The first version that has what is called.
    since: tuple[int, ...] = ()


LOADERS = {
    "penstock": Loader("penstock", penstock_load),
    "penstock-second": Loader("penstock", penstock_load, second=True),
    # Tensors that exist are filled.
    "penstock-into": Loader("penstock", penstock_into, second=True),
    "penstock-stream": Loader("penstock", penstock_stream),
    "safetensors": Loader("safetensors", safetensors_load_file),
    "safetensors-prefetch": Loader("safetensors", safetensors_prefetch, cpu=False, since=(0, 9)),
    "runai": Loader("runai-model-streamer", runai),
    "runai-buffered": Loader("runai-model-streamer", runai, {"RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"}),
    "fastsafetensors": Loader("fastsafetensors", fastsafetensors),
    "fastsafetensors-buffered": Loader("fastsafetensors", fastsafetensors, {"FASTSAFETENSORS_ODIRECT": "0"}),
    "instanttensor": Loader("instanttensor", instanttensor, cpu=False),
    "instanttensor-buffered": Loader("instanttensor", instanttensor, {"INSTANTTENSOR_BACKEND": "BUFFERED"}, cpu=False),
    "tensorizer": Loader("tensorizer", tensorizer, own_format=True),
}

# Those of a comparison that names none.
USUAL = [name for name in LOADERS if name != "penstock-into"]


def kind(name: str) -> str:
    """What is loaded with, of the name of a row: ``penstock`` of ``penstock:readers=16``."""
    return re.split("[@:]", name, maxsplit=1)[0]


def settings(name: str) -> dict[str, str]:
    """Penstock's settings in the name of a row."""
    return dict(pair.partition("=")[::2] for pair in name.partition(":")[2].split("+") if pair)


def of(name: str) -> Loader:
    """The loader of a row: ``safetensors``, or ``safetensors@0.9`` for the same one from another site directory.

    ``penstock:readers=16+block_bytes=1048576`` is Penstock with that in its environment.
    """
    row = LOADERS[kind(name)]
    return replace(row, env=row.env | {f"PENSTOCK_{key.upper()}": value for key, value in settings(name).items()})


def version(name: str, site: str | None) -> str | None:
    """The version that a row would use, from its metadata; None if it is not installed. Nothing is imported."""
    path = [site, *sys.path] if site else sys.path
    distribution = of(name).distribution
    for found in importlib.metadata.distributions(name=distribution, path=path):
        return found.version
    # A source tree on PYTHONPATH has no metadata.
    return "unpackaged" if importlib.machinery.PathFinder.find_spec(distribution.replace("-", "_"), path) else None


def reason_to_skip(name: str, version: str | None, device: str) -> str | None:
    """Why a row cannot be measured here, if it cannot."""
    row = of(name)
    if version is None:
        return f"{row.distribution} is not installed"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version))
    if numbers and numbers < row.since:
        return f"{row.distribution} {version} has no such call, {'.'.join(map(str, row.since))} has"
    if device == "cpu" and not row.cpu:
        return "loads to GPUs only"
    return None


def write_own_format(files: list[str], target: str) -> None:
    """Serialises the tensors of safetensors files for tensorizer, mapped rather than read to memory."""
    import mmap

    import torch
    from tensorizer import TensorSerializer

    state: Tensors = {}
    for file in files:
        header, data = checksum.read_header(Path(file))
        with Path(file).open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if entry["dtype"] != "BF16":
                raise NotImplementedError(f"{name} is {entry['dtype']}: only BF16 checkpoints are serialised")
            flat = torch.frombuffer(mapped, dtype=torch.bfloat16, count=(end - start) // 2, offset=data + start)
            state[name] = flat.reshape(entry["shape"])
    partial = f"{target}.partial"
    serializer = TensorSerializer(partial)
    serializer.write_state_dict(state)
    serializer.close()
    Path(partial).rename(target)


def link_cuda_runtime(directory: Path) -> bool:
    """Puts ``libcudart.so`` into a directory, where only the wheel of torch brings it and under its versioned name.

    fastsafetensors opens the unversioned name, which a CUDA toolkit has. Without a toolkit it would not run at all.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcudart.so")
        return False
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for file in importlib.metadata.files(name) or ():
                if file.name.startswith("libcudart.so."):
                    (directory / "libcudart.so").symlink_to(file.locate())
                    return True
    return False
