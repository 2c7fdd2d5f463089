"""Random loads give the bits that plain torch copies give. A million of them: ``python tests/programs/loads.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
sys.path.insert(0, str(Path(__file__).parent / "programs"))

import loads


@pytest.mark.parametrize("programs", [200, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
def test_random_loads_are_what_plain_copies_are(tmp_path: Path, programs: int) -> None:
    counts = loads.run(seed=20261122, first=0, programs=programs, folder=tmp_path)
    assert sum(counts.values()) == programs
    assert set(counts) == {"load", "stream", "load_into", "refused", "overlap"}
