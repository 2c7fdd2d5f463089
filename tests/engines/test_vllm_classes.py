"""All classes of models that vLLM knows, as far as a tiny one can be made and vLLM builds it on a CPU: verified.

What is recorded is compared with what ordinary tensors make of a second model (``{"record": "verify"}``) and with what
the stock loader makes of a third, and with one place left out verifying has to find it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from conftest import SETTINGS

sys.path.insert(0, str(Path(__file__).parents[1]))
import servers

CLASSES = [
    "ApertusForCausalLM", "ArceeForCausalLM", "AriaForConditionalGeneration", "BertForMaskedLM",
    "BertForSequenceClassification", "BertForTokenClassification", "BertModel", "Blip2ForConditionalGeneration",
    "BloomForCausalLM", "CLIPModel", "Cohere2ForCausalLM", "Cohere2MoeForCausalLM", "CohereForCausalLM",
    "CwmForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "EmbeddingGemma2Model",
    "Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM", "Exaone4ForCausalLM", "Exaone4_5_ForConditionalGeneration",
    "ExaoneMoeForCausalLM", "FalconForCausalLM", "FalconH1ForCausalLM", "FalconMambaForCausalLM",
    "FlexOlmoForCausalLM", "GPT2ForSequenceClassification", "GPT2LMHeadModel", "GPTBigCodeForCausalLM",
    "GPTJForCausalLM", "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "Gemma2Model", "Gemma3ForCausalLM",
    "Gemma3TextModel", "GemmaForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM",
    "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "GlmForCausalLM",
    "GlmOcrForConditionalGeneration", "GptOssForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteMoeSharedForCausalLM",
    "GraniteSWAForCausalLM", "GteModel", "HrmTextForCausalLM", "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM", "HyperCLOVAXForCausalLM", "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration", "Jais2ForCausalLM", "JambaForCausalLM", "JambaForSequenceClassification",
    "LagunaForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration", "LlamaForCausalLM", "LlamaModel", "Mamba2ForCausalLM", "MambaForCausalLM",
    "MellumForCausalLM", "MiniCPM3ForCausalLM", "MiniCPMV4_6ForConditionalGeneration",
    "MiniCPMV4_7ForConditionalGeneration", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration",
    "MistralForCausalLM", "MistralModel", "MixtralForCausalLM", "ModernBertForSequenceClassification",
    "ModernBertForTokenClassification", "ModernBertModel", "NemotronForCausalLM", "OPTForCausalLM",
    "Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoForCausalLM", "OlmoeForCausalLM",
    "OpenAIPrivacyFilterForTokenClassification", "PaddleOCRVLForConditionalGeneration", "Phi3ForCausalLM",
    "PhiForCausalLM", "Qwen2ForCausalLM", "Qwen2Model", "Qwen2MoeForCausalLM", "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3ASRForConditionalGeneration", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration", "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration",
    "RobertaForMaskedLM", "RobertaForSequenceClassification", "RobertaForTokenClassification", "RobertaModel",
    "SeedOssForCausalLM", "SiglipModel", "SmolLM3ForCausalLM", "SmolVLMForConditionalGeneration",
    "StableLmForCausalLM", "Starcoder2ForCausalLM", "VaultGemmaForCausalLM", "WhisperForConditionalGeneration",
    "XLMRobertaForSequenceClassification", "XLMRobertaForTokenClassification", "XLMRobertaModel",
]  # fmt: skip
"""Of the others that transformers has, vLLM refuses to build some on a CPU, and some it does not load from what
transformers saves."""
AT_A_TIME = 30
NO_SHARDS = {"BertForMaskedLM"}
"""Which vLLM cannot load as one rank of two, whatever the format."""


@pytest.fixture(scope="module")
def result() -> Callable[[str], dict[str, Any]]:
    """What came of a class; those beside it in the list are loaded by the same process."""
    known: dict[str, dict[str, Any]] = {}

    def of(name: str) -> dict[str, Any]:
        if name not in known:
            begin = CLASSES.index(name) // AT_A_TIME * AT_A_TIME
            script = Path(__file__).parent / "vllm_classes.py"
            command = [sys.executable, str(script), *CLASSES[begin : begin + AT_A_TIME]]
            done = subprocess.run(
                command, env=os.environ | SETTINGS, capture_output=True, text=True, timeout=1200, check=False
            )
            lines = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            known.update(lines)
            assert name in known, (done.stdout + done.stderr)[-6000:]
        return known[name]

    return of


def assert_verified(found: dict[str, Any]) -> None:
    [said] = found["said"]
    assert said.startswith("Penstock: verified: all ")
    assert said.endswith(" parameters and buffers are equal to those of an eager load")
    # And was recorded, or it would have been compared with itself.
    assert (found["fallback"], found["plans"], found["notes"]) == (0, 1, [])
    assert set(found["eager"].values()) <= {"a use of what it was copied to"}


@pytest.mark.parametrize("name", CLASSES)
def test_a_model_is_verified_and_equal_to_the_stock_loaders(result: Callable[[str], dict[str, Any]], name: str) -> None:
    found = result(name)
    if find_spec("vllm._C") is None and "'_C' object has no attribute" in found.get("error", ""):
        pytest.skip("this vLLM has none of the kernels that this model is built of on a CPU")
    assert "error" not in found, found["error"]
    assert_verified(found["whole"])
    assert found["differs from the stock loader's"] == []
    # vLLM goes through them while it computes: the second model's are not among them.
    layers = found["layers of experts"]
    assert len(set(layers)) == len(layers)
    if name in NO_SHARDS:
        assert found["rank 1 of 2"]["error"] == found["rank 1 of 2"]["the stock loader's"]
    else:
        assert_verified(found["rank 1 of 2"])
    [left_out], differing = found["left out"]
    assert differing, f"verifying did not find that {left_out} was not read"


def from_s3(remote: servers.Remote, directory: Path, tmp_path: Path, **extra: Any) -> subprocess.CompletedProcess[str]:
    for file in directory.iterdir():
        remote.put(f"model/{file.name}", file.read_bytes())
    homes = {"VLLM_CACHE_ROOT": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "home")}
    none = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "us-east-1"}
    script = Path(__file__).parent / "vllm_from_s3.py"
    command = [sys.executable, str(script), str(directory), f"{remote.root}/model", json.dumps(extra)]
    environment = os.environ | SETTINGS | remote.environment | none | homes
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


def test_a_signed_model_on_s3_is_loaded_and_a_changed_one_is_not(models: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("model_signing")
    import penstock
    from signing_keys import new_key, write_key

    directory = Path(shutil.copytree(models["dense"], tmp_path / "signed"))
    penstock.sign(directory, key=write_key(new_key(), tmp_path / "key"))
    trust = {"verify": "require", "trust": {"key": str(tmp_path / "key.pub")}}
    (tmp_path / "server").mkdir()
    with servers.s3(tmp_path / "server") as remote:
        done = from_s3(remote, directory, tmp_path, **trust)
        [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [done.stderr[-4000:]]
        assert json.loads(line.removeprefix("RESULT "))[0] == []
        # What vLLM fetched by itself before it asked for weights.
        config = directory / "config.json"
        config.write_text(config.read_text() + " ")
        done = from_s3(remote, directory, tmp_path, **trust)
    assert "RESULT" not in done.stdout
    assert "SignatureError" in done.stderr, done.stderr[-4000:]


def test_a_model_on_s3_is_equal_to_the_stock_loaders_of_a_directory(models: dict[str, Path], tmp_path: Path) -> None:
    with servers.s3(tmp_path) as remote:
        done = from_s3(remote, models["dense"], tmp_path)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [done.stderr[-4000:]]
    different, figures = json.loads(line.removeprefix("RESULT "))
    assert different == []
    assert sum(load["network_bytes"] for load in figures["loads"]) == figures["available_bytes"]
