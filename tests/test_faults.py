"""Promise 5 against real system calls that fail: the bytes are right or the error says all there is to say, nothing is
left behind, and the process can load again.

Every load runs in a process of its own (``faults/victim.py``), under a library that makes chosen calls fail
(``faults/shim.c``) or a filter that forbids them (``faults/seccomp.py``).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conftest import Raw, drop_cache, raw_bytes, write_raw
from faults.seccomp import NUMBERS

HERE = Path(__file__).parent / "faults"
MARKER = "faulty-model"
TENSOR_BYTES = 300_000
TENSORS = 20


class Model(NamedTuple):
    paths: list[Path]
    digests: dict[str, str]
    data_start: int
    """Where the first tensor begins in its file; the others follow."""

    def byte_of(self, tensor: int) -> int:
        """A byte in the middle of that tensor."""
        return self.data_start + tensor * TENSOR_BYTES + TENSOR_BYTES // 2


def make_model(directory: Path, *, files: int = 1) -> Model:
    """Tensors ``w0``, ``w1``, … of 300 kB in order, several of them to a block and most of them across blocks."""
    paths, digests = [], {}
    for file in range(files):
        names = [f"w{i}" for i in range(TENSORS * file // files, TENSORS * (file + 1) // files)]
        tensors = {n: Raw("U8", (TENSOR_BYTES,), raw_bytes("U8", (TENSOR_BYTES,), int(n[1:]))) for n in names}
        paths.append(write_raw(directory / f"{MARKER}-{file:03}.safetensors", tensors))
        digests |= {name: hashlib.sha256(raw.data).hexdigest() for name, raw in tensors.items()}
    return Model(paths, digests, paths[0].stat().st_size - TENSOR_BYTES * TENSORS // files)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes calls fail, compiled."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) to make the fault-injecting library with")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    # Callers may pass null where headers say they do not (to find out whether there is a statx, for one).
    options = ["-O1", "-fno-delete-null-pointer-checks", "-Wno-nonnull-compare", "-shared", "-fPIC"]
    source = str(HERE / "shim.c")
    subprocess.run([compiler, *options, "-o", str(library), source, "-ldl", "-lpthread"], check=True)
    return library


def run(
    model: Model,
    *,
    shim: Path | None = None,
    faults: dict[str, Any] | None = None,
    how: str = "load",
    cache: str = "auto",
    cold: bool = True,
    **request: Any,
) -> dict[str, Any]:
    """Loads in a process of its own and checks what holds however the load went."""
    if cold:
        for path in model.paths:
            drop_cache(path)
    settings = {f"FAULT_{name.upper()}": str(value) for name, value in (faults or {}).items()}
    asked = {
        "paths": [str(path) for path in model.paths],
        "faults": {"FAULT_PATH": MARKER, **settings},
        "how": how,
        "cache": cache,
        "readers": None,
        "forbid": {},
        "limits": {},
        "interrupt_after": None,
    }
    environment = os.environ | ({"LD_PRELOAD": str(shim)} if shim else {})
    done = subprocess.run(
        [sys.executable, str(HERE / "victim.py"), json.dumps(asked | request)],
        capture_output=True, text=True, timeout=100, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    answer: dict[str, Any] = json.loads(done.stdout)
    before, after = answer["remains"]
    assert after == before, "threads, files and slots before and after"
    assert answer["again"] == model.digests, "the next load"
    return answer


def arrived(model: Model, answer: dict[str, Any]) -> dict[str, Any]:
    """The statistics of a load that went well, every byte of which is right."""
    assert answer["error"] is None, answer["error"]
    assert answer["digests"] == model.digests
    stats: dict[str, Any] = answer["stats"]
    return stats


def failed(answer: dict[str, Any], error_class: str) -> dict[str, Any]:
    """The error of a load that failed."""
    assert answer["error"] is not None, "the load went well"
    assert answer["error"]["classes"][0] == error_class, answer["error"]
    error: dict[str, Any] = answer["error"]
    return error


def needs_direct_reads(answer: dict[str, Any]) -> None:
    if answer["stats_before"]["direct_bytes"] == 0:
        pytest.skip("the temporary directory's file system has no direct reads")


WAYS = [("use", "buffered"), ("bypass", "direct")]


# ---- storage that fails


@pytest.mark.parametrize(("cache", "way"), WAYS)
@pytest.mark.parametrize("how", ["load", "stream", "into"])
@pytest.mark.parametrize("tensor", [0, 11, TENSORS - 1])
def test_a_bad_sector_is_an_error_that_names_the_tensor_it_lies_in(
    model: Model, shim: Path, how: str, tensor: int, cache: str, way: str
) -> None:
    bad = model.byte_of(tensor)
    faults = {"read": errno.EIO, "at": bad, "way": way}
    answer = run(model, shim=shim, faults=faults, how=how, cache=cache)
    if way == "direct" and how != "into":
        needs_direct_reads(answer)
    error = failed(answer, "StorageError")
    assert (error["location"], error["tensor"], error["errno"]) == (str(model.paths[0]), f"w{tensor}", errno.EIO)
    start, end = error["byte_range"]
    assert start <= bad < end
    assert bad - start < 4096, "the range begins where reading stopped"
    assert "Input/output error" in error["cause"]
    assert "dmesg" in error["remedy"]
    assert all(
        part in error["message"] for part in (error["location"], f'"w{tensor}"', error["cause"], error["remedy"])
    )


@pytest.mark.parametrize(
    ("number", "error_class", "remedy"),
    [
        (errno.ESTALE, "StorageError", "deleted or replaced"),
        (errno.ETIMEDOUT, "StorageError", "does not answer"),
        (errno.ENOTCONN, "StorageError", "fusermount"),
        (errno.ENOMEM, "InsufficientMemoryError", "memory"),
        (errno.EACCES, "LocationAccessError", "permissions"),
    ],
)
@pytest.mark.parametrize("call", ["read", "open", "stat"])
def test_what_to_try_fits_the_failure(
    model: Model, shim: Path, call: str, number: int, error_class: str, remedy: str
) -> None:
    error = failed(run(model, shim=shim, faults={call: number}), error_class)
    assert (error["location"], error["errno"]) == (str(model.paths[0]), number)
    assert remedy in error["remedy"]
    assert error["tensor"] is not None or call != "read"


@pytest.mark.parametrize("call", ["read", "open", "stat"])
def test_a_header_that_cannot_be_read_is_an_error_that_names_the_file(model: Model, shim: Path, call: str) -> None:
    error = failed(run(model, shim=shim, faults={call: errno.EIO}, how="open"), "StorageError")
    assert (error["location"], error["errno"]) == (str(model.paths[0]), errno.EIO)
    assert "dmesg" in error["remedy"]


@pytest.mark.parametrize(("cache", "way"), WAYS)
def test_reads_that_give_nothing_from_a_file_that_goes_on_are_an_error(
    model: Model, shim: Path, cache: str, way: str
) -> None:
    bad = model.byte_of(7)
    answer = run(model, shim=shim, faults={"empty": 1, "at": bad}, cache=cache)
    error = failed(answer, "StorageError")
    assert "as long as it was" in error["cause"]
    assert error["byte_range"][0] <= bad < error["byte_range"][1]


# ---- reads that come in pieces


@pytest.mark.parametrize(("cache", "way"), WAYS)
@pytest.mark.parametrize("most", [997, 4096, 65_536, 70_001])
def test_short_reads_make_no_difference(model: Model, shim: Path, most: int, cache: str, way: str) -> None:
    stats = arrived(model, run(model, shim=shim, faults={"short": most, "way": way}, cache=cache))
    assert stats["calls"] > stats["blocks"]


def test_short_reads_to_a_few_tensors_make_no_difference(model: Model, shim: Path) -> None:
    arrived(model, run(model, shim=shim, faults={"short": 70_001}, cache="bypass", how="into"))


@pytest.mark.parametrize(("cache", "way"), WAYS)
def test_interrupted_reads_are_repeated(model: Model, shim: Path, cache: str, way: str) -> None:
    arrived(model, run(model, shim=shim, faults={"read": errno.EINTR, "every": 2, "way": way}, cache=cache))


# ---- faster ways that are refused


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "read"])
@pytest.mark.parametrize("how", ["load", "into"])
def test_direct_reads_that_are_refused_go_through_the_page_cache_and_a_note_says_why(
    model: Model, shim: Path, call: str, number: int, how: str
) -> None:
    answer = run(model, shim=shim, faults={call: number, "way": "direct"}, cache="bypass", how=how)
    needs_direct_reads(answer)
    stats = arrived(model, answer)
    assert (stats["direct_bytes"], stats["buffered_bytes"]) == (0, stats["read_bytes"])
    assert [note for note in stats["notes"] if "O_DIRECT" in note and os.strerror(number) in note]


def test_direct_reads_that_are_refused_half_way_go_on_through_the_page_cache(model: Model, shim: Path) -> None:
    faults = {"read": errno.EINVAL, "way": "direct", "at": model.byte_of(10)}
    answer = run(model, shim=shim, faults=faults, cache="bypass", readers=1)
    needs_direct_reads(answer)
    stats = arrived(model, answer)
    assert stats["direct_bytes"] > 0
    assert stats["buffered_bytes"] > 0
    assert [note for note in stats["notes"] if "O_DIRECT" in note]


def test_a_load_without_trouble_has_no_such_notes(model: Model) -> None:
    stats = arrived(model, run(model))
    assert not [note for note in stats["notes"] if "O_DIRECT" in note or "reader threads" in note]


@pytest.mark.skipif(platform.machine() not in NUMBERS, reason=f"no filter is written for {platform.machine()}")
@pytest.mark.parametrize("how", ["load", "into", "prefault"])
@pytest.mark.parametrize(
    "forbidden",
    [
        {"cachestat": "ENOSYS"},
        {"cachestat": "EPERM"},
        {"statx": "ENOSYS"},
        {"statx": "EPERM"},
        {"cachestat": "ENOSYS", "statx": "ENOSYS", "madvise": "EINVAL", "mincore": "ENOSYS", "fadvise64": "ENOSYS"},
    ],
    ids=["no cachestat", "cachestat forbidden", "no statx", "statx forbidden", "an old kernel"],
)
def test_an_old_kernel_or_a_strict_sandbox_is_slower_and_a_note_says_why(
    model: Model, forbidden: dict[str, str], how: str
) -> None:
    answer = run(model, forbid=forbidden, how=how)
    if how == "prefault":
        assert (answer["error"], answer["digests"]) == (None, model.digests)
        return
    stats = arrived(model, answer)
    noted = [note for note in stats["notes"] if "cachestat" in note]
    assert bool(noted) == ("cachestat" in forbidden)
    if noted:
        assert os.strerror(getattr(errno, forbidden["cachestat"])) in noted[0]
        assert (stats["direct_bytes"], stats["buffered_bytes"]) == (0, stats["read_bytes"])


# ---- threads that cannot be had


def test_fewer_threads_are_a_slower_load_and_a_note_says_why(model: Model, shim: Path) -> None:
    stats = arrived(model, run(model, shim=shim, faults={"threads": 1}))
    assert stats["readers"] == 1
    [note] = [note for note in stats["notes"] if "reader threads" in note]
    assert "ulimit -u" in note


def test_no_thread_at_all_is_an_error_that_names_the_limit(model: Model, shim: Path) -> None:
    error = failed(run(model, shim=shim, faults={"threads": 0}), "InsufficientMemoryError")
    assert "thread" in error["cause"]
    assert "ulimit -u" in error["remedy"]


def test_without_threads_headers_are_read_one_after_the_other(tmp_path: Path, shim: Path) -> None:
    model = make_model(tmp_path, files=4)
    answer = run(model, shim=shim, faults={"threads": 0}, how="open")
    assert answer["error"] is None
    assert answer["names"] == sorted(model.digests)


# ---- reads that hang


@pytest.mark.parametrize("how", ["load", "stream", "into"])
def test_ctrl_c_during_a_read_that_hangs_is_raised_when_the_read_returns(model: Model, shim: Path, how: str) -> None:
    """A thread that waits in the kernel cannot be stopped, and writes to its destination when it goes on. So the end
    of a load waits for it, however long that is; other threads of the program run meanwhile.
    """
    faults = {"hang": 2000, "at": model.byte_of(10)}
    answer = run(model, shim=shim, faults=faults, how=how, interrupt_after=0.3, cache="use")
    failed(answer, "KeyboardInterrupt")
    assert answer["seconds"] > 1.5  # it has waited for the read
    assert answer["ticks"] > 50  # of 170


@pytest.mark.parametrize(
    ("what", "ended"),
    [
        ("stop_while_waiting", ["LoadCancelledError", "LoadCancelledError", "nothing raised", "LoadCancelledError"]),
        ("cancel", ["LoadCancelledError"]),
        ("close_supply", ["LoadCancelledError", "None"]),
        ("abandon", ["came back"]),
    ],
)
def test_a_load_that_is_ended_while_storage_is_slow_keeps_no_thread_waiting(
    model: Model, shim: Path, tmp_path: Path, what: str, ended: list[str]
) -> None:
    if what == "close_supply":
        pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, str(HERE / "ending.py"), what, str(tmp_path / "hold"), *map(str, model.paths)],
        capture_output=True, text=True, timeout=100, check=False,
        env=os.environ | {"LD_PRELOAD": str(shim), "FAULT_PATH": MARKER},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ended
