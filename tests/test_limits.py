"""Promise 5 where the system gives no more: memory, files. An error says which limit it was; nothing aborts."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import penstock
from conftest import Raw, raw_bytes, write_raw
from test_faults import failed, make_model, run

MIB = 1 << 20


# ---- address space


@pytest.mark.parametrize("how", ["load", "stream"])
def test_memory_that_is_refused_is_an_error_that_names_the_limit(tmp_path: Path, how: str) -> None:
    model = make_model(tmp_path)
    answer = run(model, how=how, limits={"AS": 1 * MIB})
    error = failed(answer, "InsufficientMemoryError")
    assert "MemoryError" in error["classes"]
    assert "ulimit -v" in error["remedy"]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["use", "bypass"])
def test_wherever_memory_runs_out_the_process_lives_and_can_load_again(tmp_path: Path, cache: str) -> None:
    """From not enough for the tensors, over not enough for threads and scratch memory, to enough."""
    model = make_model(tmp_path)
    outcomes = []
    for room in [0, 1, 4, *range(5, 12), 16, 32, 128]:
        answer = run(model, limits={"AS": room * MIB}, cache=cache)
        if answer["error"] is None:
            assert answer["digests"] == model.digests
        else:
            assert "MemoryError" in answer["error"]["classes"], answer["error"]
        outcomes.append(answer["error"] is None)
    assert not outcomes[0]
    assert outcomes[-1], "6 MB of tensors in 128 MiB"


@pytest.mark.slow
@pytest.mark.parametrize("header", ["one long text", "many tensors"])
@pytest.mark.parametrize("room", [0.5, 1.5, 2.5, 4])
def test_a_header_that_memory_does_not_suffice_for_is_an_error(tmp_path: Path, header: str, room: float) -> None:
    path = tmp_path / "x.safetensors"
    if header == "one long text":
        text = b'{"__metadata__":{"a":"' + b"a" * (32 * MIB) + b'"}}'
    else:
        entries = (b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(400_000))
        text = b"{" + b",".join(entries) + b"}"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    script = textwrap.dedent(f"""
        import resource, penstock
        from pathlib import Path
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + {int(room * len(text))}, resource.RLIM_INFINITY))
        try:
            penstock.open({str(path)!r})
        except penstock.InsufficientMemoryError as error:
            assert "ulimit -v" in error.remedy and error.location == {str(path)!r}, error
        else:
            raise SystemExit("it was opened")
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# ---- open files


def test_more_shards_than_files_may_be_open_is_an_error_that_names_the_limit(tmp_path: Path) -> None:
    model = make_model(tmp_path, files=20)
    error = failed(run(model, limits={"NOFILE": 10}), "StorageError")
    assert "Too many open files" in error["cause"]
    assert "ulimit -n" in error["remedy"]
    assert error["location"] in [str(path) for path in model.paths]


def test_files_that_cannot_be_opened_a_second_time_are_read_through_the_page_cache(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    # One file more, and none for direct reads.
    answer = run(model, limits={"NOFILE": 1}, cache="bypass")
    if answer["stats_before"]["direct_bytes"] == 0:
        pytest.skip("the temporary directory's file system has no direct reads")
    assert (answer["error"], answer["digests"]) == (None, model.digests)
    assert answer["stats"]["direct_bytes"] == 0
    assert [note for note in answer["stats"]["notes"] if "Too many open files" in note]


def test_a_directory_of_more_shards_than_files_may_be_open_is_opened(tmp_path: Path) -> None:
    model = make_model(tmp_path, files=20)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 18, hard))
    try:
        assert sorted(penstock.open(tmp_path)) == sorted(model.digests)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- files that shrink while they are mapped


def _mapped(tmp_path: Path) -> tuple[Path, penstock.Checkpoint]:
    tensors = {f"w{i}": Raw("U8", (MIB,), raw_bytes("U8", (MIB,), i)) for i in range(4)}
    path = write_raw(tmp_path / "x.safetensors", tensors)
    return path, penstock.open(path)


@pytest.mark.parametrize("state", ["warm", "cold"])
def test_prefaulting_a_file_that_was_cut_short_is_an_error_and_no_signal(tmp_path: Path, state: str) -> None:
    path, ckpt = _mapped(tmp_path)
    mapped = ckpt._native.map(["w1", "w3"], penstock.LoadOptions())
    os.truncate(path, path.stat().st_size - 2 * MIB)
    if state == "cold":
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with pytest.raises(penstock.LocationChangedError) as raised:
        mapped.prefault()
    assert raised.value.location == str(path)
    assert (raised.value.tensor, raised.value.byte_range) == ("w3", ckpt["w3"].byte_range)


def test_prefaulting_notices_a_file_that_was_written_to(tmp_path: Path) -> None:
    path, ckpt = _mapped(tmp_path)
    mapped = ckpt._native.map(None, penstock.LoadOptions())
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, (0, 0))
    with pytest.raises(penstock.LocationChangedError):
        mapped.prefault()


def test_touching_a_view_of_a_file_that_was_cut_short_afterwards_ends_the_process(tmp_path: Path) -> None:
    """What cannot be promised of views, as the manual says: the pages are the file's."""
    path, _ = _mapped(tmp_path)
    script = textwrap.dedent(f"""
        import json, os, penstock
        views = penstock.open({str(path)!r}).load(framework="np", mmap=True, prefault=True)
        os.truncate({str(path)!r}, 4096)
        print(json.dumps("alive"), flush=True)
        views["w3"].sum()
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(done.stdout) == "alive"
    assert done.returncode == -signal.SIGBUS
