"""Metrics of loads with ``prometheus_client``, which is imported by the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from penstock.metrics import recorded
from penstock.metrics.recorded import Described, Metrics
from penstock.optional import required

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_made: WeakKeyDictionary[Any, Metrics] = WeakKeyDictionary()


def prometheus(registry: CollectorRegistry | None = None) -> Metrics:
    """Counts the process's loads in a registry of ``prometheus_client``. A second call gives what the first made.

    ===================================  =========  ================================
    metric                               type       labels
    ===================================  =========  ================================
    ``penstock_load_seconds``            histogram  ``storage``, ``device``, ``outcome``
    ``penstock_bytes_total``             counter    ``storage``, ``device``
    ``penstock_read_bytes_total``        counter    ``storage``, ``route``
    ``penstock_loads_in_progress``       gauge      ``device``
    ``penstock_lease_seconds_total``     counter    ``stage``
    ``penstock_leases_total``            counter    none
    ===================================  =========  ================================

    Args:
        registry: by default the one that ``prometheus_client`` exports. ``PROMETHEUS_MULTIPROC_DIR`` is heeded, by it.

    Returns:
        What counts: ``close()`` ends it, ``lease`` is for ``ModelPool(observe=...)``.

    Raises:
        MissingDependencyError: where ``prometheus_client`` is not installed.
    """
    required("prometheus-client", by="penstock.metrics.prometheus")
    from prometheus_client import REGISTRY

    registry = REGISTRY if registry is None else registry
    if registry not in _made:
        _made[registry] = Metrics(_Registered(registry))
    return _made[registry]


class _Registered:
    """The metrics of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        took = recorded.LOAD_SECONDS
        self._took = Histogram(took.name, took.help, took.labels, buckets=recorded.SECONDS, registry=registry)
        going = recorded.IN_PROGRESS
        # Of several processes, the sum of those that live.
        gauge = Gauge(going.name, going.help, going.labels, registry=registry, multiprocess_mode="livesum")
        counted = (recorded.BYTES, recorded.READ_BYTES, recorded.LEASE_SECONDS, recorded.LEASES)
        self._others: dict[Described, Counter | Gauge] = {going: gauge} | {
            metric: Counter(metric.name, metric.help, metric.labels, registry=registry) for metric in counted
        }

    def load_took(self, seconds: float, labels: Mapping[str, str]) -> None:
        self._took.labels(**labels).observe(seconds)

    def add(self, metric: Described, amount: float, labels: Mapping[str, str]) -> None:
        found = self._others[metric]
        (found.labels(**labels) if labels else found).inc(amount)
