"""The comparison of ``from_pretrained`` runs where there is no GPU, checks bytes, and tells of what fails."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from benchmarks import cli

import penstock
from penstock.bench import checkpoints, machine, processes, result, tables
from penstock.bench.loaders import vllm

pytestmark = pytest.mark.slow


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    if machine.filesystem(tmp_path) in {"tmpfs", "ramfs"}:
        pytest.skip("a file in memory has no other state")
    return tmp_path


def test_the_model_is_of_the_asked_size_and_whole(directory: Path) -> None:
    model = checkpoints.make("model", directory, gb=0.003, files=3).files[0].parent
    checkpoint = penstock.open(model)
    assert 0.002e9 < checkpoint.nbytes < 0.004e9
    assert len(checkpoint.files) == 3
    config = json.loads((model / "config.json").read_text())
    assert f"model.layers.{config['num_hidden_layers'] - 1}.mlp.up_proj.weight" in checkpoint
    before = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    assert checkpoints.make("model", directory, gb=0.003, files=3).files[0].parent == model
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == before


def test_loaders_are_measured_and_checked(directory: Path, capsys: Any) -> None:
    output = directory / "out.json"
    few = ["--device", "cpu", "--gb", "0.001", "--rounds", "1", "--states", "cold"]
    few += ["--loaders", "transformers,transformers-penstock"]
    cli.main(["engines", str(directory), "--output", str(output), *few])
    found = result.read(output)
    rows = {(item["axes"]["state"], item["axes"]["loader"]): item for item in found["samples"]}
    assert rows.keys() == {("cold", "transformers"), ("cold", "transformers-penstock")}
    for row in rows.values():
        assert row["facts"]["bytes_ok"] is True, row
        assert row["cache"]["before"] == 0
        assert row["figures"]["seconds"] > 0
    assert found["runs"][0]["versions"]["transformers"]
    printed = capsys.readouterr().out
    assert "### model, cold" in printed
    assert "| transformers-penstock " in printed
    assert "WRONG" not in printed


def test_what_fails_is_a_row(directory: Path) -> None:
    axes = {"state": "warm", "loader": "transformers-penstock"}
    failed = {"run": 0, "round": 0, "axes": axes, "cache": None, "error": "exit code 1: RuntimeError: no"}
    assert "| transformers-penstock | failed: exit code 1: RuntimeError: no |" in tables.tables(of_samples([failed]))
    task = {"do": "load", "loader": "transformers-absent", "files": ["m"], "device": "cpu"}
    with pytest.raises(processes.FailedError, match=r"KeyError: .*no loader transformers-absent"):
        processes.run(task, directory, seconds=60)


def of_samples(samples: list[result.Sample]) -> result.Result:
    found = result.empty("engines_vllm")
    found["runs"] = [{"command": "c", "machine": {}, "versions": {}}]
    found["samples"] = samples
    return result.validate(found)


def test_formats_of_vllm_are_told_apart_by_what_they_logged_and_generated() -> None:
    figures = {"weights_seconds": 1.5, "model_seconds": 2.5, "ready_seconds": 30, "allocated_above": 3_000_000}
    auto = {"seconds": 10, "import_seconds": 20, "outcome": [[1, 2], "a"]} | figures

    def sample(name: str, answer: dict[str, Any], number: int = 0) -> result.Sample:
        axes = {"state": "warm", "loader": f"vllm-{name}"}
        return {"run": 0, "round": number, "axes": axes, "cache": {"before": 1.0}, **result.sample(answer)}

    samples = [
        sample("auto", auto),
        sample("other", auto | {"outcome": [[2, 1], "a"], "weights_seconds": None}),
        sample("unlike", auto | {"outcome": [[1, 2], "b"], "seconds": 12, "ready_seconds": 33}),
        sample("auto", auto | {"weights_seconds": 2.5}, 1),
    ]
    failed = {"run": 0, "round": 0, "axes": {"state": "warm", "loader": "vllm-absent"}, "cache": None}
    printed = tables.tables(of_samples([*samples, failed | {"error": "exit code 1: ValueError: no"}]), ["vllm-auto"])
    rows = {line.split("|")[1].strip(): line for line in printed.splitlines() if line.startswith("| vllm")}
    assert "| 2.00 | 2.50 | 30.00 | 3 | equal |" in rows["vllm-auto"]
    assert "|  | 2.50 | 30.00 | 3 | OTHERS |" in rows["vllm-other"]
    assert "| 1.50 | 2.50 | 33.00 | 3 | OTHERS | time 1.20 (1.20-1.20) of vllm-auto |" in rows["vllm-unlike"]
    assert "failed: exit code 1: ValueError: no |" in rows["vllm-absent"]


def test_names_of_rows_hold_format_and_settings() -> None:
    assert vllm.format_of("vllm-runai_streamer@gpu:distributed=true") == "runai_streamer"


def test_what_vllm_logs_is_heard_whatever_its_handlers() -> None:
    before = logging.getLogRecordFactory()
    try:
        heard = vllm.Heard(cuda=False)
        logger = logging.getLogger("vllm.model_executor.test")
        logger.info("Loading weights took %.2f seconds", 1.25)
        logger.warning("Loading weights took %.2f seconds", 1.25)
        logger.warning("Model loading took %s GiB memory and %.6f seconds", "14.1", 3.5)
        assert (heard.weights, heard.model) == (1.25, 3.5)
    finally:
        logging.setLogRecordFactory(before)
