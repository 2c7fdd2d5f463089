"""What a recorded load did: figures, and the names of what had to be done another way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock._native import LoadStats

_NAMED = 3
"""Tensors named in one line."""

_FIGURES = (
    *("tensors", "available_bytes", "bytes", "read_bytes", "seconds", "in_place", "converted", "eager", "fallback"),
    *("plans", "shared", "received_bytes"),
)


@dataclass
class Statistics:
    """Figures of a recorded load."""

    tensors: int = 0
    """Tensors handed out, lazy ones and eager ones."""
    available_bytes: int = 0
    """Bytes of those tensors."""
    in_place: int = 0
    """Pieces of memory that were filled in place."""
    converted: int = 0
    """Pieces that went by a tensor of their own: to another dtype, or to memory that is not contiguous."""
    eager: dict[str, str] = field(default_factory=dict)
    """Tensors that were read eagerly, by name: the first function that could not be recorded."""
    fallback: int = 0
    """Tensors that were handed out as eager ones: what a load without recording does."""
    plans: int = 0
    """How many plans the recording was executed as: one, unless what was recorded was needed before the end."""
    shared: int = 0
    """Tensors that all ranks read together."""
    received_bytes: int = 0
    """Bytes that other ranks had read and handed on."""
    loads: list[LoadStats] = field(default_factory=list)
    """Of every load, the core's own figures."""
    overlap_seconds: float = 0.0
    """Seconds that were counted more than once, because loads ran side by side."""
    notes: list[str] = field(default_factory=list)
    """What else was done differently than planned."""

    @property
    def bytes(self) -> int:
        """Bytes that were asked of the checkpoint."""
        return sum(load.bytes for load in self.loads)

    @property
    def read_bytes(self) -> int:
        """Bytes that left the storage; with gaps that were cheaper to read than to skip."""
        return sum(load.read_bytes for load in self.loads)

    @property
    def seconds(self) -> float:
        """Seconds during which loads ran."""
        return sum(load.seconds for load in self.loads) - self.overlap_seconds

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        loads = [load.as_dict() for load in self.loads]
        figures = {name: getattr(self, name) for name in _FIGURES}
        return {**figures, "eager": dict(self.eager), "notes": self.all_notes(), "loads": loads}

    def all_notes(self) -> list[str]:
        """Notes of the recording and of its loads, each once."""
        return list(dict.fromkeys([*self.notes, *(note for load in self.loads for note in load.notes)]))

    def __str__(self) -> str:
        share = f" ({self.bytes / self.available_bytes:.0%} of the checkpoint)" if self.available_bytes else ""
        rate = f", {self.bytes / self.seconds / 1e9:.2f} GB/s" if self.seconds else ""
        line = (
            f"{self.bytes / 1e9:.3f} GB{share} in {self.seconds:.2f} s{rate}: {self.in_place} tensors loaded in place, "
            f"{self.converted} converted, {len(self.eager)} eager, {self.fallback} fallback"
        )
        if self.shared:
            line += (
                f"; {self.shared} tensors read together with other ranks, {self.received_bytes / 1e9:.3f} GB from them"
            )
        return line + (f" (eager: {_some(self.eager)})" if self.eager else "")


def _some(eager: dict[str, str]) -> str:
    shown: Iterable[str] = (f"{name} for {function}" for name, function in list(eager.items())[:_NAMED])
    return ", ".join(shown) + (", …" if len(eager) > _NAMED else "")
