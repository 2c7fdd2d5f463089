"""``penstock run --start-cache``: what one start compiled is there for the next one, elsewhere; and nothing else is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("typer")

PROGRAM = str(Path(__file__).parent / "programs" / "compiles.py")
RUN = [sys.executable, "-m", "penstock.cli", "run", "--no-weights", "--start-cache"]

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


class Node:
    """A machine as a start sees it: its home, its temporary files, and where the start cache is."""

    def __init__(self, home: Path, location: Path | str) -> None:
        home.mkdir(exist_ok=True)
        self.home, self.location = home, location
        self.triton = home / ".triton" / "cache"
        self.environment = os.environ | {"HOME": str(home), "TMPDIR": str(home)}
        for name in ("XDG_RUNTIME_DIR", "TRITON_CACHE_DIR", "TRITON_HOME"):
            self.environment.pop(name, None)

    def command(self, *arguments: str, limit: str | None = None) -> list[str]:
        more = [] if limit is None else ["--start-cache-bytes", limit]
        return [*RUN, str(self.location), *more, "--", sys.executable, PROGRAM, *(arguments or ("m",))]

    def start(
        self, *arguments: str, before: tuple[str, ...] = (), limit: str | None = None, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """A start until its helper, which has stderr, is done."""
        return subprocess.run(
            [*before, *self.command(*arguments, limit=limit)],
            capture_output=True,
            text=True,
            env=self.environment | more,
            check=False,
            timeout=100,
        )


@pytest.fixture
def location(tmp_path: Path) -> Path:
    path = tmp_path / "starts"
    path.mkdir(mode=0o700)
    return path


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "page cache" not in line]


def blobs(location: Path) -> list[Path]:
    return sorted(path for path in location.glob("start-1/blobs/*/*"))


def indices(location: Path) -> list[Path]:
    return sorted((location / "start-1" / "indexes").iterdir())


def test_what_one_start_compiled_the_next_one_finds_elsewhere(tmp_path: Path, location: Path) -> None:
    first = Node(tmp_path / "one", location).start("m", "2")
    assert first.stdout == "compiled 2 of 2\n"
    assert "has no cache of this start" in first.stderr
    assert "4 compiled files are saved" in first.stderr
    second = Node(tmp_path / "two", location).start("m", "2")
    assert second.stdout == "compiled 0 of 2\n"
    [line] = lines(second)
    assert "4 compiled files are restored from" in line


def test_a_start_with_other_arguments_gets_nothing_of_it(tmp_path: Path, location: Path) -> None:
    Node(tmp_path / "one", location).start("m", "1")
    assert Node(tmp_path / "two", location).start("another", "1").stdout == "compiled 1 of 1\n"
    assert len(indices(location)) == 2


def test_what_was_there_stays_as_it_is(tmp_path: Path, location: Path) -> None:
    Node(tmp_path / "one", location).start()
    node = Node(tmp_path / "two", location)
    kept = node.triton / "kernel0" / "kernel.so"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"of this node")
    assert "1 were there" in node.start().stderr
    assert kept.read_bytes() == b"of this node"


def test_a_server_that_goes_on_is_saved_once_it_is_quiet(tmp_path: Path, location: Path) -> None:
    node = Node(tmp_path / "one", location)
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": node.environment}
    with subprocess.Popen(node.command("m", "1", "serve"), **piped) as process:  # type: ignore[call-overload]
        assert process.stderr is not None
        for line in process.stderr:
            if "2 compiled files are saved" in line:
                break
        assert process.poll() is None
        assert len(blobs(location)) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 5


def test_exit_status_and_signals_are_the_commands_own(tmp_path: Path, location: Path) -> None:
    node = Node(tmp_path / "one", location)
    assert node.start("m", "1", "exit", "7").returncode == 7
    command = [*RUN, str(location), "--", "sh", "-c", "kill -KILL $$"]
    assert subprocess.run(command, capture_output=True, env=node.environment, check=False).returncode == -signal.SIGKILL


# Faults: the command starts as if nothing were there, and one line says why.


def starts_anew(node: Node, why: str, *, before: tuple[str, ...] = (), **more: str) -> None:
    done = node.start(before=before, **more)
    assert done.stdout == "compiled 1 of 1\n", done.stderr
    assert done.returncode == 0
    said = [line for line in lines(done) if why in line]
    assert len(said) == 1, done.stderr


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    yield


def test_a_flipped_bit_is_left_out_and_compiled_anew(tmp_path: Path, location: Path) -> None:
    Node(tmp_path / "one", location).start()
    with damaged(max(blobs(location), key=lambda path: path.stat().st_size)):
        starts_anew(Node(tmp_path / "two", location), "1 left out (damaged: not what the hash says)")
    # The start that compiled it has put it right.
    assert Node(tmp_path / "three", location).start().stdout == "compiled 0 of 1\n"


def test_an_index_with_a_flipped_bit_is_refused_and_made_anew(tmp_path: Path, location: Path) -> None:
    Node(tmp_path / "one", location).start()
    with damaged(indices(location)[0]):
        starts_anew(Node(tmp_path / "two", location), "index is refused: it is damaged")
    assert Node(tmp_path / "three", location).start().stdout == "compiled 0 of 1\n"


def test_a_blob_that_is_gone_is_left_out(tmp_path: Path, location: Path) -> None:
    Node(tmp_path / "one", location).start()
    for blob in blobs(location):
        blob.unlink()
    starts_anew(Node(tmp_path / "two", location), "2 left out (its blob is missing)")


@pytest.mark.parametrize("of", ["", "start-1", "start-1/indexes", "start-1/blobs"])
def test_a_location_that_others_may_write_to_is_refused(tmp_path: Path, location: Path, of: str) -> None:
    Node(tmp_path / "one", location).start()
    (location / of).chmod(0o777)
    starts_anew(Node(tmp_path / "two", location), "can be written by others, and what is in it will be run")


def test_a_location_in_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    around = tmp_path / "around"
    (around / "starts").mkdir(parents=True)
    around.chmod(0o777)
    starts_anew(Node(tmp_path / "one", around / "starts"), "can be written by others")
    assert not list((around / "starts").iterdir())


def test_a_file_of_the_cache_that_others_may_write_to_is_left_out(tmp_path: Path, location: Path) -> None:
    Node(tmp_path / "one", location).start()
    for blob in blobs(location):
        blob.chmod(0o666)
    starts_anew(Node(tmp_path / "two", location), "left out (others may write to it)")


def test_plain_http_is_refused(tmp_path: Path) -> None:
    starts_anew(Node(tmp_path / "one", "http://127.0.0.1:1/starts"), "could change what comes by plain HTTP")


def test_a_store_that_is_away_is_not_waited_for(tmp_path: Path) -> None:
    here = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    node = Node(tmp_path / "one", "s3://bucket/starts")
    begun = time.monotonic()
    with subprocess.Popen(
        node.command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=node.environment | here
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read() == "compiled 1 of 1\n"
        assert time.monotonic() - begun < 60
        assert process.wait(30) == 0
        assert process.stderr.readline().startswith("penstock: ")


def mounted(path: Path, how: str) -> tuple[str, ...]:
    """What runs a command where something is mounted at a directory. Skips where that cannot be done."""
    shell = ("unshare", "-rm", "sh", "-ec", f'{how.format(path)}; exec "$@"', "sh")
    if subprocess.run([*shell, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    return shell


SMALL_DISK = "mount -t tmpfs -o size=2m,mode=700 none '{0}'"
READ_ONLY = "mount --bind '{0}' '{0}'; mount -o remount,bind,ro '{0}'"


def test_a_home_that_cannot_be_written(tmp_path: Path, location: Path) -> None:
    Node(tmp_path / "one", location).start()
    node = Node(tmp_path / "two", location)
    starts_anew(node, "cache: Read-only file system)", before=mounted(node.home, READ_ONLY), TMPDIR=str(tmp_path))


def test_a_location_that_cannot_be_written_is_read(tmp_path: Path, location: Path) -> None:
    Node(tmp_path / "one", location).start()
    done = Node(tmp_path / "two", location).start(before=mounted(location, READ_ONLY))
    assert done.stdout == "compiled 0 of 1\n"
    assert "2 compiled files are restored" in done.stderr


def test_a_disk_that_is_almost_full_gets_nothing(tmp_path: Path, location: Path) -> None:
    Node(tmp_path / "one", location).start()
    node = Node(tmp_path / "two", location)
    starts_anew(node, "2 left out (the disk of ", before=mounted(node.home, SMALL_DISK))


def test_a_location_that_fills_up_gets_no_half_of_a_cache(tmp_path: Path, location: Path) -> None:
    node = Node(tmp_path / "one", location)
    large = "import os, pathlib; pathlib.Path(os.environ['TRITON_CACHE_DIR'], 'a.bin').write_bytes(bytes(8 << 20))"
    node.triton.mkdir(parents=True)
    done = subprocess.run(
        [*mounted(location, SMALL_DISK), *RUN, str(location), "--", sys.executable, "-c", large],
        capture_output=True,
        text=True,
        env=node.environment | {"TRITON_CACHE_DIR": str(node.triton)},
        check=False,
    )
    assert done.returncode == 0
    assert [line for line in lines(done) if "nothing is saved" in line and "No space left" in line], done.stderr


def test_penstock_disabled_changes_nothing(tmp_path: Path, location: Path) -> None:
    done = Node(tmp_path / "one", location).start(PENSTOCK_DISABLE="1")
    assert (done.stdout, done.stderr) == ("compiled 1 of 1\n", "")
    assert not list(location.iterdir())


# Bounds, and several starts


def test_the_oldest_caches_go_when_there_are_too_many(tmp_path: Path, location: Path) -> None:
    for name in ("a", "b", "c"):
        done = Node(tmp_path / name, location).start(f"model-{name}", "1", limit="40kB")
        assert "are saved" in done.stderr, done.stderr
    assert "older caches went" in done.stderr
    assert len(indices(location)) == 2
    assert sum(path.stat().st_size for path in blobs(location)) <= 40_000
    assert Node(tmp_path / "d", location).start("model-c", "1").stdout == "compiled 0 of 1\n"
    assert Node(tmp_path / "e", location).start("model-a", "1").stdout == "compiled 1 of 1\n"


def test_two_starts_that_save_at_once_lose_nothing(tmp_path: Path, location: Path) -> None:
    nodes = [Node(tmp_path / f"node{number}", location) for number in range(2)]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(node.command("m", "3"), env=node.environment, **piped)  # type: ignore[call-overload]
        for node in nodes
    ]
    for process in processes:
        process.communicate(timeout=100)
    assert Node(tmp_path / "three", location).start("m", "3").stdout == "compiled 0 of 3\n"
