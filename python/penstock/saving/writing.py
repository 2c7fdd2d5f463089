"""``penstock.save``: tensors to safetensors files, as fast as the storage takes them, complete or absent.

What is checked is checked before the first byte is written; the core writes, here it is asked for and waited for.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock._native import Save, shown, without_file_scheme
from penstock.arguments import AnyPath, described, is_url, location
from penstock.errors import ConfigError
from penstock.progress import ProgressOption, progress_reporter
from penstock.saving.layout import File, index_name, plan
from penstock.saving.tensors import Collected, Held, collect, memory_of
from penstock.storage_options import core_options
from penstock.units import size_meant

SHARD_BYTES = 50_000_000_000
"""Of one file, where nothing is said: what transformers writes."""

MAX_WRITERS = 256

_SUFFIX = ".safetensors"
_FILES_AHEAD = 2
"""Files whose memory is held at once: one is written while the next is made ready."""


class SavedFile(NamedTuple):
    """One file of a save.

    Attributes:
        path: where it is, relative to the location.
        nbytes: its size in bytes.
        blake3: its BLAKE3 hash, 64 hexadecimal digits, where a manifest was made; None of the manifest itself.
    """

    path: str
    nbytes: int
    blake3: str | None


class Saved(NamedTuple):
    """What a save wrote.

    Attributes:
        location: what was given: a path, or a URL without secrets.
        files: all of them, sorted by path.
        seconds: wall-clock time, until everything was visible (and flushed, if that was asked for).
        notes: fallbacks taken, in words.
    """

    location: str
    files: list[SavedFile]
    seconds: float
    notes: list[str]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


def save(
    tensors: Any,
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
    """Saves tensors as safetensors, from the CPU and from GPUs, complete or not at all.

    A location that ends in ``.safetensors`` is one file of this machine. Any other is a directory, or a prefix of an
    object store: ``model.safetensors`` is in it, or shards and ``model.safetensors.index.json``. Locally, files are
    written beside their place, which is exchanged in one step at the end. In an object store the prefix has to be new,
    and a marker in it (``penstock-save.incomplete``) says for how long it is not complete: loads refuse it until then.
    The second of two saves to one place is refused. Tensors must not be written to until this returns.

    Args:
        tensors: a ``torch.nn.Module``, or a mapping from names to torch tensors or numpy arrays. Of a module, a tensor
            with several names is saved under the first of them, and the metadata says so, as
            ``safetensors.torch.save_model`` does. Of a mapping, every name is saved.
        location: a path, or ``s3://``, ``gs://``, ``az://`` and a prefix.
        shard_bytes: the most bytes of tensors in a file: a number, or such as ``"5GB"``; None for a single file.
        metadata: of every file. By default ``{"format": "pt"}`` for torch tensors and ``{"format": "np"}`` for arrays.
        manifest: whether to make a manifest (see ``penstock.manifest``) of the bytes as they are written.
        overwrite: whether what is there may be replaced. Of a directory, weights, their indexes and the manifest are
            replaced; other files (a configuration, a tokenizer) stay. Not for object stores.
        flush: whether files are on stable storage when this returns (``fsync``), and after a power failure there is the
            old or the new. Object stores always keep what they have confirmed.
        name: what files are called in a directory: ``diffusion_pytorch_model`` for diffusers.
        writers: how many threads write; by default what suits the store.
        progress: ``True`` for a bar, or a function of (bytes done, bytes in all).
        storage_options: credentials, endpoint and settings of the remote store, as for ``penstock.open``.

    Raises:
        LocationExistsError: something is there, or another save is writing there (``code="being_saved"``).
        ConfigError: for tensors that safetensors cannot hold, and for impossible arguments.
        StorageError: the disk is full (``code="storage_full"``), or the disk or the network failed.
        LocationAccessError: the place may not be written to.
        DeviceError, InsufficientMemoryError: a GPU failed, or memory for staging could not be had.
    """
    return save_collected(
        collect(tensors),
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


def save_collected(
    collected: Collected,
    place: AnyPath,
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
    """As ``save``, of tensors that are collected already."""
    began = time.monotonic()
    where = without_file_scheme(location(place, "location"))
    is_directory = not where.endswith(_SUFFIX)
    most = _shard_bytes(shard_bytes) if is_directory else None
    _check(where, name, writers, is_directory=is_directory, manifest=manifest, overwrite=overwrite)
    files, index = plan(collected.entries, _metadata(metadata, collected), name, most)
    devices = sorted(collected.gpus)
    running = Save(
        where,
        is_directory,
        overwrite=overwrite,
        flush=flush,
        manifest=manifest,
        devices=[(device, _stream(device)) for device in devices],
        writers=writers,
        storage_options=core_options(storage_options, [where]),
    )
    total = sum(len(file.header) + sum(entry.nbytes for entry in file.entries) for file in files)
    reporter = progress_reporter(progress, total, "Saving")
    try:
        _write(running, files, devices, reporter)
        notes = running.notes()
        published = running.publish(None if index is None else (index_name(name), index))
    finally:
        # Before any tensor goes: nothing of them is read once this returns.
        running.stop()
        reporter.close()
    if not is_directory:
        base = os.path.basename(where)  # noqa: PTH119 - a location may be no path of this machine
        published = [(base, nbytes, root) for _, nbytes, root in published]
    return Saved(shown(where), [SavedFile(*file) for file in published], time.monotonic() - began, notes)


def _write(running: Save, files: list[File], devices: list[int], reporter: Any) -> None:
    pending: deque[tuple[int, list[Held]]] = deque()
    told = 0

    def wait() -> None:
        nonlocal told
        number, _ = pending[0]
        written = False
        while not written:
            written = running.wait_for(number)
            done = running.written()
            reporter.advance(done - told)
            told = done
        pending.popleft()

    try:
        for file in files:
            held = memory_of(file.entries)
            pieces = [
                (memory.address, memory.nbytes, None if memory.device is None else devices.index(memory.device))
                for memory in held
            ]
            pending.append((running.add(file.name, file.header, pieces), held))
            if len(pending) >= _FILES_AHEAD:
                wait()
        while pending:
            wait()
    finally:
        if pending:
            # It reads what is held here.
            running.stop()


def _stream(device: int) -> int:
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)


def _metadata(given: Mapping[str, str] | None, collected: Collected) -> dict[str, str]:
    if given is None:
        own = {"format": next(iter(collected.libraries))} if len(collected.libraries) == 1 else {}
    else:
        own = dict(given)
        for key, value in own.items():
            if not isinstance(key, str) or not isinstance(value, str):
                cause = f"metadata maps str to str, and {key!r} is mapped to {described(value)}"
                raise ConfigError(cause=cause, remedy="Write it as text, such as json.dumps gives")
    # What the caller says counts.
    return {**collected.ties, **own}


def _shard_bytes(given: int | str | None) -> int | None:
    nbytes = size_meant(given) if isinstance(given, str) else given
    if given is None:
        return None
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        cause = f"shard_bytes={given!r} is not a number of bytes"
        raise ConfigError(cause=cause, remedy='Give a number, or text such as "5GB"; None for a single file')
    return nbytes


def _check(where: str, name: str, writers: int | None, *, is_directory: bool, manifest: bool, overwrite: bool) -> None:
    if writers is not None and (
        isinstance(writers, bool) or not isinstance(writers, int) or not 1 <= writers <= MAX_WRITERS
    ):
        raise ConfigError(cause=f"writers={writers!r} is not a number of threads, 1 to {MAX_WRITERS}")
    if not name or "/" in name or name.startswith(".") or "\0" in name:
        raise ConfigError(cause=f"name={name!r} is not the beginning of a file's name", remedy="Give such as 'model'")
    if is_url(where) and not is_directory:
        cause = "an object store is saved to under a new prefix, not to a single object"
        remedy = "Give a prefix, such as s3://bucket/model/: model.safetensors will be in it"
        raise ConfigError(location=shown(where), cause=cause, remedy=remedy)
    if is_url(where) and overwrite:
        cause = "an object store cannot replace several objects in one step, so overwrite=True is for paths"
        remedy = "Save to a new prefix, and delete the old one once it is not used any more"
        raise ConfigError(location=shown(where), cause=cause, remedy=remedy)
    if manifest and not is_directory:
        cause = "a manifest speaks of a directory, and this is a single file"
        remedy = "Give a directory: model.safetensors will be in it"
        raise ConfigError(location=shown(where), cause=cause, remedy=remedy)
