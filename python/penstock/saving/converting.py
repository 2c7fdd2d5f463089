"""``penstock.convert``: weights that torch pickled (``.bin``, ``.pt``, ``.pth``) to safetensors.

Pickles are read by torch with ``weights_only=True``, which runs no code of theirs, and mapped where they can be, so
that a checkpoint larger than memory converts. Everything else is ``penstock.save``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock._native import without_file_scheme
from penstock.arguments import AnyPath, is_url, location
from penstock.errors import ConfigError, FormatError, LocationNotFoundError
from penstock.optional import required
from penstock.progress import ProgressOption
from penstock.saving.tensors import collect
from penstock.saving.writing import SHARD_BYTES, Saved, save_collected

_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
_INDEX = "pytorch_model.bin.index.json"
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
"""How files of a training directory begin that are no weights."""


def convert(
    source: AnyPath,
    location: AnyPath,
    *,
    shard_bytes: int | str | None = SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    manifest: bool = False,
    overwrite: bool = False,
    flush: bool = True,
    name: str = "model",
    writers: int | None = None,
    progress: ProgressOption = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Saved:
    """Converts weights that torch pickled to safetensors. No code of the pickle runs.

    A tensor with several names is saved once, and the metadata says so, as of modules in ``save``. What is nested under
    ``"state_dict"``, as Lightning writes it, is found there.

    Args:
        source: a ``.bin``, ``.pt``, ``.pth`` or ``.ckpt`` file of this machine; a directory with one of them; or one
            with ``pytorch_model.bin.index.json`` and its shards.
        location: as for ``save``; so are all others.

    Raises:
        LocationNotFoundError: there is no such file, or no weights in the directory.
        FormatError: the file is no pickle of tensors, or one that wants to run code.
        ConfigError: for what is no tensor among the weights, for a URL, and as ``save``.
        MissingDependencyError: where torch is absent or too old.
    """
    required("torch", by="penstock.convert")
    weights: dict[str, Any] = {}
    for path in _files(source):
        for key, value in _read(path).items():
            if weights.setdefault(key, value) is not value:
                cause = f"the tensor {key!r} is in more than one file"
                raise FormatError(location=str(path), tensor=str(key), cause=cause)
    return save_collected(
        collect(weights, tied=True),
        location,
        shard_bytes=shard_bytes,
        metadata=metadata,
        manifest=manifest,
        overwrite=overwrite,
        flush=flush,
        name=name,
        writers=writers,
        progress=progress,
        storage_options=storage_options,
    )


def _files(source: AnyPath) -> list[Path]:
    text = location(source, "source")
    if is_url(text):
        cause = "pickled weights are read from files of this machine"
        raise ConfigError(location=text, cause=cause, remedy="Bring them here first: penstock pull URL DIRECTORY")
    path = Path(without_file_scheme(text))
    if not path.exists():
        raise LocationNotFoundError(location=str(path), cause="there is no such file or directory")
    if not path.is_dir():
        return _shards(path) if path.name.endswith(".index.json") else [path]
    index = path / _INDEX
    if index.is_file():
        return _shards(index)
    found = sorted(
        file for file in path.iterdir() if file.suffix in _ENDINGS and not file.name.startswith((".", *_NOT_WEIGHTS))
    )
    if not found:
        cause = f"the directory holds no file that ends in {', '.join(_ENDINGS)}"
        raise LocationNotFoundError(location=str(path), cause=cause, remedy="Name the file")
    return found


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if any("/" in name or name.startswith(".") for name in names):
            raise ValueError("a shard's name leads out of the directory")  # noqa: TRY301 - as malformed as the others
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        cause = f"this is no index of shards ({error})"
        raise FormatError(location=str(index), cause=cause, code="bad_index") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        cause = f"the index names {len(missing)} shards that are not there, the first {missing[0]!r}"
        raise LocationNotFoundError(location=str(index), cause=cause)
    return [index.parent / name for name in names]


def _read(path: Path) -> Mapping[Any, Any]:
    import torch

    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            # Files from before torch 1.6 are no archives, and cannot be mapped.
            if "mmap" not in str(error):
                raise
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # what unpickling comes to: RuntimeError, UnpicklingError, EOFError, …
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        cause = f"torch.load(weights_only=True) refuses it: {first}"
        remedy = "Convert files of tensors only; what wants to run code is not run"
        raise FormatError(location=str(path), cause=cause, remedy=remedy) from error
    for key in ("state_dict", "model_state_dict"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            return dict(loaded[key])
    if not isinstance(loaded, Mapping):
        cause = f"it holds a {type(loaded).__name__}, not tensors by name"
        raise FormatError(location=str(path), cause=cause, remedy="Save model.state_dict() instead of the model")
    return loaded
