"""Reading ahead of a load: files come into the page cache while something else is under way, and it ends when told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import penstock
from conftest import Raw, drop_cache, raw_bytes, write_raw

MIB = 1 << 20


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """A checkpoint of 96 MiB that is not in the page cache."""
    tensors = {f"t{n}": Raw("U8", (12 * MIB,), raw_bytes("U8", (12 * MIB,), seed=n)) for n in range(8)}
    path = tmp_path / "model.safetensors"
    write_raw(path, tensors)
    drop_cache(path)
    checkpoint = penstock.open(path)
    checkpoint.load()
    assert checkpoint.stats is not None
    if checkpoint.stats.cached_bytes:
        pytest.skip("this file system is in memory")
    drop_cache(path)
    return path


def cached_bytes(checkpoint: penstock.Checkpoint) -> int:
    checkpoint.load()
    assert checkpoint.stats is not None
    return checkpoint.stats.cached_bytes


def wait(ahead: Any) -> None:
    until = time.monotonic() + 60
    while not ahead.done:
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_load_finds_in_the_cache_what_was_read_ahead(on_disk: Path) -> None:
    checkpoint = penstock.open(on_disk)
    with checkpoint.prefetch() as ahead:
        wait(ahead)
        assert ahead.bytes == checkpoint.nbytes
    assert cached_bytes(checkpoint) == checkpoint.nbytes
    again = checkpoint.prefetch()
    wait(again)
    assert again.bytes == 0, "what is cached is not asked for"


def test_of_some_tensors_only_those_are_brought_in(on_disk: Path) -> None:
    checkpoint = penstock.open(on_disk)
    ahead = checkpoint.prefetch(["t5"])
    wait(ahead)
    assert ahead.bytes == 12 * MIB
    with pytest.raises(penstock.TensorNotFoundError, match="t9"):
        checkpoint.prefetch(["t9"])


def test_who_rules_the_page_cache_out_has_nothing_read_into_it(on_disk: Path) -> None:
    ahead = penstock.open(on_disk).prefetch(options=penstock.LoadOptions(cache="bypass"))
    assert ahead.done
    assert ahead.bytes == 0


def test_a_file_that_is_gone_is_the_load_s_to_report(on_disk: Path) -> None:
    checkpoint = penstock.open(on_disk)
    on_disk.unlink()
    wait(checkpoint.prefetch())
    with pytest.raises(penstock.LocationNotFoundError):
        checkpoint.load()


@pytest.mark.usefixtures("nothing_remains")
def test_no_thread_and_no_file_outlives_it(on_disk: Path) -> None:
    checkpoint = penstock.open(on_disk)
    for _ in range(20):
        with checkpoint.prefetch():
            pass


def test_a_model_is_built_while_its_weights_come_in(on_disk: Path) -> None:
    torch = pytest.importorskip("torch")
    checkpoint = penstock.open(on_disk)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            time.sleep(1)
            for name in checkpoint:
                empty = torch.empty(12 * MIB, dtype=torch.uint8)
                self.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))

    penstock.load_model(Model, checkpoint)
    assert checkpoint.stats is not None
    assert checkpoint.stats.cached_bytes > 0
