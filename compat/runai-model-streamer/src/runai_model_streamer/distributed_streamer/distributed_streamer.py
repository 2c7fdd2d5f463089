"""The interface's ``FileStreamer`` for several processes, each of which reads for itself here.

Engines that are asked for ``is_distributed`` name the device that tensors go to, which is what makes it fast. To read
each byte once for several processes there is ``--load-format penstock``.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from runai_model_streamer.file_streamer.file_streamer import FileStreamer
from runai_model_streamer.file_streamer.requests_iterator import FileChunks
from runai_model_streamer.s3_utils.s3_utils import S3Credentials


class DistributedStreamer:
    """Streams ranges of files. A context manager."""

    def __init__(self) -> None:
        self.file_streamer = FileStreamer()

    def __enter__(self) -> DistributedStreamer:
        self.file_streamer.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.file_streamer.__exit__(exc_type, exc_value, traceback)

    def stream_files(
        self,
        file_stream_requests: list[FileChunks],
        credentials: S3Credentials | None = None,
        device: Any = "cpu",
        is_distributed: bool = False,
        owned: bool = True,
    ) -> None:
        """As ``FileStreamer.stream_files``."""
        del is_distributed
        self.file_streamer.stream_files(file_stream_requests, credentials, device, owned=owned)

    def get_chunks(self) -> Iterator[tuple[int, int, Any]]:
        """As ``FileStreamer.get_chunks``."""
        return self.file_streamer.get_chunks()
