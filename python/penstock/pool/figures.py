"""What a pool has done, and where its components are: for people, logs and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from penstock.units import size

if TYPE_CHECKING:
    from penstock.fp8.numbers import TensorError


@dataclass
class Stages:
    """Where the time of a lease went, in seconds. Each moment counts once, so the sum is how long it took."""

    queue: float = 0.0
    """Waiting for room on the device."""
    download: float = 0.0
    """Waiting for masters from a remote store."""
    read: float = 0.0
    """Waiting for masters from a disk."""
    switch: float = 0.0
    """Waiting for copies to the device."""
    compute: float = 0.0
    """The rest: what the program did within the lease. Work on the GPU counts as far as the program waited for it."""

    def add(self, stage: str, seconds: float) -> None:
        """Counts seconds to a stage."""
        setattr(self, stage, getattr(self, stage) + seconds)

    def add_all(self, other: Stages) -> None:
        """Counts those of another one."""
        for stage, seconds in asdict(other).items():
            self.add(stage, seconds)

    @property
    def total(self) -> float:
        """The sum."""
        return float(sum(asdict(self).values()))


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
    """Components that were copied to the device, or the part of them that was missing there."""
    copied_bytes: int = 0
    copy_seconds: float = 0.0
    resent_bytes: int = 0
    """Of tensors that were copied to the device again, as adapters that are merged into them changed."""
    adapters_bytes: int = 0
    """Of adapters in host memory, now."""
    adapters_budget: int = 0
    adapters_device_bytes: int = 0
    """Of adapters on the device, now, beside ``device_bytes``: those that are not merged."""
    adapters_read: int = 0
    """Adapters that were read from storage."""
    adapters_read_bytes: int = 0
    adapters_copied_bytes: int = 0
    """Of adapters that were copied to the device."""
    queue_seconds: float = 0.0
    """That requests waited for room."""
    evicted_from_device: int = 0
    """Components that left the device, or a part of them."""
    evicted_from_host: int = 0
    late_writes: int = 0
    """How often memory was found written to that its component had left; found with ``debug=True`` only."""
    ended: int = 0
    """Leases that have ended."""
    stages: Stages = field(default_factory=Stages)
    """Of these, the sums."""


class Residence(NamedTuple):
    """Where a component is, and why."""

    component: str
    nbytes: int
    on_host: bool
    device_bytes: int
    """Of these that are on the device, from its start."""
    used_by: tuple[str, ...]
    """Models of the pool that have it."""
    why: tuple[str, ...]
    """What happened to it last, newest first."""
    float8: int = 0
    """Linear layers whose weights are float8."""
    errors: Mapping[str, TensorError] = {}
    """How far these are from the checkpoint's, by the names there; of those that were converted, and read by now."""

    @property
    def on_device(self) -> bool:
        """Whether all of it is on the device."""
        return self.device_bytes == self.nbytes

    def __str__(self) -> str:
        where = ["device" if self.on_device else f"device ({size(self.device_bytes)})"] if self.device_bytes else []
        where += ["host"] if self.on_host else []
        shared = f", shared by {', '.join(self.used_by)}" if len(self.used_by) > 1 else ""
        return f"{self.component}: {size(self.nbytes)}, on {' and '.join(where) or 'storage only'}{shared}"

    def accuracy(self) -> list[str]:
        """A line about its float8 weights, if there are any."""
        if not self.float8:
            return []
        line = f"    float8 weights of {self.float8} layers"
        if self.errors:
            name, worst = max(self.errors.items(), key=lambda of: of[1].relative)
            line += f", at most {worst.relative:.2%} from the checkpoint's ({name})"
        return [line]


@dataclass
class Explanation:
    """Where the components of a model are, with the reasons; readable as text."""

    model: str
    components: list[Residence] = field(default_factory=list)
    adapters: dict[str, float] = field(default_factory=dict)
    """Those that are set, and their weights."""

    def __str__(self) -> str:
        lines = [self.model]
        lines += [f"  adapter {name}: {weight:g}" for name, weight in self.adapters.items()]
        for one in self.components:
            lines += [f"  {one}", *one.accuracy(), *(f"    {reason}" for reason in one.why)]
        return "\n".join(lines)
