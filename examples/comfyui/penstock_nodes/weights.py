"""Weights for ComfyUI: a dict of tensors in host memory, and the metadata of the file. Knows nothing of ComfyUI."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import penstock

if TYPE_CHECKING:
    import torch


def is_url(path: str) -> bool:
    """Whether it names something on an object store or a server."""
    return "://" in path


def load(path: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a safetensors file (or anything else that Penstock opens) by name, and its metadata.

    A local file is mapped, as ComfyUI's own loader does and its memory management counts on, and brought into memory by
    many threads first. What lies elsewhere is read into memory.

    Raises:
        penstock.PenstockError: naming the file, the cause, and what to do.
    """
    checkpoint = penstock.open(path)
    local = not is_url(path)
    return checkpoint.load(mmap=local, prefault=local), checkpoint.metadata() or {}


def found(name: str, url: str, full_path: str | None) -> str:
    """What a node loads: the URL if one is given, else the file that was chosen in ComfyUI.

    Raises:
        ValueError: where neither leads anywhere.
    """
    if url.strip():
        return url.strip()
    if full_path is None or not Path(full_path).exists():
        raise ValueError(f"there is no file {name!r} in ComfyUI's models, and no URL is given")
    return full_path
