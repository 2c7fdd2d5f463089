"""``penstock start-report``: a command as it is, and a timeline of its start."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("typer")

from penstock.start.residency import drop, resident, total, united, without
from penstock.start.steps import STEPS, Timeline, markers

HERE = Path(__file__).parent
PROGRAM = str(HERE / "programs" / "loads_weights.py")
COMMAND = [sys.executable, "-m", "penstock.cli", "start-report", "--files", "0"]


def environment(columns: int = 120) -> dict[str, str]:
    return os.environ | {"COLUMNS": str(columns), "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}


def reported(*arguments: object, columns: int = 120) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(columns), check=False, timeout=110)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones((64, 1024), np.float32), "b": np.ones(8, np.float32)}, path)
    return path


def steps_of(log: str, engine: str, version: str) -> dict[str, float | None]:
    """The ends of steps; each line comes a second after the one before."""
    timeline = Timeline(0.0, markers(engine, version))
    for number, line in enumerate((HERE / "logs" / log).read_text().splitlines(), 1):
        timeline.feed(line, float(number))
    return {step.name: step.ended for step in timeline.steps()}


def test_the_log_of_a_vllm_server_tells_all_six_steps() -> None:
    ended = steps_of("vllm-0.32.0-cpu.log", "vllm", "0.32.0")
    lines = (HERE / "logs" / "vllm-0.32.0-cpu.log").read_text().splitlines()
    said = {step: lines[int(at) - 1] for step, at in ended.items() if at is not None}
    assert list(said) == list(STEPS)
    expected = [
        "non-default args",
        "Starting to load",
        "Loading weights took",
        "Warming up done",
        "init engine",
        "startup",
    ]
    assert [part for part, line in zip(expected, said.values(), strict=True) if part not in line] == []


def test_a_step_that_is_not_told_has_no_time_and_leaves_it_to_the_next() -> None:
    timeline = Timeline(10.0, markers("vllm", None))
    for line, when in [
        ("non-default args: {}", 12.0),
        ("Starting to load model x...", 13.0),
        ("Model loading took 1 GiB", 15.0),
        ("init engine (profile, create kv cache, warmup model) took 2 s", 18.0),
        ("Application startup complete.", 19.0),
    ]:
        timeline.feed(line, when)
    assert [step.seconds for step in timeline.steps()] == [2.0, 1.0, 2.0, None, 3.0, 1.0]


def test_of_several_ranks_the_slowest_counts_and_a_step_that_is_over_stays_over() -> None:
    timeline = Timeline(0.0, markers("vllm", None))
    loaded, warm = "Model loading took 1 GiB", "init engine (profile, create kv cache, warmup model) took 2 s"
    for when, line in enumerate([loaded, loaded, warm, loaded], 1):
        timeline.feed(line, float(when))
    assert {step.name: step.ended for step in timeline.steps()}["weights"] == 2.0


def test_output_and_exit_status_are_the_commands_own(weights: Path) -> None:
    alone = subprocess.run([sys.executable, PROGRAM, str(weights), "7"], capture_output=True, text=True, check=False)
    done = reported("--output", weights.parent / "report", "--", sys.executable, PROGRAM, weights, "7")
    assert (done.returncode, done.stdout, done.stderr) == (7, alone.stdout, alone.stderr)
    assert "no answer was seen" in (weights.parent / "report").read_text()


def test_a_programs_imports_and_weights_are_told_by_hooks(weights: Path) -> None:
    done = reported("--json", "--", sys.executable, PROGRAM, weights)
    assert done.returncode == 0
    report = json.loads(done.stdout)  # and nothing else: what the program prints is on stderr
    assert "2 tensors" in done.stderr
    steps: dict[str, Any] = {step["step"]: step for step in report["steps"]}
    assert list(steps) == list(STEPS)
    assert steps["import"]["cpu_seconds"] > 0.2
    assert 0.2 < steps["import"]["ended"] <= steps["weights"]["begun"] <= steps["weights"]["ended"] <= report["seconds"]
    assert report["ready"] is True
    assert steps["compile"]["seconds"] is None


def test_what_was_put_out_of_the_page_cache_is_seen_to_be_read(weights: Path) -> None:
    os.sync()
    drop(str(weights))
    if total(resident(str(weights)) or ()):
        pytest.skip("the file system keeps what it is asked to forget")
    done = reported("--files", "5", "--cold", "--json", "--", "sha256sum", weights)
    assert done.returncode == 0
    files = {file["path"]: file["bytes"] for step in json.loads(done.stdout)["steps"] for file in step["files"]}
    assert files[str(weights.resolve())] == pytest.approx(weights.stat().st_size, abs=4096)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_command(weights: Path, number: int) -> None:
    command = [*COMMAND, "--ready-log", "listening", "-o", str(weights.parent / "report"), "--"]
    command += [sys.executable, PROGRAM, str(weights), "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "listening" in line:
                break
        process.send_signal(number)
        assert process.stdout.read() == "stopped\n"
        assert process.wait(30) == 5


def test_a_command_that_a_signal_ends_is_seen_to_end_so() -> None:
    done = reported("-o", os.devnull, "--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert done.returncode == -signal.SIGKILL


def test_a_command_that_is_not_there_is_127() -> None:
    done = reported("--", "/no/such/program")
    assert done.returncode == 127
    assert "cannot be started" in done.stderr


def test_a_url_that_answers_means_ready_and_the_program_can_be_ended(tmp_path: Path) -> None:
    server = (
        "import http.server, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "s = http.server.HTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\n"
        "open('port', 'w').write(str(s.server_port))\n"
        "time.sleep(1)\n"
        "s.serve_forever()\n"
    )
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = server.replace("('127.0.0.1', 0)", f"('127.0.0.1', {port})")
    command = [*COMMAND, "--stop", "--json", "-o", "report.json", "--ready-url", f"http://127.0.0.1:{port}/"]
    began = time.monotonic()
    done = subprocess.run([*command, "--", sys.executable, "-c", server], cwd=tmp_path, check=False, timeout=100)
    assert done.returncode == 3
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ready"] is True
    assert 1.0 <= report["seconds"] <= time.monotonic() - began


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_timeline_fits_the_terminal(weights: Path, columns: int) -> None:
    done = reported("--", sys.executable, PROGRAM, weights, columns=columns)
    shown = done.stderr.partition("Start of program")[2].splitlines()
    assert max(map(len, shown[1:])) <= columns
    assert [step for step in STEPS if not any(line.startswith(step) for line in shown)] == []


def test_secrets_of_the_command_are_not_in_the_report(weights: Path) -> None:
    done = reported("--json", "--", sys.executable, PROGRAM, weights, "0", "--api-key=hunter22", "hunter22")
    assert done.returncode == 0
    assert "hunter22" not in done.stdout


def test_a_regular_expression_that_is_none_is_refused() -> None:
    done = reported("--ready-log", "(", "--", "true")
    assert done.returncode == 8
    assert "--ready-log" in done.stderr


def test_ranges_are_told_apart() -> None:
    assert without(((0, 10), (20, 30)), ((5, 25),)) == ((0, 5), (25, 30))
    assert without(((0, 10),), ((2, 3), (4, 5))) == ((0, 2), (3, 4), (5, 10))
    assert united(((0, 5),), ((5, 9), (12, 13))) == ((0, 9), (12, 13))


def test_the_package_alone_imports_nothing_of_this() -> None:
    code = "import sys, penstock; print([m for m in sys.modules if m.startswith('penstock.start')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\[\]", done.stdout.strip())


def test_a_command_on_a_terminal_writes_as_on_a_terminal(tmp_path: Path) -> None:
    import pty

    code = "import os, sys; print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size().columns)"
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 77, 0, 0))
    command = [*COMMAND, "-o", str(tmp_path / "report"), "--", sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # nobody holds the other end any more
            while data := os.read(master, 4096):
                shown += data
    os.close(master)
    assert (process.returncode, shown) == (0, b"True True 77\r\n")


def test_the_environments_own_sitecustomize_is_imported_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.marked = __file__")
    command = [*COMMAND, "-o", str(tmp_path / "report"), "--"]
    command += [sys.executable, "-c", "import sys; print(sys.marked, any(p.endswith('start/hooks') for p in sys.path))"]
    environ = environment() | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False, timeout=60)
    assert done.stdout.split() == [str(tmp_path / "sitecustomize.py"), "False"]
