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

from benchmarks import cli, servers
from benchmarks.experiments import remote

import penstock
from penstock.bench import (
    checkpoints,
    checksum,
    data,
    limits,
    loaders,
    machine,
    processes,
    result,
    states,
    tables,
)

pytestmark = pytest.mark.slow

SHAPES = {"large": (700, 1300), "odd": (3, 3), "one": (1,), "none": (0, 4)} | {
    f"small.{n}": (64, 128) for n in range(9)
}


@pytest.fixture
def _on_a_disk(tmp_path: Path) -> None:
    if machine.filesystem(tmp_path) in {"tmpfs", "ramfs"}:
        pytest.skip("a file in memory has no other state")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    data.write_checkpoint(path, SHAPES)
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
    case = checkpoints.make("llama", tmp_path, gb=0.005)
    extra = tmp_path / "extra"
    extra.write_bytes(b"\1" * 100_001)
    copied = checkpoints.copy(case, tmp_path / "copy", also=[extra])
    assert [file.read_bytes() for file in copied.files] == [file.read_bytes() for file in case.files]
    assert (tmp_path / "copy" / "extra").read_bytes() == extra.read_bytes()


@pytest.mark.parametrize("size", [3 * states.PAGE + 5, 40 << 20])
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
        share = states.set_cache([path], state)
        assert low <= share <= high
        assert share == states.cached_share([path])


def test_a_state_that_cannot_be_reached_is_refused() -> None:
    memory = Path("/dev/shm/penstock-test-state")
    if machine.filesystem(memory.parent) != "tmpfs":
        pytest.skip("needs a tmpfs")
    memory.write_bytes(bytes(1 << 20))
    try:
        with pytest.raises(states.StateError, match=r"penstock-test-state should be cold, but 100\.0% of it"):
            states.set_cache([memory], "cold")
    finally:
        memory.unlink()


# ---- the harness


