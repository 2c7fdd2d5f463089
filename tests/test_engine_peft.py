"""peft within ``patch_safetensors``: adapters are what its own loader makes of the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from tiny_models import QUIET, assert_same_model, randomise

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings(*QUIET)]


def base(dtype: Any = torch.float32) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return randomise(transformers.LlamaForCausalLM(config)).to(dtype)


LAYERS = ["q_proj", "v_proj", "down_proj"]
KINDS = {
    "lora": lambda: peft.LoraConfig(r=4, lora_alpha=12, target_modules=LAYERS, task_type="CAUSAL_LM"),
    "lora with a whole layer": lambda: peft.LoraConfig(r=4, target_modules=LAYERS, modules_to_save=["lm_head"]),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=LAYERS, use_dora=True, task_type="CAUSAL_LM"),
    "ia3": lambda: peft.IA3Config(target_modules=LAYERS, feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=LAYERS),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
}


def saved(kind: str, path: Path, dtype: Any = torch.float32) -> Path:
    made = peft.get_peft_model(base(), KINDS[kind]())
    generator = torch.Generator().manual_seed(5)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype) * 0.1
    made.save_pretrained(path)
    return path


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(8)[None]).logits


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_loader_gives_the_same_through_penstock(tmp_path: Path, kind: str) -> None:
    path = saved(kind, tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(base(), path)
    with penstock.patch_safetensors():
        ours = peft.PeftModel.from_pretrained(base(), path)
    assert_same_model(ours, theirs)
    assert torch.equal(logits(ours), logits(theirs))
    assert not torch.equal(logits(ours)[:, -8:], logits(base()))
