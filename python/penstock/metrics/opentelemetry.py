"""Metrics of loads with ``opentelemetry-api``, which is imported by the call. The program chooses what exports them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock._native import __version__
from penstock.metrics import recorded
from penstock.metrics.recorded import Described, Metrics
from penstock.optional import required

if TYPE_CHECKING:
    from opentelemetry.metrics import Counter, MeterProvider, UpDownCounter


def opentelemetry(meter_provider: MeterProvider | None = None) -> Metrics:
    """Counts the process's loads in instruments of OpenTelemetry.

    They have the names and labels of ``penstock.metrics.prometheus``, without ``_total``: an exporter for Prometheus
    adds that.

    Args:
        meter_provider: by default the program's.

    Returns:
        What counts: ``close()`` ends it, ``lease`` is for ``ModelPool(observe=...)``. Each call counts anew.

    Raises:
        MissingDependencyError: where ``opentelemetry-api`` is not installed.
    """
    required("opentelemetry-api", by="penstock.metrics.opentelemetry")
    return Metrics(_Instruments(meter_provider))


class _Instruments:
    """The instruments of one meter."""

    def __init__(self, meter_provider: MeterProvider | None) -> None:
        from opentelemetry.metrics import get_meter

        meter = get_meter("penstock", __version__, meter_provider)
        took = recorded.LOAD_SECONDS
        self._took = meter.create_histogram(
            took.name, "s", took.help, explicit_bucket_boundaries_advisory=recorded.SECONDS
        )
        going = recorded.IN_PROGRESS
        units = {recorded.BYTES: "By", recorded.READ_BYTES: "By", recorded.LEASE_SECONDS: "s", recorded.LEASES: "1"}
        self._others: dict[Described, Counter | UpDownCounter] = {
            going: meter.create_up_down_counter(going.name, "1", going.help)
        }
        for metric, unit in units.items():
            self._others[metric] = meter.create_counter(metric.name.removesuffix("_total"), unit, metric.help)

    def load_took(self, seconds: float, labels: Mapping[str, str]) -> None:
        self._took.record(seconds, dict(labels))

    def add(self, metric: Described, amount: float, labels: Mapping[str, str]) -> None:
        self._others[metric].add(amount, dict(labels))
