"""Processes that stream the same files together: each byte is read by one of them, and all get every tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "tests")]

from dist_rank import described  # noqa: E402

import penstock  # noqa: E402
import servers  # noqa: E402

pytestmark = pytest.mark.libraries

SMALL = {"RUNAI_STREAMER_DIST_BUFFER_MIN_BYTESIZE": "0"}
"""Rounds as small as they get: 64 KiB for each process."""
Results = list[list[dict[str, Any]]]


def run(store: Path, *cases: list[dict[str, Any]], backend: str = "gloo") -> Results:
    """Runs cases one after the other, each of which has settings for every process; what each found of each case.

    Long before a process would stop to wait for another, which takes ten minutes, this fails.
    """
    count = len(cases[0])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RUNAI_STREAMER")}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = [sys.executable, str(HERE / "dist_rank.py")]
    # Files: a process that waits for its pipe to be read would keep the others waiting.
    outputs = [store.with_name(f"{store.name}.{rank}") for rank in range(count)]
    processes = []
    for rank, output in enumerate(outputs):
        with output.open("w") as stdout:
            command = [*script, str(rank), str(count), str(store), backend, json.dumps(cases)]
            processes.append(subprocess.Popen(command, env=environment, stdout=stdout))
    try:
        for process in processes:
            process.wait(timeout=100)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [[json.loads(line) for line in output.read_text().splitlines()] for output in outputs]
    # One that died has fewer.
    return [[lines[number] if number < len(lines) else {} for lines in found] for number in range(len(cases))]


def tensors(seed: int) -> dict[str, Any]:
    chance = torch.Generator().manual_seed(seed)
    made = {
        f"{seed}.empty": torch.empty(0, 5),
        f"{seed}.large": torch.rand(700, 401, generator=chance),
        f"{seed}.odd": torch.randint(0, 99, (12_347,), generator=chance).to(torch.uint8),
        f"{seed}.half": torch.rand(300, 33, generator=chance).to(torch.bfloat16),
        f"{seed}.scalar": torch.tensor(seed + 0.5),
        f"{seed}.last": torch.empty(3, 0, dtype=torch.float16),
    }
    return made | {f"{seed}.small.{index}": torch.rand(index, generator=chance) for index in range(40)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    home = tmp_path_factory.mktemp("files")
    paths = [str(home / f"{seed}.safetensors") for seed in range(5)]
    for seed, path in enumerate(paths):
        penstock.save_file(tensors(seed), path)
    return paths


def held(paths: list[str]) -> dict[str, str]:
    """What is in files, by an ordinary load."""
    return {name: described(tensor) for path in paths for name, tensor in penstock.open(path).load().items()}


def nbytes(paths: list[str]) -> int:
    return sum(penstock.open(path).nbytes for path in paths)


@pytest.mark.parametrize("count", [2, 3])
def test_each_byte_is_read_once_and_all_get_every_tensor_in_one_order(
    files: list[str], tmp_path: Path, count: int
) -> None:
    cases: list[dict[str, Any]] = [
        {"paths": files},
        {"paths": files[:1]},
        {"paths": files, "environment": SMALL},
        {"paths": files[:1], "environment": SMALL},
        {"paths": files, "environment": {"RUNAI_STREAMER_MEMORY_LIMIT": "1500000"}},
        {"paths": []},
    ]
    for case, found in zip(cases, run(tmp_path / "store", *([case] * count for case in cases)), strict=True):
        assert all("error" not in rank and rank["is_distributed"] and not rank["threads"] for rank in found), found
        orders = [rank["tensors"] for rank in found]
        assert orders == [orders[0]] * count
        assert dict(map(tuple, orders[0])) == held(case["paths"])
        assert sum(rank["bytes"] for rank in found) == nbytes(case["paths"]), "each byte once"
        # Each has memory of its own: keeping a small one keeps no more.
        with_bytes = sum("(0," not in what and "0)" not in what for _, what in orders[0])
        assert all(rank["storages"] == with_bytes for rank in found)
        if "environment" in case:
            assert all(rank["rounds"] > 1 for rank in found), "tensors go over several"
        if case["paths"]:
            assert max(rank["bytes"] for rank in found) < nbytes(case["paths"]) / count * 1.2


def test_named_tensors_alone_are_read_and_a_streamer_can_be_used_again(files: list[str], tmp_path: Path) -> None:
    names = ["0.large", "3.half", "4.scalar", "1.empty"]
    named: dict[str, Any] = {"paths": files, "names": names, "environment": SMALL}
    other_way = {**named, "names": names[::-1]}
    again: dict[str, Any] = {"paths": files[:2], "wrong": "streams again", "environment": SMALL}
    picked, twice = run(tmp_path / "store", [named, other_way], [again] * 2)
    wanted = {name: what for name, what in held(files).items() if name in names}
    for rank in picked:
        assert dict(map(tuple, rank["tensors"])) == wanted
    assert picked[0]["tensors"] == picked[1]["tensors"]
    assert sum(rank["bytes"] for rank in picked) == sum(penstock.open(files)[name].nbytes for name in names)
    assert twice[0]["tensors"] == twice[1]["tensors"]
    assert len(twice[0]["tensors"]) == 2 * len(held(files[:2]))


def test_ranges_of_files_are_read_once_too(tmp_path: Path) -> None:
    path = tmp_path / "f.bin"
    content = bytes(range(256)) * 2000
    path.write_bytes(content)
    offsets, sizes = [300_000, 5, 10, 200_000, 7], [200_000, 100_000, 0, 90_001, 20]
    case = {"ranges": [[70, str(path), offsets, sizes], [90, str(path), [1], [3]]], "environment": SMALL}
    wanted = {
        (file, index): described(torch.frombuffer(bytearray(content[o : o + s]) or bytearray(1), dtype=torch.uint8)[:s])
        for file, request in ((70, zip(offsets, sizes, strict=True)), (90, [(1, 3)]))
        for index, (o, s) in enumerate(request)
    }
    [found] = run(tmp_path / "store", [case] * 2)
    for rank in found:
        flat = {(file, index): what.replace("(1, ", "(").replace(") ", ",) ") for file, index, what in rank["chunks"]}
        assert flat == wanted
    assert found[0]["chunks"] == found[1]["chunks"]
    # Ranges that overlap are streams of their own.
    assert sum(rank["bytes"] for rank in found) == sum(sizes) + 3


@pytest.mark.parametrize(
    ("case", "is_together"),
    [
        ({}, True),
        ({"is_distributed": False}, False),
        ({"environment": {"RUNAI_STREAMER_DIST": "0"}}, False),
        # Between CPUs it has to be asked for.
        ({"environment": {"RUNAI_STREAMER_DIST": "auto"}}, False),
        ({"environment": {"RUNAI_STREAMER_DIST_GLOBAL": "1"}}, True),
    ],
)
def test_when_processes_read_together(files: list[str], tmp_path: Path, case: Any, is_together: bool) -> None:
    [found] = run(tmp_path / "store", [{"paths": files[:2], **case}] * 2)
    for rank in found:
        assert rank["is_distributed"] is is_together
        assert dict(map(tuple, rank["tensors"])) == held(files[:2])
        assert ("bytes" in rank) is is_together


GONE = "a process is gone, or did not answer in time"
WRONG = {
    "leaves": "process 1 of 3 cannot go on: what it streams was not taken",
    "never takes any": "process 1 of 3 cannot go on: what it streams was not taken",
    "its model fails": "process 1 of 3 cannot go on: what it streams was not taken",
    "is interrupted": "process 1 of 3 cannot go on: what it streams was not taken",
    "sleeps": GONE,
    "dies": GONE,
}
"""What may be wrong with process 1, and what the others say of it."""


def test_what_goes_wrong_in_one_process_is_an_error_in_all(files: list[str], tmp_path: Path) -> None:
    cases = []
    for wrong in WRONG:
        patience = {"RUNAI_STREAMER_DIST_TIMEOUT": "5"} if wrong == "sleeps" else {}
        case = {"paths": files, "environment": SMALL | patience}
        cases.append([case, {**case, "wrong": wrong}, case])
    # Then all goes well again, with groups of its own.
    cases.insert(3, [{"paths": files}] * 3)
    results = run(tmp_path / "store", *cases)
    well = results.pop(3)
    for (wrong, words), found in zip(WRONG.items(), results, strict=True):
        for rank in (0, 2):
            assert words in found[rank].get("error", ""), (wrong, found)
            assert found[rank]["error"].startswith("ValueError"), "what callers catch"
            assert found[rank]["threads"] == []
    assert all("error" not in rank for rank in well)


def test_what_cannot_be_opened_or_is_not_the_same_is_refused_by_all(files: list[str], tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(Path(files[1]).read_bytes())
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\x10\0\0\0\0\0\0\0{")
    good: dict[str, Any] = {"paths": files[:2]}
    version = "not all processes see the same version of the files"
    others = {
        str(tmp_path / "absent.safetensors"): "process 1 of 2 cannot load: ValueError: ",
        str(broken): "process 1 of 2 cannot load: ValueError: Corrupted File",
        str(copy): version,
    }
    wrong = [{"paths": [files[0], path]} for path in others]
    names = [{**good, "names": names} for names in (["0.large"], ["1.large"], ["nowhere"])]
    ranges = [{"ranges": [[0, path, [0], [10]]]} for path in (files[0], str(tmp_path / "absent"))]
    results = run(
        tmp_path / "store", *([good, case] for case in wrong), names[:2], [names[0], names[2]], ranges, [good] * 2
    )
    for words, found in zip(others.values(), results, strict=False):
        assert words in found[0]["error"], found
        assert found[1]["error"].startswith("ValueError"), found
    different, unknown, absent, well = results[len(others) :]
    assert all("not all processes ask for the same tensors" in rank["error"] for rank in different)
    assert "process 1 of 2 cannot load: ValueError: tensor_names not found" in unknown[0]["error"]
    assert "tensor_names not found in checkpoint: ['nowhere']" in unknown[1]["error"]
    assert "process 1 of 2 cannot load: LocationNotFoundError" in absent[0]["error"]
    assert str(tmp_path / "absent") in absent[1]["error"]
    assert all("error" not in rank for rank in well)


# From a server that counts


@contextmanager
def served(files: list[str], home: Path) -> Iterator[tuple[servers.Remote, list[str]]]:
    with servers.web(home) as remote:
        for path in files:
            remote.put(Path(path).name, Path(path).read_bytes())  # type: ignore[operator]
        yield remote, [f"{remote.root}/{Path(path).name}" for path in files]


def test_a_server_sends_each_byte_once_to_all_processes_together(tmp_path: Path) -> None:
    path = str(tmp_path / "m.safetensors")
    penstock.save_file({f"t{index}": torch.rand(3000, 800 + index) for index in range(4)}, path)
    with served([path], tmp_path) as (remote, _):
        counted = servers.Counted(int(remote.root.rpartition(":")[2]))
        port = str(counted.port)
        case = {"paths": [f"http://127.0.0.1:{port}/m.safetensors"]}
        [found] = run(tmp_path / "store", [case] * 3)
        counted.close()
    assert all(dict(map(tuple, rank["tensors"])) == held([path]) for rank in found)
    assert sum(counted.served.values()) <= 1.1 * os.path.getsize(path), "with all that was asked to open it"


def test_storage_that_fails_one_process_in_the_middle_fails_all(files: list[str], tmp_path: Path) -> None:
    with served(files, tmp_path) as (remote, urls):
        asked = []

        def decide(headers: Any) -> tuple[int, bytes] | None:
            if headers["Host"].startswith("localhost"):
                asked.append(headers["Range"])
                if len(asked) > len(files) + 3:
                    return 403, b"no more"
            return None

        assert remote.refuse is not None
        remote.refuse.append(decide)
        good = {"paths": urls, "environment": SMALL}
        cut_off = {**good, "paths": [url.replace("127.0.0.1", "localhost") for url in urls]}
        [found] = run(tmp_path / "store", [good, cut_off, good])
    assert len(asked) > len(files) + 3
    for rank in (0, 2):
        assert "process 1 of 3 cannot go on: LocationAccessError" in found[rank]["error"], found
    assert "403" in found[1]["error"], found


# Between GPUs


@pytest.mark.gpu
def test_gpus_get_every_tensor_once_read(files: list[str], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    auto = {"RUNAI_STREAMER_DIST": "auto"}
    cases: list[dict[str, Any]] = [
        {"paths": files, "environment": auto},
        {"paths": files, "environment": SMALL | auto},
        {"paths": files, "environment": SMALL | auto, "wrong": "goes on elsewhere"},
        {"paths": files, "environment": SMALL | auto},
    ]
    results = run(tmp_path / "store", *([case] * 2 for case in cases[:3]), [cases[3], {**cases[3], "wrong": "leaves"}],
                  backend="nccl")  # fmt: skip
    for found in results[:3]:
        assert all("error" not in rank and rank["is_distributed"] for rank in found), found
        assert found[0]["tensors"] == found[1]["tensors"]
        assert dict(map(tuple, found[0]["tensors"])) == held(files)
        assert sum(rank["bytes"] for rank in found) == nbytes(files)
    assert "process 1 of 2 cannot go on" in results[3][0]["error"]
