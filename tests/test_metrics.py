"""``penstock.metrics`` with the real libraries: what a scrape of the process shows of its loads."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from conftest import Raw, raw_bytes, write_raw
from penstock import metrics, watching

prometheus_client = pytest.importorskip("prometheus_client")

NBYTES = 6 * 200 * 100 * 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {f"weight.{n}": Raw("F32", (200, 100), raw_bytes("F32", (200, 100), n)) for n in range(6)}
    return write_raw(tmp_path / "model.safetensors", tensors)


@pytest.fixture
def registry() -> Iterator[Any]:
    made = prometheus_client.CollectorRegistry()
    recorder = metrics.prometheus(made)
    yield made
    recorder.close()


def value(registry: Any, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def samples(registry: Any) -> dict[str, list[dict[str, str]]]:
    return {
        family.name: [sample.labels for sample in family.samples if not sample.name.endswith("_created")]
        for family in registry.collect()
    }


def test_a_load_counts_its_seconds_and_bytes(file: Path, registry: Any) -> None:
    checkpoint = penstock.open(file)
    checkpoint.load(framework="np")
    stats = checkpoint.stats
    assert stats is not None
    where = {"storage": stats.storage_kind, "device": "cpu"}
    assert value(registry, "penstock_bytes_total", **where) == NBYTES
    assert value(registry, "penstock_load_seconds_count", **where, outcome="complete") == 1
    assert value(registry, "penstock_load_seconds_sum", **where, outcome="complete") == pytest.approx(stats.seconds)
    routes = [value(registry, "penstock_read_bytes_total", storage=stats.storage_kind, route=route)
              for route in ("cached", "direct", "buffered")]  # fmt: skip
    assert sum(filter(None, routes)) == stats.read_bytes
    assert value(registry, "penstock_loads_in_progress", device="cpu") == 0


def test_loads_of_every_kind_count(file: Path, registry: Any) -> None:
    np = pytest.importorskip("numpy")
    checkpoint = penstock.open(file)
    assert len(list(checkpoint.stream(framework="np"))) == 6
    checkpoint.load_into({name: np.empty((200, 100), np.float32) for name in checkpoint})
    where = {"storage": checkpoint.stats.storage_kind, "device": "cpu"}  # type: ignore[union-attr]
    assert value(registry, "penstock_bytes_total", **where) == 2 * NBYTES


def test_a_stream_is_in_progress_until_it_is_closed_and_counts_as_cancelled(file: Path, registry: Any) -> None:
    tensors = penstock.open(file).stream(framework="np")
    next(tensors)
    assert value(registry, "penstock_loads_in_progress", device="cpu") == 1
    tensors.close()
    assert value(registry, "penstock_loads_in_progress", device="cpu") == 0
    outcomes = {labels["outcome"] for labels in samples(registry)["penstock_load_seconds"]}
    assert outcomes == {"cancelled"}
    assert samples(registry)["penstock_bytes"] == []


def test_a_load_that_fails_counts_as_failed(file: Path, registry: Any) -> None:
    checkpoint = penstock.open(file)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(penstock.LocationChangedError):
        checkpoint.load(framework="np")
    outcomes = {labels["outcome"] for labels in samples(registry)["penstock_load_seconds"]}
    assert outcomes == {"failed"}


def test_no_label_holds_a_path_or_a_name(file: Path, registry: Any) -> None:
    penstock.open(file).load(framework="np")
    for rows in samples(registry).values():
        for labels in rows:
            assert labels.keys() <= {"storage", "device", "outcome", "route", "stage", "le"}
            assert not any("/" in text or "model" in text for text in labels.values())


def test_a_registry_has_one_set_of_metrics_and_close_ends_the_counting(file: Path) -> None:
    registry = prometheus_client.CollectorRegistry()
    recorder = metrics.prometheus(registry)
    assert metrics.prometheus(registry) is recorder
    penstock.open(file).load(framework="np")
    recorder.close()
    recorder.close()
    penstock.open(file).load(framework="np")
    counts = [
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "penstock_load_seconds_count"
    ]
    assert counts == [1]


def test_leases_of_a_pool_count_by_stage(tmp_path: Path, registry: Any) -> None:
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(torch.nn.Linear(64, 64).state_dict(), tmp_path / "net.safetensors")
    with penstock.ModelPool("cpu", device_budget=1 << 24, observe=metrics.prometheus(registry).lease) as pool:
        pool.register("m", {"net": tmp_path / "net.safetensors"}, build={"net": lambda: torch.nn.Linear(64, 64)})
        for _ in range(2):
            with pool.use("m") as lease:
                lease["net"](torch.ones(64))
        stages = pool.stats().stages
    assert value(registry, "penstock_leases_total") == 2
    for stage in ("queue", "read", "switch", "compute"):
        found = value(registry, "penstock_lease_seconds_total", stage=stage)
        assert found == pytest.approx(getattr(stages, stage)), stage
    assert stages.compute > 0
    # The pool's own reads are loads too.
    assert value(registry, "penstock_loads_in_progress", device="cpu") == 0


def test_opentelemetry_has_the_same_names_once_they_are_exported(file: Path) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    exporter = pytest.importorskip("opentelemetry.exporter.prometheus")
    reader = exporter.PrometheusMetricReader()
    provider = sdk.MeterProvider(metric_readers=[reader])
    recorder = metrics.opentelemetry(provider)
    try:
        checkpoint = penstock.open(file)
        checkpoint.load(framework="np")
        page = prometheus_client.generate_latest().decode()
    finally:
        recorder.close()
        provider.shutdown()
    stats = checkpoint.stats
    assert stats is not None
    lines = {}
    for line in page.splitlines():
        if line.startswith("penstock_"):
            name, _, number = line.rpartition(" ")
            lines[name.partition("{")[0]] = float(number)
    assert lines["penstock_bytes_total"] == NBYTES
    assert lines["penstock_load_seconds_count"] == 1
    assert lines["penstock_load_seconds_sum"] == pytest.approx(stats.seconds)
    assert lines["penstock_loads_in_progress"] == 0
    assert lines["penstock_read_bytes_total"] == stats.read_bytes


def test_what_listens_and_fails_fails_no_load(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def begun(self, device: str) -> None:
            raise RuntimeError("begun")

        def ended(self, load: watching.Ended) -> None:
            raise RuntimeError("ended")

    stop = watching.listen(Broken())
    try:
        with caplog.at_level(logging.ERROR, "penstock.watching"):
            assert len(penstock.open(file).load(framework="np")) == 6
    finally:
        stop()
    assert caplog.text.count("what listens to loads failed") == 2


def test_penstock_imports_neither_library_by_itself() -> None:
    code = (
        "import sys, penstock, penstock.metrics, penstock.checkpoint;"
        "print([name for name in sys.modules if name.startswith(('prometheus_client', 'opentelemetry'))])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
