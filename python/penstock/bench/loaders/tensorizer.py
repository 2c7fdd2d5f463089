"""tensorizer, which has a format of its own: the same tensors are serialised for it beforehand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .. import checksum
from . import Load, Loader, Tensors, Use


def deserialise(use: Use) -> Load:
    from tensorizer import TensorDeserializer

    def load(files: list[str]) -> Tensors:
        (file,) = files
        readers = {"num_readers": int(number)} if (number := os.environ.get("TENSORIZER_READERS")) else {}
        with TensorDeserializer(file, device=use.device, **readers) as tensors:
            return dict(tensors.items())

    return load


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """Serialises the tensors of safetensors files, mapped rather than read to memory."""
    import mmap

    import torch
    from tensorizer import TensorSerializer

    state: Tensors = {}
    for file in task["files"]:
        header, data = checksum.read_header(Path(file))
        with Path(file).open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if entry["dtype"] != "BF16":
                raise NotImplementedError(f"{name} is {entry['dtype']}: only BF16 checkpoints are serialised")
            flat = torch.frombuffer(mapped, dtype=torch.bfloat16, count=(end - start) // 2, offset=data + start)
            state[name] = flat.reshape(entry["shape"])
    partial = f"{task['target']}.partial"
    serializer = TensorSerializer(partial)
    serializer.write_state_dict(state)
    serializer.close()
    Path(partial).rename(task["target"])
    return {}


LOADERS = {"tensorizer": Loader("tensorizer", deserialise, own_format=True, readers="TENSORIZER_READERS")}
