"""Byte ranges of any objects, loaded as tensors are: however they overlap, each has its own bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock import _native
from penstock.checkpoint import Checkpoint

BYTES = 120_000


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("ranges") / "object"
    data = np.random.default_rng(7).bytes(BYTES)
    path.write_bytes(data)
    return path, data


def check(file: tuple[Path, bytes], ranges: list[tuple[int, int]], how: str, block_bytes: int) -> None:
    path, data = file
    config = penstock.LoadOptions(block_bytes=block_bytes, readers=3)
    ckpt = Checkpoint(_native.Checkpoint.of_ranges([(str(path), ranges)], config), config)
    loaded: dict[str, Any]
    if how == "load":
        loaded = ckpt.load(framework="np")
    elif how == "stream":
        loaded = dict(ckpt.stream(framework="np"))
    else:
        loaded = {name: np.full(info.shape, 0xA5, np.uint8) for name, info in ckpt.items()}
        ckpt.load_into(loaded)
    for number, (start, end) in enumerate(ranges):
        assert loaded[f"0:{number}"].tobytes() == data[start:end], (number, ranges)


@pytest.mark.parametrize("how", ["load", "stream", "load_into"])
@pytest.mark.parametrize("block_bytes", [4096, 16_384, 1 << 20])
def test_a_range_in_the_gap_between_two_others_keeps_its_bytes(
    file: tuple[Path, bytes], how: str, block_bytes: int
) -> None:
    """Behind the first in host memory, it lies where the gap between the others is in the file."""
    for _ in range(10):
        check(file, [(0, 30_000), (5_496, 5_596), (30_200, 35_000)], how, block_bytes)


spans = st.tuples(st.integers(0, BYTES), st.one_of(st.integers(0, 50), st.integers(0, 5_000), st.integers(0, BYTES)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(spans, min_size=1, max_size=12), st.sampled_from(["load", "stream", "load_into"]),
    st.sampled_from([4096, 16_384, 1 << 20]),
)  # fmt: skip
def test_ranges_that_overlap_in_any_way_have_their_own_bytes(
    file: tuple[Path, bytes], wanted: list[tuple[int, int]], how: str, block_bytes: int
) -> None:
    check(file, [(start, min(start + length, BYTES)) for start, length in wanted], how, block_bytes)
