"""What is recorded of loads and leases, whatever it is recorded with.

Promises names, units and labels that are the same for Prometheus and OpenTelemetry. Knows neither: a ``Sink`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.watching import Ended, listen

if TYPE_CHECKING:
    from penstock.pool.figures import Stages

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
"""Upper bounds of the buckets of ``penstock_load_seconds``: an adapter to a checkpoint of a terabyte."""

ROUTES = {"cached": "cached_bytes", "direct": "direct_bytes", "buffered": "buffered_bytes", "network": "network_bytes"}
"""By the value of the label ``route``, the figure of ``LoadStats``."""


class Described(NamedTuple):
    """A metric: its name as Prometheus has it, what it is, its labels."""

    name: str
    help: str
    labels: tuple[str, ...]


LOAD_SECONDS = Described("penstock_load_seconds", "Loads, by how long they took", ("storage", "device", "outcome"))
BYTES = Described("penstock_bytes_total", "Bytes of tensors that were loaded", ("storage", "device"))
READ_BYTES = Described("penstock_read_bytes_total", "Bytes that left the store, by route", ("storage", "route"))
IN_PROGRESS = Described("penstock_loads_in_progress", "Loads under way", ("device",))
LEASE_SECONDS = Described("penstock_lease_seconds_total", "Where the time of leases of a model pool went", ("stage",))
LEASES = Described("penstock_leases_total", "Leases of a model pool that have ended", ())


class Sink(Protocol):
    """What keeps figures. May be called from several threads at once."""

    def load_took(self, seconds: float, labels: Mapping[str, str]) -> None:
        """Adds to ``LOAD_SECONDS``."""

    def add(self, metric: Described, amount: float, labels: Mapping[str, str]) -> None:
        """Adds to any other."""


class Metrics:
    """Metrics that are kept: see ``penstock.metrics.prometheus``."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._stop: Callable[[], None] | None = listen(self)

    def begun(self, device: str) -> None:
        """A load begins: for ``penstock.watching``."""
        self._sink.add(IN_PROGRESS, 1, {"device": device})

    def ended(self, load: Ended) -> None:
        """It has ended."""
        stats, sink = load.stats, self._sink
        storage = stats.storage_kind or "unknown"
        sink.add(IN_PROGRESS, -1, {"device": load.device})
        sink.load_took(stats.seconds, {"storage": storage, "device": load.device, "outcome": load.outcome})
        if load.outcome == "complete":
            sink.add(BYTES, stats.bytes, {"storage": storage, "device": load.device})
            for route, figure in ROUTES.items():
                if nbytes := getattr(stats, figure):
                    sink.add(READ_BYTES, nbytes, {"storage": storage, "route": route})

    def lease(self, model: str, stages: Stages) -> None:
        """For ``ModelPool(observe=metrics.lease)``: where the time of each lease went. The model's name is no label."""
        del model
        self._sink.add(LEASES, 1, {})
        for stage, seconds in asdict(stages).items():
            self._sink.add(LEASE_SECONDS, seconds, {"stage": stage})

    def close(self) -> None:
        """Counts no load that begins from now on. What was counted stays."""
        if self._stop is not None:
            self._stop()
            self._stop = None
