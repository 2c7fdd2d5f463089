"""Tensors of safetensors files, streamed; listings; models brought from object stores."""

from __future__ import annotations

import fcntl
import glob
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import IO, Any

import penstock
from penstock._native import shown
from penstock.integrations.shared import objects
from runai_model_streamer import _penstock
from runai_model_streamer.distributed_streamer._shared_stream import SharedSource, SharedStream
from runai_model_streamer.distributed_streamer.distributed_streamer import DistributedStreamer
from runai_model_streamer.s3_utils.s3_utils import S3Credentials, is_object_storage
from runai_model_streamer.safetensors_streamer import safetensors_pytorch

logger = logging.getLogger(__name__)

SAFETENSORS_PATTERN = "*.safetensors"


def list_safetensors(path: str, s3_credentials: S3Credentials | None = None) -> list[str]:
    """The safetensors files directly in a directory or under a prefix, with their full paths or URLs."""
    if not is_object_storage(path):
        return glob.glob(os.path.join(path, SAFETENSORS_PATTERN))
    with _penstock.as_value_errors():
        try:
            return objects.list_safetensors(path, _penstock.storage_options([path], s3_credentials))
        except penstock.LocationNotFoundError:
            return []


def pull_files(
    model_path: str,
    dst: str,
    allow_pattern: list[str] | None = None,
    ignore_pattern: list[str] | None = None,
    s3_credentials: S3Credentials | None = None,
) -> None:
    """Brings the objects under a prefix to a directory.

    Raises:
        NotImplementedError: for a path that is not on an object store.
        ValueError: where listing or reading fails.
    """
    if not is_object_storage(model_path):
        raise NotImplementedError("pull files is not implemented for file system paths")
    with _penstock.as_value_errors():
        options = _penstock.storage_options([model_path], s3_credentials)
        objects.pull(model_path, dst, allow_pattern, ignore_pattern, options)


class ObjectStorageModel:
    """A model's files, brought from an object store to a directory by one of several processes.

    The first process to come brings them, the others wait for its lock and find the sentinel that says they are
    complete. After an error within the context there is no sentinel: the next process begins anew. The lock is beside
    the directory, and is between processes of one machine.

    Raises:
        ValueError: for a path that is not on an object store.
    """

    SENTINEL_NAME = ".runai_complete"

    def __init__(self, model_path: str, dst: str, s3_credentials: S3Credentials | None = None) -> None:
        if not is_object_storage(model_path):
            raise ValueError(
                f"model_path {shown(model_path)!r} is not a supported object storage path (expected s3://, gs://, or az://)"
            )
        self.dir = dst.rstrip("/") or "/"
        self._model_path = model_path.rstrip("/") + "/"
        self._credentials = s3_credentials
        self._sentinel = os.path.join(self.dir, self.SENTINEL_NAME)
        self._lock: IO[str] | None = open(self.dir + ".lock", "a")  # noqa: SIM115 - held until the end of the context
        try:
            self._skip = self._wait()
            if not self._skip:
                shutil.rmtree(self.dir, ignore_errors=True)
                os.makedirs(self.dir, exist_ok=True)
        except BaseException:
            self._release()
            raise

    def _wait(self) -> bool:
        """Whether the files are there. If not, this process holds the lock alone."""
        if self._lock is None:
            raise ValueError("the context has ended")
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        if os.path.exists(self._sentinel):
            return True
        # Two that hold a shared lock and both wish for it alone would wait for each other: it is let go in between.
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        if not os.path.exists(self._sentinel):
            return False
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        return True

    def pull_files(self, allow_pattern: list[str] | None = None, ignore_pattern: list[str] | None = None) -> None:
        """Brings files whose names match; nothing where another process has."""
        if not self._skip:
            pull_files(self._model_path, self.dir, allow_pattern, ignore_pattern, self._credentials)

    def _release(self) -> None:
        lock, self._lock = getattr(self, "_lock", None), None
        if lock is not None:
            lock.close()  # which unlocks it

    def __enter__(self) -> ObjectStorageModel:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            if exc_type is None and not self._skip:
                if not any(name != self.SENTINEL_NAME for name in os.listdir(self.dir)):
                    raise RuntimeError(
                        f"No files were downloaded to {self.dir!r} - verify that the model path is correct"
                    )
                try:
                    with open(self._sentinel, "w"):
                        pass
                except OSError as error:
                    raise RuntimeError(f"Failed to write download sentinel {self._sentinel!r}: {error}") from error
        finally:
            self._release()
        return False

    def __del__(self) -> None:
        self._release()


