"""Byte ranges of files."""

from runai_model_streamer.file_streamer.file_streamer import FileStreamer
from runai_model_streamer.file_streamer.requests_iterator import FileChunks

__all__ = ["FileChunks", "FileStreamer"]
