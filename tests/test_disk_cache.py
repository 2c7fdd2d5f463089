"""The disk cache: the second load is a local one, whoever shares the directory, and however the first ended."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock
import servers
from conftest import Raw, assert_bits, raw_bytes, threads, write_raw

pytestmark = pytest.mark.stores


class Model:
    """A file of some MiB on an HTTP server, and a directory for the cache."""

    def __init__(self, remote: servers.Remote, tmp_path: Path) -> None:
        shape = (1024, 1500)
        self.tensors = {f"w{i}": Raw("F32", shape, raw_bytes("F32", shape, i)) for i in range(4)}
        self.body = write_raw(tmp_path / "m.safetensors", self.tensors).read_bytes()
        remote.put("m.safetensors", self.body)
        self.remote = remote
        self.url = f"{remote.root}/m.safetensors"
        self.requests = remote.requests
        self.cache = tmp_path / "cache"

    def load(self, **how: object) -> penstock.Checkpoint:
        ckpt = penstock.open(self.url, cache_dir=self.cache, **how)
        assert_bits(ckpt.load(framework="np"), self.tensors)
        assert penstock.flush_disk_cache()
        return ckpt


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.delenv("PENSTOCK_CACHE_DIR", raising=False)
    with servers.web(tmp_path) as remote:
        yield Model(remote, tmp_path)


def network_bytes(ckpt: penstock.Checkpoint) -> int:
    assert ckpt.stats is not None
    return ckpt.stats.network_bytes


def test_the_second_load_is_a_local_one(model: Model) -> None:
    first = model.load()
    assert network_bytes(first) > 0
    assert first.stats is not None
    assert first.stats.storage == "http"
    second = model.load()
    assert network_bytes(second) == 0
    assert second.stats is not None
    # What the directory lies on decides how it is read.
    assert second.stats.storage == second.storage != "http"
    assert_bits(second.load(framework="np", mmap=True), model.tensors)
    assert model.requests is not None
    model.requests.clear()
    # A load asks nobody; opening asks which version it is.
    assert_bits(second.load(framework="np"), model.tensors)
    assert model.requests == []
    penstock.open(model.url, cache_dir=model.cache)
    assert len(model.requests) == 1
    held = {name: np.zeros(tensor.shape, np.float32) for name, tensor in model.tensors.items()}
    penstock.open(model.url, cache_dir=model.cache).load_into(held)
    assert_bits(held, model.tensors)


def test_what_is_kept_is_for_its_user_only_and_holds_nothing_secret(model: Model) -> None:
    query = "password=SENTINEL"
    ckpt = penstock.open(f"{model.url}?{query}", cache_dir=model.cache)
    assert_bits(ckpt.load(framework="np"), model.tensors)
    assert penstock.flush_disk_cache()
    (root,) = model.cache.iterdir()
    (entry,) = (path for path in root.iterdir() if path.is_dir())
    assert [stat.S_IMODE(path.stat().st_mode) for path in (root, entry)] == [0o700, 0o700]
    files = [root / "lock", *entry.iterdir()]
    assert {path.name for path in files} == {"lock", "data", "map", "complete"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    # A number of 64 bits can be computed back to as many bits of what it is of: the label ends with a longer one.
    label = (entry / "map").read_bytes().decode("latin-1")
    assert hashlib.sha256(query.encode()).hexdigest() in label
    assert re.search(r"\n[0-9a-f]{16}\b", label) is None


def test_keyword_then_environment_then_nothing(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    penstock.open(model.url).load(framework="np")
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "from-environment"))
    ckpt = penstock.open(model.url)
    # For one load only.
    ckpt.load(framework="np", options=penstock.LoadOptions(cache_dir=tmp_path / "for-a-load"))
    penstock.open(model.url, cache_dir="").load(framework="np")
    penstock.open(model.url, cache_dir=b"").load(framework="np")
    model.load()
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} >= {"from-environment", "for-a-load", "cache"}
    assert penstock.LoadOptions(cache_dir="").cache_dir is None
    assert penstock.LoadOptions().cache_dir == str(tmp_path / "from-environment")
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", "1000")
    ckpt = penstock.open(model.url, cache_dir=tmp_path / "small")
    ckpt.load(framework="np")
    assert ckpt.stats is not None
    assert any("the cache may have 1000" in note for note in ckpt.stats.notes)
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", "much")
    with pytest.raises(penstock.ConfigError, match="PENSTOCK_CACHE_BYTES"):
        penstock.open(model.url)


def test_a_program_that_ends_after_its_load_has_kept_all(model: Model) -> None:
    command = [sys.executable, "-m", "penstock.cli", "load", "--framework", "np", "--json"]
    command += ["--cache-dir", str(model.cache), "--cache-bytes", "1GB", model.url]
    first = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    second = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert first["stats"]["network_bytes"] > 0
    assert second["stats"]["network_bytes"] == 0


def _load(url: str, cache: str, queue: multiprocessing.Queue[bool]) -> None:
    ckpt = penstock.open(url, cache_dir=cache)
    loaded = ckpt.load(framework="np")
    penstock.flush_disk_cache()
    queue.put(sorted(loaded) == [f"w{i}" for i in range(4)])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_processes_share_a_directory(model: Model, how: str) -> None:
    if how == "fork":
        model.load()  # the parent has threads and entries of its own by now
    context = multiprocessing.get_context(how)
    queue: multiprocessing.Queue[bool] = context.Queue()
    children = [context.Process(target=_load, args=(model.url, str(model.cache), queue)) for _ in range(4)]
    for child in children:
        child.start()
    assert [queue.get(timeout=90) for _ in children] == [True] * 4
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    model.load()
    assert network_bytes(model.load()) == 0
    assert len([entry for entry in model.cache.glob("*/*") if entry.is_dir()]) == 1


IN_CHILD = """
import json, os, signal, subprocess, sys
import penstock

