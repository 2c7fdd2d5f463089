"""Byte ranges of files, streamed as tensors of bytes in the order in which they arrive."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatch
from types import TracebackType
from typing import Any

from penstock import LoadOptions
from penstock._native import Checkpoint as Catalogue
from penstock._native import shown
from penstock.checkpoint import Checkpoint, signed_by
from penstock.errors import LocationNotFoundError, PenstockError
from penstock.integrations.shared import objects
from penstock.storage_options import core_options
from runai_model_streamer import _penstock
from runai_model_streamer._penstock import RunaiStreamerInvalidInputException
from runai_model_streamer.file_streamer.requests_iterator import FileChunks
from runai_model_streamer.s3_utils.s3_utils import (
    S3Credentials,
    is_azure_path,
    is_gs_path,
    is_object_storage,
    is_s3_path,
)

__all__ = ["FileStreamer", "RunaiStreamerInvalidInputException", "homogeneous_paths"]


def homogeneous_paths(paths: list[str]) -> bool:
    """Whether all paths are of one kind: files, S3, GCS or Azure."""
    kinds = {(is_s3_path(path), is_gs_path(path), is_azure_path(path)) for path in paths}
    return len(kinds) <= 1


class FileStreamer:
    """Streams ranges of files. A context manager; ``list_files`` also works outside of it."""

    def __init__(self) -> None:
        self.device_str: str | None = None
        self._entered = False
        self._chunks: Iterator[tuple[int, int, Any]] | None = None

    def __enter__(self) -> FileStreamer:
        self._entered = True
        self._chunks = None
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered = False
        self.close()

    def close(self) -> None:
        """Ends what is being streamed; tensors that were handed out stay."""
        chunks, self._chunks = self._chunks, None
        if chunks is not None and hasattr(chunks, "close"):
            chunks.close()

    def stream_files(
        self,
        file_stream_requests: list[FileChunks],
        credentials: S3Credentials | None = None,
        device: Any = "cpu",
        memory_limit: int | None = None,
        owned: bool = True,
    ) -> None:
        """Begins to read the ranges of files of one kind; ``get_chunks`` gives them.

        Args:
            file_stream_requests: the files, with an ``id`` each.
            credentials: of S3, for this call.
            device: where the bytes go.
            memory_limit: bytes to read ahead at most, in place of ``RUNAI_STREAMER_MEMORY_LIMIT``.
            owned: not needed: every tensor is the caller's.

        Raises:
            RunaiStreamerInvalidInputException: for files of several kinds, or an unknown device.
            RunaiStreamerMemoryLimitException: for a limit smaller than the largest range.
            ValueError: outside of the context, or while another stream is unfinished.
        """
        del owned
        if self._chunks is not None:
            raise ValueError(
                "cannot start a new stream while responses are outstanding from the previous one - consume or close "
                "get_chunks() before calling stream_files again"
            )
        self.check(file_stream_requests, device, memory_limit)
        ids = [request.id for request in file_stream_requests]
        try:
            catalogue = self.catalogue(file_stream_requests, _penstock.load_options(memory_limit), credentials)
        except PenstockError as error:
            # Callers expect what is wrong with files where they take what was read of them.
            self._chunks = failing(error)
        else:
            self._chunks = self._stream(catalogue, ids, self.device_str or "cpu")

    def check(self, requests: list[FileChunks], device: Any, memory_limit: int | None = None) -> None:
        """Takes the device, and refuses what cannot be streamed; see ``stream_files``."""
        if not self._entered:
            raise ValueError("Streamer not initialized")
        if not homogeneous_paths([request.path for request in requests]):
            raise RunaiStreamerInvalidInputException("Cannot stream files from multiple source types in parallel")
        self.device_str = _penstock.device_of(device)
        sizes = [size for request in requests for size in request.sizes]
        _penstock.check_memory_limit(max(sizes, default=0), memory_limit)

    @staticmethod
    def catalogue(requests: list[FileChunks], options: LoadOptions, credentials: S3Credentials | None) -> Checkpoint:
        """Ranges of files as tensors of bytes, called "file:range" by their numbers.

        Raises:
            PenstockError: a file cannot be opened, or ends before a range does.
        """
        wanted = [
            (
                os.fspath(request.path),
                [(offset, offset + size) for offset, size in zip(request.offsets, request.sizes, strict=True)],
            )
            for request in requests
        ]
        storage = core_options(_penstock.storage_options((path for path, _ in wanted), credentials))
        signed = signed_by(None, [path for path, _ in wanted], storage)
        return Checkpoint(Catalogue.of_ranges(wanted, options, storage, signed), options)

    @staticmethod
    def _stream(catalogue: Checkpoint, ids: list[int], device: str) -> Iterator[tuple[int, int, Any]]:
        with _penstock.as_value_errors():
            for name, tensor in catalogue.stream(device=_penstock.loads_to(device)):
                file, _, index = name.partition(":")
                yield ids[int(file)], int(index), tensor.to(device).view(1, -1)

    def get_chunks(self) -> Iterator[tuple[int, int, Any]]:
        """Yields ``(id of the file, index of the range, bytes)`` as ranges arrive; bytes are a tensor of shape (1, n).

        Raises:
            ValueError: outside of the context, or where a file cannot be opened or read; it says why.
        """
        if not self._entered:
            raise ValueError("Streamer not initialized")
        chunks = self._chunks
        try:
            yield from chunks or ()
        finally:
            # Whoever drops this late may drop it during the next stream.
            if self._chunks is chunks:
                self.close()

    def list_files(
        self,
        prefix: str,
        is_recursive: bool = True,
        allow_patterns: list[str] | None = None,
        ignore_patterns: list[str] | None = None,
    ) -> list[tuple[str, int]]:
        """(path, bytes) of what is under a prefix, of which patterns are shell patterns for the whole path.

        Raises:
            ValueError: where there is no such directory, or the store cannot be asked.
        """
        found = _below(prefix, is_recursive)
        return [
            (path, size)
            for path, size in found
            if (not allow_patterns or any(fnmatch(path, pattern) for pattern in allow_patterns))
            and not any(fnmatch(path, pattern) for pattern in ignore_patterns or [])
        ]


def failing(error: PenstockError) -> Iterator[tuple[int, int, Any]]:
    """A stream of which the first range cannot be had."""
    with _penstock.as_value_errors():
        raise error
    yield  # so that it fails when it is asked for the first range


def _below(prefix: str, recursive: bool) -> list[tuple[str, int]]:
    if is_object_storage(prefix):
        with _penstock.as_value_errors():
            options = _penstock.storage_options([prefix])
            try:
                return objects.list_files(prefix, recursive=recursive, storage_options=options)
            except LocationNotFoundError:
                return []
    if not os.path.exists(prefix):
        raise ValueError(f"Could not list {shown(prefix)!r}: there is no such directory")
    found = []
    for directory, folders, files in os.walk(prefix):
        found += [(path := os.path.join(directory, file), os.path.getsize(path)) for file in files]
        if not recursive:
            folders.clear()
    return sorted(found)
