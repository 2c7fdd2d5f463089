"""What is still to be read, and the places that are filled of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from penstock.parts import Part
from penstock.recording.geometry import View
from penstock.recording.sources import Source

if TYPE_CHECKING:
    from penstock._native import LoadOptions
    from penstock.checkpoint import Checkpoint
    from penstock.progress import ProgressOption
    from penstock.recording.statistics import Statistics


class Copy(NamedTuple):
    """A place that is to be filled, held until then, and how to make its value of what was read."""

    memory: torch.Tensor
    make: Callable[[torch.Tensor], torch.Tensor]


Place = tuple[int, int, int, View]
"""The address of a memory, and a view of it."""


class PendingCopy:
    """Something that is still to be read, for one copy, or for all copies of parts of one computed value."""

    def __init__(
        self,
        source: Source,
        device: str,
        copies: dict[Place, Copy],
        into: torch.Tensor | None,
        keeps: object = None,
    ) -> None:
        """``keeps`` is kept as long as this is, so that its ``id`` means it."""
        self.checkpoint = source.stored.checkpoint
        self.source = source
        self.device = device
        self._keeps = keeps
        self.copies = copies
        take = self.fill if into is None else None
        self.part = Part(source.stored.name, source.ranges, out=into, on_ready=take)

    @property
    def nbytes(self) -> int:
        return sum(copy.memory.numel() * copy.memory.element_size() for copy in self.copies.values())

    def fill(self, packed: torch.Tensor) -> None:
        """Makes the copies, of the box."""
        with torch.inference_mode(mode=False), torch.no_grad():
            value = self.source.make(packed)
            for copy in self.copies.values():
                copy.memory.copy_(copy.make(value))


class Sharing(Protocol):
    """What a recorder asks of ranks that read together (``penstock.distributed.Sharing``)."""

    def read(
        self,
        checkpoints: Sequence[Checkpoint],
        writes: Sequence[PendingCopy],
        device: torch.device,
        statistics: Statistics,
        alone: Callable[..., None],
        *,
        progress: ProgressOption,
        options: LoadOptions | None,
    ) -> None:
        """Reads ``writes``, which are all that is left to read; ``alone`` reads some of them without the others."""

    def opt_out(self, why: str | BaseException) -> None:
        """Tells the other ranks that this one reads for itself, if they were not told anything yet."""
