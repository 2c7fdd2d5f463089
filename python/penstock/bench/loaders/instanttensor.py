"""InstantTensor, by direct and by buffered reads. It loads to GPUs only."""

from __future__ import annotations

from . import Load, Loader, Tensors, Use


def opened(use: Use) -> Load:
    from instanttensor import safe_open

    def load(files: list[str]) -> Tensors:
        # It sorts the list that it is given.
        with safe_open(list(files), framework="pt", device=use.device) as file:
            return dict(file.tensors())

    return load


LOADERS = {
    "instanttensor": Loader("instanttensor", opened, cpu=False),
    "instanttensor-buffered": Loader("instanttensor", opened, {"INSTANTTENSOR_BACKEND": "BUFFERED"}, cpu=False),
}
