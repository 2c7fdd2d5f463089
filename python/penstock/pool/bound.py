"""A module whose tensors are a component's: rebound in place as the component moves.

Parameters stay the objects that optimisers, hooks and compiled code know: they get other memory (``tensor.data``), at
a quarter of a microsecond each. Only where a module changes between having memory and having none, torch wants other
objects. Knows no budget and takes no lock: the pool calls it with its own held.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.weak import WeakIdKeyDictionary

from penstock.errors import ConfigError
from penstock.frameworks.torch import has_version

if TYPE_CHECKING:
    from penstock.pool.component import Component

Home = Literal["host", "device"] | None
"""Whose memory a module has: the master's, that of the copy on the device, or none."""

_owners: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
"""For every tensor that a pool of this process has, which model it belongs to."""


def named_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a module, each once, in the order of its modules."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        found.setdefault(id(tensor), (name, tensor))
    return list(found.values())


@contextmanager
def plain_tensors() -> Iterator[None]:
    """For tensors that are made here to be used anywhere: none that belongs to the caller's inference mode or graph."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


class Bound:
    """The tensors of a module, in the order of its component's layout."""

    def __init__(self, owner: str, module: torch.nn.Module, component: Component) -> None:
        self.owner, self.module, self.component = owner, module, component
        self.home: Home = None
        self.leases = 0
        """That are open: while there is one, the module has the copy on the device as soon as that has arrived."""
        self.lasting = False
        """Whether its component's master may not go, as it was adopted."""
        self.points: list[Any] | None = None
        """Work on the device of leases that have ended, where there is more to it than its component: adapters."""
        self.tensors = [tensor for _, tensor in named_tensors(module)]
        numbers = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self._places: list[tuple[dict[str, Any], str, int]] = [
            (owned, name, numbers[id(tensor)])
            for part in module.modules()
            for owned in (part._parameters, part._buffers)
            for name, tensor in owned.items()
            if tensor is not None
        ]
        self._is_changed = False
        """Whether ``changed`` found any since they were bound."""
        self._seen: list[int] = []
        """Version counters, as they were when the tensors were bound."""

    def to(self, home: Home) -> None:
        """Gives the tensors the memory of their component there, or none, so that torch refuses their use."""
        if home is not None and self.home is not None and not self._is_changed:
            # All have memory, and are where they belong: a lease of a model that is there takes little else. That
            # leaves version counters as they are.
            with plain_tensors():
                for tensor, there in zip(self.tensors, self.component.views(home), strict=True):
                    tensor.data = there
        else:
            self._rebind(home)
        self.home = home

    def _rebind(self, home: Home) -> None:
        places = self.component.layout.places
        views: Sequence[torch.Tensor | None] = [None] * len(places) if home is None else self.component.views(home)
        with plain_tensors():
            for number, (tensor, view, place) in enumerate(zip(self.tensors, views, places, strict=True)):
                if view is not None and not tensor.is_meta:
                    tensor.data = view
                elif view is not None:
                    self._put(number, view)
                elif not tensor.is_meta:
                    without = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="meta")
                    self._put(number, without)
        for owned, name, number in self._places:
            owned[name] = self.tensors[number]
        self._is_changed = False
        self._seen = self.versions()

    def _put(self, number: int, memory: torch.Tensor) -> None:
        _owners.pop(self.tensors[number], None)
        self.tensors[number] = _like(self.tensors[number], memory)
        _owners[self.tensors[number]] = self.owner

    def versions(self) -> list[int]:
        """Numbers that differ after a write."""
        return _versions(self.tensors)

    def let_go(self) -> None:
        """Leaves the tensors to the module as they are."""
        for tensor in self.tensors:
            _owners.pop(tensor, None)

    def changed(self) -> dict[int, torch.Tensor]:
        """By number, tensors that were written to in place, or replaced by others, since they were bound.

        What was replaced by a tensor of another shape or dtype, or is gone, is the module's own from here on.
        """
        found = {
            number: tensor
            for number, (tensor, now, seen) in enumerate(
                zip(self.tensors, _versions(self.tensors), self._seen, strict=True)
            )
            if now != seen
        }
        stays = []
        for owned, name, number in self._places:
            now, place = owned.get(name), self.component.layout.places[number]
            if now is self.tensors[number]:
                stays.append((owned, name, number))
            elif now is not None and now.shape == place.shape and now.dtype == place.dtype and not now.is_meta:
                stays.append((owned, name, number))
                found[number] = now
        self._is_changed |= bool(found) or len(stays) < len(self._places)
        self._places = stays
        return found

    def aliased(self) -> set[int]:
        """Tensors by number that several places of the module have, or whose memory others share."""
        uses = Counter(number for _, _, number in self._places)
        found = {number for number, count in uses.items() if count > 1}
        spans = sorted((one.offset, one.offset + one.nbytes, n) for n, one in enumerate(self.component.layout.places))
        last, of = 0, -1
        for start, end, number in spans:
            if start < min(last, end):
                found |= {of, number}
            if end > last:
                last, of = end, number
        return found

    def is_changed(self) -> bool:
        """Whether there is anything in ``changed``."""
        if _versions(self.tensors) != self._seen:
            return True
        return any(owned.get(name) is not self.tensors[number] for owned, name, number in self._places)


_claiming = threading.Lock()


def _in_child() -> None:
    """A thread that is not in a forked child may have had it."""
    global _claiming  # noqa: PLW0603
    _claiming = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def claim(bounds: Sequence[Bound]) -> None:
    """Notes that the tensors of these modules are a pool's.

    Raises:
        ConfigError: where a pool has one of them already, or two of these modules have.
    """
    with _claiming:
        claimed: list[torch.Tensor] = []
        for bound in bounds:
            for tensor in bound.tensors:
                owner = _owners.get(tensor)
                if owner is not None:
                    for other in claimed:
                        del _owners[other]
                    cause = f"a tensor of {bound.owner} is one of {owner} too, and is moved with that already"
                    raise ConfigError(cause=cause, remedy="Give a pool each module once; modules that share no tensors")
                _owners[tensor] = bound.owner
                claimed.append(tensor)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [tensor._version if has_version(tensor) else 0 for tensor in tensors]


def _like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A tensor of that memory, which is a parameter where ``tensor`` is one, with its attributes."""
    # With a version counter of its own: a view shares that of all views of its slab.
    memory = memory.data
    if not isinstance(tensor, torch.nn.Parameter):
        return memory
    grad = tensor.requires_grad and (memory.is_floating_point() or memory.is_complex())
    made = torch.nn.Parameter(memory, requires_grad=grad)
    if type(tensor) is not torch.nn.Parameter:
        made.__class__ = type(tensor)
    made.__dict__.update(tensor.__dict__)
    return made
