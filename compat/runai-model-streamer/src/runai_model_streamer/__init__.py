"""The interface of ``runai_model_streamer`` over Penstock.

Programs that know that package load with Penstock when this one is installed in its place. The modules are where theirs
are, since programs import from them: ``safetensors_streamer``, ``file_streamer``, ``distributed_streamer``,
``s3_utils``. What Penstock is asked for is in ``_penstock`` alone.

Two things are stricter here. Every tensor is the caller's to keep, with ``owned=False`` too. And memory is bounded
by Penstock's read-ahead (512 MiB), not by 40 GB, unless ``RUNAI_STREAMER_MEMORY_LIMIT`` says otherwise.
"""

import logging
import os
import sys

from runai_model_streamer.distributed_streamer.distributed_streamer import DistributedStreamer
from runai_model_streamer.file_streamer.file_streamer import FileStreamer
from runai_model_streamer.file_streamer.requests_iterator import FileChunks
from runai_model_streamer.safetensors_streamer.safetensors_streamer import (
    ObjectStorageModel,
    SafetensorsStreamer,
    list_safetensors,
    pull_files,
)

__all__ = [
    "DistributedStreamer",
    "FileChunks",
    "FileStreamer",
    "ObjectStorageModel",
    "SafetensorsStreamer",
    "list_safetensors",
    "pull_files",
]


def _set_up_logging() -> None:
    """``RUNAI_STREAMER_LOG_LEVEL``, and ``RUNAI_STREAMER_LOG_TO_STDERR=1`` for a handler of its own."""
    logger = logging.getLogger(__name__)
    level = logging.getLevelName(os.environ.get("RUNAI_STREAMER_LOG_LEVEL", "INFO").upper())
    logger.setLevel(level if isinstance(level, int) else logging.INFO)
    has_own = any(getattr(handler, "penstock", False) for handler in logger.handlers)
    if os.environ.get("RUNAI_STREAMER_LOG_TO_STDERR") == "1" and not has_own:
        handler = logging.StreamHandler(sys.stderr)
        handler.penstock = True  # type: ignore[attr-defined]
        handler.setFormatter(logging.Formatter("%(asctime)s [%(levelname)s] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


_set_up_logging()
