"""A file, seen as the checkpoint of one component: names are the component's, tensors are parts of the file's.

What each tensor is, was worked out once, on lazy tensors: a stored tensor, rows of it, or what a function makes of one.
Reading goes through one plan, to the places that are given. Nothing is read twice, and nothing that is not wanted.

Promises what the pool asks of a checkpoint: names, shapes and dtypes without reading, an identity, loads in place, and
a stream in bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from penstock.checkpoint import Checkpoint
from penstock.frameworks.torch import DTYPE_NAMES, DTYPES, Torch
from penstock.loading import window_of
from penstock.parts import load_parts
from penstock.progress import ProgressOption, SharedProgress, progress_reporter
from penstock.recording.pending import Pending, PendingCopy
from penstock.recording.places import place_of, storage_address
from penstock.recording.sources import Value
from penstock.recording.statistics import Statistics


class ConvertedTensor(NamedTuple):
    """What is known of a tensor without reading it."""

    name: str
    dtype: str
    """As headers spell it: ``"BF16"``."""
    shape: tuple[int, ...]
    location: str

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class ConvertedCheckpoint(Mapping[str, ConvertedTensor]):
    """The tensors of one component."""

    def __init__(
        self, checkpoint: Checkpoint, values: Mapping[str, Value | torch.Tensor], what: tuple[Any, ...]
    ) -> None:
        """With what each tensor is: a value of the file, or one that is in no file; and what tells that conversion."""
        self._checkpoint, self._values, self._what = checkpoint, dict(values), what
        self._infos = {name: self._info(name, value) for name, value in values.items()}

    def _info(self, name: str, value: Value | torch.Tensor) -> ConvertedTensor:
        if isinstance(value, torch.Tensor):
            return ConvertedTensor(name, DTYPE_NAMES[value.dtype], tuple(value.shape), self.files[0][0])
        location = self._checkpoint[value.stored().name].location
        return ConvertedTensor(name, DTYPE_NAMES[value.dtype], tuple(value.meta.shape), location)

    def __getitem__(self, name: str) -> ConvertedTensor:
        return self._infos[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def offset_keys(self) -> list[str]:
        """Names of all tensors."""
        return list(self._infos)

    def metadata(self) -> dict[str, str] | None:
        """As of the file."""
        return self._checkpoint.metadata()

    @property
    def files(self) -> list[tuple[str, int]]:
        """As of the file."""
        return self._checkpoint.files

    @property
    def core(self) -> ConvertedCheckpoint:
        """What has the fingerprint."""
        return self

    def fingerprint(self) -> tuple[Any, ...]:
        """What tells its content without reading it: the file's version, and the conversion."""
        return (self._checkpoint.core.fingerprint(), *self._what)

    def load_into(
        self, destinations: Mapping[str, torch.Tensor], *, names: Sequence[str], progress: ProgressOption = None
    ) -> None:
        """Fills tensors of these names, as ``Checkpoint.load_into``.

        Raises:
            PenstockError: as that.
        """
        plan = Pending(Statistics())
        with torch.no_grad():
            for name in names:
                value, into = self._values[name], destinations[name]
                if isinstance(value, torch.Tensor):
                    into.copy_(value)
                elif into.numel():
                    plan.add_pending((storage_address(into), *place_of(into)), into, value)
        by_device: dict[str, list[PendingCopy]] = {}
        for copy in plan.take_pending():
            by_device.setdefault(copy.device, []).append(copy)
        reporter = progress_reporter(progress, sum(copy.nbytes for of in by_device.values() for copy in of))
        try:
            for device, of in by_device.items():
                load_parts(self._checkpoint, [copy.part for copy in of], device, SharedProgress(reporter))
                if device != "cpu":
                    # Other streams do not wait for this one, on which some of them were worked out.
                    torch.cuda.current_stream(torch.device(device)).synchronize()
        finally:
            reporter.close()

    def stream(
        self, names: Sequence[str], *, device: Any = "cpu", progress: ProgressOption = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(name, tensor)``, as ``Checkpoint.stream``: as many at once as the window has room for.

        Raises:
            PenstockError: as that.
        """
        left, window = list(reversed(names)), window_of(self._checkpoint.options)
        where = Torch().device(device)
        while left:
            made: dict[str, torch.Tensor] = {}
            room = window
            while left and (not made or self[left[-1]].nbytes <= room):
                name = left.pop()
                room -= self[name].nbytes
                made[name] = torch.empty(self[name].shape, dtype=self._values[name].dtype, device=where)
            self.load_into(made, names=list(made), progress=progress)
            for name in list(made):
                yield name, made.pop(name)
