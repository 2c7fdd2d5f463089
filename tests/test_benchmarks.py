"""The comparison with rivals can be believed: states are proved, bytes are checked, failures are rows and not gaps.

The harness runs as a user runs it, on the CPU, with tiny checkpoints and loaders that are installed for tests anyway.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks import checkpoints, checksum, common, limits, object_servers, processes, remote, report, rivals

import penstock

pytestmark = pytest.mark.slow

SHAPES = {"large": (700, 1300), "odd": (3, 3), "one": (1,), "none": (0, 4)} | {
    f"small.{n}": (64, 128) for n in range(9)
}


@pytest.fixture
def _on_a_disk(tmp_path: Path) -> None:
    if common.filesystem(tmp_path) in {"tmpfs", "ramfs"}:
        pytest.skip("a file in memory has no other state")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    common.write_checkpoint(path, SHAPES)
    return path


# ---- data and checksums


def test_generated_data_is_a_checkpoint_of_bytes_that_do_not_repeat(checkpoint: Path) -> None:
    tensors = penstock.open(checkpoint).load()
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SHAPES
    words = tensors["large"].view(torch.int64).unique()
    assert len(words) == tensors["large"].nbytes // 8


@pytest.mark.parametrize("read_bytes", [checksum.READ_BYTES, 64 << 10])
def test_checksums_of_files_and_of_tensors_agree(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(checksum, "READ_BYTES", read_bytes)
    found = checksum.of_tensors(penstock.open(checkpoint).load())
    assert checksum.wrong(found, checksum.of_files([checkpoint])) == []


@pytest.mark.parametrize("size", [16, 4096, (5 << 20) + 24])
def test_checksums_find_words_that_changed_places(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    swapped = data.copy()
    swapped[:8], swapped[-8:] = data[-8:], data[:8]
    good, bad = torch.from_numpy(data), torch.from_numpy(swapped)
    assert checksum.of_tensors({"t": good})["t"] == checksum.of_bytes(data.tobytes())
    assert checksum.of_tensors({"t": bad})["t"] == checksum.of_bytes(swapped.tobytes())
    assert checksum.wrong(checksum.of_tensors({"t": bad}), checksum.of_tensors({"t": good})) == ["t"]


def test_checksums_find_what_is_missing_too_much_or_of_another_length() -> None:
    zeros = {"a": torch.zeros(8), "b": torch.zeros(8)}
    expected = checksum.of_tensors(zeros)
    assert checksum.wrong(checksum.of_tensors({"a": torch.zeros(9), "c": torch.zeros(8)}), expected) == ["a", "b", "c"]
    assert checksum.wrong(checksum.of_tensors(zeros), expected) == []


def test_wrong_bytes_are_reported_by_the_measured_process(checkpoint: Path, tmp_path: Path) -> None:
    reference = tmp_path / "reference.json"
    reference.write_text(json.dumps(checksum.of_files([checkpoint])))
    header, data = checksum.read_header(checkpoint)
    at = data + header["small.4"]["data_offsets"][0]
    with checkpoint.open("r+b") as file:
        file.seek(at)
        first, second = file.read(8), file.read(8)
        file.seek(at)
        file.write(second + first)
    task = {
        "do": "load",
        "loader": "penstock",
        "files": [str(checkpoint)],
        "device": "cpu",
        "reference": str(reference),
    }
    answer = processes.run(task, tmp_path, seconds=60)
    assert (answer["bytes_ok"], answer["wrong"]) == (False, ["small.4"])


# ---- the page cache, and memory


def test_a_copy_of_a_checkpoint_has_its_bytes(tmp_path: Path) -> None:
    case = checkpoints.make("llama", tmp_path, gb=0.005, small=0, one_gb=0)
    extra = tmp_path / "extra"
    extra.write_bytes(b"\1" * 100_001)
    copied = checkpoints.copy(case, tmp_path / "copy", also=[extra])
    assert [file.read_bytes() for file in copied.files] == [file.read_bytes() for file in case.files]
    assert (tmp_path / "copy" / "extra").read_bytes() == extra.read_bytes()


@pytest.mark.parametrize("size", [3 * common.PAGE + 5, 40 << 20])
@pytest.mark.usefixtures("_on_a_disk")
def test_states_of_the_page_cache_are_made_and_proved(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    for state, low, high in (
        ("cold", 0, 0),
        ("half", 0.45, 0.55),
        ("warm", 1, 1),
        ("half", 0.45, 0.55),
        ("cold", 0, 0),
    ):
        share = common.set_cache([path], state)
        assert low <= share <= high
        assert share == common.cached_share([path])


def test_a_state_that_cannot_be_reached_is_refused() -> None:
    memory = Path("/dev/shm/penstock-test-state")
    if common.filesystem(memory.parent) != "tmpfs":
        pytest.skip("needs a tmpfs")
    memory.write_bytes(bytes(1 << 20))
    try:
        with pytest.raises(common.StateError, match=r"penstock-test-state should be cold, but 100\.0% of it"):
            common.set_cache([memory], "cold")
    finally:
        memory.unlink()


# ---- the harness


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "rivals", "--device", "cpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.mark.usefixtures("_on_a_disk")
def test_a_run_measures_installed_loaders_and_tells_of_those_that_fail(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    (broken / "safetensors").mkdir(parents=True)
    (broken / "safetensors" / "__init__.py").write_text("raise ImportError(f'built for another machine: {__file__}')")
    output = tmp_path / "out.json"
    done = run(
        *(tmp_path / "data", "--output", output, "--states", "cold", "--rounds", "1"),
        *("--cases", "small-tensors", "--tensors", "20", "--loaders", "penstock,instanttensor"),
        *("--site", f"safetensors@broken={broken}"),
    )
    result = json.loads(output.read_text())

    (of_run,) = result["runs"]
    assert of_run["command"].startswith("python -m benchmarks rivals --device cpu DIRECTORY --output out.json --states")
    assert of_run["machine"]["kernel"]
    assert of_run["machine"]["versions"]["torch"]
    assert set(of_run["skipped"]) == {"instanttensor"}
    assert str(tmp_path) not in output.read_text()

    assert result["cases"] == {"small-tensors": {"bytes": 20 * 16384, "tensors": 20, "files": 1}}
    assert {item["limit"] for item in result["limits"]} == {"memcpy", "disk"}
    assert all(item["gb_per_s"] > 0 for item in result["limits"])
    of_disk = [item["setting"] for item in result["limits"] if item["limit"] == "disk"]
    assert sorted(of_disk) == sorted(limits.settings("disk")), "each once a round"
    ok, failed = (
        [item for item in result["measurements"] if item["loader"] == name]
        for name in ("penstock", "safetensors@broken")
    )
    assert len(ok) == len(failed) == 1
    assert ok[0]["seconds"] > 0
    assert ok[0]["cpu_seconds"] >= 0
    assert ok[0]["peak_rss"] >= 0
    assert ok[0]["bytes"] == ok[0]["stats"]["bytes"] == 20 * 16384
    assert ok[0]["bytes_ok"] is True
    assert ok[0]["cached"] == 0
    assert "built for another machine" in failed[0]["error"]

    rows = {row["loader"]: row for row in result["rows"]}
    assert rows["penstock"]["limit"] == "disk"
    assert rows["penstock"]["of_limit"] > 0
    assert "seconds" not in rows["safetensors@broken"]
    assert "### small-tensors, cold" in done.stdout
    assert "| failed: exit code 1: ImportError: built for another machine" in done.stdout

    # Nothing is left to be done, so nothing is done again.
    again = run(
        *(tmp_path / "data", "--output", output, "--states", "cold", "--rounds", "1", "--resume"),
        *("--cases", "small-tensors", "--tensors", "20", "--loaders", "penstock"),
    )
    assert "round" not in again.stderr
    assert len(json.loads(output.read_text())["measurements"]) == len(result["measurements"])


def test_a_budget_that_is_too_small_leaves_measurements_out_and_counts_them(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    done = run(tmp_path / "data", "--output", output, "--budget", "1", "--loaders", "penstock", "--rounds", "2")
    assert json.loads(output.read_text())["runs"][0]["unmeasured"] == 3 * 4 * 2
    assert "24 measurements were left out" in done.stdout


def test_a_loader_that_hangs_is_ended(tmp_path: Path, checkpoint: Path) -> None:
    task = {"do": "limit", "limit": "disk", "files": [str(checkpoint)], "setting": "16 x 1 MiB", "device": "cpu"}
    with pytest.raises(processes.HungError, match="no end after 0 s"):
        processes.run(task, tmp_path, seconds=0.01)


@pytest.mark.usefixtures("_on_a_disk")
def test_the_number_of_readers_that_is_found_is_held_against_fixed_ones(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks", "readers", str(tmp_path / "data"), "--output", str(output)]
    options = ["--gb", "0.02", "--rounds", "1", "--readers", "1,3", "--states", "cold"]
    done = subprocess.run(command + options, capture_output=True, text=True, check=True)
    result = json.loads(output.read_text())
    assert {item["readers"]: item["used"] for item in result["measurements"] if item["readers"] != "found"} == {
        "1": 1,
        "3": 3,
    }
    assert "| cold | found |" in done.stdout
    assert str(tmp_path) not in output.read_text()


@pytest.mark.usefixtures("_on_a_disk")
def test_readers_of_a_disk_are_held_against_each_other_file_by_file(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks", "disk", str(tmp_path / "data"), "--output", str(output)]
    options = ["--gb", "0.02", "--rounds", "2", "--device", "cpu"]
    readers = ["--plain", "2x512", "--loaders", "penstock:readers=3"]
    done = subprocess.run(command + options + readers, capture_output=True, text=True, check=True)
    result = json.loads(output.read_text())
    taken = sorted((item["round"], item["place"]) for item in result["measurements"])
    assert taken == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {item["name"] for item in result["measurements"]} == {"2x512", "penstock:readers=3"}
    assert all(item["gb_per_s"] > 0 for item in result["measurements"])
    assert "| penstock:readers=3 |" in done.stdout
    assert str(tmp_path) not in output.read_text()


# ---- results


def result_of(seconds: list[float], **machine: str) -> report.Result:
    known = {"cpu": "C", "cores": 2, "gpu": "G, 1.0", "filesystem": "ext4"} | machine
    result = report.empty()
    result["runs"] = [{"device": "cuda:0", "machine": known, "skipped": {}, "unmeasured": 0, "budget": None}]
    result["cases"] = {"llama": {"bytes": 10**9, "tensors": 1, "files": 1}}
    of_state = {"run": 0, "case": "llama", "state": "warm"}
    result["limits"] = [
        of_state | {"limit": "page-cache", "setting": "1", "gb_per_s": 40.0},
        of_state | {"limit": "pcie", "setting": "1", "state": None, "gb_per_s": 50.0},
    ]
    one = {"loader": "a", "version": "1", "cpu_seconds": 1.0, "peak_rss": 5, "bytes": 10**9, "bytes_ok": True}
    result["measurements"] = [of_state | one | {"seconds": value} for value in seconds]
    return result


def test_merged_results_are_one_table_of_all_rounds() -> None:
    merged = report.merge([result_of([0.05]), result_of([0.1, 0.2], gpu="G, 2.0")])
    (row,) = merged["rows"]
    assert row["all_seconds"] == [0.05, 0.1, 0.2]
    assert (row["seconds"], row["gb_per_s"], row["limit"], row["of_limit"]) == (0.1, 10.0, "page cache", 0.25)
    assert [item["run"] for item in merged["measurements"]] == [0, 1, 1]
    assert "| a 1 | 0.100 | 10.00 | 0.25 | 1.00 | 0 MB | ok |" in report.table(merged)


def test_results_of_different_machines_are_not_merged() -> None:
    with pytest.raises(ValueError, match="different machines"):
        report.merge([result_of([0.1]), result_of([0.1], cpu="D")])


def test_one_wrong_check_marks_the_row() -> None:
    result = result_of([0.1, 0.2])
    result["measurements"][1]["bytes_ok"] = False
    assert "| WRONG |" in report.table(result | {"rows": report.rows(result)})


def test_commands_name_no_directory() -> None:
    arguments = [
        "/data/x",
        "--site",
        "a@b=/sites/y",
        "--site=c=/z",
        "--output=/out/r.json",
        "--tmpfs",
        "/dev/shm",
        "--resume",
    ]
    shown = rivals.command(arguments)
    assert (
        shown
        == "python -m benchmarks rivals DIRECTORY --site a@b=DIR --site=c=DIR --output=r.json --tmpfs shm --resume"
    )


# ---- from an object store


def test_ratios_beside_a_plain_client_are_of_the_same_round() -> None:
    def row(what: str, seconds: list[float], cpu: list[float]) -> dict[str, object]:
        samples = [
            {"bytes": 10**9, "seconds": took, "cpu_seconds": spent, "bytes_ok": None}
            for took, spent in zip(seconds, cpu, strict=True)
        ]
        return remote.summary("loopback", what, samples)

    rows = [
        row("object_store@4", [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]),
        row("object_store@16", [1.0, 1.0, 4.0], [1.0, 1.0, 2.0]),
        row("object_store-ready@4", [0.1, 0.1, 0.1], [0.1, 0.1, 0.1]),
        row("penstock", [2.0, 1.0, 2.0], [1.0, 0.5, 1.0]),
    ]
    remote.against_object_store(rows)
    assert [row.get("ratios") for row in rows[:3]] == [None] * 3
    # The disturbed third round is disturbed for both.
    assert rows[3]["ratios"] == {"beside": "object_store@16", "speed": [1.0, 0.5, 2.0], "cpu": [0.5, 0.5, 1.0]}
    assert (rows[3]["gb_per_s"], rows[3]["cpu_s_per_gb"]) == (0.5, 1.0)


def test_a_row_that_failed_says_so_and_is_compared_with_nothing() -> None:
    rows = [remote.summary("loopback", "penstock", [{"error": "no"}, {"error": "no more"}])]
    remote.against_object_store(rows)
    assert rows == [{"network": "loopback", "what": "penstock", "error": "no more", "failed": 2}]


def test_a_rival_is_compared_at_its_best_setting_and_where_it_loads_to() -> None:
    def row(what: str, seconds: float, size: int = 10**9) -> dict[str, object]:
        sample = {"bytes": size, "seconds": seconds, "cpu_seconds": seconds / 2, "bytes_ok": True}
        return remote.summary("loopback", what, [sample])

    rows = [row("runai@8", 3.0), row("runai@16", 2.0), row("runai@16:cpu", 0.5), row("penstock", 0.5)]
    rows += [row("penstock:cpu", 0.5), {"what": "runai@32", "network": "loopback", "error": "no"}]
    remote.against_runai(rows)
    assert rows[3]["ratios_runai"] == {"beside": "runai@16", "speed": [4.0] * 3, "cpu": [0.25] * 3}
    assert rows[4]["ratios_runai"]["beside"] == "runai@16:cpu"  # type: ignore[index]
    # A plain client that read a quarter of the bytes in a quarter of the time is as fast.
    assert remote.beside(row("penstock", 2.0), row("recv@4", 0.5, 250_000_000))["speed"] == [1.0] * 3


def test_rows_say_how_many_requests_and_where_to() -> None:
    assert remote.parts("runai@8", "cuda:0") == ("runai", "8", "cuda:0")
    assert remote.parts("recv-ready@4:cpu", "cuda:0") == ("recv-ready", "4", "cpu")
    assert remote.parts("penstock", "cpu") == ("penstock", "", "cpu")


@pytest.mark.parametrize("files", [1, 4])
def test_a_checkpoint_is_made_once_and_lies_where_the_server_looks(tmp_path: Path, files: int) -> None:
    made = remote.make(tmp_path, 0.01, files)
    assert [file.parent for file in made] == [tmp_path] * files
    before = [file.read_bytes() for file in made]
    assert [file.read_bytes() for file in remote.make(tmp_path, 0.01, files)] == before
    assert 0.005e9 < sum(len(file) for file in before) < 0.02e9
    assert len(penstock.open(made)) > 10


def test_nginx_serves_what_s3_clients_ask_for(tmp_path: Path) -> None:
    program = object_servers.nginx()
    if program is None:
        pytest.skip("nginx is not installed")
    (file,) = remote.make(tmp_path, 0.01, 1)
    with object_servers.serving(program, tmp_path, []) as address:
        loaded = penstock.open(f"http://{address}/bucket/{file.name}").load()
    expected = penstock.open(file).load()
    assert all(torch.equal(loaded[name].view(torch.int16), expected[name].view(torch.int16)) for name in expected)
