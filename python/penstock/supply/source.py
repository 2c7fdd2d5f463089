"""What a lazy file asks of whatever delivers its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from penstock.selection import Selection


class TensorSource(Protocol):
    """Delivers tensors of one checkpoint. May be asked by several threads at once."""

    def take(self, name: str) -> Any:
        """The whole tensor."""

    def part(self, name: str, selection: Selection) -> Any:
        """A part of a tensor: integers, slices and an ellipsis that fit its shape."""

    def take_all(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Several tensors at once, or all."""

    def close(self) -> None:
        """Ends reading ahead. What was handed out stays."""
