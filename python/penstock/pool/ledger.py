"""The books of a pool: bytes against a budget, who holds what, and what goes first. Pure arithmetic.

One ledger for host memory, one for the device. An entry is *held* while it may not go: leased, pinned, being filled.
On the device, the beginning of a component may be there without its end.
Promises that the bytes counted never exceed the budget, unless ``shrink`` made it smaller than what is held.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.errors import InsufficientMemoryError
from penstock.units import size


@dataclass(eq=False)
class Entry:
    """Bytes of one component in one memory."""

    component: Any
    nbytes: int
    """That are there, or have been given room."""
    whole: int
    """Of the component."""
    holds: int = 0
    """By how many it is held."""


_REMEMBERED = 4
"""Uses that are remembered of an entry."""


class Ledger:
    """Entries of one memory under one budget."""

    def __init__(self, memory: str, budget: int, time_to_return: Callable[[Any], float]) -> None:
        """``time_to_return`` says how many seconds it takes to bring a component back to this memory."""
        self.memory, self.budget = memory, budget
        self._time_to_return = time_to_return
        self._entries: dict[Any, Entry] = {}
        self._now = 0
        self._uses: dict[Any, list[int]] = {}
        """The last few requests that used a component, by number; also of those that were evicted."""

    @property
    def used(self) -> int:
        """Bytes of all entries."""
        return sum(entry.nbytes for entry in self._entries.values())

    @property
    def held(self) -> int:
        """Bytes of entries that may not go."""
        return sum(entry.nbytes for entry in self._entries.values() if entry.holds)

    def __contains__(self, component: Any) -> bool:
        return component in self._entries

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._entries))

    def hold(self, component: Any, nbytes: int) -> None:
        """Enters a component with all its bytes, or finds it, and holds it."""
        entry = self._entries.setdefault(component, Entry(component, 0, nbytes))
        entry.nbytes = nbytes
        entry.holds += 1

    def holds(self, component: Any) -> int:
        """By how many a component is held."""
        entry = self._entries.get(component)
        return 0 if entry is None else entry.holds

    def bytes_of(self, component: Any) -> int:
        """Bytes of a component that are there, or have been given room."""
        entry = self._entries.get(component)
        return 0 if entry is None else entry.nbytes

    def release(self, component: Any) -> None:
        """Takes a hold back. The entry stays until it is removed."""
        entry = self._entries[component]
        if not entry.holds:
            raise AssertionError(f"{component} is not held in {self.memory}")
        entry.holds -= 1

    def is_held(self, component: Any) -> bool:
        """Whether a component is there and may not go."""
        return self.holds(component) > 0

    def begin_request(self) -> None:
        """Counts requests, by which the time between uses is told."""
        self._now += 1

    def touch(self, component: Any) -> None:
        """Notes that the request that began last uses a component."""
        self._uses[component] = [*self._uses.get(component, ()), self._now][-_REMEMBERED:]

    def keep(self, component: Any, nbytes: int = 0) -> None:
        """Notes that of a component which nobody holds only so many bytes are left; without any, it is out."""
        entry = self._entries[component]
        if entry.holds:
            raise AssertionError(f"{component} is held in {self.memory}")
        entry.nbytes = nbytes
        if not nbytes:
            del self._entries[component]

    def forget(self, component: Any) -> None:
        """Removes a component, and what is known of its uses."""
        if component in self._entries:
            self.keep(component)
        self._uses.pop(component, None)

    def room_for(self, components: Iterable[tuple[Any, int]], workspace: int = 0) -> list[tuple[Any, int]] | None:
        """What has to go so that these can be held all together, beside ``workspace`` bytes that stay free.

        Returns:
            Components in the order in which they go, with how many of their first bytes may stay; None if all that
            could go is not enough.
        """
        wanted = dict(components)
        stays = self.used - sum(self._entries[one].nbytes for one in wanted if one in self._entries)
        going, over = self._going(stays + sum(wanted.values()) + workspace - self.budget, wanted)
        return going if over <= 0 else None

    def excess(self) -> list[tuple[Any, int]]:
        """What has to go to meet the budget, as far as it can."""
        return self._going(self.used - self.budget, ())[0]

    def _going(self, over: int, stay: Container[Any]) -> tuple[list[tuple[Any, int]], int]:
        chosen = []
        for component in self.first_to_go() if over > 0 else ():
            if over <= 0:
                break
            if component not in stay and self._entries[component].nbytes:
                chosen.append(component)
                over -= self._entries[component].nbytes
        going, spare = [], max(-over, 0)
        # Of what is worth most, as much may stay as is not needed.
        for component in reversed(chosen):
            keep = min(spare, self._entries[component].nbytes)
            spare -= keep
            if keep < self._entries[component].nbytes:
                going.append((component, keep))
        return going[::-1], over

    def first_to_go(self) -> list[Any]:
        """Components that nobody holds, the one whose absence would cost least first."""
        free = (entry for entry in self._entries.values() if not entry.holds)
        return [entry.component for entry in sorted(free, key=self._worth)]

    def check_fits(self, what: str, nbytes: int, workspace: int = 0) -> None:
        """Refuses what could not be held even alone.

        Raises:
            InsufficientMemoryError: saying how much there is.
        """
        if nbytes + workspace > self.budget:
            beside = f" and {size(workspace)} of workspace" if workspace else ""
            cause = f"{what} needs {size(nbytes)}{beside} of {self.memory}; the pool's budget is {size(self.budget)}"
            raise InsufficientMemoryError(cause=cause, remedy=f"Raise the pool's budget of {self.memory}")

    def _worth(self, entry: Entry) -> float:
        """What keeping an entry is worth, for each of its bytes: the time that it saves by how soon it is wanted again.

        Of what was used in turns, the one that was used last is wanted last. Evicting the least recently used would
        always evict what is wanted next.
        """
        seconds = self._time_to_return(entry.component)
        return seconds / max(entry.whole, 1) / (self._next_use(entry.component) - self._now)

    def _next_use(self, component: Any) -> float:
        """When it is expected to be wanted next: after the mean interval between its uses."""
        uses = self._uses.get(component, [0])
        last, intervals = uses[-1], len(uses) - 1
        expected = last + (last - uses[0]) / intervals if intervals else self._now
        # What is overdue, or was used once, is taken to be away for as long again.
        return expected if expected > self._now else self._now + (self._now - last) + 1
