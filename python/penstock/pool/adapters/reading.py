"""An adapter's file, and the configuration that peft writes beside it: read through Penstock, from wherever it is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.errors import AdapterError, LocationNotFoundError
from penstock.storage_options import core_options

if TYPE_CHECKING:
    import torch

    from penstock.arguments import AnyPath
    from penstock.checkpoint import Checkpoint

_CONFIGURATION = "adapter_config.json"
_LIMIT_BYTES = 16 << 20
_METADATA = "lora_adapter_metadata"
"""What diffusers puts peft's configuration under, in the header of a file."""
_WEIGHTS = {"adapter_model", "pytorch_lora_weights", "model", "weights", "lora"}
"""Names of files that say nothing: the folder's is better."""


@dataclass
class Content:
    """What an adapter's files hold."""

    tensors: dict[str, torch.Tensor]
    """By their names in the file, in host memory."""
    config: Mapping[str, Any] | None
    """peft's configuration, where there is one beside it."""
    by_component: Mapping[str, Any]
    """peft's configurations as diffusers writes them into the file: ``{"unet.r": 4, …}``; or nothing."""


def name_of(location: AnyPath) -> str:
    """What an adapter is called by default: as its file, or its folder where the file's name says nothing."""
    path = PurePosixPath(os.fsdecode(location).split("?")[0].rstrip("/"))
    stem = path.stem if path.suffix == ".safetensors" else path.name
    return path.parent.name if stem in _WEIGHTS and path.parent.name else stem


def read(checkpoint: Checkpoint, location: AnyPath, storage_options: Mapping[str, Any] | None) -> Content:
    """Reads all of an adapter.

    Raises:
        AdapterError: for a configuration that is none.
        PenstockError: as ``Checkpoint.load``.
    """
    config = _configuration(location, storage_options)
    raw = (checkpoint.metadata() or {}).get(_METADATA)
    by_component = _parsed(raw, f"{_METADATA} in the header", location) if raw else {}
    return Content(checkpoint.load(), config, by_component)


def _configuration(location: AnyPath, storage_options: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    where = os.fsdecode(location)
    base, mark, query = where.partition("?") if "://" in where else (where, "", "")
    folder = base.rpartition("/")[0] if base.endswith(".safetensors") else base.rstrip("/")
    data = None
    with suppress(LocationNotFoundError, FileNotFoundError, NotADirectoryError):
        if "://" in where:
            url = f"{folder}/{_CONFIGURATION}{mark}{query}"
            data = _native.read_object(url, _LIMIT_BYTES, core_options(storage_options))
        else:
            data = (Path(folder).expanduser() / _CONFIGURATION).read_bytes()
    return None if data is None else _parsed(data, _CONFIGURATION, location)


def _parsed(text: str | bytes, what: str, location: AnyPath) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise AdapterError(location=_native.shown(location), cause=f"{what} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise AdapterError(location=_native.shown(location), cause=f"{what} is no JSON object")
    return found
