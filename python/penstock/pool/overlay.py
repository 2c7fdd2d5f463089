"""What a component's copy on the device has beside its master: tensors to which something was added.

The master stays as it is. Whatever is to be changed is copied from there again first, so that taking something away is
exact, to the bit; tensors that nothing changes are not sent again. Knows neither what is added nor when it is wanted: a
component with an overlay that is stale is not usable, and is brought up to date by whoever brings it to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from penstock.pool.bound import plain_tensors

if TYPE_CHECKING:
    from penstock.pool.component import Component
    from penstock.pool.memory import Memory

Target = tuple[torch.Tensor, Any]
"""A tensor on the device, as in the master, and what is to be added to it."""
_UNKNOWN = object()
"""What a tensor has that could not be finished."""


class Overlay:
    """What is added to tensors of one component, by number."""

    def __init__(self, add: Callable[[Mapping[int, Target]], None]) -> None:
        """``add`` adds to tensors of the device what is wanted of them. It is called on the stream of copies."""
        self._add = add
        self._wanted: dict[int, Hashable] = {}
        self._there: dict[int, Hashable] = {}
        self.is_stale = False
        """Whether the copy on the device, where there is one, is not as wanted."""

    @property
    def is_empty(self) -> bool:
        """Whether the copy is that of the master, and is to be."""
        return not self._wanted and not self._there

    @property
    def touches_copy(self) -> bool:
        """Whether tensors of the copy on the device differ from the master's."""
        return bool(self._there)

    @property
    def wanted(self) -> Mapping[int, Hashable]:
        """What is to be added to which tensors."""
        return self._wanted

    # With the pool's lock held, and while the component does not move

    def want(self, wanted: Mapping[int, Hashable]) -> None:
        """Changes what is to be added."""
        self._wanted = dict(wanted)
        self._settle()

    def overwritten(self, number: int, *, as_it_is: bool) -> None:
        """Notes that a tensor of the copy was written to from outside: ``as_it_is``, nothing is added to it again."""
        self._there.pop(number, None)
        if as_it_is:
            self._wanted.pop(number, None)
        self._settle()

    # In the thread that moves the component, without the lock

    def refilled(self, component: Component, start: int) -> None:
        """Notes that the copy is that of the master from this byte on."""
        there: dict[int, Hashable] = {}
        for number, one in self._there.items():
            place = component.layout.places[number]
            if place.offset < start:
                # Of a tensor that this byte is in, the beginning still has what was added.
                there[number] = one if place.offset + place.nbytes <= start else _UNKNOWN
        self._there = there
        self._settle()

    def apply(self, component: Component, memory: Memory) -> int:
        """Brings the copy on the device up to date. Returns the bytes that were sent again.

        Raises:
            Exception: what adding failed with, or reading from storage. The overlay is stale then.
        """
        stale = [n for n in {**self._there, **self._wanted} if self._there.get(n) != self._wanted.get(n)]
        restored = [n for n in stale if n in self._there]
        with plain_tensors(), memory.working(component.points):
            views = component.views("device")
            self._there.update((n, _UNKNOWN) for n in stale)
            self._settle()
            _restore(component, restored, memory)
            self._add({n: (views[n], self._wanted[n]) for n in stale if n in self._wanted})
        for number in stale:
            if number in self._wanted:
                self._there[number] = self._wanted[number]
            else:
                del self._there[number]
        self._settle()
        return sum(component.layout.places[n].nbytes for n in restored)

    def _settle(self) -> None:
        self.is_stale = self._there != self._wanted


def _restore(component: Component, numbers: list[int], memory: Memory) -> None:
    """Has tensors of the copy be the master's, or what storage holds where there is no master."""
    there = component.views("device")
    if component.host is not None:
        masters = component.views("host")
        for number in numbers:
            there[number].copy_(masters[number], non_blocking=True)
    elif numbers:
        # A load copies on streams of its own.
        memory.finish()
        component.read({number: there[number] for number in numbers})
