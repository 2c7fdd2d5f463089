"""What headers of safetensors files say, in the shape that programs look at, and tensors made of ranges of bytes.

Programs that want part of a checkpoint only (the experts of one rank, a few layers at a time) read headers here, ask a
``FileStreamer`` or ``DistributedStreamer`` for the ranges that they chose, and make tensors of what comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

import penstock
from penstock.frameworks.torch import DTYPES
from runai_model_streamer import _penstock
from runai_model_streamer.file_streamer.file_streamer import homogeneous_paths
from runai_model_streamer.s3_utils.s3_utils import S3Credentials

safetensors_to_torch_dtype = {name: dtype for name, dtype in DTYPES.items() if name != "F4"}
"""safetensors' dtypes and the torch dtypes that tensors get. Programs change it: what it says counts."""
safetenors_to_torch_dtype = safetensors_to_torch_dtype
"""As versions before 0.15 spelt it."""


class Offsets:
    """Where a tensor's bytes lie, from the beginning of its file's data."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self.start, self.end = offsets

    def get_diff(self) -> int:
        """Bytes."""
        return self.end - self.start


class SafetensorMetadata:
    """One tensor of a header.

    Raises:
        ValueError: where shape and dtype do not make the bytes that the offsets reserve, or torch lacks the dtype.
    """

    def __init__(self, name: str, safetensorMetadata: dict[str, Any]) -> None:  # noqa: N803 - the interface's name
        self.name = name
        self.shape = list(safetensorMetadata["shape"])
        self.dtype = safetensorMetadata["dtype"]
        self.offsets = Offsets(safetensorMetadata["data_offsets"])
        expected = prod(self.shape) * self.get_element_size()
        if expected != self.get_bytesize():
            raise ValueError(
                f"Corrupted Tensor '{name}': Shape claims {expected} bytes ({self.shape} x {self.dtype}), "
                f"but offsets reserve {self.get_bytesize()} bytes."
            )

    def get_bytesize(self) -> int:
        """Bytes of the tensor."""
        return self.offsets.get_diff()

    def get_item_count(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)

    def get_element_size(self) -> int:
        """Bytes of an element."""
        return self.get_torch_dtype().itemsize

    def get_torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        dtype = safetensors_to_torch_dtype.get(self.dtype)
        if dtype is None:
            raise ValueError(f"Unsupported dtype '{self.dtype}' in tensor '{self.name}'")
        return dtype


class SafetensorsMetadata:
    """A file's header: where its data begins, its tensors in the order of their bytes, and how many those are."""

    def __init__(self, offset: int, tensors_metadata: list[SafetensorMetadata]) -> None:
        self.offset = offset
        self.tensors_metadata = tensors_metadata
        self.read_sizes = [tensor.get_bytesize() for tensor in tensors_metadata]

    @staticmethod
    def from_files(
        fs: object, filenames: list[str], s3_credentials: S3Credentials | None = None
    ) -> list[SafetensorsMetadata]:
        """The headers of files, read all at once. ``fs`` is not needed.

        Raises:
            ValueError: a file is absent or malformed; it says which, and how.
        """
        del fs
        return [
            SafetensorsMetadata(start, tensors) for start, tensors in headers(open_files(filenames, s3_credentials))
        ]


def open_files(paths: list[str], s3_credentials: S3Credentials | None = None) -> list[penstock.Checkpoint]:
    """The checkpoints of files: one, or one for each file where two files hold tensors of the same name, or where they
    are on stores of several kinds, each of which has options of its own.
    """
    config = _penstock.load_options()

    def opened(path: str | list[str]) -> penstock.Checkpoint:
        options = _penstock.storage_options([path] if isinstance(path, str) else path, s3_credentials)
        return penstock.open(path, storage_options=options, options=config)

    with _penstock.as_value_errors():
        if not paths:
            return []
        if not homogeneous_paths(paths):
            return [opened(path) for path in paths]
        try:
            together = opened(paths)
        except penstock.FormatError as error:
            if error.tensor is None or len(paths) == 1:
                raise
            return [opened(path) for path in paths]
        # A path may be given twice, or lead to another: then files and paths would not be in step.
        return [together] if len(together.files) == len(paths) else [opened(path) for path in paths]


def headers(checkpoints: list[penstock.Checkpoint]) -> list[tuple[int, list[SafetensorMetadata]]]:
    """For every file, where its data begins, and its tensors in the order of their bytes."""
    found = []
    for checkpoint in checkpoints:
        files: dict[str, list[Any]] = {location: [] for location, _ in checkpoint.files}
        for name in checkpoint.offset_keys():
            info = checkpoint[name]
            files[info.location].append(info)
        for infos in files.values():
            # The format has no gaps, so the first tensor begins where the data does.
            start = infos[0].byte_range[0] if infos else 0
            found.append((start, [_described(info, start) for info in infos]))
    return found


def _described(info: Any, start: int) -> SafetensorMetadata:
    first, end = info.byte_range
    entry = {"shape": info.shape, "dtype": info.dtype, "data_offsets": [first - start, end - start]}
    return SafetensorMetadata(info.name, entry)


def prepare_request(
    fs: object, paths: list[str], s3_credentials: S3Credentials | None = None
) -> list[tuple[int, list[SafetensorMetadata], list[int]]]:
    """For every file: where its data begins, its tensors, and their sizes in bytes."""
    files = SafetensorsMetadata.from_files(fs, paths, s3_credentials)
    return [(file.offset, file.tensors_metadata, file.read_sizes) for file in files]


def create_torch_tensor(buffer: Any, tensor_metadata: SafetensorMetadata) -> torch.Tensor:
    """The tensor that a range of bytes holds: the same memory, wherever its dtype can be read from that address.

    Args:
        buffer: what ``get_chunks`` gave; of a tensor without elements anything.
        tensor_metadata: what the header says of it.
    """
    dtype = tensor_metadata.get_torch_dtype()
    if tensor_metadata.get_item_count() == 0:
        return torch.empty(tensor_metadata.shape, dtype=dtype)
    memory = buffer.reshape(-1)
    if memory.data_ptr() % dtype.itemsize or memory.storage_offset() % dtype.itemsize:
        memory = memory.clone()
    return memory.view(dtype).view(tensor_metadata.shape)
