"""Figures of a process's loads for Prometheus or OpenTelemetry, where a program asks for them.

::

    from prometheus_client import start_http_server
    import penstock.metrics

    metrics = penstock.metrics.prometheus()     # or opentelemetry(), with the program's MeterProvider
    start_http_server(9100)

Every load of the process counts from then on: those of engines and libraries too. Labels have few values each: the
class of the storage (``LoadStats.storage_kind``), the device, the outcome. No path, name or URL is one.
"""

from __future__ import annotations

from penstock.metrics.opentelemetry import opentelemetry
from penstock.metrics.prometheus import prometheus
from penstock.metrics.recorded import Metrics

__all__ = ["Metrics", "opentelemetry", "prometheus"]