def run(experiment: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", experiment, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.mark.usefixtures("_on_a_disk")
def test_a_run_measures_installed_loaders_and_tells_of_those_that_fail(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    (broken / "safetensors").mkdir(parents=True)
    (broken / "safetensors" / "__init__.py").write_text("raise ImportError(f'built for another machine: {__file__}')")
    output = tmp_path / "out.json"
    few = ("--device", "cpu", "--states", "cold", "--rounds", "1", "--cases", "small-tensors", "--tensors", "20")
    done = run(
        *("rivals", tmp_path / "data", "--output", output, *few, "--loaders", "penstock,instanttensor"),
        *("--site", f"safetensors@broken={broken}"),
    )
    found = result.read(output)

    (of_run,) = found["runs"]
    assert of_run["command"].startswith("python -m benchmarks rivals DIRECTORY --output out.json --device cpu --states")
    assert of_run["machine"]["kernel"]
    assert of_run["versions"]["torch"]
    assert set(of_run["skipped"]) == {"instanttensor"}
    assert str(tmp_path) not in output.read_text()

    assert found["cases"] == {"small-tensors": {"bytes": 20 * 16384, "tensors": 20, "files": 1}}
    of_limits = [item for item in found["samples"] if "limit" in item["axes"]]
    assert {item["axes"]["limit"] for item in of_limits} == {"memcpy", "disk"}
    assert all(item["figures"]["gb_per_s"] > 0 for item in of_limits)
    of_disk = [item["axes"]["setting"] for item in of_limits if item["axes"]["limit"] == "disk"]
    assert sorted(of_disk) == sorted(limits.settings("disk")), "each once a round"
    ok, failed = (
        [item for item in found["samples"] if item["axes"].get("loader") == name]
        for name in ("penstock", "safetensors@broken")
    )
    assert len(ok) == len(failed) == 1
    figures, facts = ok[0]["figures"], ok[0]["facts"]
    assert figures["seconds"] > 0
    assert figures["cpu_seconds"] >= 0
    assert figures["peak_rss"] >= 0
    assert figures["bytes"] == facts["stats"]["bytes"] == 20 * 16384
    assert facts["bytes_ok"] is True
    assert ok[0]["cache"]["before"] == 0
    result.prove(ok[0])
    assert "built for another machine" in failed[0]["error"]

    seconds, what = tables.limit(found, "small-tensors", "cold") or (0, "")
    assert (seconds > 0, what) == (True, "disk")
    assert "### small-tensors, cold" in done.stdout
    assert "| failed: exit code 1: ImportError: built for another machine" in done.stdout

    # Nothing is left to be done, so nothing is done again.
    again = run("rivals", tmp_path / "data", "--output", output, *few, "--resume", "--loaders", "penstock")
    assert "round" not in again.stderr
    assert len(result.read(output)["samples"]) == len(found["samples"])


def test_a_budget_that_is_too_small_leaves_measurements_out_and_counts_them(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    few = ("--device", "cpu", "--budget", "1", "--loaders", "penstock", "--rounds", "2")
    done = run("rivals", tmp_path / "data", "--output", output, *few)
    assert result.read(output)["runs"][0]["unmeasured"] == 3 * 4 * 2
    assert "24 measurements were left out" in done.stdout


def test_a_loader_that_hangs_is_ended(tmp_path: Path, checkpoint: Path) -> None:
    task = {"do": "limit", "limit": "disk", "files": [str(checkpoint)], "setting": "16 x 1 MiB", "device": "cpu"}
    with pytest.raises(processes.HungError, match="no end after 0 s"):
        processes.run(task, tmp_path, seconds=0.01)


@pytest.mark.parametrize("mode", ["fork", "keep"])
def test_a_resident_process_answers_one_task_after_another(tmp_path: Path, checkpoint: Path, mode: str) -> None:
    resident = processes.Resident(mode)
    task = {"do": "load", "loader": "penstock", "files": [str(checkpoint)], "device": "cpu"}
    try:
        assert resident.run(task, seconds=60)["bytes"] > 0
        with pytest.raises(processes.FailedError, match="nowhere"):
            resident.run(task | {"files": [str(tmp_path / "nowhere.safetensors")]}, seconds=60)
        assert resident.run(task, seconds=60)["bytes"] > 0
        with pytest.raises(processes.HungError, match="no end after 0 s"):
            resident.run(task, seconds=0)
        with pytest.raises(processes.FailedError, match="has ended"):
            resident.run(task, seconds=60)
    finally:
        resident.close()


@pytest.mark.usefixtures("_on_a_disk")
def test_the_number_of_readers_that_is_found_is_held_against_fixed_ones(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    few = ("--gb", "0.02", "--rounds", "1", "--states", "cold", "--loaders", "penstock,penstock:readers=1|3")
    done = run("readers", tmp_path / "data", "--output", output, *few)
    samples = result.read(output)["samples"]
    used = {item["axes"]["loader"]: item["facts"]["stats"]["readers"] for item in samples}
    assert used.pop("penstock")
    assert used == {"penstock:readers=1": 1, "penstock:readers=3": 3}
    assert "| penstock " in done.stdout
    assert str(tmp_path) not in output.read_text()


@pytest.mark.usefixtures("_on_a_disk")
def test_readers_of_a_disk_are_held_against_each_other_file_by_file(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    few = ("--gb", "0.02", "--rounds", "2", "--device", "cpu")
    done = run(
        *("disk", tmp_path / "data", "--output", output, *few),
        *("--loaders", "plain:threads=2+kib=512,penstock:cache=bypass+readers=3"),
    )
    samples = result.read(output)["samples"]
    assert sorted(item["round"] for item in samples) == [0, 0, 1, 1]
    assert {item["axes"]["loader"] for item in samples} == {
        "plain:threads=2+kib=512",
        "penstock:cache=bypass+readers=3",
    }
    assert all(item["figures"]["bytes"] / item["figures"]["seconds"] > 0 for item in samples)
    assert all(item["cache"]["before"] <= 0.01 for item in samples)
    assert "| penstock:cache=bypass+readers=3" in done.stdout
    assert str(tmp_path) not in output.read_text()


@pytest.mark.usefixtures("_on_a_disk")
def test_local_cpu_measures_every_row_beside_plain_readers(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    done = run("local_cpu", tmp_path / "data", "--gb", "0.1", "--rounds", "1", "--output", output)
    found = result.read(output)
    rows = {(item["axes"]["state"], item["axes"]["loader"]) for item in found["samples"] if "loader" in item["axes"]}
    names = ["penstock", "penstock-each", "penstock-into", "penstock-mmap", "safetensors", "safetensors-clone"]
    assert sorted(rows) == [(state, name) for state in ("cold", "warm") for name in names]
    for item in found["samples"]:
        assert "error" not in item, item
        assert item["facts"].get("bytes_ok") is not False
        result.prove(item)
    assert done.stdout.count("of limit") == 2


@pytest.mark.usefixtures("_on_a_disk")
def test_builds_are_compared_in_forked_processes(tmp_path: Path) -> None:
    built = Path(penstock.__file__).parent.parent
    sites = ("--site", f"penstock@before={built}", "--site", f"penstock@after={built}")
    few = ("--device", "cpu", "--gb", "0.02", "--rounds", "3", "--states", "warm")
    done = run("pairs", tmp_path / "data", *few, *sites)
    assert " of penstock@before |" in done.stdout
    assert done.stdout.count("| ok |") == 2


ROOT = Path(__file__).resolve().parent.parent
HTTP_BENCH = next((ROOT / "benchmarks" / "http" / "target").glob("*/http-bench"), None)


@pytest.mark.skipif(HTTP_BENCH is None, reason="http-bench is not built: cargo build in benchmarks/http")
def test_remote_measures_plain_clients_and_loaders_through_networks(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    rows = "recv-ready@4,object_store@4,penstock,penstock-into,runai@8"
    done = run(
        *("remote", tmp_path / "data", "--gb", "0.01", "--rounds", "2", "--networks", "loopback,capped"),
        *("--rows", rows, "--program", str(HTTP_BENCH), "--output", output),
    )
    found = result.read(output)
    good = {(item["axes"]["network"], item["axes"]["loader"], item["round"]) for item in found["samples"]}
    of_runai = {"runai@8"} if "runai" in found["runs"][0]["skipped"] else set()
    asked = set(rows.split(",")) - of_runai
    assert good == {(network, row, number) for network in ("loopback", "capped") for row in asked for number in (0, 1)}
    assert all("figures" in item and item["facts"].get("bytes_ok") is not False for item in found["samples"])
    assert "of object_store@4 |" in done.stdout


@pytest.mark.skipif(HTTP_BENCH is None, reason="http-bench is not built: cargo build in benchmarks/http")
@pytest.mark.usefixtures("_on_a_disk")
def test_the_disk_cache_is_filled_and_read(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    run(
        *("disk_cache", tmp_path / "data", "--gb", "0.02", "--rounds", "2", "--source", tmp_path / "served"),
        *("--program", str(HTTP_BENCH), "--output", output),
    )
    samples = result.read(output)["samples"]
    assert all("figures" in item for item in samples), samples
    assert sorted(item["axes"]["loader"] for item in samples) == sorted(["remote", "filling", "cached", "local"] * 2)
    of_network = {item["axes"]["loader"]: item["figures"].get("network_bytes") for item in samples}
    assert of_network["cached"] < of_network["filling"]


def test_ranks_read_apart_and_together(tmp_path: Path) -> None:
    if machine.filesystem(tmp_path) in {"tmpfs", "ramfs"}:
        pytest.skip("a file in memory has no other state")
    output = tmp_path / "out.json"
    few = ("--device", "cpu", "--layers", "1", "--rounds", "1", "--states", "warm")
    run("sharing", tmp_path / "data", *few, "--output", output)
    samples = {item["axes"]["loader"]: item for item in result.read(output)["samples"]}
    assert all(item["facts"]["bytes_ok"] for item in samples.values())
    assert samples["together"]["figures"]["read_bytes"] < samples["apart"]["figures"]["read_bytes"]


# ---- results


def result_of(seconds: list[float], **about: str) -> result.Result:
    known = {"cpu": "C", "cores": 2, "gpu": "G, 1.0", "filesystem": "ext4"} | about
    found = result.empty("rivals")
    found["runs"] = [{"device": "cuda:0", "command": "c", "machine": known, "versions": {}}]
    found["cases"] = {"llama": {"bytes": 10**9, "tensors": 1, "files": 1}}
    of_state = {"run": 0, "round": 0, "cache": {"before": 1.0}}
    at = {"case": "llama", "state": "warm"}
    found["samples"] = [
        of_state | {"axes": at | {"limit": "page-cache", "setting": "1"}} | result.sample({"gb_per_s": 40.0}),
        of_state | {"axes": {"limit": "pcie", "setting": "1"}} | result.sample({"gb_per_s": 50.0}),
    ]
    one = {"version": "1", "cpu_seconds": 1.0, "peak_rss": 5, "bytes": 10**9, "bytes_ok": True}
    found["samples"] += [
        of_state | {"axes": at | {"loader": "a"}} | result.sample(one | {"seconds": value}) for value in seconds
    ]
    return result.validate(found)


def test_merged_results_are_one_table_of_all_rounds() -> None:
    merged = result.merge([result_of([0.05]), result_of([0.1, 0.2], gpu="G, 2.0")])
    group = tables.groups(merged)["llama", "warm"]
    assert [item["figures"]["seconds"] for item in group["a"]] == [0.05, 0.1, 0.2]
    assert tables.limit(merged, "llama", "warm") == (0.025, "page cache")
    assert [item["run"] for item in group["a"]] == [0, 1, 1]
    assert "| a 1 | 0.100 | 0.050-0.200 | 10.00 | 1.00 ± 0.00 | 0.25 | 1.00 | 0 | ok |" in tables.tables(merged)


def test_results_of_different_machines_are_not_merged() -> None:
    with pytest.raises(ValueError, match="different machines"):
        result.merge([result_of([0.1]), result_of([0.1], cpu="D")])


def test_one_wrong_check_marks_the_row() -> None:
    found = result_of([0.1, 0.2])
    found["samples"][-1]["facts"]["bytes_ok"] = False
    assert "| WRONG |" in tables.tables(found)


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
    shown = cli.shown(["rivals", *arguments], "python -m benchmarks")
    assert (
        shown
        == "python -m benchmarks rivals DIRECTORY --site a@b=DIR --site=c=DIR --output=r.json --tmpfs shm --resume"
    )


# ---- from an object store


def rows_of(**rows: list[dict[str, float]]) -> tables.Group:
    return {
        what.replace("__", "@").replace("_to_", ":"): [
            {"axes": {"loader": what}, "round": number, **result.sample({"bytes": 10**9} | figures)}
            for number, figures in enumerate(samples)
        ]
        for what, samples in rows.items()
    }


def of(seconds: list[float], cpu: list[float], size: int = 10**9) -> list[dict[str, float]]:
    return [{"seconds": took, "cpu_seconds": spent, "bytes": size} for took, spent in zip(seconds, cpu, strict=True)]


def test_ratios_beside_a_plain_client_are_of_the_same_round() -> None:
    group = rows_of(
        object_store__4=of([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]),
        object_store__16=of([1.0, 1.0, 4.0], [1.0, 1.0, 2.0]),
        penstock=of([2.0, 1.0, 2.0], [1.0, 0.5, 1.0]),
    )
    group["object_store-ready@4"] = rows_of(x=of([0.1] * 3, [0.1] * 3))["x"]
    other = tables.baseline(group, "penstock", "object_store")
    assert other == "object_store@16"
    # The disturbed third round is disturbed for both.
    assert tables.beside(group["penstock"], group[other]) == [2.0, 1.0, 0.5]
    assert tables.beside(group["penstock"], group[other], "cpu_seconds") == [1.0, 0.5, 0.5]
    assert tables.baseline(group, "penstock-into", "object_store") == "object_store-ready@4"


def test_a_row_that_failed_says_so_and_is_compared_with_nothing() -> None:
    found = result_of([])
    failure = {"run": 0, "round": 0, "cache": None, "axes": {"network": "loopback", "loader": "penstock"}}
    found["samples"] += [failure | {"error": "no"}, failure | {"error": "no more"}]
    group = tables.groups(found)["loopback",]
    assert tables.baseline(group, "penstock", "object_store") is None
    assert "| penstock | failed: no more |" in tables.tables(found)


def test_a_rival_is_compared_at_its_best_setting_and_where_it_loads_to() -> None:
    group = rows_of(
        runai__8=of([3.0], [1.5]),
        runai__16=of([2.0], [1.0]),
        runai__16_to_cpu=of([0.5], [0.25]),
        penstock=of([0.5], [0.25]),
        penstock_to_cpu=of([0.5], [0.25]),
    )
    assert tables.baseline(group, "penstock", "runai") == "runai@16"
    assert tables.beside(group["penstock"], group["runai@16"], "cpu_seconds") == [0.25]
    assert tables.baseline(group, "penstock:cpu", "runai") == "runai@16:cpu"
    # A plain client that read a quarter of the bytes in a quarter of the time is as fast.
    plain = rows_of(recv=of([0.5], [0.25], 250_000_000))["recv"]
    assert tables.beside(rows_of(penstock=of([2.0], [1.0]))["penstock"], plain) == [1.0]


def test_settings_of_a_row_have_alternatives() -> None:
    rows = loaders.expand("penstock:readers=1|2+block_bytes=5")
    assert rows == ["penstock:readers=1+block_bytes=5", "penstock:readers=2+block_bytes=5"]
    assert loaders.of(rows[1]).env == {"PENSTOCK_READERS": "2", "PENSTOCK_BLOCK_BYTES": "5"}


def test_every_plugin_makes_its_rows() -> None:
    assert {loaders.of(name).task for name in loaders.names()} == {"load", "vllm", "sglang"}
    with pytest.raises(KeyError, match="no loader absent"):
        loaders.of("absent")


def test_rows_say_how_many_requests_and_where_to() -> None:
    assert remote.parts("runai@8", "cuda:0") == ("runai", "8", "cuda:0")
    assert remote.parts("recv-ready@4:cpu", "cuda:0") == ("recv-ready", "4", "cpu")
    assert remote.parts("penstock", "cpu") == ("penstock", "", "cpu")


@pytest.mark.parametrize("files", [1, 4])
def test_a_checkpoint_is_made_once_and_lies_where_the_server_looks(tmp_path: Path, files: int) -> None:
    made = checkpoints.make("llama", tmp_path, gb=0.01, files=files).files
    assert [file.parent for file in made] == [tmp_path / "llama"] * files
    before = [file.read_bytes() for file in made]
    again = checkpoints.make("llama", tmp_path, gb=0.01, files=files).files
    assert [file.read_bytes() for file in again] == before
    assert 0.005e9 < sum(len(file) for file in before) < 0.02e9
    assert len(penstock.open(made)) > 10


def test_nginx_serves_what_s3_clients_ask_for(tmp_path: Path) -> None:
    program = servers.nginx()
    if program is None:
        pytest.skip("nginx is not installed")
    (file,) = checkpoints.make("llama", tmp_path, gb=0.01, files=1).files
    with servers.serving(program, file.parent, []) as address:
        loaded = penstock.open(f"http://{address}/bucket/{file.name}").load()
    expected = penstock.open(file).load()
    assert all(torch.equal(loaded[name].view(torch.int16), expected[name].view(torch.int16)) for name in expected)
