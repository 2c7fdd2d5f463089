"""``--load-format penstock`` in a vLLM on a GPU whose engine sleeps: the weights come back as they were.

Not part of CI, which has no GPU: ``benchmarks/gpu_machine.sh`` runs it as ``sleep``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from conftest import save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

SLEEPER = """
import json, sys
import torch
from vllm import LLM, SamplingParams

engine = LLM(
    sys.argv[1], load_format=sys.argv[2], dtype="bfloat16", max_model_len=128, enforce_eager=True,
    skip_tokenizer_init=True, enable_sleep_mode=True, gpu_memory_utilization=0.3, seed=0,
)
answers = {}

def answer(when):
    how = SamplingParams(max_tokens=16, temperature=0, detokenize=False)
    [made] = engine.generate([{"prompt_token_ids": list(range(3, 20))}], how, use_tqdm=False)
    answers[when] = list(made.outputs[0].token_ids)

def used():
    free, total = torch.cuda.mem_get_info()
    return total - free

answer("awake")
memory = {"awake": used()}
engine.sleep(level=1)
memory["level 1"] = used()
engine.wake_up()
answer("level 1")
engine.sleep(level=2)
memory["level 2"] = used()
engine.wake_up(tags=["weights"])
engine.collective_rpc("reload_weights")
engine.wake_up(tags=["kv_cache"])
engine.reset_prefix_cache()
answer("level 2")
print("RESULT " + json.dumps({"answers": answers, "memory": memory}), flush=True)
"""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def slept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What an engine answered before and after it slept, and the GPU's memory, by load format."""
    model = save(
        "Llama", tmp_path_factory.mktemp("sleep") / "model", "bfloat16", "20MB", hidden_size=1024,
        intermediate_size=2816, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, vocab_size=8192,
    )  # fmt: skip
    results = {}
    for load_format in ("auto", "penstock"):
        done = subprocess.run(
            [sys.executable, "-c", SLEEPER, str(model), load_format],
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert lines, (done.stdout + done.stderr)[-6000:]
        results[load_format] = json.loads(lines[0])
    return results


@pytest.mark.parametrize("when", ["awake", "level 1", "level 2"])
def test_tokens_after_sleep_are_those_of_the_stock_loader_before_it(slept: Any, when: str) -> None:
    assert slept["penstock"]["answers"][when] == slept["auto"]["answers"]["awake"]


@pytest.mark.parametrize("level", ["level 1", "level 2"])
def test_the_weights_memory_is_given_back_while_the_engine_sleeps(slept: Any, level: str) -> None:
    ours, stock = slept["penstock"]["memory"], slept["auto"]["memory"]
    assert ours["awake"] - ours[level] > 1 << 30
    assert ours[level] <= stock[level] + (64 << 20)
