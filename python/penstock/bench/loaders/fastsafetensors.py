"""fastsafetensors without GPUDirect Storage, by direct and by buffered reads."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
from pathlib import Path

from . import Load, Loader, Tensors, Use


def copy_files(use: Use) -> Load:
    from fastsafetensors import SafeTensorsFileLoader

    def load(files: list[str]) -> Tensors:
        loader = SafeTensorsFileLoader(None, use.device, nogds=True)
        try:
            loader.add_filenames({0: files})
            buffers = loader.copy_files_to_device()
            tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
            buffers.close()
        finally:
            loader.close()
        return tensors

    return load


def link_cuda_runtime(directory: Path) -> bool:
    """Puts ``libcudart.so`` into a directory, where only the wheel of torch brings it and under its versioned name.

    fastsafetensors opens the unversioned name, which a CUDA toolkit has. Without a toolkit it would not run at all.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcudart.so")
        return False
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for file in importlib.metadata.files(name) or ():
                if file.name.startswith("libcudart.so."):
                    (directory / "libcudart.so").symlink_to(file.locate())
                    return True
    return False


LOADERS = {
    "fastsafetensors": Loader("fastsafetensors", copy_files),
    "fastsafetensors-buffered": Loader("fastsafetensors", copy_files, {"FASTSAFETENSORS_ODIRECT": "0"}),
}
