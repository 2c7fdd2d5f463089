"""The checkpoints that loaders are compared on: made once, deterministic, of the shapes that tell loaders apart.

- ``llama``: Llama-3-8B's shapes in four files, fewer layers (or narrower ones) where fewer bytes are asked for.
- ``small-tensors``: very many tensors of 16 KiB in one file, where each tensor's overhead counts.
- ``one-tensor``: a single very large one, which only parts can be read of in parallel.
- ``narrow``: a Llama of half the width in one file, for machines with little memory.
- ``model``: a Llama with its configuration and index, which engines and transformers can run.

A directory that holds safetensors files itself is taken as it is: ``checkpoint``.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import checksum, data, states

NAMES = ["llama", "small-tensors", "one-tensor", "narrow", "model"]
LARGE = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096}
LARGE |= {"intermediate_size": 14336, "vocab_size": 128256}
TINY = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "hidden_size": 64}
TINY |= {"intermediate_size": 128, "vocab_size": 512}
MIDDLE = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 1024}
MIDDLE |= {"intermediate_size": 2816, "vocab_size": 32000}
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
    return of_files(files) if files else None


def of_files(files: list[Path]) -> Case:
    """The checkpoint of safetensors files that lie somewhere."""
    return _case("checkpoint", files)


def make(
    name: str, directory: Path, *, gb: float, tensors: int = 100_000, one_gb: float = 12.0, files: int = 4
) -> Case:
    """The case of that name under ``directory``, written if it is not there as asked for."""
    home = directory / name
    note = home / "made.json"
    wanted: dict[str, Any] = {"gb": one_gb if name == "one-tensor" else gb}
    if name == "small-tensors":
        wanted = {"tensors": tensors}
    elif name in {"llama", "model"}:
        wanted |= {"files": files}
    if not note.exists() or json.loads(note.read_text()) != wanted:
        home.mkdir(parents=True, exist_ok=True)
        for old in home.iterdir():
            old.unlink()
        shards = _shards(name, gb, tensors, one_gb, files)
        paths = [home / f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        for number, (path, shapes) in enumerate(zip(paths, shards, strict=True), 1):
            data.write_checkpoint(path, shapes, seed=number)
        if name == "model":
            weight_map = {tensor: path.name for path, of in zip(paths, shards, strict=True) for tensor in of}
            (home / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
            (home / "config.json").write_text(json.dumps(_config(gb)))
        # Last, so that it says that the rest is there.
        note.write_text(json.dumps(wanted))
    return _case(name, sorted(home.glob("*.safetensors")))


def _case(name: str, files: list[Path]) -> Case:
    tensors = [entry["data_offsets"] for file in files for entry in checksum.read_header(file)[0].values()]
    return Case(name, files, sum(end - start for start, end in tensors), len(tensors))


def _shards(name: str, gb: float, tensors: int, one_gb: float, files: int) -> list[Shapes]:
    if name == "small-tensors":
        return [{f"model.experts.{number}.weight": (64, 128) for number in range(tensors)}]
    if name == "one-tensor":
        return [{"weight": (max(1, round(one_gb * data.GB / 2 / 4096)), 4096)}]
    if name == "narrow":
        return [data.llama_shapes(max(1, round(gb * data.GB / 2 / 67_000_000)), 2048, 8192, 32000, 512)]
    shapes = llama(gb) if name == "llama" else _model_shapes(_sizes(gb), _config(gb)["num_hidden_layers"])
    shards: list[Shapes] = [{} for _ in range(files)]
    done, total = 0, _nbytes(shapes)
    for tensor, shape in shapes.items():
        shards[min(files - 1, done * files // total)][tensor] = shape
        done += _nbytes({tensor: shape})
    return [shard for shard in shards if shard]


def _nbytes(shapes: Shapes) -> int:
    return sum(2 * math.prod(shape) for shape in shapes.values())


def _sizes(gb: float) -> dict[str, int]:
    return TINY if gb < 0.1 else MIDDLE if gb < 2.5 else LARGE


def _model_shapes(sizes: dict[str, int], layers: int) -> Shapes:
    kv = sizes["num_key_value_heads"] * sizes["head_dim"]
    return data.llama_shapes(layers, sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"], kv)


def _config(gb: float) -> dict[str, Any]:
    """The configuration of a Llama of about ``gb`` GB: of Llama-3-8B's width from 2.5 on, a tiny one below 0.1."""
    sizes = _sizes(gb)
    none, one = (_nbytes(_model_shapes(sizes, layers)) for layers in (0, 1))
    return sizes | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": max(1, round((gb * data.GB - none) / (one - none))),
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def llama(gb: float) -> Shapes:
    """Llama-3-8B's tensors, about ``gb`` GB of them: as many layers as fit, narrower ones where not even four would."""
    ends, layer = 2.101, 0.4362  # GB: embedding and head; one layer
    narrower = 1
    while gb * narrower**2 < ends + 4 * layer and narrower < 64:
        narrower *= 2
    layers = max(1, round((gb * narrower**2 - ends) / layer))
    return data.llama_shapes(layers, 4096 // narrower, 14336 // narrower, 128256 // narrower, max(1, 1024 // narrower))


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
            end = min(at + states.PIECE, size)
            while at < end:
                count = os.preadv(reading.fileno(), [buffer[: end - at]], at)
                if os.pwrite(writing.fileno(), buffer[:count], at) != count:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
                at += count

        data.in_threads(part, range(0, size, states.PIECE))
