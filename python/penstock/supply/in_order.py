"""Tensors for a consumer who may take one, all of them in order, or any: ``safe_open`` with memory of its own.

A tensor that is asked for alone costs its own bytes. Whoever then asks for its successor, by name or by place in the
file, is taken to go on so, and gets a ``Supply`` that reads ahead in that order. What it holds is bounded by one group.
Where the order breaks off, tensors are loaded one by one again; nothing is lost by having been read too early.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from penstock.errors import (
    InsufficientMemoryError,
    LoadCancelledError,
    MissingDependencyError,
    PenstockError,
    SelectionError,
)
from penstock.supply.own_process import OwnProcess
from penstock.supply.streamed import GROUP_BYTES, Supply, groups_of

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint
    from penstock.selection import Selection


_OF_OTHERS = (LoadCancelledError, SelectionError, MissingDependencyError, InsufficientMemoryError)
"""What reading ahead may fail with though nothing is wrong with the tensor that was asked for: another thread ended it,
the library lacks the dtype of another tensor, or there is memory for this one only. It is then read by itself."""


class InOrder(OwnProcess):
    """Hands out tensors of a checkpoint, each in memory of its own. May be asked by several threads at once.

    Args:
        checkpoint: whose tensors.
        framework, device: as for ``Checkpoint.load``.
    """

    _last: str | None
    _supply: Supply | None

    def __init__(self, checkpoint: Checkpoint, framework: str = "pt", device: Any = "cpu") -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._framework = framework
        self._device = device
        self._closed = False
        self._orders: list[tuple[list[str], dict[str, int]]] = []

    def take(self, name: str) -> Any:
        """The whole tensor, which is the caller's."""
        supply = self._supply_for(name)
        if supply is not None:
            try:
                return supply.take(name)
            except _OF_OTHERS:
                pass
            except PenstockError as error:
                if error.tensor in {None, name}:
                    raise
        return self.part(name, ...)

    def part(self, name: str, selection: Selection) -> Any:
        """A part of a tensor, of which nothing else is read."""
        return self._checkpoint.get_tensor(name, selection, device=self._device, framework=self._framework)

    def take_all(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Several tensors by one load, or all."""
        return self._checkpoint.load(names, device=self._device, framework=self._framework)

    def close(self) -> None:
        """Ends reading ahead. What is asked for later is read by itself."""
        with self._locked():
            self._closed = True
            supply, self._supply = self._supply, None
        if supply is not None:
            supply.close()

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._last = self._supply = None

    def _supply_for(self, name: str) -> Supply | None:
        """What reads ahead and has this tensor next; None where it is to be read by itself."""
        with self._locked():
            last, self._last = self._last, name
            if self._supply is not None and (self._supply.failure is not None or self._supply.is_idle(name)):
                # What failed is tried again by whoever asks again.
                self._supply.close()
                self._supply = None
            if self._supply is not None:
                return self._supply if self._supply.offers(name) else None
            if last is None or self._closed:
                return None
            for names, position in self._sequences():
                if position[name] == position[last] + 1:
                    groups = groups_of(self._checkpoint, names[position[name] :], GROUP_BYTES)
                    self._supply = Supply(self._checkpoint, groups, self._device, framework=self._framework)
                    break
            return self._supply

    def _sequences(self) -> list[tuple[list[str], dict[str, int]]]:
        if not self._orders:
            orders = [list(self._checkpoint), self._checkpoint.offset_keys()]
            self._orders = [(names, {name: at for at, name in enumerate(names)}) for names in orders]
        return self._orders
