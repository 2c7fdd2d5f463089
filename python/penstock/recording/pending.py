"""What is still to be read, and the places that are filled of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.frameworks.torch import Torch
from penstock.parts import Part
from penstock.recording.geometry import View
from penstock.recording.places import Places
from penstock.recording.sources import DeferredOp, DeferredRead, Value, computed

if TYPE_CHECKING:
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
        read: DeferredRead,
        device: str,
        copies: dict[Place, Copy],
        into: torch.Tensor | None,
        keeps: object = None,
    ) -> None:
        """``keeps`` is kept as long as this is, so that its ``id`` means it."""
        self.checkpoint = read.stored.checkpoint
        self.read = read
        self.device = device
        self._keeps = keeps
        self.copies = copies
        take = self.fill if into is None else None
        self.part = Part(read.stored.name, read.ranges, out=into, on_ready=take)

    @property
    def nbytes(self) -> int:
        return sum(copy.memory.numel() * copy.memory.element_size() for copy in self.copies.values())

    def fill(self, packed: torch.Tensor) -> None:
        """Makes the copies, of the box."""
        with torch.inference_mode(mode=False), torch.no_grad():
            value = self.read.make(packed)
            for copy in self.copies.values():
                copy.memory.copy_(copy.make(value))


class Pending:
    """All that is still to be read, by the places that it goes to.

    Attributes:
        copies: what is to be read, by number.
        places: the places in each memory, by its address.
    """

    def __init__(self, statistics: Statistics) -> None:
        self.copies: dict[int, PendingCopy] = {}
        self.places: dict[int, Places] = {}
        self._statistics = statistics
        self._written: dict[int, dict[Place, int]] = {}
        """By the address of a memory, which of ``copies`` goes exactly there."""
        self._deferred: dict[tuple[int, str], int] = {}
        """Which of ``copies`` is of a computed value, by that and the device."""
        self._numbers = count()

    def at(self, place: Place) -> int | None:
        """The number of what is to be read to exactly this place."""
        return self._written.get(place[0], {}).get(place)

    def of_memory(self, memory: int) -> dict[Place, PendingCopy]:
        """What is to be read to one memory."""
        return {place: self.copies[number] for place, number in self._written[memory].items()}

    def add_pending(self, place: Place, memory: torch.Tensor, value: Value) -> None:
        """A place gets a value."""
        number = self._numbered(place, memory, value)
        written = self._written.setdefault(place[0], {})
        if place not in written:
            self.places.setdefault(place[0], Places()).add(memory)
        written[place] = number

    def _numbered(self, place: Place, memory: torch.Tensor, value: Value) -> int:
        root, device, number = value.root, Torch().device(memory.device), next(self._numbers)
        if isinstance(root, DeferredOp):
            # Computed once, however many places its parts go to.
            number = self._deferred.setdefault((id(root), device), number)
            if number not in self.copies:
                self.copies[number] = PendingCopy(computed(root), device, {}, None, keeps=root)
            self.copies[number].copies[place] = Copy(memory, value.of_computed)
            self._statistics.converted += 1
            return number
        read = value.deferred_read()
        plain = read.is_plain and memory.shape == value.meta.shape and memory.is_contiguous()
        # Bytes are bytes: what was reinterpreted as another dtype goes there as it is.
        out = memory if plain and memory.dtype == value.meta.dtype else None
        self.copies[number] = PendingCopy(read, device, {place: Copy(memory, _as_it_is)}, out)
        self._count(self.copies[number], 1)
        return number

    def drop_pending(self, place: Place, number: int) -> None:
        """A place gets something else, which is added next."""
        copy = self.copies[number]
        self._count(copy, -1)
        del copy.copies[place]
        if not copy.copies:
            del self.copies[number]

    def filled(self, place: Place) -> None:
        """A place has been filled; all others of its memory are about to be."""
        address = place[0]
        number = self._written[address].pop(place)
        del self.copies[number].copies[place]
        if not self.copies[number].copies:
            del self.copies[number]
        if not self._written[address]:
            del self._written[address], self.places[address]

    def take_pending(self) -> list[PendingCopy]:
        """Everything, which is pending no more."""
        taken = list(self.copies.values())
        self.clear()
        self._statistics.plans += bool(taken)
        return taken

    def clear(self) -> None:
        """Nothing is to be read any more."""
        self.copies.clear()
        self.places.clear()
        self._written.clear()
        self._deferred.clear()

    def _count(self, copy: PendingCopy, by: int) -> None:
        if copy.part.out is None:
            self._statistics.converted += by
        else:
            self._statistics.in_place += by


def _as_it_is(value: torch.Tensor) -> torch.Tensor:
    return value
