"""examples/switching: it runs on the CPU, models answer as before, and there is a chart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
EXAMPLE = Path(__file__).parent.parent / "examples" / "switching" / "switch.py"


def test_it_switches_and_draws(tmp_path: Path) -> None:
    few = ["--device", "cpu", "--layers", "3", "--width", "64", "--chart", str(tmp_path / "switch.svg")]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *few], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.count("the same answer") == 3
    assert "made room for a" in done.stdout or "brought to cpu for a" in done.stdout
    assert (tmp_path / "switch.svg").read_text().startswith("<svg")