url, cache = sys.argv[1:]
loading = iter(penstock.open(url, cache_dir=cache).stream(framework="np"))
next(loading)


def child(work):
    said, say = os.pipe()
    if child := os.fork():
        assert os.read(said, 4) == b"done"
        return child
    work()
    assert penstock.flush_disk_cache()
    os.write(say, b"done")
    signal.pause()


def drop():
    global loading
    del loading


def load():
    assert len(penstock.open(url, cache_dir=cache).load(framework="np")) == 4


children = [child(work) for work in (drop, load, lambda: None)]
list(loading)
del loading
assert penstock.flush_disk_cache()
penstock_cache = [sys.executable, "-m", "penstock", "cache"]
for command in (["ls"], ["rm", "*"]):
    done = subprocess.run([*penstock_cache, *command, "--json", "--cache-dir", cache], check=True, capture_output=True)
    print(json.dumps(json.loads(done.stdout)))
for child in children:
    os.kill(child, signal.SIGKILL)
"""


def test_children_forked_during_a_load_leave_its_entry_to_it_and_hold_no_lock_of_it(model: Model) -> None:
    command = [sys.executable, "-W", "ignore", "-c", IN_CHILD, model.url, str(model.cache)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    listed, removed = map(json.loads, done.stdout.splitlines())
    assert [entry["is_complete"] for entry in listed["entries"]] == [True]
    assert len(removed["removed"]) == 1


def test_a_killed_process_leaves_nothing_that_harms(model: Model) -> None:
    script = (
        "import sys, penstock\n"
        "while True:\n"
        "    ckpt = penstock.open(sys.argv[1], cache_dir=sys.argv[2])\n"
        "    for _ in ckpt.stream(framework='np'): pass\n"
        "    import shutil; shutil.rmtree(sys.argv[2], ignore_errors=True)\n"
    )
    for delay in (0.3, 0.35, 0.4, 0.5):
        child = subprocess.Popen([sys.executable, "-c", script, model.url, str(model.cache)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while not model.cache.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait()
        model.load()
    assert network_bytes(model.load()) == 0


def test_without_a_cache_nothing_of_it_is_there(model: Model) -> None:
    before = threads()
    penstock.open(model.url).load(framework="np")
    assert not [name for task, name in threads().items() if task not in before and "cache" in name]


def test_a_directory_that_cannot_be_written_to_is_read(model: Model, tmp_path: Path) -> None:
    """As one that was baked into an image, where copying changed every change time."""
    model.load()
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    shutil.copytree(model.cache, tmp_path / "copy")
    mount = ["mount", "--bind", str(tmp_path / "copy"), str(mounted)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("this process may not mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(mounted)], check=True)
        model.cache = mounted
        for _ in range(2):
            ckpt = model.load()
            assert network_bytes(ckpt) == 0
            assert ckpt.stats is not None
            assert not ckpt.stats.notes, ckpt.stats.notes
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)
