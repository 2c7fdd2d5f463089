"""Pulls: files whole or not there, what came is kept, nothing is left behind; ``ls`` of a remote prefix."""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import penstock
import servers
from conftest import Raw, Remains, raw_bytes, write_raw
from penstock._native import Source

pytestmark = pytest.mark.stores

BODY = raw_bytes("U8", (20 << 20,), 3)
"""Three of the largest requests."""


class Slow:
    """A server of one large object that comes in pieces, with a pause after each."""

    def __init__(self) -> None:
        self.pause = 0.0
        self.sent = 0
        slow = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                start, end = (int(part) for part in self.headers["Range"].removeprefix("bytes=").split("-"))
                end = min(end, len(BODY) - 1)
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{end}/{len(BODY)}")
                self.send_header("Content-Length", str(end + 1 - start))
                self.send_header("ETag", '"v1"')
                self.end_headers()
                try:
                    for at in range(start, end + 1, 1 << 18):
                        self.wfile.write(BODY[at : min(at + (1 << 18), end + 1)])
                        slow.sent += 1 << 18
                        # The first block comes at once, so that there is something to keep.
                        time.sleep(slow.pause if start >= 8 << 20 else 0)
                except OSError:
                    self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/big.bin"


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.server.shutdown()
    made.server.server_close()


