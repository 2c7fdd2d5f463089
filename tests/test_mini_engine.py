"""Recording in an engine of our own, in the shapes of vLLM's and SGLang's loaders: what it fills equals an eager load.

The engines themselves are tested in ``tests/engines``, in environments of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file

from mini_engine import VOCABULARY, Engine, checkpoint_tensors
from penstock.recording import Recorder

STYLES = ["vllm", "sglang"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_file(checkpoint_tensors(), path)
    return path


def eager(style: str, rank: int = 0, ranks: int = 1) -> dict[str, str]:
    engine = Engine(rank, ranks, style)
    engine.load_weights(checkpoint_tensors().items())
    return engine.checksums()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_a_recorded_load_fills_what_an_eager_one_fills_and_reads_this_ranks_part(
    model: Path, style: str, rank: int, ranks: int
) -> None:
    checkpoint = penstock.open(model)
    engine = Engine(rank, ranks, style)
    with Recorder() as recorder:
        loaded = engine.load_weights(recorder.weights(checkpoint))
    assert loaded == {name.replace("/", ".") for name, _ in engine.named_parameters()}
    assert engine.checksums() == eager(style, rank, ranks)
    statistics = recorder.statistics
    assert statistics.fallback == 0
    if ranks == 1:
        assert statistics.bytes <= checkpoint.nbytes
    else:
        # What every rank has whole (norms, routers, replicated KV heads) is little of it.
        assert statistics.bytes < 0.75 * checkpoint.nbytes


def test_the_head_stays_tied(model: Path) -> None:
    engine = Engine()
    with Recorder() as recorder:
        engine.load_weights(recorder.weights(penstock.open(model)))
    assert engine.lm_head is engine.get("model.embed_tokens.weight")
    assert torch.equal(engine.lm_head[:VOCABULARY], checkpoint_tensors()["model.embed_tokens.weight"])


def test_an_error_of_the_models_code_comes_through_unchanged(model: Path) -> None:
    engine = Engine()
    parameter = engine.get("model.norm.weight")
    parameter.data = parameter.data[:8]
    with pytest.raises(AssertionError), Recorder() as recorder:
        engine.load_weights(recorder.weights(penstock.open(model)))


@pytest.mark.parametrize("style", STYLES)
def test_two_ranks_that_share_get_the_same_and_read_each_byte_once(model: Path, tmp_path: Path, style: str) -> None:
    found = ranks(model, tmp_path / "store", style)
    assert [rank["sums"] for rank in found] == [eager(style, rank, 2) for rank in range(2)]
    assert sum(rank["read_bytes"] for rank in found) <= 1.1 * model.stat().st_size


def ranks(model: Path, store: Path, style: str, count: int = 2) -> list[dict[str, Any]]:
    script = str(Path(__file__).parent / "mini_engine.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(count), str(store), str(model), style, "yes"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(text) for text in printed]
