"""A start cache with the real torch.compile: what one home compiled, another home need not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("typer")

PROGRAM = str(Path(__file__).parent / "programs" / "compiles_torch.py")


def started(home: Path, location: Path) -> tuple[dict[str, Any], str]:
    home.mkdir()
    command = [
        sys.executable,
        "-m",
        "penstock.cli",
        "run",
        "--start-cache",
        str(location),
        "--",
        sys.executable,
        PROGRAM,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment | {"HOME": str(home), "TMPDIR": str(home)},
        check=True,
        timeout=280,
    )
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_what_torch_compile_made_in_one_home_is_not_compiled_in_another(tmp_path: Path) -> None:
    location = tmp_path / "starts"
    location.mkdir(mode=0o700)
    first, said = started(tmp_path / "one", location)
    assert (first["graph hits"], first["graph misses"]) == (0, 1)
    assert first["compiled"], "the compiler is not seen to run: the other half of this test would prove nothing"
    assert "are saved to" in said
    shutil.rmtree(tmp_path / "one")
    second, said = started(tmp_path / "two", location)
    assert "are restored from" in said
    assert (second["graph hits"], second["graph misses"], second["autograd hits"]) == (1, 0, 1)
    assert second["compiled"] == []
    assert second["sum"] == first["sum"]