def begin(url: str, to: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock.cli", "pull", *more, url, str(to)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until_first_block(to: Path) -> None:
    """Waits until the map of the partial file says that the first 8 MiB are there, 16 blocks."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        maps = list(to.glob(".penstock/parts/*.map"))
        # A word for each block after the header, which holds the name and the version.
        there = maps[0].read_bytes() if maps else b""
        words = there[(32 + int.from_bytes(there[24:32], "little") + 7) // 8 * 8 :]
        if len(words) >= 16 * 8 and all(any(words[at : at + 8]) for at in range(0, 16 * 8, 8)):
            return
        time.sleep(0.02)
    raise AssertionError("nothing comes")


def test_a_pull_that_was_killed_goes_on_where_it_stopped(slow: Slow, tmp_path: Path) -> None:
    slow.pause = 0.5
    process = begin(slow.url, tmp_path)
    until_first_block(tmp_path)
    process.kill()
    process.communicate()
    assert not (tmp_path / "big.bin").exists()
    slow.pause = 0.0
    pulled = penstock.pull(slow.url, tmp_path)
    assert (tmp_path / "big.bin").read_bytes() == BODY
    assert pulled.files == [penstock.PulledFile("big.bin", len(BODY), "resumed")]
    assert pulled.fetched_bytes <= len(BODY) - (8 << 20)
    assert penstock.pull(slow.url, tmp_path).files[0].how == "kept"


def test_a_pull_goes_on_where_the_disk_has_room_for_the_rest_only(slow: Slow, tmp_path: Path) -> None:
    megabytes = len(BODY) * 5 // 4 // 10**6
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("this process may not mount")
    try:
        slow.pause = 0.5
        process = begin(slow.url, tmp_path)
        until_first_block(tmp_path)
        process.kill()
        process.communicate()
        slow.pause = 0.0
        assert penstock.pull(slow.url, tmp_path).files == [penstock.PulledFile("big.bin", len(BODY), "resumed")]
        with pytest.raises(penstock.StorageError, match="the disk has room for"):
            penstock.pull(slow.url, tmp_path / "again")
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_ctrl_c_ends_a_pull_at_once_and_keeps_what_came(slow: Slow, tmp_path: Path) -> None:
    slow.pause = 5.0
    process = begin(slow.url, tmp_path, "--json")
    until_first_block(tmp_path)
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    # The interpreter's own end takes longer than the pull's.
    assert time.monotonic() - asked < 3
    assert process.returncode == 130
    assert "interrupted" in errors
    slow.pause = 0.0
    assert penstock.pull(slow.url, tmp_path).fetched_bytes < len(BODY)


def test_progress_reaches_the_end_and_nothing_remains(slow: Slow, tmp_path: Path) -> None:
    before = Remains.now().threads
    told: list[tuple[int, int]] = []
    penstock.pull(slow.url, tmp_path, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (len(BODY), len(BODY))
    assert sorted(told) == told
    # Connections are the process's and are kept for the next pull; threads and files are not.
    assert Remains.now().threads == before
    open_files = [file.resolve() for file in Path("/proc/self/fd").iterdir()]
    assert not [file for file in open_files if file.is_relative_to(tmp_path)]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[servers.Remote]:
    (tmp_path / "gateway").mkdir()
    with servers.s3(tmp_path / "gateway") as remote:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name, value in remote.environment.items():
            monkeypatch.setenv(name, value)
        for key in ("config.json", "a.safetensors", "b[1].safetensors", "unet/a.safetensors", "unet/deep/x.bin"):
            remote.put(f"model/{key}", key.encode())
        yield remote


def test_allow_and_ignore_are_fnmatchs_on_the_path_below_the_url(bucket: servers.Remote, tmp_path: Path) -> None:
    names = ["a.safetensors", "b[1].safetensors", "config.json", "unet/a.safetensors", "unet/deep/x.bin"]
    cases = [("*.safetensors", None), (["config.json", "unet/"], ["*.bin"]), (None, "unet/*"), ("b[[]1].*", [])]
    for number, (allow, ignore) in enumerate([*cases, (None, "[!u]*")]):
        to = tmp_path / f"to-{number}"
        pulled = penstock.pull(f"{bucket.root}/model", to, allow_patterns=allow, ignore_patterns=ignore)
        full = [f"{p}*" if p.endswith("/") else p for p in ([allow] if isinstance(allow, str) else allow or ["*"])]
        without = [ignore] if isinstance(ignore, str) else ignore or []
        kept = [n for n in names if any(fnmatch.fnmatchcase(n, p) for p in full)]
        kept = [n for n in kept if not any(fnmatch.fnmatchcase(n, p) for p in without)]
        assert [file.path for file in pulled.files] == kept
    with pytest.raises(penstock.LocationNotFoundError, match="none of the 5 objects"):
        penstock.pull(f"{bucket.root}/model", tmp_path / "none", allow_patterns="*.gguf")
    assert not (tmp_path / "none").exists()


def test_the_command_pulls_and_says_so_in_json(bucket: servers.Remote, tmp_path: Path) -> None:
    process = begin(f"{bucket.root}/model/", tmp_path / "to", "--json", "--exclude", "unet/")
    out, _ = process.communicate(timeout=60)
    told = json.loads(out)
    assert [file["path"] for file in told["files"]] == ["a.safetensors", "b[1].safetensors", "config.json"]
    assert (told["bytes"], told["fetched_bytes"]) == (40, 40)
    process = begin(f"{bucket.root}/model/", tmp_path / "to")
    out, _ = process.communicate(timeout=60)
    assert "5 files" in out
    assert "3 already there" in out
    process = begin(f"{bucket.root}/none", tmp_path / "to")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "error: s3://" in errors
    process = begin(f"{bucket.root}/model/", tmp_path / "to", "--include", "*.gguf")
    _, errors = process.communicate(timeout=60)
    assert "try: Check --include and --exclude: " in errors


def test_a_dry_run_says_what_a_pull_would_do_and_makes_nothing(bucket: servers.Remote, tmp_path: Path) -> None:
    url, to = f"{bucket.root}/model", tmp_path / "to"

    def would() -> dict[str, str]:
        planned = penstock.pull(url, to, ignore_patterns="unet/*", dry_run=True)
        assert (planned.fetched_bytes, planned.nbytes) == (0, 40)
        return {file.path: file.how for file in planned.files}

    assert would() == dict.fromkeys(["a.safetensors", "b[1].safetensors", "config.json"], "pulled")
    assert not to.exists()
    penstock.pull(url, to, ignore_patterns="unet/*")
    assert set(would().values()) == {"kept"}
    out, _ = begin(url, to, "--dry-run").communicate(timeout=60)
    *files, last = out.splitlines()
    assert [line.split()[0] for line in files] == ["keep", "keep", "keep", "fetch", "fetch"]
    assert "5 files" in last
    assert "2 to fetch" in last
    assert last.endswith("(dry run: nothing was fetched)")
    assert not (to / "unet").exists()


def test_inspect_lists_a_prefix_without_a_checkpoint(bucket: servers.Remote, tmp_path: Path) -> None:
    bucket.put("model/unet/deep/\x1b[31m.txt", b"12345")
    run = [sys.executable, "-m", "penstock.cli", "inspect"]
    for url in (f"{bucket.root}/", bucket.root):
        shown = json.loads(subprocess.run([*run, "--json", url], check=True, stdout=subprocess.PIPE, text=True).stdout)
        assert (shown["directories"], shown["objects"]) == (["model"], [])
    out = subprocess.run([*run, f"{bucket.root}/model/unet/deep"], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert "x.bin" in out
    assert "2 objects, 20 B" in out
    assert "\x1b" not in out
    tensors = {"w": Raw("U8", (4,), b"abcd")}
    body = write_raw(tmp_path / "x.safetensors", tensors).read_bytes()
    bucket.put("real/x.safetensors", body)
    command = [*run, "--json", f"{bucket.root}/real/"]
    shown = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert shown["total"]["tensors"] == 1


def test_a_directory_that_cannot_be_made_is_told(bucket: servers.Remote, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(penstock.PenstockError, match="file"):
        penstock.pull(f"{bucket.root}/model", tmp_path / "file" / "to")


def test_engines_list_and_pull_by_the_same_means(bucket: servers.Remote, tmp_path: Path) -> None:
    from penstock.integrations.shared import objects

    where, to = f"{bucket.root}/model/", tmp_path / "to"
    names = ["a.safetensors", "b[1].safetensors", "config.json"]
    assert objects.list_files(where) == [(f"{where}{name}", len(name)) for name in names]
    deeper = [(f"{where}{name}", len(name)) for name in ("unet/a.safetensors", "unet/deep/x.bin")]
    assert objects.list_files(where, recursive=True) == [*objects.list_files(where), *deeper]
    assert objects.list_safetensors(where) == [f"{where}{name}" for name in names[:2]]

    def there() -> list[str]:
        files = (file.relative_to(to) for file in to.rglob("*") if file.is_file())
        return sorted(str(file) for file in files if file.parts[0] != ".penstock")

    objects.pull(where, str(to), allow_pattern=["*.model"])
    assert there() == [], "nothing is wanted, which is no failure"
    objects.pull(where, str(to), ignore_pattern=["*.safetensors"])
    assert there() == ["config.json", "unet/deep/x.bin"]
    objects.pull(where, str(to), allow_pattern=[f"{where}a.*"])
    assert there() == ["a.safetensors", "config.json", "unet/deep/x.bin"]
    with pytest.raises(penstock.LocationNotFoundError):
        objects.pull(f"{bucket.root}/nothing/", str(to))
    (to / "b").mkdir()
    (to / "b" / "c.safetensors").write_bytes(b"12345")
    assert objects.list_files(str(to / "b")) == [(str(to / "b" / "c.safetensors"), 5)]


@pytest.mark.parametrize("kind", ["moto", "gcs", "azure"])
def test_a_key_with_an_empty_part_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with versitygw, which keeps objects in a file system, which has no such names."""
    with servers.ALL[kind](tmp_path) as remote:
        for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR"))]:
            monkeypatch.delenv(name)
        for name, value in remote.environment.items():
            monkeypatch.setenv(name, value)
        tensors = {"w": Raw("U8", (4,), b"abcd")}
        remote.put("model/m.safetensors", write_raw(tmp_path / "m.safetensors", tensors).read_bytes())
        remote.put("model//lost.json", b"12345")
        where = f"{remote.root}/model/"
        for use in (penstock.open, lambda where: penstock.pull(where, tmp_path / "to")):
            with pytest.raises(penstock.StorageError, match=r"a key that cannot be read: .*model//") as raised:
                use(where)
            assert "Give the objects themselves" in (raised.value.remedy or "")
        assert not (tmp_path / "to").exists()
        # The object itself, and what is beside its directory.
        assert penstock.open(f"{where}m.safetensors").load(framework="np")["w"].tobytes() == b"abcd"
        shown = [sys.executable, "-m", "penstock.cli", "inspect", "--json", where.replace("model/", "")]
        listed = json.loads(subprocess.run(shown, check=True, stdout=subprocess.PIPE, text=True).stdout)
        assert listed["directories"] == ["model"]


FORKED = """
import os, sys, time
import penstock

url, to = sys.argv[1:]
children = []

def progress(done, total):
    if done and not children:
        children.append(os.fork())
        if not children[0]:
            time.sleep(60)
            os._exit(0)
        print(children[0], flush=True)

penstock.pull(url, to, progress=progress)
"""


def test_a_forked_child_does_not_keep_the_lock(slow: Slow, tmp_path: Path) -> None:
    """A worker that is forked during a pull and lives on, while its parent ends."""
    slow.pause = 0.05
    process = subprocess.Popen(
        [sys.executable, "-c", FORKED, slow.url, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        child = int(process.stdout.readline())
    try:
        assert process.wait(60) == 0
        slow.pause = 0.0
        os.kill(child, 0)
        done: list[penstock.Pulled] = []
        pulling = threading.Thread(target=lambda: done.append(penstock.pull(slow.url, tmp_path)), daemon=True)
        pulling.start()
        pulling.join(30)
        assert done, "the child keeps the directory locked"
        assert (tmp_path / "big.bin").read_bytes() == BODY
    finally:
        os.kill(child, signal.SIGKILL)


IN_CHILD = """
import os, sys, time
import penstock
from penstock._native import Source

source = Source(sys.argv[1])
running = source.pull(sys.argv[2], [0], None)
while running.progress()[0] == 0:
    running.wait()
child = os.fork()
if not child:
    try:
        running.wait()
    except penstock.LoadCancelledError as error:
        assert "forked" in str(error), error
    else:
        os._exit(2)
    running.stop()
    del running
    os._exit(0)
deadline = time.monotonic() + 30
while not (ended := os.waitpid(child, os.WNOHANG))[0]:
    if time.monotonic() > deadline:
        os.kill(child, 9)
        raise SystemExit("the child hangs")
    time.sleep(0.02)
assert ended[1] == 0, ended
while running.wait() is None:
    pass
"""


def test_a_forked_childs_copy_of_a_pull_can_be_dropped(slow: Slow, tmp_path: Path) -> None:
    slow.pause = 0.02
    done = subprocess.run(
        [sys.executable, "-c", IN_CHILD, slow.url, str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "big.bin").read_bytes() == BODY


def test_a_pull_that_waits_for_another_says_so(slow: Slow, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slow.pause = 5.0
    other = begin(slow.url, tmp_path)
    until_first_block(tmp_path)
    done: list[penstock.Pulled] = []
    waiting = threading.Thread(target=lambda: done.append(penstock.pull(slow.url, tmp_path)), daemon=True)
    waiting.start()
    deadline = time.monotonic() + 60
    while not caplog.messages and time.monotonic() < deadline:
        time.sleep(0.05)
    assert str(tmp_path / ".penstock" / "lock") in caplog.text
    slow.pause = 0.0
    other.kill()
    other.communicate()
    waiting.join(60)
    assert done[0].files[0].nbytes == len(BODY)
    assert len(caplog.messages) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_while_another_thread_waits_for_a_pull_is_not_blocked_by_it(slow: Slow, tmp_path: Path) -> None:
    slow.pause = 0.05
    running = Source(slow.url).pull(str(tmp_path), [0], None)
    stop = threading.Event()

    def wait() -> None:
        while not stop.is_set():
            running.wait()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        time.sleep(0.2)
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(penstock.LoadCancelledError, match="forked"):
                    running.progress()
                running.stop()
                os._exit(0)
            except BaseException:  # noqa: BLE001 - a child must not return to pytest
                os._exit(2)
        timer = threading.Timer(30, os.kill, (child, signal.SIGKILL))
        timer.start()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        timer.cancel()
        stop.set()
        waiting.result()
    running.stop()
    assert status == 0


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, ValueError])
def test_what_a_log_handler_raises_ends_a_pull_if_it_ends_programs(
    slow: Slow, tmp_path: Path, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that comes while Python's logging runs is raised from there."""
    slow.pause = 5.0
    other = begin(slow.url, tmp_path)
    until_first_block(tmp_path)
    called = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            slow.pause = 0.0
            other.kill()
            called.set()
            raise raised

    handler = Handler()
    logging.getLogger("penstock").addHandler(handler)
    try:
        if raised is ValueError:
            assert penstock.pull(slow.url, tmp_path).files[0].nbytes == len(BODY)
        else:
            with pytest.raises(raised):
                penstock.pull(slow.url, tmp_path)
    finally:
        logging.getLogger("penstock").removeHandler(handler)
        other.kill()
        other.communicate()
    assert called.is_set()


def test_a_file_as_the_directory_is_said_to_be_one(bucket: servers.Remote, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(penstock.LocationAccessError, match="this is a file") as raised:
        penstock.pull(f"{bucket.root}/model", tmp_path / "file")
    assert "directory" in (raised.value.remedy or "")
    assert (tmp_path / "file").read_text() == "precious"