class SafetensorsStreamer:
    """Streams tensors of safetensors files in the order in which they arrive. A context manager."""

    def __init__(self) -> None:
        self.file_streamer = DistributedStreamer()
        self.files_to_tensors_metadata: dict[int, list[safetensors_pytorch.SafetensorMetadata]] = {}
        self.total_size = 0
        self.device_str: str | None = None
        self.start_time: float | None = None
        self._streams: list[Iterator[tuple[str, Any]]] = []

    def __enter__(self) -> SafetensorsStreamer:
        self.file_streamer.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()
        self.file_streamer.__exit__(exc_type, exc_value, traceback)

    def _close(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            if hasattr(stream, "close"):
                stream.close()
        self.file_streamer.end()

    def stream_file(
        self,
        path: str,
        s3_credentials: S3Credentials | None = None,
        device: Any = "cpu",
        is_distributed: bool = False,
        tensor_names: Collection[str] | None = None,
        owned: bool = True,
    ) -> None:
        """As ``stream_files``, for one file."""
        self.stream_files([path], s3_credentials, device, is_distributed, tensor_names, owned)

    def stream_files(
        self,
        paths: list[str],
        s3_credentials: S3Credentials | None = None,
        device: Any = "cpu",
        is_distributed: bool = False,
        tensor_names: Collection[str] | None = None,
        owned: bool = True,
    ) -> None:
        """Reads headers, and begins to stream; ``get_tensors`` gives the tensors.

        Args:
            paths: files, or URLs of objects.
            s3_credentials: for this call.
            device: where tensors go, straight from the storage where it is a CUDA device.
            is_distributed: whether all processes stream this together, each byte read by one of them; where
                ``DistributedStreamer`` can do that.
            tensor_names: only these; what lies between them is not read.
            owned: not needed: every tensor is the caller's to keep.

        Raises:
            ValueError: for names that no file holds or several do, files that are absent or malformed, unknown dtypes.
            RunaiStreamerMemoryLimitException: for a limit smaller than the largest tensor.
            In all processes that stream together, whichever it is wrong in.
        """
        del owned
        self._close()
        self.device_str = self.file_streamer.file_streamer.device_str = _penstock.device_of(device)
        self.file_streamer.set_is_distributed(is_distributed, self.device_str)
        self.start_time = time.perf_counter()
        sources: list[SharedSource] = []

        def prepare() -> list[SharedSource]:
            sources.extend(self._sources([os.fspath(path) for path in paths], s3_credentials, tensor_names))
            return sources

        if self.file_streamer.is_distributed:
            with _penstock.as_value_errors():
                stream = self.file_streamer.share(prepare)
            if stream is not None:
                self._streams.append(self._shared(stream, sources))
                return
        else:
            prepare()
        self._streams.extend(self._stream(*source) for source in sources)

    def _sources(
        self, paths: list[str], credentials: S3Credentials | None, tensor_names: Collection[str] | None
    ) -> list[SharedSource]:
        """What is to be streamed; what ``files_to_tensors_metadata`` says is that."""
        if isinstance(tensor_names, str):
            raise ValueError("tensor_names must be a collection of names, not a single str")  # noqa: TRY004
        if tensor_names is not None and not tensor_names:
            raise ValueError("tensor_names must not be empty - pass None to load every tensor")
        checkpoints = safetensors_pytorch.open_files(paths, credentials)
        files = [tensors for _, tensors in safetensors_pytorch.headers(checkpoints)]
        if tensor_names is not None:
            wanted = frozenset(tensor_names)
            files = [[tensor for tensor in tensors if tensor.name in wanted] for tensors in files]
            _check_names(wanted, files)
        self.files_to_tensors_metadata = dict(enumerate(files))
        sizes = [tensor.get_bytesize() for tensors in files for tensor in tensors]
        self.total_size = sum(sizes)
        _penstock.check_memory_limit(max(sizes, default=0))
        held = {tensor.name for tensors in files for tensor in tensors}
        kept = [
            SharedSource(checkpoint, [name for name in checkpoint.offset_keys() if name in held])
            for checkpoint in checkpoints
        ]
        return [source for source in kept if source.names]

    def _stream(self, checkpoint: penstock.Checkpoint, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        device = self.device_str or "cpu"
        with _penstock.as_value_errors():
            for name, tensor in checkpoint.stream(names, device=_penstock.loads_to(device)):
                yield name, _as_told(_aligned(tensor), checkpoint[name].dtype).to(device)

    @staticmethod
    def _shared(stream: SharedStream, sources: Sequence[SharedSource]) -> Iterator[tuple[str, Any]]:
        with _penstock.as_value_errors():
            for number, name, memory in stream.tensors():
                info = sources[number].checkpoint[name]
                yield name, memory.view(safetensors_pytorch.safetensors_to_torch_dtype[info.dtype]).view(info.shape)

    def _chosen(self) -> Iterator[tuple[str, Any]]:
        for file, index, memory in self.file_streamer.get_chunks():
            tensor = self.files_to_tensors_metadata[file][index]
            yield tensor.name, safetensors_pytorch.create_torch_tensor(memory, tensor)

    def get_tensors(self) -> Iterator[tuple[str, Any]]:
        """Yields ``(name, tensor)`` as tensors arrive. Each is the caller's to keep.

        Programs that choose ranges themselves ask ``file_streamer.stream_files`` for them, and say in
        ``files_to_tensors_metadata`` which tensor each range of each file is.

        Raises:
            ValueError: where reading fails; it says which object and tensor, why, and what to do.
        """
        if not self._streams:
            self._streams.append(self._chosen())
        streams = self._streams
        try:
            while streams:
                yield from streams[0]
                streams.pop(0)
        finally:
            # Whoever drops this late may drop it during the next stream.
            if self._streams is streams:
                self._close()
        self._log_throughput()

    def _log_throughput(self) -> None:
        if self.start_time is None:
            return
        seconds = time.perf_counter() - self.start_time
        gib = self.total_size / 2**30
        logger.info(
            "[RunAI Streamer] Overall time to stream %.1f GiB of all files to %s: %.2fs, %.1f GiB/s",
            gib,
            self.device_str,
            seconds,
            gib / seconds if seconds > 0 else 0.0,
        )


def _aligned(tensor: Any) -> Any:
    """The tensor where its dtype can be read from: the format lets one lie at any address of a file."""
    return tensor.clone() if tensor.numel() and tensor.data_ptr() % tensor.element_size() else tensor


def _as_told(tensor: Any, dtype: str) -> Any:
    """The tensor in the dtype that ``safetensors_to_torch_dtype`` says, should a program have changed that."""
    told = safetensors_pytorch.safetensors_to_torch_dtype.get(dtype, tensor.dtype)
    return tensor if tensor.dtype == told else tensor.view(told)


def _check_names(wanted: frozenset[str], files: list[list[safetensors_pytorch.SafetensorMetadata]]) -> None:
    counts = Counter(tensor.name for tensors in files for tensor in tensors)
    if missing := sorted(wanted - set(counts)):
        raise ValueError(f"tensor_names not found in checkpoint: {missing}")
    if several := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(f"tensor_names requested tensors that appear in more than one file: {several}")
