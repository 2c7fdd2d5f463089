"""Where the tensors of a module lie in one slab of memory, and views of them there.

Promises that tensors which share memory (tied, views of one storage) share it in the slab as well, with the strides
that they had; that a slab is at most 256 bytes a run longer than what is used; and that nothing is read of tensors
without memory (the meta device). Knows no device and copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from penstock.errors import DestinationError

ALIGNMENT = 256
"""Bytes to which a run of tensors is aligned: what CUDA aligns allocations to."""
_WITHIN = 16
"""Bytes of the storage to which the beginning of a run is rounded down, so that elements of every size stay aligned."""


class Place(NamedTuple):
    """Where a tensor lies in its slab."""

    offset: int
    """In bytes, of its first element."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""

    @property
    def nbytes(self) -> int:
        """From its first byte to the end of its last element."""
        return _span(self.shape, self.stride) * self.dtype.itemsize

    def of(self, slab: torch.Tensor) -> torch.Tensor:
        """The tensor at this place of a slab, which is one-dimensional and of bytes."""
        if not self.nbytes:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=slab.device)
        elements = self.elements(slab)
        return elements.as_strided(self.shape, self.stride, elements.storage_offset())

    def elements(self, slab: torch.Tensor) -> torch.Tensor:
        """All elements from its first one to its last one, in one dimension, those of gaps included."""
        return slab[self.offset : self.offset + self.nbytes].view(self.dtype)


class Layout(NamedTuple):
    """The places of tensors in the order that they were given in, and the bytes of the slab."""

    places: tuple[Place, ...]
    nbytes: int

    def views(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a slab of ``nbytes`` bytes."""
        return [place.of(slab) for place in self.places]


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """As ``Place.elements``, of a tensor where it is. Copied so, elements that overlap (``expand``) do so after it."""
    span = _span(tuple(tensor.shape), tuple(tensor.stride()))
    return tensor.detach().as_strided((span,), (1,), tensor.storage_offset())


class _Run:
    """Bytes of one storage that follow each other."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end, self.offset = start, end, 0


def layout_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> Layout:
    """Lays out named tensors, each once, in their order.

    Raises:
        DestinationError: for a tensor whose elements are not simply in memory: sparse, quantised, wrapper subclasses.
    """
    spans = [(_storage(name, tensor), *_bytes_of(tensor)) for name, tensor in tensors]
    runs: dict[int, list[_Run]] = {}
    for storage, start, end in sorted(set(spans), key=lambda span: span[1:]):
        of_storage = runs.setdefault(storage, [])
        if of_storage and start <= of_storage[-1].end:
            of_storage[-1].end = max(of_storage[-1].end, end)
        elif start < end:
            of_storage.append(_Run(start // _WITHIN * _WITHIN, end))
    places, nbytes = [], 0
    placed: set[int] = set()
    for (_, tensor), (storage, start, _) in zip(tensors, spans, strict=True):
        run = _containing(runs.get(storage, ()), start)
        offset = 0
        if run is not None and tensor.numel():
            if id(run) not in placed:
                placed.add(id(run))
                run.offset = nbytes
                nbytes += -(-(run.end - run.start) // ALIGNMENT) * ALIGNMENT
            offset = run.offset + start - run.start
        places.append(Place(offset, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())))
    return Layout(tuple(places), nbytes)


def _containing(runs: Iterable[_Run], start: int) -> _Run | None:
    return next((run for run in runs if run.start <= start < run.end), None)


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + _span(tuple(tensor.shape), tuple(tensor.stride())) * tensor.element_size()


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements of the storage from the first one to the last one."""
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))


def _storage(name: str, tensor: torch.Tensor) -> int:
    kind = type(tensor)
    plain = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not plain or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        cause = f"a {kind.__qualname__} of layout {tensor.layout} has no plain memory that could be moved"
        raise DestinationError(tensor=name, cause=cause, remedy="Keep this module out of the pool")
    return int(tensor.untyped_storage()._cdata)
