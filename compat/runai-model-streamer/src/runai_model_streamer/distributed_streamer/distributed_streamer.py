"""A ``FileStreamer`` for several processes: each byte is read by one of them, and handed to the others.

Where that does not apply (see ``_ranks``) each process reads for itself. Where it does, all processes have to stream
the same, in the same order; what goes wrong in one is an error in all, which names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from penstock.errors import PenstockError
from penstock.integrations.shared.filling import in_short
from runai_model_streamer import _penstock
from runai_model_streamer.distributed_streamer import _ranks
from runai_model_streamer.distributed_streamer._shared_stream import MEMORY_BYTES, SharedSource, SharedStream
from runai_model_streamer.file_streamer.file_streamer import FileStreamer, failing
from runai_model_streamer.file_streamer.requests_iterator import FileChunks
from runai_model_streamer.s3_utils.s3_utils import S3Credentials

logger = logging.getLogger(__name__)

RUNAI_STREAMER_CUDA_ALIGNMENT_ENV_VAR = "RUNAI_STREAMER_CUDA_ALIGNMENT"
"""Not needed: every tensor has memory of its own, aligned as torch does it."""
_SHARE = "RUNAI_STREAMER_DIST_BUFFER_MIN_BYTESIZE"


class DistributedStreamer:
    """Streams what several processes read together, each its part. A context manager."""

    def __init__(self) -> None:
        self.file_streamer = FileStreamer()
        self.is_distributed = False
        self._ranks = _ranks.Ranks()
        self._shared: SharedStream | None = None
        self._chunks: Iterator[tuple[int, int, Any]] | None = None

    def __enter__(self) -> DistributedStreamer:
        self.file_streamer.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.end()
            self._ranks.close()
        finally:
            self.file_streamer.__exit__(exc_type, exc_value, traceback)

    def get_group_size(self) -> int:
        """How many processes there are: 1 where torch's process groups are not in use."""
        return _ranks.size()

    def set_is_distributed(self, is_distributed: bool, device: str) -> None:
        """Decides, in ``is_distributed``, whether the processes stream together.

        Raises:
            ValueError: for a ``RUNAI_STREAMER_DIST`` other than 0, 1 and auto.
        """
        self.is_distributed = _ranks.apply(is_distributed, device)

    # Streaming together

    def share(self, prepare: Callable[[], Sequence[SharedSource]]) -> SharedStream | None:
        """Has the processes agree on a stream; None where each had better read for itself.

        Args:
            prepare: what to stream. What it fails with is an error in all processes.

        Raises:
            PeerError: it failed in another process, or one of them streams something else, or is gone.
        """
        self.end()
        device = self.file_streamer.device_str or "cpu"
        peers = self._ranks.peers(device)
        try:
            stream = SharedStream(peers, prepare(), device, options=_penstock.load_options(), **_memory(peers.size))
        except Exception as error:
            peers.opt_out(in_short(error))
            self._ranks.close(orderly=False)
            raise
        try:
            if not stream.agree():
                logger.warning(
                    "[RunAI Streamer][Distributed] not enough free memory on a device: each process reads for itself"
                )
                return None
        except PenstockError:
            self._ranks.close(orderly=False)
            raise
        logger.info("[RunAI Streamer][Distributed] process %d of %d reads its share", peers.rank, peers.size)
        self._shared = stream
        return stream

    def end(self) -> None:
        """Ends what is being streamed; where it is not at its end, the other processes are told."""
        chunks, self._chunks = self._chunks, None
        if chunks is not None and hasattr(chunks, "close"):
            chunks.close()
        stream, self._shared = self._shared, None
        if stream is not None:
            stream.leave("what it streams was not taken")
            if stream.is_broken:
                self._ranks.close(orderly=False)

    # Ranges of files

    def stream_files(
        self,
        file_stream_requests: list[FileChunks],
        credentials: S3Credentials | None = None,
        device: Any = "cpu",
        is_distributed: bool = False,
        owned: bool = True,
    ) -> None:
        """As ``FileStreamer.stream_files``."""
        self.end()
        where = self.file_streamer.device_str = _penstock.device_of(device)
        self.set_is_distributed(is_distributed, where)
        if self.is_distributed:

            def prepare() -> list[SharedSource]:
                self.file_streamer.check(file_stream_requests, device)
                return _ranges(file_stream_requests, credentials)

            ids = [request.id for request in file_stream_requests]
            try:
                stream = self.share(prepare)
            except PenstockError as error:
                # Callers expect what is wrong with files where they take what was read of them.
                self._chunks = failing(error)
                return
            if stream is not None:
                self._chunks = _numbered(stream, ids)
                return
            self.is_distributed = False
        self.file_streamer.stream_files(file_stream_requests, credentials, device, owned=owned)

    def get_chunks(self) -> Iterator[tuple[int, int, Any]]:
        """As ``FileStreamer.get_chunks``; in the same order in all processes that stream together."""
        if not self.is_distributed:
            yield from self.file_streamer.get_chunks()
            return
        chunks = self._chunks
        try:
            yield from chunks or ()
        finally:
            # Whoever drops this late may drop it during the next stream.
            if self._chunks is chunks:
                self.end()


def _memory(ranks: int) -> dict[str, Any]:
    """How much of it a process takes: the limit is for all that read together."""
    limit = _penstock.limit()
    most = MEMORY_BYTES if limit is None or limit < 0 else min(MEMORY_BYTES, limit // ranks)
    return {"memory_bytes": most, "share_bytes": _penstock.number(_SHARE, least=0)}


def _ranges(requests: list[FileChunks], credentials: S3Credentials | None) -> list[SharedSource]:
    checkpoint = FileStreamer.catalogue(requests, _penstock.load_options(), credentials)
    return [SharedSource(checkpoint, checkpoint.offset_keys())]


def _numbered(stream: SharedStream, ids: list[int]) -> Iterator[tuple[int, int, Any]]:
    with _penstock.as_value_errors():
        for _, name, memory in stream.tensors():
            file, _, index = name.partition(":")
            yield ids[int(file)], int(index), memory.view(1, -1)
