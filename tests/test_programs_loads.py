"""Random loads give the bits that plain torch copies give. A million of them: ``python tests/programs/loads.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
sys.path.insert(0, str(Path(__file__).parent / "programs"))

import loads


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_random_loads_are_what_plain_copies_are(tmp_path: Path) -> None:
    counts = loads.run(seed=20261122, first=0, programs=2000, folder=tmp_path)
    assert sum(counts.values()) == 2000
    assert set(counts) == {"load", "stream", "load_into", "refused", "overlap"}
