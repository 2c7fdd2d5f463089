"""The checkpoints that loaders are compared on: made once, deterministic, of the shapes that tell loaders apart.

- ``llama``: Llama-3-8B's shapes in four files, fewer layers (or narrower ones) where fewer bytes are asked for.
- ``small-tensors``: very many tensors of 16 KiB in one file, where each tensor's overhead counts.
- ``one-tensor``: a single very large one, which only parts can be read of in parallel.

A directory that holds safetensors files itself is taken as it is: ``checkpoint``.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import checksum, common

NAMES = ["llama", "small-tensors", "one-tensor"]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """One checkpoint on disk."""

    name: str
    files: list[Path]
    nbytes: int
    tensors: int

    def as_dict(self) -> dict[str, Any]:
        return {"bytes": self.nbytes, "tensors": self.tensors, "files": len(self.files)}


def given(directory: Path) -> Case | None:
    """The checkpoint that lies in the directory itself, if there is one."""
    files = sorted(directory.glob("*.safetensors"))
    return _case("checkpoint", files) if files else None


def given_or_llama(directory: Path, gb: float) -> Case:
    """The checkpoint that lies in the directory, else Llama's shapes under it."""
    return given(directory) or make("llama", directory, gb=gb, small=0, one_gb=0)


def make(name: str, directory: Path, *, gb: float, small: int, one_gb: float) -> Case:
    """The case of that name under ``directory``, written if it is not there as asked for."""
    home = directory / name
    wanted = {"gb": gb} if name == "llama" else {"tensors": small} if name == "small-tensors" else {"gb": one_gb}
    note = home / "made.json"
    if not note.exists() or json.loads(note.read_text()) != wanted:
        home.mkdir(parents=True, exist_ok=True)
        for old in home.iterdir():
            old.unlink()
        shards = _shards(name, gb, small, one_gb)
        for number, shapes in enumerate(shards, 1):
            path = home / f"model-{number:05}-of-{len(shards):05}.safetensors"
            common.write_checkpoint(path, shapes, seed=number)
        note.write_text(json.dumps(wanted))
    return _case(name, sorted(home.glob("*.safetensors")))


def _case(name: str, files: list[Path]) -> Case:
    tensors = [entry["data_offsets"] for file in files for entry in checksum.read_header(file)[0].values()]
    return Case(name, files, sum(end - start for start, end in tensors), len(tensors))


def _shards(name: str, gb: float, small: int, one_gb: float) -> list[Shapes]:
    if name == "small-tensors":
        return [{f"model.experts.{number}.weight": (64, 128) for number in range(small)}]
    if name == "one-tensor":
        return [{"weight": (max(1, round(one_gb * common.GB / 2 / 4096)), 4096)}]
    shapes = llama(gb)
    sizes = {name: 2 * rows * (rest[0] if rest else 1) for name, (rows, *rest) in shapes.items()}
    shards: list[Shapes] = [{} for _ in range(4)]
    done = 0
    for tensor, shape in shapes.items():
        shards[min(3, done * 4 // sum(sizes.values()))][tensor] = shape
        done += sizes[tensor]
    return shards


def llama(gb: float) -> Shapes:
    """Llama-3-8B's tensors, about ``gb`` GB of them: as many layers as fit, narrower ones where not even four would."""
    ends, layer = 2.101, 0.4362  # GB: embedding and head; one layer
    narrower = 1
    while gb * narrower**2 < ends + 4 * layer and narrower < 64:
        narrower *= 2
    layers = max(1, round((gb * narrower**2 - ends) / layer))
    return common.llama_shapes(
        layers, 4096 // narrower, 14336 // narrower, 128256 // narrower, max(1, 1024 // narrower)
    )


def own_format(case: Case) -> Path:
    """Where the checkpoint lies in the format of a loader that has its own."""
    return case.files[0].parent / "model.tensors"


def copy(case: Case, target: Path, *, also: list[Path]) -> Case:
    """The checkpoint, and other files of it, copied to another directory, which is made: wholly or not at all."""
    target.mkdir(parents=True)
    try:
        for file in [*case.files, *also]:
            _copy_file(file, target / file.name)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return replace(case, files=[target / file.name for file in case.files])


def _copy_file(source: Path, target: Path) -> None:
    size = source.stat().st_size
    with source.open("rb") as reading, target.open("wb") as writing:
        writing.truncate(size)

        def part(at: int) -> None:
            buffer = memoryview(bytearray(8 << 20))
            end = min(at + common.PIECE, size)
            while at < end:
                count = os.preadv(reading.fileno(), [buffer[: end - at]], at)
                if os.pwrite(writing.fileno(), buffer[:count], at) != count:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
                at += count

        common.in_threads(part, range(0, size, common.PIECE))
