"""A vLLM whose model lies on two GPUs: each rank has the shards of the stock loader, and reads no more than its part.

Not part of CI, which has no GPU: ``benchmarks/gpu_machine.sh`` runs it as ``two``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from conftest import save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]

COMPAT = Path(__file__).parents[2] / "compat" / "runai-model-streamer" / "src"
ENVIRONMENT = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "RUNAI_STREAMER_LOG_TO_STDERR": "1",
}
ENGINES: dict[str, dict[str, Any]] = {
    "auto": {"calls": ["weights"]},
    "penstock": {},
    # Files that were just written are cached: each rank would read them itself.
    "penstock, shared": {"load_format": "penstock", "model_loader_extra_config": {"share": True}},
    "runai_streamer": {"calls": ["weights"], "model_loader_extra_config": {"distributed": True}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(
        "Llama", tmp_path_factory.mktemp("two") / "model", "bfloat16", "100MB", hidden_size=2048,
        intermediate_size=5632, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8, vocab_size=8192,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engines(model: Path) -> dict[str, dict[str, Any]]:
    """What each engine printed as its result, and its log."""
    results = {}
    path = os.pathsep.join([str(COMPAT), os.environ.get("PYTHONPATH", "")])
    for name, settings in ENGINES.items():
        case = {"load_format": name, "model": str(model), "tensor_parallel_size": 2, "dtype": "bfloat16"}
        case |= {"gpu_memory_utilization": 0.3, "disable_custom_all_reduce": True} | settings
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "generate.py"), json.dumps(case)],
            env=os.environ | ENVIRONMENT | ({"PYTHONPATH": path} if name == "runai_streamer" else {}),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        log = done.stdout + done.stderr
        lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        results[name] = {**json.loads(lines[0]), "log": log} if lines else {"log": log}
    return results


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "auto"])
def test_each_rank_has_what_the_stock_loader_gives_it(engines: Any, name: str) -> None:
    stock, ours = engines["auto"], engines[name]
    assert "weights" in ours, ours["log"][-6000:]
    assert ours["weights"] == stock["weights"]
    assert ours["weights"][0] != ours["weights"][1]
    assert ours["tokens"] == stock["tokens"]


def test_alone_a_rank_reads_its_rows_and_what_lies_between_its_columns(engines: Any) -> None:
    for figures in engines["penstock"]["figures"]:
        assert (figures["eager"], figures["fallback"], figures["plans"]) == ({}, 0, 1)
        assert (figures["shared"], figures["received_bytes"]) == (0, 0)
        assert figures["bytes"] <= 0.55 * figures["available_bytes"]


def test_together_the_ranks_read_each_byte_once(engines: Any, model: Path) -> None:
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    figures = engines["penstock, shared"]["figures"]
    assert [rank["shared"] for rank in figures] == [8, 8], "o_proj and down_proj of four layers"
    assert all(rank["received_bytes"] > 0 and rank["read_bytes"] <= 0.55 * size for rank in figures)
    assert sum(rank["read_bytes"] for rank in figures) <= 1.1 * size


def test_through_the_stand_in_the_ranks_read_together(engines: Any) -> None:
    for rank in range(2):
        assert engines["runai_streamer"]["log"].count(f"process {rank} of 2 reads its share") == 1
