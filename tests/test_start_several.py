"""Several starts on one node at once: each file is read once, and each part of a start cache is fetched once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer")

import servers
from penstock.start.node import Turns
from penstock.start.residency import drop, resident, total

STARTS = 3
BRING = """
import json, sys
from penstock.start.prefetch import bring
from penstock.start.profile import whole
sys.stdin.read()  # all begin at once
done = bring(whole(iter(sys.argv[1:])), lambda: None)
counts = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
print(json.dumps([done.nbytes, done.files, int(counts["rchar"])]))
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Eight files of 8 MiB that are not in the page cache, and a node of its own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    found = []
    for number in range(8):
        path = tmp_path / f"{number}.so"
        path.write_bytes(os.urandom(8 << 20))
        with path.open("rb") as file:
            os.fsync(file.fileno())
        drop(str(path))
        if total(resident(str(path)) or ()):
            pytest.skip("the file system keeps what it is asked to forget")
        found.append(path)
    return found


def brought(files: list[Path]) -> list[list[int]]:
    command = [sys.executable, "-c", BRING, *map(str, files)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(STARTS)
    ]
    time.sleep(1)  # until they have imported what they need
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    found = []
    for process in processes:
        with process:
            assert process.stdout is not None
            found.append(json.loads(process.stdout.read()))
        assert process.returncode == 0
    return found


def test_several_starts_read_each_file_once(files: list[Path]) -> None:
    found = brought(files)
    nbytes = sum(path.stat().st_size for path in files)
    assert [(of[0], of[1]) for of in found] == [(nbytes, len(files))] * STARTS
    assert nbytes <= sum(of[2] for of in found) < nbytes * 1.5  # Python reads its modules, too


def test_what_is_in_the_page_cache_is_not_read_again(files: list[Path]) -> None:
    for path in files:
        path.read_bytes()
    nbytes = sum(path.stat().st_size for path in files)
    assert all(of[0] == nbytes and of[2] < nbytes / 2 for of in brought(files))


def test_a_start_that_is_killed_leaves_its_turn(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from penstock.start.node import Turns\n"
        "with Turns('prefetch', Path(sys.argv[1])).at('a', lambda: None): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        asked = []

        def stop() -> None:
            if not asked:
                process.send_signal(signal.SIGKILL)
            asked.append(1)

        turns = Turns("prefetch", tmp_path)
        with turns.at("another", lambda: pytest.fail("it waits for what another has")):
            pass
        with turns.at("a", stop):
            assert asked
        turns.close()


def test_without_a_place_for_locks_everyone_goes_on(tmp_path: Path) -> None:
    with Turns("prefetch", tmp_path / "none").at("a", lambda: None):
        pass


COMPILES = """
import os, pathlib
cache = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
missing = [number for number in range(8) if not (cache / f"{number}.bin").exists()]
for number in missing:
    cache.mkdir(parents=True, exist_ok=True)
    (cache / f"{number}.bin").write_bytes(os.urandom(1 << 20))
print(len(missing))
"""


@pytest.mark.stores
def test_several_starts_fetch_a_start_cache_once(tmp_path: Path) -> None:
    mine = tmp_path / "starts"
    mine.mkdir(mode=0o700)
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}

    def command(location: str) -> list[str]:
        run = [sys.executable, "-m", "penstock.cli", "run", "--no-weights", "--start-cache", location, "--"]
        return [*run, sys.executable, "-c", COMPILES]

    elsewhere = environment | {"TRITON_CACHE_DIR": str(tmp_path / "elsewhere")}
    subprocess.run(command(str(mine)), env=elsewhere, check=True, capture_output=True)
    with servers.s3(tmp_path) as remote:
        for path in mine.rglob("*"):
            if path.is_file() and path.name != "lock":
                remote.put(f"starts/{path.relative_to(mine)}", path.read_bytes())
        line = servers.Line(int(remote.environment["AWS_ENDPOINT_URL"].rpartition(":")[2]))
        here = environment | remote.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{line.port}"}
        here["TRITON_CACHE_DIR"] = str(tmp_path / "here")
        starts = [
            subprocess.Popen(
                command(f"{remote.root}/starts"), env=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for _ in range(STARTS)
        ]
        said = [process.communicate(timeout=60) for process in starts]
    assert [out for out, _ in said] == ["0\n"] * STARTS, said
    assert 8 << 20 <= line.passed < 12 << 20
    told = [err for _, err in said]
    assert sum("8 compiled files are restored" in err for err in told) == 1
    assert sum("8 were there" in err for err in told) == STARTS - 1
