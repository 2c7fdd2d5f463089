"""What is to be read of a file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from penstock._native import shown
from runai_model_streamer import _penstock
from runai_model_streamer._penstock import RunaiStreamerMemoryLimitException

__all__ = ["FileChunks", "RunaiStreamerMemoryLimitException"]

RUNAI_STREAMER_MEMORY_LIMIT_ENV_VAR_NAME = _penstock.MEMORY_LIMIT
RUNAI_STREAMER_RING_BUFFERS_ENV_VAR_NAME = "RUNAI_STREAMER_RING_BUFFERS"
"""Not needed: buffers are not what tensors are made of."""
RUNAI_STREAMER_MAX_PADS_PER_BUFFER_ENV_VAR_NAME = "RUNAI_STREAMER_MAX_PADS_PER_BUFFER"
"""Not needed either."""


class FileChunks:
    """A file, and the ranges to read of it, in any order.

    Both shapes that the interface has had are taken: ``FileChunks(id, path, offsets, sizes)`` with a list of each, and
    the older ``FileChunks(id, path, offset, chunks)`` with one offset and the sizes of what follows it end to end.
    """

    def __init__(
        self,
        id: int,  # noqa: A002 - the interface's name
        path: str,
        offsets: Sequence[int] | int | None = None,
        sizes: Sequence[int] | None = None,
        *,
        offset: int | None = None,
        chunks: Sequence[int] | None = None,
    ) -> None:
        begin: Any = offset if offsets is None else offsets
        lengths = chunks if sizes is None else sizes
        if begin is None or lengths is None:
            raise TypeError("FileChunks needs offsets and sizes (or an offset and chunks)")
        self.id = id
        self.path = path
        self.sizes = list(lengths)
        if isinstance(begin, int):
            ends = list(accumulate(self.sizes, initial=begin))
            self.offsets = ends[:-1]
        else:
            self.offsets = list(begin)
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"offsets ({len(self.offsets)}) and sizes ({len(self.sizes)}) must be parallel")

    @staticmethod
    def contiguous(id: int, path: str, offset: int, sizes: list[int]) -> FileChunks:  # noqa: A002
        """Ranges that lie end to end from ``offset`` on."""
        return FileChunks(id, path, offset, sizes)

    @property
    def offset(self) -> int:
        """Where the first range begins, as the older interface calls it."""
        return self.offsets[0] if self.offsets else 0

    @property
    def chunks(self) -> list[int]:
        """The sizes, as the older interface calls them."""
        return self.sizes

    def total_size(self) -> int:
        """Bytes of all ranges."""
        return sum(self.sizes)

    def max_chunk_size(self) -> int:
        """Bytes of the largest range."""
        return max(self.sizes)

    def __repr__(self) -> str:
        return (
            f"FileChunks(id={self.id!r}, path={shown(self.path)!r}, num_ranges={len(self.sizes)}, "
            f"total_size={self.total_size()})"
        )
