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
from benchmarks import common, engines, engines_vllm, engines_vllm_measured

import penstock

pytestmark = pytest.mark.slow


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    if common.filesystem(tmp_path) in {"tmpfs", "ramfs"}:
        pytest.skip("a file in memory has no other state")
    return tmp_path


def test_the_model_is_of_the_asked_size_and_whole(directory: Path) -> None:
    model = engines.build(directory / "m", 0.003, 3)
    checkpoint = penstock.open(model)
    assert 0.002e9 < checkpoint.nbytes < 0.004e9
    assert len(checkpoint.files) == 3
    config = json.loads((model / "config.json").read_text())
    assert f"model.layers.{config['num_hidden_layers'] - 1}.mlp.up_proj.weight" in checkpoint
    assert engines.build(directory / "m", 0.003, 3) == model


def test_loaders_are_measured_and_checked(directory: Path, capsys: Any) -> None:
    output = directory / "out.json"
    few = ["--device", "cpu", "--gb", "0.001", "--rounds", "1", "--states", "cold", "--loaders", "stock,penstock"]
    engines.main([str(directory), "--output", str(output), *few])
    result = json.loads(output.read_text())
    rows = {(item["state"], item["loader"]): item for item in result["measurements"]}
    assert rows.keys() == {("cold", "stock"), ("cold", "penstock")}
    for row in rows.values():
        assert row["bytes_ok"] is True, row
        assert row["cached"] == 0
        assert row["seconds"] > 0
    assert result["versions"]["transformers"]
    printed = capsys.readouterr().out
    assert "| cold | penstock |" in printed
    assert "WRONG" not in printed
    assert not list(directory.glob("*/*.safetensors"))


def test_what_fails_is_a_row(directory: Path) -> None:
    failed = {"loader": "penstock", "state": "warm", "error": "exit code 1: RuntimeError: no"}
    assert "| warm | penstock | failed: exit code 1: RuntimeError: no |" in engines.table([failed])
    task = {"loader": "absent", "model": "m", "device": "cpu", "dtype": "bfloat16", "reference": None}
    (directory / "x").write_bytes(b"x")
    answer = engines.measured(task, [directory / "x"], "warm", directory, 60)
    assert "ValueError: no loader 'absent'" in answer["error"]


def test_formats_of_vllm_are_told_apart_by_what_they_logged_and_generated() -> None:
    figures = {"weights_seconds": 1.5, "model_seconds": 2.5, "ready_seconds": 30, "allocated_above": 3 << 20}
    auto = {"state": "warm", "format": "auto", "round": 0, "tokens": [1, 2], "parameters": "a", "import_seconds": 20}
    auto |= figures
    wrong = auto | {"format": "other", "tokens": [2, 1], "weights_seconds": None}
    unlike = auto | {"format": "unlike", "parameters": "b", "ready_seconds": 33, "import_seconds": 21}
    failed = {"state": "warm", "format": "absent", "error": "exit code 1: ValueError: no"}
    printed = engines_vllm.table([auto, wrong, unlike, failed, auto | {"weights_seconds": 2.5}])
    assert "| warm | auto | 2.00 | 2.50 | 30.00 | 10.00 | 0.00 | 3 MiB | equal |" in printed
    assert "| warm | other | not heard | 2.50 | 30.00 | 10.00 | 0.00 | 3 MiB | OTHERS |" in printed
    assert "| warm | unlike | 1.50 | 2.50 | 33.00 | 12.00 | 2.00 | 3 MiB | OTHERS |" in printed
    assert "| warm | absent | failed: exit code 1: ValueError: no |" in printed


def test_what_vllm_logs_is_heard_whatever_its_handlers() -> None:
    before = logging.getLogRecordFactory()
    try:
        heard = engines_vllm_measured.Heard(cuda=False)
        logger = logging.getLogger("vllm.model_executor.test")
        logger.info("Loading weights took %.2f seconds", 1.25)
        logger.warning("Loading weights took %.2f seconds", 1.25)
        logger.warning("Model loading took %s GiB memory and %.6f seconds", "14.1", 3.5)
        assert (heard.weights, heard.model) == (1.25, 3.5)
    finally:
        logging.setLogRecordFactory(before)
