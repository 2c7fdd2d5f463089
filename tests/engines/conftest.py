"""Engines are run in processes of their own, by ``generate.py``; here are the models they are given, and the way to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., list[dict[str, Any]]]

_TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def save(kind: str, directory: Path, dtype: str, **other: Any) -> Path:
    """A model of random weights, as transformers saves it, in several shards."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**_TINY, **other})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size="400KB")
    return directory


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of models, by name."""
    home = tmp_path_factory.mktemp("models")
    return {
        "dense": save("Llama", home / "dense", "float32"),
        "converted": save("Llama", home / "converted", "bfloat16"),
        "tied": save("Llama", home / "tied", "float32", tie_word_embeddings=True),
        "experts": save("Mixtral", home / "experts", "float32", num_local_experts=4, num_experts_per_tok=2),
        # Rows so long that not reading the other rank's half of each is worth a request of its own.
        "wide": save(
            "Llama", home / "wide", "float32",
            intermediate_size=65536, num_hidden_layers=1, max_position_embeddings=128,
        ),
    }  # fmt: skip


@pytest.fixture(scope="session")
def vllm() -> Run:
    """Runs engines, one after the other, in one process; gives what each printed as its result."""

    def run(*settings: dict[str, Any], environment: dict[str, str] | None = None, fails: bool = False) -> Any:
        own = {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
        }
        script = Path(__file__).parent / "generate.py"
        command = [sys.executable, str(script), *map(json.dumps, settings)]
        done = subprocess.run(
            command, env=os.environ | own | (environment or {}), capture_output=True, text=True, timeout=300, check=False
        )
        if fails:
            assert done.returncode != 0
            return done.stdout + done.stderr
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert len(results) == len(settings)
        for result in results:
            result["log"] = done.stdout + done.stderr
        return results

    return run
