"""For tests of programs that stream from buckets: a directory in the place of the bucket."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlparse

from runai_model_streamer.s3_utils.s3_utils import S3Credentials, filter_allow, filter_ignore, is_gs_path, is_s3_path
from runai_model_streamer.safetensors_streamer.safetensors_streamer import SafetensorsStreamer, list_safetensors


class StreamerPatcher:
    """Gives stand-ins for the package's functions that read ``local_bucket_path`` in the place of any bucket."""

    def __init__(self, local_bucket_path: str) -> None:
        self.local_path = local_bucket_path

    def is_remote_path(self, path: str) -> bool:
        """Whether it is a path that is led to the directory."""
        return is_s3_path(path) or is_gs_path(path)

    def convert_remote_path_to_local_path(self, path: str) -> str:
        """``s3://bucket/key`` as a path in the directory; other paths as they are."""
        if not self.is_remote_path(path):
            return path
        return os.path.join(self.local_path, urlparse(path).path.lstrip("/"))

    def convert_local_path_to_mocked_remote_path(self, local_path_result: str, original_remote_path: str) -> str:
        """A path in the directory as a location in the bucket of ``original_remote_path``."""
        if not local_path_result.startswith(self.local_path):
            return local_path_result
        bucket = urlparse(original_remote_path)
        key = Path(os.path.relpath(local_path_result, self.local_path)).as_posix()
        return f"{bucket.scheme}://{bucket.netloc}/{key}"

    def shim_list_safetensors(self, path: str, s3_credentials: S3Credentials | None = None) -> list[str]:
        """For ``list_safetensors``."""
        found = list_safetensors(self.convert_remote_path_to_local_path(path), s3_credentials)
        return [self.convert_local_path_to_mocked_remote_path(file, path) for file in found]

    def shim_pull_files(
        self,
        model_path: str,
        dst: str,
        allow_pattern: list[str] | None = None,
        ignore_pattern: list[str] | None = None,
        s3_credentials: S3Credentials | None = None,
    ) -> None:
        """For ``pull_files``: copies, at any depth, what matches."""
        del s3_credentials
        if not self.is_remote_path(model_path):
            raise NotImplementedError("pull files is not implemented for file system paths")
        source = Path(self.convert_remote_path_to_local_path(model_path))
        names = sorted(path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file())
        names = filter_allow(names, allow_pattern) if allow_pattern else names
        for name in filter_ignore(names, ignore_pattern or []):
            target = Path(dst, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target)

    def create_mock_streamer(self, *args: Any, **kwargs: Any) -> MockSafetensorsStreamer:
        """For ``SafetensorsStreamer``."""
        del args, kwargs
        return MockSafetensorsStreamer(self)


class MockSafetensorsStreamer:
    """A ``SafetensorsStreamer`` whose buckets are a directory."""

    def __init__(self, patcher: StreamerPatcher) -> None:
        self.patcher = patcher
        self.original_streamer = SafetensorsStreamer()

    @property
    def files_to_tensors_metadata(self) -> dict[int, Any]:
        """As the streamer's."""
        return self.original_streamer.files_to_tensors_metadata

    def __enter__(self) -> MockSafetensorsStreamer:
        self.original_streamer.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.original_streamer.__exit__(exc_type, exc_value, traceback)

    def stream_file(self, path: str, *args: Any, **kwargs: Any) -> None:
        """As the streamer's."""
        self.original_streamer.stream_file(self.patcher.convert_remote_path_to_local_path(path), *args, **kwargs)

    def stream_files(self, paths: list[str], *args: Any, **kwargs: Any) -> None:
        """As the streamer's."""
        local = [self.patcher.convert_remote_path_to_local_path(path) for path in paths]
        self.original_streamer.stream_files(local, *args, **kwargs)

    def get_tensors(self) -> Iterator[tuple[str, Any]]:
        """As the streamer's."""
        return self.original_streamer.get_tensors()


StreamerPatcher.MockSafetensorsStreamer = MockSafetensorsStreamer  # type: ignore[attr-defined]
