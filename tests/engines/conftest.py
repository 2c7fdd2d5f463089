"""Engines run in processes of their own, by ``generate.py``; here are the models they are given, and the way to run."""

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

SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}
"""The environment of engines."""

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

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

STATES = {"state_size": 16, "num_attention_heads": None, "num_key_value_heads": None}


def save(kind: str, directory: Path, dtype: str, shards: str = "400KB", seed: int = 0, **other: Any) -> Path:
    """A model of random weights, as transformers saves it, in several shards."""
    import torch
    import transformers

    torch.manual_seed(seed)
    # What a kind has no notion of is None.
    described = {key: value for key, value in {**_TINY, **other}.items() if value is not None}
    config = getattr(transformers, f"{kind}Config")(**described)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=shards)
    return directory


def quantised(directory: Path, method: str) -> Path:
    """A model with weights of the shapes that a method of quantisation has, and random values."""
    import safetensors.torch
    import torch

    sizes = {"hidden": 128, "key": 64, "inner": 256}
    layers = {
        "self_attn.q_proj": ("hidden", "hidden"), "self_attn.k_proj": ("hidden", "key"),
        "self_attn.v_proj": ("hidden", "key"), "self_attn.o_proj": ("hidden", "hidden"),
        "mlp.gate_proj": ("hidden", "inner"), "mlp.up_proj": ("hidden", "inner"), "mlp.down_proj": ("inner", "hidden"),
    }  # fmt: skip
    chance = torch.Generator().manual_seed(0)

    def ints(*shape: int) -> Any:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=chance)

    def halves(*shape: int) -> Any:
        return torch.rand(shape, generator=chance).to(torch.float16)

    tensors = {"model.embed_tokens.weight": halves(512, 128), "lm_head.weight": halves(512, 128)}
    tensors["model.norm.weight"] = halves(128)
    for number in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{number}.{norm}.weight"] = halves(128)
        for name, (into, out_of) in layers.items():
            rows, columns, layer = sizes[into], sizes[out_of], f"model.layers.{number}.{name}"
            if method == "awq":
                tensors |= {
                    f"{layer}.qweight": ints(rows, columns // 8),
                    f"{layer}.qzeros": ints(rows // 32, columns // 8),
                }
                tensors[f"{layer}.scales"] = halves(rows // 32, columns)
            elif method == "gptq":
                tensors |= {
                    f"{layer}.qweight": ints(rows // 8, columns),
                    f"{layer}.qzeros": ints(rows // 32, columns // 8),
                }
                tensors |= {f"{layer}.scales": halves(rows // 32, columns)}
                tensors[f"{layer}.g_idx"] = (torch.arange(rows) // 32).to(torch.int32)
            else:
                weights = torch.randn(columns, rows, generator=chance)
                tensors |= {f"{layer}.weight": weights.to(torch.float8_e4m3fn)}
                tensors |= {f"{layer}.weight_scale": torch.rand(1, generator=chance)}
                tensors |= {f"{layer}.input_scale": torch.rand(1, generator=chance)}
    directory.mkdir()
    safetensors.torch.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    described = {
        "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
        "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
    }
    config = {**_TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16"}
    config["quantization_config"] = described[method]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of models, by name."""
    home = tmp_path_factory.mktemp("models")
    return {
        "dense": save("Llama", home / "dense", "float32"),
        "converted": save("Llama", home / "converted", "bfloat16"),
        # Another, smaller, with the same words.
        "draft": save("Llama", home / "draft", "float32", intermediate_size=128, num_hidden_layers=1),
        "tied": save("Llama", home / "tied", "float32", tie_word_embeddings=True),
        "experts": save("Mixtral", home / "experts", "float32", **EXPERTS),
        **{method: quantised(home / method, method) for method in ("awq", "gptq", "fp8")},
        # Rows so long that not reading the other rank's half of each is worth a request of its own.
        "wide": save(
            "Llama", home / "wide", "float32",
            intermediate_size=65536, num_hidden_layers=1, max_position_embeddings=128,
        ),
        # Proportions of a dense model: the other rank's half of each row is far less than what is worth skipping.
        "columns": save(
            "Llama", home / "columns", "float32", "40MB", hidden_size=1024, intermediate_size=3584,
            num_attention_heads=16, num_key_value_heads=8,
        ),
        "columns of experts": save(
            "Mixtral", home / "columns of experts", "float32", "40MB", hidden_size=512, intermediate_size=1024,
            num_attention_heads=8, num_key_value_heads=4, **EXPERTS,
        ),
        # Whose loading code does more with weights than to cut them.
        "Mamba": save("Mamba", home / "mamba", "bfloat16", **STATES),
        "Mamba2": save("Mamba2", home / "mamba2", "bfloat16", num_heads=8, head_dim=32, n_groups=1, **STATES),
        "GptOss": save("GptOss", home / "gpt-oss", "bfloat16", head_dim=32, **EXPERTS),
        # Of a kind whose attention can be whole on every rank.
        "attention": save(
            "Qwen3", home / "attention", "float32", hidden_size=256, num_attention_heads=8, num_key_value_heads=4,
            head_dim=32,
        ),
    }  # fmt: skip


@pytest.fixture(scope="session")
def vllm() -> Run:
    """Runs engines, one after the other, in one process; gives what each printed as its result."""

    def run(*settings: dict[str, Any], environment: dict[str, str] | None = None, fails: bool = False) -> Any:
        script = Path(__file__).parent / "generate.py"
        command = [sys.executable, str(script), *map(json.dumps, settings)]
        try:
            done = subprocess.run(
                command,
                env=os.environ | SETTINGS | (environment or {}),
                capture_output=True,
                text=True,
                timeout=1200,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            # A rank that failed says so only here: the others wait for it. These are bytes whatever `text` is.
            pytest.fail(f"did not end within 1200 s:\n{(error.stderr or b'').decode(errors='replace')[-6000:]}")
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
