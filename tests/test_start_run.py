"""``penstock run`` and ``penstock warm``: the command as it is, and its files in the page cache ahead of it."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("typer")

from penstock.cli import quick_run
from penstock.cli.starting import run_command
from penstock.doctor.tree import Tree
from penstock.errors import FormatError
from penstock.start import environment as environments
from penstock.start import profile as profiles
from penstock.start import run as runs
from penstock.start.environment import Environment
from penstock.start.prefetch import bring, headroom
from penstock.start.profile import Profile, Wanted
from penstock.start.residency import drop, resident, total

PROGRAM = str(Path(__file__).parent / "programs" / "loads_weights.py")
PENSTOCK = [sys.executable, "-m", "penstock.cli"]


def ran(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*PENSTOCK, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, check=False, timeout=100
    )


def in_cache(path: Path) -> int:
    return total(resident(str(path)) or ())


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A file of 8 MiB that is not in the page cache."""
    path = tmp_path / "library.so"
    path.write_bytes(os.urandom(8 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    drop(str(path))
    if in_cache(path):
        pytest.skip("the file system keeps what it is asked to forget")
    return path


def wanted(path: Path, *ranges: tuple[int, int]) -> Wanted:
    status = path.stat()
    return Wanted(str(path), ranges or ((0, status.st_size),), (status.st_size, status.st_mtime_ns))


def saved(folder: Path, *of: Wanted) -> Path:
    path = folder / "start.profile"
    profiles.save(Profile("vllm", "0.32.0", of), str(path))
    return path


def test_a_profile_is_read_as_it_was_written(cold: Path) -> None:
    path = saved(cold.parent, wanted(cold, (0, 4096), (8192, 9000)))
    assert profiles.load(str(path)) == Profile("vllm", "0.32.0", (wanted(cold, (0, 4096), (8192, 9000)),))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"penstock start profile": 2, "wanted": []}', "[" * 5000, "\ud800"],
    ids=["empty", "list", "object", "of another schema", "deep", "no Unicode"],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(FormatError, match="no start profile"):
        profiles.load(str(path))


@pytest.mark.parametrize("ranges", [[[4, 2]], [[0, 5], [3, 9]], [[-1, 5]], [[0, "5"]], [[0]], 7])
def test_ranges_that_cannot_be_are_refused(cold: Path, ranges: object) -> None:
    value = {"penstock start profile": 1, "engine": "vllm", "version": None}
    value["wanted"] = [{"path": str(cold), "stamp": [1, 1], "ranges": ranges}]  # type: ignore[assignment]
    path = cold.parent / "profile"
    path.write_text(json.dumps(value))
    with pytest.raises(FormatError):
        profiles.load(str(path))


def test_what_a_profile_names_is_brought_in_and_a_file_that_changed_is_not(cold: Path) -> None:
    other = cold.with_name("changed.so")
    other.write_bytes(bytes(1 << 20))
    stale = wanted(other)
    other.write_bytes(bytes(2 << 20))
    parts = wanted(cold, (0, 1 << 20)), wanted(cold, (1 << 20, 8 << 20))
    done = bring([stale, *parts], lambda: None)
    assert (done.nbytes, done.files, done.stale, done.why) == (8 << 20, 1, 1, None)
    assert in_cache(cold) == 8 << 20


def test_it_stops_before_memory_runs_short(cold: Path) -> None:
    done = bring([wanted(cold)], lambda: None, free=lambda: 1 << 20)
    assert (done.nbytes, done.why) == (0, "memory would run short")


def test_it_stops_when_the_command_has_ended(cold: Path) -> None:
    answers = iter([None, "the command has ended"])
    done = bring([wanted(cold)], lambda: next(answers))
    assert (done.nbytes, done.why) == (2 << 20, "the command has ended")


def test_warm_brings_in_the_profile_and_the_models_weights(cold: Path) -> None:
    weights = cold.parent / "model.safetensors"
    save_file({"a": np.ones((512, 1024), np.float32)}, weights)
    with weights.open("rb") as file:
        os.fsync(file.fileno())
    drop(str(weights))
    done = ran("warm", "--json", "--profile", saved(cold.parent, wanted(cold)), "--", "serve", weights)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == 2
    assert (in_cache(cold), in_cache(weights)) == (8 << 20, weights.stat().st_size)


def test_run_brings_files_in_beside_the_command(cold: Path) -> None:
    command = [*PENSTOCK, "run", "--profile", str(saved(cold.parent, wanted(cold))), "--", "sleep", "60"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("penstock: 8.39 MB of 1 file")
        assert process.poll() is None
        process.terminate()
    assert process.returncode == -signal.SIGTERM
    assert in_cache(cold) == 8 << 20


def test_output_exit_status_and_process_are_the_commands_own(cold: Path) -> None:
    code = "import os, sys; print(os.getpid(), len(os.listdir(f'/proc/{os.getpid()}/fd'))); sys.exit(11)"
    command = [sys.executable, "-c", code]
    alone = subprocess.run(command, capture_output=True, text=True, check=False)
    wrapped = [*PENSTOCK, "run", "--profile", str(saved(cold.parent, wanted(cold))), "--", *command]
    with subprocess.Popen(wrapped, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, handles = process.stdout.read().split()
    assert (process.returncode, int(pid)) == (11, process.pid)
    assert handles == alone.stdout.split()[1]


def test_signals_go_to_the_command(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    save_file({"a": np.ones(8, np.float32)}, weights)
    command = [*PENSTOCK, "run", "--", sys.executable, PROGRAM, str(weights), "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "listening" in line:
                break
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "stopped\n"
        assert process.wait(30) == 5


@pytest.mark.parametrize("made", ["none", "malformed", "stale", "a directory"])
def test_without_a_profile_that_fits_the_command_starts_and_a_line_says_why(cold: Path, made: str) -> None:
    path = cold.parent / "profile"
    if made == "malformed":
        path.write_text("{")
    elif made == "stale":
        path = saved(cold.parent, wanted(cold))
        cold.write_bytes(b"another")
    elif made == "a directory":
        path.mkdir()
    done = ran("run", "--profile", path, "--", "sh", "-c", "sleep 3; echo here; exit 4")
    assert (done.returncode, done.stdout) == (4, "here\n")
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("penstock: ")
    assert {"none": "No such file", "malformed": "no start profile", "stale": "is stale", "a directory": "directory"}[
        made
    ] in lines[0]


def test_a_home_that_cannot_be_written_and_penstock_disabled_change_nothing(cold: Path) -> None:
    profile = saved(cold.parent, wanted(cold))
    done = ran("run", "--profile", profile, "--", "sleep", "1", HOME="/proc/none", PENSTOCK_DISABLE="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert in_cache(cold) == 0


def test_the_helper_is_gone_when_the_command_is(tmp_path: Path) -> None:
    code = "import time; time.sleep(0.2)"
    done = ran("run", "--", sys.executable, "-c", code, str(tmp_path))
    assert done.returncode == 0
    deadline = time.monotonic() + 30
    while any(str(tmp_path) in line for line in _commands()):
        assert time.monotonic() < deadline, "a helper stayed"
        time.sleep(0.1)


def _commands() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                found.append((entry / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return found


def test_a_command_that_is_not_there_is_127() -> None:
    assert ran("run", "--", "/no/such/program").returncode == 127


def test_without_a_profile_the_libraries_of_what_is_installed_are_read_in_the_order_of_their_use(
    tmp_path: Path,
) -> None:
    site = tmp_path / "site-packages"
    names = ["vllm/_C.abi3.so", "torch/lib/libtorch_cuda.so", "torch/lib/libtorch_cpu.so", "torch/lib/libc10.so"]
    names += ["nvidia/cublas/lib/libcublasLt.so.13", "unrelated/huge.so", "torch/lib/readme.txt"]
    for name in names:
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    found = runs.libraries(Environment("vllm", None, None, (str(site),)))
    in_order = ["libc10.so", "libtorch_cpu.so", "libtorch_cuda.so", "libcublasLt.so.13", "_C.abi3.so"]
    assert [Path(each.path).name for each in found] == in_order


def test_an_installed_command_is_found_with_its_python_and_engine(tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    script.write_text(f"#!{sys.executable}\nprint('x')\n")
    script.chmod(0o755)
    found = environments.of([str(script), "serve", "m"])
    assert (found.engine, found.python) == ("vllm", sys.executable)
    assert any((Path(path) / "torch").is_dir() for path in found.packages)
    assert environments.of([sys.executable, "-m", "sglang.launch_server"]).engine == "sglang"
    assert environments.of(["sh", "-c", "true"]).python is None


def test_headroom_is_the_cgroups_where_that_is_less(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n")
    assert headroom(Tree(tmp_path)) == 900_000 * 1024 - 100_000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("100000000\n")
    (group / "memory.current").write_text("60000000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 10000000\nactive_file 5000000\n")
    assert headroom(Tree(tmp_path)) == 100_000_000 - 60_000_000 + 15_000_000 - 10_000_000


def test_a_plain_run_is_understood_as_the_application_understands_it() -> None:
    given = [
        "--profile",
        "p",
        "--no-weights",
        "--start-cache=/c",
        "--start-cache-bytes",
        "5GiB",
        "--",
        "vllm",
        "--json",
    ]
    asked = quick_run.plain(given)
    assert asked == quick_run.Plain(
        ["vllm", "--json"], "p", with_weights=False, start_cache="/c", start_cache_bytes=5 << 30
    )
    for word in ("--help", "--debug", "--profil", "x", "--profile", "--start-cache-bytes=many"):
        assert quick_run.plain([word, "--", "vllm"]) is None
    assert quick_run.plain(["vllm", "serve"]) is None
    assert quick_run.plain(["--"]) is None
    options = {parameter for parameter in inspect.signature(run_command).parameters if parameter != "command"}
    assert options == {"profile", "no_weights", "start_cache", "start_cache_bytes", "debug"}


def test_a_plain_run_imports_neither_typer_nor_rich() -> None:
    code = "import os, sys; from penstock.cli import main; os.execvp = lambda *_: print(*sys.modules); main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "--", "true"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "penstock.start.run" in done.stdout.split()
    assert not {"typer", "rich", "click"} & {name.partition(".")[0] for name in done.stdout.split()}


def test_a_helper_is_behind_all_others_in_its_session_and_among_sessions() -> None:
    code = (
        "import os; os.setsid(); from penstock.start.prefetch import be_idle; be_idle()\n"
        "path = '/proc/self/autogroup'\n"
        "print(os.nice(0), open(path).read().split()[-1] if os.path.exists(path) else 19)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "19 19\n"
