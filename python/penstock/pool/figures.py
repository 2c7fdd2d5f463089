"""What a pool has done, and where its components are: for people, logs and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.units import size


@dataclass
class PoolStats:
    """Figures of a pool since it was made. Bytes and counts of components; seconds."""

    host_bytes: int = 0
    """Of masters, now."""
    host_budget: int = 0
    device_bytes: int = 0
    """Of copies on the device, now; those on their way included."""
    device_budget: int = 0
    leases: int = 0
    """Open now."""
    waiting: int = 0
    """Requests that wait for room now."""
    fetched: int = 0
    """Components whose master was read from storage."""
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0
    copied: int = 0
    """Components that were copied to the device."""
    copied_bytes: int = 0
    copy_seconds: float = 0.0
    queue_seconds: float = 0.0
    """That requests waited for room."""
    evicted_from_device: int = 0
    evicted_from_host: int = 0


class Residence(NamedTuple):
    """Where a component is, and why."""

    component: str
    nbytes: int
    on_host: bool
    on_device: bool
    used_by: tuple[str, ...]
    """Models of the pool that have it."""
    why: tuple[str, ...]
    """What happened to it last, newest first."""


@dataclass
class Explanation:
    """Where the components of a model are, with the reasons; readable as text."""

    model: str
    components: list[Residence] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [self.model]
        for one in self.components:
            where = [name for name, there in (("device", one.on_device), ("host", one.on_host)) if there]
            shared = f", shared by {', '.join(one.used_by)}" if len(one.used_by) > 1 else ""
            lines.append(f"  {one.component}: {size(one.nbytes)}, on {' and '.join(where) or 'storage only'}{shared}")
            lines.extend(f"    {reason}" for reason in one.why)
        return "\n".join(lines)
