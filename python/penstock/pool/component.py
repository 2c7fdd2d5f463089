"""A component: tensors of a module that travel together, their master, and their copy on the device.

A component has one master and one copy, however many models use it. Modules are *bound* to it (``bound``): their
parameters and buffers are views of its slabs. Knows no budget and takes no lock: the pool calls it with its own held.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from penstock.pool.layout import Layout

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint
    from penstock.pool.bound import Bound
    from penstock.pool.device_slab import DeviceSlab
    from penstock.pool.overlay import Overlay

_numbers = itertools.count(1)
Watch = Callable[[int, int], object] | None
"""Told of bytes that have come, of how many; may raise to end the load."""


class Source(Protocol):
    """Where a component's tensors come from."""

    is_remote: bool

    def read(self, views: Mapping[int, torch.Tensor], watch: Watch) -> None:
        """Reads the tensors of these numbers to these; those that it does not hold are left as they are."""


class Component:
    """Tensors that travel together."""

    def __init__(self, name: str, layout: Layout, source: Source | None) -> None:
        self.name, self.layout, self.source = name, layout, source
        self.number = next(_numbers)
        self.host: torch.Tensor | None = None
        """The master, or None while it has to be fetched again."""
        self.slab: DeviceSlab | None = None
        """Its memory on the device."""
        self.kept: dict[int, torch.Tensor] = {}
        """Tensors that no checkpoint holds, by number: buffers as construction left them, and changed ones."""
        self.edits = 0
        """How often it was changed: what was compared with it holds for this number only."""
        self.writes = 0
        """How often a module's writes to one of its slabs were dealt with."""
        self.mixed = False
        """Whether what a module wrote, and was not dealt with yet, may be in both slabs."""
        self.bound: list[Bound] = []
        self.derived = 0
        """Components whose source this one is."""
        self.overlay: Overlay | None = None
        """What its copy on the device has beside the master: it is of one module then, and nothing's twin."""
        self.points: list[Any] = []
        """Work on the device that may still use its copy."""
        self._views: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def __repr__(self) -> str:
        return f"{self.name} ({self.number})"

    @property
    def nbytes(self) -> int:
        """Bytes of a slab of it."""
        return self.layout.nbytes

    @property
    def arrived(self) -> int:
        """How many of its bytes are on the device, from the start."""
        return 0 if self.slab is None else self.slab.filled

    @property
    def is_whole(self) -> bool:
        """Whether all of its bytes are on the device."""
        return self.slab is not None and self.slab.tensor is not None and self.arrived >= self.nbytes

    @property
    def on_device(self) -> bool:
        """Whether it can be used on the device: all of it is there, with its overlay."""
        return self.is_whole and not (self.overlay is not None and self.overlay.is_stale)

    def versions(self) -> tuple[int, list[list[int]]]:
        """What differs once a module has written to the master, whether that was dealt with or not."""
        return self.writes, [bound.versions() for bound in self.bound if bound.home == "host"]

    def master(self) -> torch.Tensor:
        """The master, which must be there."""
        if self.host is None:
            raise AssertionError(f"{self} has no master")
        return self.host

    def copy(self) -> torch.Tensor:
        """Its bytes on the device, which must be there."""
        if self.slab is None or self.slab.tensor is None:
            raise AssertionError(f"{self} is not on the device")
        return self.slab.tensor

    def views(self, home: Literal["host", "device"]) -> list[torch.Tensor]:
        """Its tensors in the master, or on the device. Made once for a slab: a view takes as long as 30 rebindings."""
        slab = self.master() if home == "host" else self.copy()
        known = self._views.get(home)
        if known is None or known[0] is not slab:
            known = self._views[home] = (slab, self.layout.views(slab))
        return known[1]

    def drop_host(self) -> None:
        """Lets the master go. Modules must not be bound to it."""
        self.host = None
        self._views.pop("host", None)

    def drop_device(self, keep: int = 0) -> None:
        """Lets the copy on the device go, behind the first ``keep`` bytes. Modules must not be bound to it."""
        if self.slab is not None:
            self.slab.evict(self.points, keep - keep % self.slab.granularity)
            if self.slab.tensor is None:
                self._views.pop("device", None)
        if not self.arrived:
            self.points = []

    def give_up_device(self) -> None:
        """Lets the copy on the device go for good, with its addresses."""
        if self.slab is not None:
            self.slab.close(self.points)
            self.slab, self.points = None, []
            self._views.pop("device", None)

    def read(self, views: Mapping[int, torch.Tensor], watch: Watch = None) -> None:
        """Brings tensors of these numbers from storage.

        Raises:
            PenstockError: what the checkpoint's load raises; the content of the views is undefined then.
        """
        if self.source is None:
            raise AssertionError(f"{self} comes from nowhere")
        self.source.read({number: view for number, view in views.items() if number not in self.kept}, watch)
        for number, view in views.items():
            if number in self.kept:
                view.copy_(self.kept[number])

    def is_equal(self, other: Component) -> bool:
        """Whether the other is of the same versions of the same files, with equal buffers: the same for sure."""
        one, two = self.source, other.source
        if not isinstance(one, Stored) or not isinstance(two, Stored) or self.layout != other.layout:
            return False
        if self.overlay is not None or other.overlay is not None:
            return False
        if self.edits or other.edits or one.identity != two.identity or self.kept.keys() != other.kept.keys():
            return False
        return all(same_bits(value, other.kept[number]) for number, value in self.kept.items())


class Stored:
    """A checkpoint, and which of its tensors goes where."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, int]) -> None:
        self.checkpoint, self.names = checkpoint, dict(names)
        self.is_remote = any("://" in location for location, _ in checkpoint.files)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells its content without reading it: the versions of its files, and which tensor goes where."""
        return self.checkpoint.core.fingerprint(), tuple(sorted(self.names.items()))

    def read(self, views: Mapping[int, torch.Tensor], watch: Watch) -> None:
        """Reads the tensors of these numbers to these.

        Raises:
            PenstockError: as ``Checkpoint.load_into``.
        """
        into = {name: views[number] for name, number in self.names.items() if number in views}
        if into:
            self.checkpoint.load_into(into, names=list(into), progress=watch)


class Derived:
    """Another component, which this one is a changed version of and which was adopted: its master never goes."""

    is_remote = False

    def __init__(self, of: Component) -> None:
        self.of = of

    def read(self, views: Mapping[int, torch.Tensor], watch: Watch) -> None:
        """Copies tensors from the other's master."""
        del watch
        for number, view in views.items():
            view.copy_(self.of.layout.places[number].of(self.of.master()))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits, wherever they are."""
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    if bits[0].device != bits[1].device:
        bits = [tensor.cpu() for tensor in bits]
    return equal_bytes(*bits)


def equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two spans of bytes are equal: as words of eight bytes, which are compared seven times as fast."""
    whole = one.numel() // 8 * 8
    aligned = not (one.storage_offset() % 8 or other.storage_offset() % 8)
    if not whole or not aligned:
        return torch.equal(one, other)
    words = torch.equal(one[:whole].view(torch.int64), other[:whole].view(torch.int64))
    return words and torch.equal(one[whole:], other[whole:])
