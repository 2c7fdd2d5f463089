"""A ``FileStreamer`` with the interface for several processes.

Each process reads for itself: there is no collective, so none that can hang. What the first one has read of a file is
in the page cache for the others.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from runai_model_streamer.file_streamer.file_streamer import FileStreamer
from runai_model_streamer.file_streamer.requests_iterator import FileChunks
from runai_model_streamer.s3_utils.s3_utils import S3Credentials

logger = logging.getLogger(__name__)


class DistributedStreamer:
    """See the module. A context manager."""

    def __init__(self) -> None:
        self.file_streamer = FileStreamer()
        self.is_distributed = False

    def __enter__(self) -> DistributedStreamer:
        self.file_streamer.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.file_streamer.__exit__(exc_type, exc_value, traceback)

    def get_group_size(self) -> int:
        """How many processes there are: 1 where torch's process groups are not in use."""
        import torch.distributed

        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_world_size() if ready else 1

    def set_is_distributed(self, is_distributed: bool, device: str) -> None:
        """Takes note of what is wished for; each process reads for itself in any case.

        Raises:
            ValueError: for a ``RUNAI_STREAMER_DIST`` other than 0, 1 and auto.
        """
        del device
        wish = os.environ.get("RUNAI_STREAMER_DIST", "auto")
        if wish not in {"0", "1", "auto"}:
            raise ValueError(f"Invalid value for RUNAI_STREAMER_DIST: {wish}")
        if is_distributed and wish != "0" and self.get_group_size() > 1:
            logger.info("[RunAI Streamer][Distributed] each of %d processes reads for itself", self.get_group_size())
        self.is_distributed = False

    def stream_files(
        self,
        file_stream_requests: list[FileChunks],
        credentials: S3Credentials | None = None,
        device: Any = "cpu",
        is_distributed: bool = False,
        owned: bool = True,
    ) -> None:
        """As ``FileStreamer.stream_files``."""
        self.set_is_distributed(is_distributed, str(device))
        self.file_streamer.stream_files(file_stream_requests, credentials, device, owned=owned)

    def get_chunks(self) -> Iterator[tuple[int, int, Any]]:
        """As ``FileStreamer.get_chunks``."""
        return self.file_streamer.get_chunks()
