"""safetensors: mapped files, copies of them, and its prefetching."""

from __future__ import annotations

import contextlib

from . import Load, Loader, Tensors, Use


def load_file(use: Use) -> Load:
    from safetensors.torch import load_file

    def load(files: list[str]) -> Tensors:
        tensors: Tensors = {}
        for file in files:
            tensors |= load_file(file, device=use.device)
            if use.device != "cpu":  # there, a mapped file has not been read yet
                use.arrived()
        return tensors

    return load


def clone(use: Use) -> Load:
    mapped = load_file(use)
    return lambda files: {name: tensor.clone() for name, tensor in mapped(files).items()}


def prefetch(use: Use) -> Load:
    from safetensors import safe_open

    def load(files: list[str]) -> Tensors:
        tensors: Tensors = {}
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(safe_open(file, framework="pt", device=use.device)) for file in files]
            for loader in [stack.enter_context(file.prefetch()) for file in opened]:
                tensors |= loader
        return tensors

    return load


LOADERS = {
    "safetensors": Loader("safetensors", load_file),
    "safetensors-clone": Loader("safetensors", clone),
    "safetensors-prefetch": Loader("safetensors", prefetch, cpu=False, since=(0, 9)),
}
